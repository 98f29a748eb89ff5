"""Log-probs and gradients of every kind of head equal the module's: plain, parametrized, PEFT, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import device as under_test
from helpers.device import on_device, to_device
from helpers.marks import by_dtype
from helpers.oracle import DTYPES
from helpers.samples import call_fused, make_sample, run_fused
from tolerance import check
from torch import Tensor, nn

from gspo_kernels import KeptSets, LossOutput, Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.distillation import linear_top_k

pytestmark = pytest.mark.filterwarnings("ignore:Already results a `peft_config`")

B, T, H, V = 3, 6, 16, 41
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3])
EVERYTHING = Objective(kl_coef=0.1, entropy_coef=0.02)


def targets_and_mask() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    mask = torch.rand(B, T, generator=rng) > 0.3
    mask[:, 0] = True
    return torch.where(mask, torch.randint(0, V, (B, T), generator=rng), -100), mask


def hidden_states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, H, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def upstream() -> Tensor:
    return torch.randn(B, T, generator=torch.Generator().manual_seed(3)).double()


def plain_log_probs(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return log-probs from the logits of the head's forward, 0 where masked."""
    ids, mask = targets_and_mask()
    log_p = torch.log_softmax(head(hidden), -1).gather(-1, ids.clamp(min=0)[..., None])[..., 0]
    return torch.where(mask, log_p, 0)


