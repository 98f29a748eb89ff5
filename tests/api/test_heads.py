"""Log-probs and gradients of every kind of head equal the module's: plain, parametrized, PEFT, autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import device as under_test
from helpers.array import arguments_of, leaves_of
from helpers.device import on_device, to_device
from helpers.features import make
from helpers.marks import by_dtype
from tolerance import check
from torch import Tensor, nn

from gspo_kernels import LossOutput, Objective, gspo_fused_loss, linear_log_probs, policy_loss

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


@on_device
def test_rows_that_peft_trains_are_in_the_weight(backend: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(H, H), "lm_head": nn.Linear(H, V, bias=False)})
    configs = [
        peft.LoraConfig(target_modules=["body"], trainable_token_indices={"lm_head": x}) for x in ([1, 2], [2, 3])
    ]
    wrapped = peft.get_peft_model(model, configs[0])
    wrapped.add_adapter("other", configs[1])
    head: Any = model["lm_head"]
    deltas = head.token_adapter.trainable_tokens_delta
    for name, factor in (("default", 1.5), ("other", 2.0)):
        with torch.no_grad():
            deltas[name].mul_(factor)
        wrapped.set_adapter(name)
        grads = assert_equals_the_module(head, backend)
        assert set(grads) == {"hidden", f"token_adapter.trainable_tokens_delta.{name}"}


def test_a_bias_is_added_to_a_head_with_trained_rows(backend: str) -> None:
    """The argument `bias`, or what the module adds: PEFT 0.21 drops its own. Also with an fp32 head under autocast."""
    peft = pytest.importorskip("peft")
    ids, mask = targets_and_mask()
    hidden, bias = hidden_states(), torch.randn(V, generator=torch.Generator().manual_seed(5))
    for own in (True, False):
        model = nn.ModuleDict({"body": nn.Linear(H, H), "lm_head": nn.Linear(H, V, bias=own)})
        config = peft.LoraConfig(target_modules=["body"], trainable_token_indices={"lm_head": [1, 2]})
        peft.get_peft_model(model, config)
        head: Any = model["lm_head"]
        if own:
            head.token_adapter.base_layer.bias.data = bias
        with torch.autocast("cpu", torch.bfloat16, enabled=own):
            options: dict[str, Any] = {"mask": mask, "bias": None if own else bias, "head_precision": "fp32"}
            out = linear_log_probs(hidden, head, ids, backend=backend, **options)
        expected = plain_log_probs(lambda x, head=head, own=own: head(x) + (0 if own else bias), hidden)
        torch.testing.assert_close(out.log_probs, expected)


@on_device
def test_modules_to_save_use_the_trained_copy(backend: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(H, H), "lm_head": nn.Linear(H, V)})
    model.forward = lambda hidden: model["lm_head"](hidden)  # PEFT requires a forward
    config = peft.LoraConfig(r=2, target_modules=["body"], modules_to_save=["lm_head"])
    wrapped = peft.get_peft_model(model, config)
    wrapped.add_adapter("other", config)
    head: Any = model["lm_head"]
    assert type(head).__name__ == "ModulesToSaveWrapper"
    for name in ("default", "other"):
        with torch.no_grad():
            head.modules_to_save[name].weight.mul_(1.5)
        wrapped.set_adapter(name)
        grads = assert_equals_the_module(head, backend)
        assert set(grads) == {"hidden", f"modules_to_save.{name}.weight", f"modules_to_save.{name}.bias"}
    with wrapped.disable_adapter():
        assert set(assert_equals_the_module(head, backend)) == {"hidden"}


# -- autocast


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


# -- checkpointing, micro-batches, precision settings, threads


# -- modes that must not change a value


def outputs(out: LossOutput) -> list[Tensor]:
    metrics = [value for key, value in out.metrics.items() if key not in ("entropy", "passes")]
    return [x.detach() for x in (out.loss, out.log_probs, out.log_ratio, *metrics)]


@by_dtype
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_grad_mode_and_entropy_change_no_bit(dtype: str, layout: str, backend: str) -> None:
    case = make(f"dtype={dtype} layout={layout} kl=term bias=argument temperature=number backend={backend}", 6)
    leaves = leaves_of(case)
    arguments = arguments_of(case, leaves)
    reference, with_entropy = (under_test.gspo_fused_loss(**arguments | {"entropy": x}) for x in (False, True))
    runs = [with_entropy]
    for mode in (torch.no_grad, torch.inference_mode):
        for entropy in (False, True):
            with mode():
                out = under_test.gspo_fused_loss(**arguments | {"entropy": entropy})
            assert not out.loss.requires_grad
            runs.append(out)
    for out in runs:
        for ours, value in zip(outputs(out), outputs(reference), strict=True):
            assert torch.equal(ours, value)
        assert with_entropy.entropy is not None
        assert out.entropy is None or torch.equal(out.entropy, with_entropy.entropy)
    both = (torch.autograd.grad(x.loss, list(leaves.values())) for x in (reference, with_entropy))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_everything_but_the_loss_is_detached(backend: str) -> None:
    case = make(f"kl=term entropy_coef=0.02 backend={backend}")
    fused = gspo_fused_loss(**arguments_of(case, leaves_of(case)))
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