def gradients(log_probs: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    total = (log_probs * upstream().to(log_probs.dtype)).sum()
    grads = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
    return {name: g for name, g in zip(tensors, grads, strict=True) if g is not None}


def trained(head: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def assert_equals_the_module(
    head: Any,
    backend: str,
    dtype: torch.dtype = torch.float32,
    log_probs_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Tensor]:
    """Assert that log-probs and gradients equal the results of the module's forward. Return our gradients."""
    ids, mask = targets_and_mask()
    hidden = hidden_states(dtype)
    moved = to_device(copy.deepcopy(head))
    ours = under_test.linear_log_probs(hidden, moved, ids, mask=mask, backend=backend, **options).log_probs
    grads = to_device(gradients(ours, {"hidden": hidden, **trained(moved)}), "cpu")
    same = plain_log_probs(head, hidden)
    same_grads = gradients(same, {"hidden": hidden, **trained(head)})
    wide_head = copy.deepcopy(head).double()
    wide_hidden = hidden.detach().double().requires_grad_()
    truth = plain_log_probs(wide_head, wide_hidden)
    true_grads = gradients(truth, {"hidden": wide_hidden, **trained(wide_head)})
    check("log_probs", ours, same, truth, log_probs_dtype)
    assert grads.keys() == true_grads.keys()
    for name, grad in grads.items():
        ours_flat, same_flat, true_flat = (
            x.flatten(0, -2) if x.ndim == 3 else x for x in (grad, same_grads[name], true_grads[name])
        )
        check(f"d_{name}", ours_flat, same_flat, true_flat, grad.dtype)
    return grads


# -- plain heads


@on_device
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_linear_module_equals_its_forward(bias: bool, dtype: str, backend: str) -> None:
    torch.manual_seed(0)
    assert_equals_the_module(nn.Linear(H, V, bias=bias, dtype=DTYPES[dtype]), backend, DTYPES[dtype])


@on_device
def test_a_parametrized_weight_gets_its_gradient_through_the_parametrization(backend: str) -> None:
    torch.manual_seed(0)
    head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(H, V))
    grads = assert_equals_the_module(head, backend)
    assert any("original0" in name for name in grads)


# -- adapters


def lora(
    dtype: torch.dtype = torch.float32,
    adapters: int = 1,
    adapter_dtype: torch.dtype | None = None,
    base: nn.Linear | None = None,
    **config: Any,
) -> Any:
    """Return a PEFT LoRA head whose adapters are all active and not zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"lm_head": base or nn.Linear(H, V, bias=False, dtype=dtype)})
    names = [f"adapter{i}" for i in range(adapters)]
    for i, name in enumerate(names):
        options = {"r": 3 + i, "lora_alpha": 5 - i, "target_modules": ["lm_head"], "init_lora_weights": False, **config}
        peft.inject_adapter_in_model(peft.LoraConfig(**options), model, adapter_name=name)
    head: Any = model["lm_head"]
    head.set_adapter(names)
    for name, parameter in head.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype or dtype)
    return head


def plain_or_lora(kind: str) -> Any:
    torch.manual_seed(0)
    return lora(adapters=2) if kind == "lora" else nn.Linear(H, V)


def loss_of(hidden: Tensor, head: Any, backend: str) -> LossOutput:
    """Compute the fused loss of a batch, with every term of the loss."""
    ids, mask = targets_and_mask()
    old = -3 - torch.rand(B, T, generator=torch.Generator().manual_seed(4))
    options: dict[str, Any] = {"old_log_probs": old, "ref_log_probs": old, "objective": EVERYTHING}
    return gspo_fused_loss(hidden, head, ids, ADVANTAGES, mask=mask, backend=backend, **options)


def adapter_parameters(head: Any) -> set[str]:
    return {name for name, _ in head.named_parameters() if "lora_" in name}


@on_device
@pytest.mark.parametrize(
    ("use_rslora", "base_bias", "adapters"), [(False, False, 1), (False, True, 3), (True, True, 1)]
)
def test_lora_on_the_head_equals_peft(adapters: int, base_bias: bool, use_rslora: bool, backend: str) -> None:
    base = nn.Linear(H, V, bias=base_bias)
    head = lora(adapters=adapters, base=base, use_rslora=use_rslora)
    grads = assert_equals_the_module(head, backend)
    assert set(grads) == {"hidden"} | adapter_parameters(head), "the base gets no gradient"


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters_on_a_bf16_head_keep_their_dtype(dtype: torch.dtype, backend: str) -> None:
    grads = assert_equals_the_module(lora(torch.bfloat16, 2, adapter_dtype=dtype), backend, torch.bfloat16)
    assert {g.dtype for name, g in grads.items() if "lora_" in name} == {dtype}


@on_device
def test_kept_sets_of_all_ids_equal_the_vocabulary_of_a_lora_head(backend: str) -> None:
    sets = KeptSets.from_mask(torch.ones(B, T, V, dtype=torch.bool))
    grads = assert_equals_the_module(lora(adapters=2), backend, kept_sets=sets)
    assert len(grads) == 5


def test_the_top_k_of_a_lora_head_are_those_of_its_forward() -> None:
    head, hidden = lora(adapters=2), hidden_states()
    top = linear_top_k(hidden, head, V)
    log_p = torch.log_softmax(head(hidden), -1).detach()
    torch.testing.assert_close(top.log_probs, log_p.gather(-1, top.ids))
    assert torch.equal(top.ids.sort().values, torch.arange(V).expand(B, T, V))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = linear_top_k(hidden, head, 3)
    assert rounded.log_probs.dtype == torch.float32 and not torch.equal(rounded.log_probs, top.log_probs[..., :3])


def test_only_active_adapters_count(backend: str) -> None:
    head = lora(adapters=3)
    head.set_adapter(["adapter1"])
    grads = assert_equals_the_module(head, backend)
    assert all("adapter1" in name for name in grads if name != "hidden")
    head.enable_adapters(False)
    assert set(assert_equals_the_module(head, backend)) == {"hidden"}


def test_merged_adapters_are_counted_once(backend: str) -> None:
    head = lora(adapters=2)
    head.merge()
    assert set(assert_equals_the_module(head, backend)) == {"hidden"}


@pytest.mark.parametrize("adapters", [1, 2])
def test_lora_dropout_drops_what_peft_drops(adapters: int, backend: str) -> None:
    head = lora(torch.float64, adapters, lora_dropout=0.4).train()
    ids, mask = targets_and_mask()

    def run(log_probs: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(5)
        hidden = hidden_states(torch.float64)
        lp = log_probs(hidden)
        return {"log_probs": lp, **gradients(lp, {"hidden": hidden, **trained(head)})}

    ours = run(lambda hidden: linear_log_probs(hidden, head, ids, mask=mask, backend=backend).log_probs)
    for name, truth in run(lambda hidden: plain_log_probs(head, hidden)).items():
        check(name, ours[name], truth, truth, torch.float64)
    head.eval()
    assert_equals_the_module(head, backend, torch.float64, torch.float64)


def test_a_fused_loss_with_lora_equals_the_chained_functions(backend: str) -> None:
    head = lora(adapters=2)
    ids, mask = targets_and_mask()
    options: dict[str, Any] = {"mask": mask, "backend": backend}

    def chained(hidden: Tensor) -> Tensor:
        log_probs = linear_log_probs(hidden, head, ids, **options).log_probs
        return policy_loss(log_probs, ADVANTAGES, **options).loss

    def run(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        hidden = hidden_states()
        loss = function(hidden)
        return [loss, *torch.autograd.grad(loss, [hidden, *trained(head).values()])]

    fused = run(lambda hidden: gspo_fused_loss(hidden, head, ids, ADVANTAGES, **options).loss)
    for a, b in zip(fused, run(chained), strict=True):
        assert torch.equal(a, b)


def test_masked_tokens_have_exactly_zero_influence_on_an_adapter(backend: str) -> None:
    head = lora(adapters=2)
    _, mask = targets_and_mask()
    results = []
    for value in (0.0, float("nan")):
        hidden = hidden_states().detach()
        hidden[~mask] = value
        hidden.requires_grad_()
        out = loss_of(hidden, head, backend)
        grads = torch.autograd.grad(out.loss, [hidden, *trained(head).values()])
        assert (grads[0][~mask] == 0).all()
        results.append([out.loss, out.log_probs, *grads])
    for expected, ours in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@on_device
def test_rows_that_peft_trains_are_in_the_weight(backend: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(H, H), "lm_head": nn.Linear(H, V, bias=False)})
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["body"], trainable_token_indices={"lm_head": [1, 2]}))
    head: Any = model["lm_head"]
    with torch.no_grad():
        head.token_adapter.trainable_tokens_delta["default"].mul_(1.5)
    grads = assert_equals_the_module(head, backend)
    assert set(grads) == {"hidden", "token_adapter.trainable_tokens_delta.default"}


@on_device
def test_modules_to_save_use_the_trained_copy(backend: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(H, H), "lm_head": nn.Linear(H, V)})
    model.forward = lambda hidden: model["lm_head"](hidden)  # PEFT requires a forward
    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["lm_head"])
    wrapped = peft.get_peft_model(model, config)
    head: Any = model["lm_head"]
    assert type(head).__name__ == "ModulesToSaveWrapper"
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(1.5)
    grads = assert_equals_the_module(head, backend)
    assert set(grads) == {"hidden", "modules_to_save.default.weight", "modules_to_save.default.bias"}
    with wrapped.disable_adapter():
        assert set(assert_equals_the_module(head, backend)) == {"hidden"}


# -- autocast


@pytest.mark.parametrize("bias", [False, True])
def test_autocast_computes_on_operands_cast_to_bf16_and_rounds_nothing_else(bias: bool, backend: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias)
    ids, mask = targets_and_mask()
    hidden = hidden_states()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_log_probs(hidden, head, ids, mask=mask, entropy=True, backend=backend)
    grads = gradients(out.log_probs, {"hidden": hidden, **trained(head)})
    cast_head = copy.deepcopy(head).bfloat16()
    cast_hidden = hidden.detach().bfloat16().requires_grad_()
    expected = linear_log_probs(cast_hidden, cast_head, ids, mask=mask, entropy=True, backend=backend)
    cast_grads = gradients(expected.log_probs, {"hidden": cast_hidden, **trained(cast_head)})
    assert out.log_probs.dtype == torch.float32 and torch.equal(out.log_probs, expected.log_probs)
    assert out.entropy is not None and expected.entropy is not None and torch.equal(out.entropy, expected.entropy)
    assert (out.log_probs.bfloat16().float() != out.log_probs)[mask].any(), "rounded to bf16"
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, cast_grads[name].float()), name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head_kind", ["linear", "lora"])
def test_an_fp32_head_of_bf16_hidden_states_equals_one_of_widened_hidden_states(
    head_kind: str, compiled: bool, backend: str
) -> None:
    head = plain_or_lora(head_kind)
    ids, mask = targets_and_mask()

    def log_probs(hidden: Tensor, **options: Any) -> Tensor:
        return linear_log_probs(hidden, head, ids, mask=mask, logit_softcap=3.0, backend=backend, **options).log_probs

    hidden = hidden_states(torch.bfloat16)
    function = torch.compile(log_probs, backend="aot_eager", fullgraph=True) if compiled else log_probs
    with torch.autocast("cpu", torch.bfloat16):
        ours = function(hidden, head_precision="fp32")
    grads = gradients(ours, {"hidden": hidden, **trained(head)})
    wide = hidden.detach().float().requires_grad_()
    expected = log_probs(wide)
    assert torch.equal(ours, expected)
    wide_grads = gradients(expected, {"hidden": wide, **trained(head)})
    for name, grad in grads.items():
        assert torch.equal(grad, wide_grads[name].to(grad.dtype)), name
        assert grad.dtype == (torch.bfloat16 if name == "hidden" else torch.float32)


@pytest.mark.parametrize("head_kind", ["linear", "lora"])
def test_a_backward_inside_autocast_equals_one_outside(head_kind: str, backend: str) -> None:
    head = plain_or_lora(head_kind)
    results = []
    for inside in (False, True):
        hidden = hidden_states()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(hidden, head, backend).loss
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            results.append([loss, *torch.autograd.grad(loss, [hidden, *trained(head).values()])])
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_autocast_leaves_an_fp32_adapter_unrounded(backend: str) -> None:
    """Autocast casts the operands of the head, but not the adapter's term of the logits."""
    head = lora(adapters=2)
    ids, mask = targets_and_mask()
    hidden = hidden_states().detach()
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_log_probs(hidden, head, ids, mask=mask, backend=backend).log_probs
        same = plain_log_probs(head, hidden)
    wide = copy.deepcopy(head).double()
    wide.base_layer.weight.data = head.base_layer.weight.data.bfloat16().double()

    def logits(x: Tensor) -> Tensor:
        return wide(x) - wide.base_layer(x) + wide.base_layer(x.bfloat16().double())

    check("log_probs", ours, same, plain_log_probs(logits, hidden.double()), torch.float32)


# -- checkpointing, micro-batches, precision settings, threads


# -- modes that must not change a value


def outputs(out: LossOutput) -> list[Tensor]:
    metrics = [value for key, value in out.metrics.items() if key not in ("entropy", "passes")]
    return [x.detach() for x in (out.loss, out.log_probs, out.log_ratio, *metrics)]


@by_dtype
@pytest.mark.parametrize("packed", [False, True])
def test_grad_mode_and_entropy_change_no_bit(dtype: str, packed: bool, backend: str) -> None:
    objective = Objective(kl_coef=0.1)
    sample = make_sample(6, dtype=DTYPES[dtype], packed=packed, objective=objective, bias=True, temperature=0.8)
    reference, expected = run_fused(sample, backend, entropy=False)
    with_entropy, grads = run_fused(sample, backend, entropy=True)
    runs = [with_entropy]
    for mode in (torch.no_grad, torch.inference_mode):
        for entropy in (False, True):
            with mode():
                out = call_fused(sample, sample.leaves, backend, entropy=entropy)
            assert not out.loss.requires_grad
            runs.append(out)
    for out in runs:
        for ours, value in zip(outputs(out), outputs(reference), strict=True):
            assert torch.equal(ours, value)
        assert with_entropy.entropy is not None
        assert out.entropy is None or torch.equal(out.entropy, with_entropy.entropy)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


def test_everything_but_the_loss_is_detached(backend: str) -> None:
    fused, _ = run_fused(make_sample(6, objective=EVERYTHING), backend)
    lp, entropy = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    for out in (fused, policy_loss(lp, torch.ones(2), entropy=entropy, backend=backend)):
        assert out.loss.requires_grad
        assert not any(x.requires_grad for x in (out.log_probs, out.entropy, out.log_ratio, *out.metrics.values()))


@pytest.mark.parametrize("head_kind", ["linear", "lora"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(head_kind: str, backend: str) -> None:
    torch.manual_seed(0)
    rows, width, vocab = 300, 256, 50
    head: Any = nn.Linear(width, vocab)
    if head_kind == "lora":
        head = lora(base=head)
    hidden = torch.randn(rows, width)
    ids = torch.randint(0, vocab, (rows,))
    together = linear_log_probs(hidden, head, ids, backend=backend).log_probs
    for low, high in ((0, 1), (7, 8), (3, 40), (100, 300)):
        alone = linear_log_probs(hidden[low:high], head, ids[low:high], backend=backend).log_probs
        assert torch.equal(alone, together[low:high]), f"rows {low} to {high}"
    mask = torch.arange(rows) % 7 == 3
    assert torch.equal(linear_log_probs(hidden, head, ids, mask=mask, backend=backend).log_probs[mask], together[mask])
