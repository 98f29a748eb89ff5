"""Log-probs and gradients of every kind of head equal the module's: plain, tied, frozen, PEFT, autocast, threads."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import device as under_test
from helpers.device import on_device, to_device
from helpers.marks import by_dtype, slow
from helpers.oracle import DTYPES
from helpers.samples import Sample, make_sample, run_fused
from tolerance import check, check_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gspo_kernels import LossOutput, Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.backends.precision import exact_products
from gspo_kernels.reference import gspo_reference_loss

pytestmark = pytest.mark.filterwarnings("ignore:Already results a `peft_config`")

B, T, H, V = 3, 6, 16, 41
EVERYTHING = Objective(kl_coef=0.1, entropy_coef=0.02)

Call = Callable[[Tensor, Any], Tensor]  # (hidden, head) -> a scalar

MKLDNN: Any = torch.backends.mkldnn  # PyTorch does not declare its `matmul`


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
    head: Any, backend: str, dtype: torch.dtype = torch.float32, log_probs_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Assert that log-probs and gradients equal the results of the module's forward. Return our gradients."""
    ids, mask = targets_and_mask()
    hidden = hidden_states(dtype)
    moved = to_device(copy.deepcopy(head))
    ours = under_test.linear_log_probs(hidden, moved, ids, mask=mask, backend=backend).log_probs
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


def test_a_module_equals_its_weight_and_bias_bitwise(backend: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(H, V)
    ids, mask = targets_and_mask()
    hidden = hidden_states()
    module = linear_log_probs(hidden, head, ids, mask=mask, backend=backend).log_probs
    tensors = linear_log_probs(hidden, head.weight, ids, mask=mask, bias=head.bias, backend=backend).log_probs
    assert torch.equal(module, tensors)
    no_bias = nn.Linear(H, V, bias=False)
    no_bias.weight = head.weight
    separate = linear_log_probs(hidden, no_bias, ids, mask=mask, bias=head.bias, backend=backend).log_probs
    assert torch.equal(separate, tensors)
    sources = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    expected = gradients(tensors, sources)
    for name, grad in gradients(module, sources).items():
        assert torch.equal(grad, expected[name]), name


@on_device
def test_a_parametrized_weight_gets_its_gradient_through_the_parametrization(backend: str) -> None:
    torch.manual_seed(0)
    head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(H, V))
    grads = assert_equals_the_module(head, backend)
    assert any("original0" in name for name in grads)


class TiedModel(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H, dtype=dtype)
        self.body = nn.Linear(H, H, dtype=dtype)
        self.lm_head = nn.Linear(H, V, bias=False, dtype=dtype)
        self.lm_head.weight = self.embedding.weight

    def hidden_states(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embedding(ids)))


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_tied_weights_add_up_the_gradients_of_embedding_and_head(dtype: str, backend: str) -> None:
    torch.manual_seed(0)
    model = TiedModel(DTYPES[dtype])
    ids, mask = targets_and_mask()
    prompt = ids.clamp(min=0).flip(1)
    advantages = torch.tensor([1.0, -0.5, 0.3])

    def run(model: TiedModel, loss: Callable[[Tensor, TiedModel], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        value = loss(model.hidden_states(prompt), model)
        model.zero_grad()
        value.backward()
        return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    def fused(hidden: Tensor, model: TiedModel) -> Tensor:
        return gspo_fused_loss(hidden, model.lm_head, ids, advantages, mask=mask, backend=backend).loss

    def oracle(hidden: Tensor, model: TiedModel) -> Tensor:
        weight = model.lm_head.weight
        return gspo_reference_loss(hidden, weight, ids, advantages, mask=mask, objective=Objective()).loss

    loss, grads = run(model, fused)
    _, same_grads = run(model, oracle)
    truth, true_grads = run(copy.deepcopy(model).double(), oracle)
    check_loss(loss, truth, advantages)
    assert set(grads) == {"embedding.weight", "body.weight", "body.bias"}
    for name, grad in grads.items():
        check(f"d_{name}", grad, same_grads[name], true_grads[name], DTYPES[dtype])


@pytest.mark.parametrize("entropy", [False, True])
def test_a_frozen_head_gets_no_gradient_and_d_hidden_is_the_same(entropy: bool, backend: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(H, V)
    ids, mask = targets_and_mask()
    results = []
    for frozen in (False, True):
        head.requires_grad_(not frozen)
        hidden = hidden_states()
        out = linear_log_probs(hidden, head, ids, mask=mask, entropy=entropy, backend=backend)
        value = (out.log_probs * upstream().float()).sum() + (out.entropy.sum() if entropy else 0)
        value.backward()
        results.append(hidden.grad)
        assert (head.weight.grad is None) == (head.bias.grad is None) == frozen
        head.weight.grad = head.bias.grad = None
    assert torch.equal(*results)


# -- adapters


def lora(
    dtype: torch.dtype = torch.float32, adapters: int = 1, adapter_dtype: torch.dtype | None = None, **config: Any
) -> Any:
    """Return a PEFT LoRA head whose adapters are all active and not zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"lm_head": nn.Linear(H, V, bias=config.pop("base_bias", False), dtype=dtype)})
    names = [f"adapter{i}" for i in range(adapters)]
    for i, name in enumerate(names):
        shape = {"r": 3 + i, "lora_alpha": 5 - i}
        lora_config = peft.LoraConfig(**{**shape, "target_modules": ["lm_head"], "init_lora_weights": False, **config})
        peft.inject_adapter_in_model(lora_config, model, adapter_name=name)
    head: Any = model["lm_head"]
    head.set_adapter(names)
    for name, parameter in head.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype or dtype)
    return head


def adapter_parameters(head: Any) -> set[str]:
    return {name for name, _ in head.named_parameters() if "lora_" in name}


@on_device
@pytest.mark.parametrize("adapters", [1, 3])
@pytest.mark.parametrize("base_bias", [False, True])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_lora_on_the_head_equals_peft(adapters: int, base_bias: bool, use_rslora: bool, backend: str) -> None:
    head = lora(adapters=adapters, base_bias=base_bias, use_rslora=use_rslora)
    grads = assert_equals_the_module(head, backend)
    assert set(grads) == {"hidden"} | adapter_parameters(head), "the base gets no gradient"


@on_device
def test_fp32_adapters_on_a_bf16_head_are_not_rounded(backend: str) -> None:
    head = lora(torch.bfloat16, adapters=2, adapter_dtype=torch.float32)
    grads = assert_equals_the_module(head, backend, torch.bfloat16)
    assert {g.dtype for name, g in grads.items() if "lora_" in name} == {torch.float32}


@on_device
def test_bf16_adapters_get_bf16_gradients(backend: str) -> None:
    grads = assert_equals_the_module(lora(torch.bfloat16, adapters=2), backend, torch.bfloat16)
    assert {g.dtype for g in grads.values()} == {torch.bfloat16}


def test_only_active_adapters_count(backend: str) -> None:
    head = lora(adapters=3)
    head.set_adapter(["adapter1"])
    grads = assert_equals_the_module(head, backend)
    assert all("adapter1" in name for name in grads if name != "hidden")
    head.enable_adapters(False)
    disabled = assert_equals_the_module(head, backend)
    assert set(disabled) == {"hidden"}
    ids, mask = targets_and_mask()
    out = linear_log_probs(hidden_states(), head, ids, mask=mask, backend=backend).log_probs
    base = linear_log_probs(hidden_states(), head.base_layer, ids, mask=mask, backend=backend).log_probs
    assert torch.equal(out, base)


def test_merged_adapters_are_counted_once(backend: str) -> None:
    head = lora(adapters=2)
    ids, mask = targets_and_mask()
    before = linear_log_probs(hidden_states(), head, ids, mask=mask, backend=backend).log_probs
    head.merge()
    assert set(assert_equals_the_module(head, backend)) == {"hidden"}
    merged = linear_log_probs(hidden_states(), head, ids, mask=mask, backend=backend).log_probs
    wide = plain_log_probs(copy.deepcopy(head).double(), hidden_states(torch.float64))
    check("merged", before, merged, wide, torch.float32)


@pytest.mark.parametrize("adapters", [1, 2])
def test_lora_dropout_drops_what_peft_drops(adapters: int, backend: str) -> None:
    head = lora(adapters=adapters, lora_dropout=0.4).train()
    ids, mask = targets_and_mask()
    results = []
    for plain in (False, True):
        torch.manual_seed(5)
        hidden = hidden_states()
        lp = plain_log_probs(head, hidden) if plain else linear_log_probs(hidden, head, ids, mask=mask).log_probs
        results.append({"log_probs": lp, **gradients(lp, {"hidden": hidden, **trained(head)})})
    wide_head = copy.deepcopy(head).double()
    wide_hidden = hidden_states().detach().double().requires_grad_()
    torch.manual_seed(5)
    # Draw the random numbers in fp32 as above, so that the same elements are dropped.
    for name in wide_head.lora_dropout:
        drop = wide_head.lora_dropout[name]
        drop.forward = lambda x, p=drop.p: x * torch.dropout(torch.ones(x.shape), p, True).double()
    truth = plain_log_probs(wide_head, wide_hidden)
    wide = {"log_probs": truth, **gradients(truth, {"hidden": wide_hidden, **trained(wide_head)})}
    for name, true_value in wide.items():
        ours, same, truth = (
            x.flatten(0, -2) if x.ndim == 3 else x for x in (results[0][name], results[1][name], true_value)
        )
        check(name, ours, same, truth, torch.float32)
    head.eval()
    assert_equals_the_module(head, backend)


def test_a_fused_loss_with_lora_equals_the_chained_functions(backend: str) -> None:
    head = lora(adapters=2)
    ids, mask = targets_and_mask()
    advantages = torch.tensor([1.0, -0.5, 0.3])
    old = plain_log_probs(head, hidden_states()).detach() - 1e-4
    options = {"mask": mask, "backend": backend}
    results = []
    for fused in (False, True):
        hidden = hidden_states()
        if fused:
            loss = gspo_fused_loss(hidden, head, ids, advantages, old_log_probs=old, **options).loss
        else:
            lp = linear_log_probs(hidden, head, ids, **options).log_probs
            loss = policy_loss(lp, advantages, old_log_probs=old, **options).loss
        results.append([loss, *torch.autograd.grad(loss, [hidden, *trained(head).values()])])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_masked_tokens_have_exactly_zero_influence_on_an_adapter(garbage: float, backend: str) -> None:
    head = lora(adapters=2, base_bias=True)
    ids, mask = targets_and_mask()
    advantages = torch.tensor([1.0, -0.5, 0.3])
    results = []
    for value in (0.0, garbage):
        hidden = hidden_states().detach()
        hidden[~mask] = value
        hidden.requires_grad_()
        out = gspo_fused_loss(hidden, head, ids, advantages, mask=mask, backend=backend)
        grads = torch.autograd.grad(out.loss, [hidden, *trained(head).values()])
        assert (grads[0][~mask] == 0).all()
        results.append([out.loss, out.log_probs, *grads])
    for ours, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("case", ["B = 0", "T = 0", "all masked"])
def test_an_adapter_without_tokens_gets_zero(case: str, backend: str) -> None:
    head = lora(adapters=2)
    ids, mask = targets_and_mask()
    advantages = torch.tensor([1.0, -0.5, 0.3])
    cut = {"B = 0": (slice(0, 0),), "T = 0": (slice(None), slice(0, 0)), "all masked": (slice(None),)}[case]
    hidden = hidden_states()
    loss = gspo_fused_loss(
        hidden[cut], head, ids[cut], advantages[cut[:1]], mask=torch.zeros_like(mask[cut]), backend=backend
    ).loss
    loss.backward()
    assert loss == 0 and (hidden.grad == 0).all()
    assert all((p.grad == 0).all() for p in trained(head).values())


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


class QuantizedLinear(nn.Linear):
    """A Linear whose forward does not multiply by its weight, like bitsandbytes' Linear4bit."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight / 16, self.bias)


def lora_on_a_quantized_head() -> Any:
    head = lora()
    head.base_layer.__class__ = QuantizedLinear
    return head


REJECTED: dict[str, Callable[[], Any]] = {
    "dora": lambda: lora(use_dora=True),
    "dora-beside-plain-lora": lambda: add_adapter(lora(), use_dora=True),
    "lora-bias": lambda: lora(lora_bias=True),
    "quantized": lambda: QuantizedLinear(H, V),
    "lora-on-a-quantized-head": lora_on_a_quantized_head,
}


def add_adapter(head: Any, **config: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": head})
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["lm_head"], **config), model, adapter_name="another"
    )
    head = model["lm_head"]
    head.set_adapter([*head.lora_A])
    return head


@pytest.mark.parametrize("kind", REJECTED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_head_that_cannot_be_reproduced_is_rejected(kind: str, backend: str) -> None:
    head = REJECTED[kind]()
    ids, mask = targets_and_mask()
    with pytest.raises((TypeError, ValueError), match="lm_head must be"):
        linear_log_probs(hidden_states(), head, ids, mask=mask, backend=backend)
    with pytest.raises((TypeError, ValueError), match="lm_head must be"):
        gspo_fused_loss(hidden_states(), head, ids, torch.ones(B), mask=mask, backend=backend)


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


@pytest.mark.parametrize("head_kind", ["linear", "lora"])
def test_a_backward_inside_autocast_equals_one_outside(head_kind: str, backend: str) -> None:
    ids, mask = targets_and_mask()
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        head = lora(adapters=2) if head_kind == "lora" else nn.Linear(H, V)
        hidden = hidden_states()
        old = plain_log_probs(head, hidden).detach()
        with torch.autocast("cpu", torch.bfloat16):
            out = gspo_fused_loss(
                hidden,
                head,
                ids,
                torch.tensor([1.0, -0.5, 0.3]),
                mask=mask,
                old_log_probs=old,
                ref_log_probs=old,
                objective=EVERYTHING,
                backend=backend,
            )
            if inside:
                out.loss.backward()
        if not inside:
            out.loss.backward()
        assert out.loss.dtype == torch.float32
        results.append([out.loss.detach(), hidden.grad, *(p.grad for p in trained(head).values())])
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


def test_autocast_does_not_reach_policy_loss(backend: str) -> None:
    sample = make_sample(3, objective=EVERYTHING)
    results = []
    for enabled in (False, True):
        lp = torch.where(sample.options["mask"], sample.options["old_log_probs"] + 1e-4, 0).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = policy_loss(
                lp,
                sample.advantages,
                mask=sample.options["mask"],
                old_log_probs=sample.options["old_log_probs"],
                ref_log_probs=sample.options["ref_log_probs"],
                entropy=torch.ones_like(lp),
                objective=EVERYTHING,
                backend=backend,
            )
            out.loss.backward()
        results.append((out.loss.detach(), lp.grad))
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


# -- checkpointing, micro-batches, precision settings, threads


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("head_kind", ["linear", "lora-with-dropout"])
def test_activation_checkpointing_changes_no_bit(use_reentrant: bool, head_kind: str, backend: str) -> None:
    ids, mask = targets_and_mask()
    head = lora(lora_dropout=0.3).train() if head_kind != "linear" else nn.Linear(H, V)
    old = plain_log_probs(head, hidden_states()).detach()

    def loss(hidden: Tensor) -> Tensor:
        return gspo_fused_loss(
            hidden,
            head,
            ids,
            torch.tensor([1.0, -0.5, 0.3]),
            mask=mask,
            old_log_probs=old,
            ref_log_probs=old,
            objective=EVERYTHING,
            backend=backend,
        ).loss

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(4)
        hidden = hidden_states()
        value = checkpoint(loss, hidden, use_reentrant=use_reentrant) if checkpointed else loss(hidden)
        head.zero_grad()
        value.backward()
        results.append([value.detach(), hidden.grad, *(p.grad.clone() for p in trained(head).values())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


AGGREGATIONS = ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("as_tensor", [False, slow(True)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype", ["fp64", slow("fp32")])
def test_micro_batches_with_a_common_normalizer_equal_one_batch(
    dtype: str, aggregation: str, as_tensor: bool, backend: str
) -> None:
    objective = replace(EVERYTHING, aggregation=aggregation, length_norm=12)
    sample = make_sample(4, dtype=DTYPES[dtype], objective=objective, token_weights=True)
    mask = sample.options["mask"]
    number = mask.sum() if aggregation == "token-mean" else (mask.any(1).sum() if "norm" not in aggregation else 1)
    normalizer: Any = torch.as_tensor(number) if as_tensor else int(number)
    batch = sample.with_options(normalizer=normalizer)
    expected, expected_grads = run_fused(batch, backend)
    if aggregation != "seq-mean-token-sum-norm":  # `number` is the default normalizer
        assert torch.equal(run_fused(sample, backend)[0].loss, expected.loss)
    truth, true_grads = run_fused(batch.cast(torch.float64), backend)
    loss = torch.zeros((), dtype=expected.loss.dtype)
    grads: dict[str, Any] = {"hidden": [], "weight": 0}
    for rows in (slice(0, 1), slice(1, 6), slice(6, 12)):

        def cut(x: Any, rows: slice = rows) -> Any:
            return x[rows] if isinstance(x, Tensor) and x.ndim and x.shape[0] == 12 else x

        micro = Sample(
            {"hidden": cut(sample.leaves["hidden"]), "weight": sample.leaves["weight"]},
            cut(sample.target_ids),
            cut(sample.advantages),
            objective,
            {k: cut(v) for k, v in batch.options.items()},
        )
        out, micro_grads = run_fused(micro, backend)
        loss += out.loss.detach()
        grads["hidden"].append(micro_grads["hidden"])
        grads["weight"] = grads["weight"] + micro_grads["weight"]
    check_loss(loss, truth.loss, sample.advantages)
    d_hidden = torch.cat(grads["hidden"])
    same_hidden, true_hidden = expected_grads["hidden"].flatten(0, 1), true_grads["hidden"].flatten(0, 1)
    check("d_hidden", d_hidden.flatten(0, 1), same_hidden, true_hidden, DTYPES[dtype])
    check("d_weight", grads["weight"], expected_grads["weight"], true_grads["weight"], DTYPES[dtype])


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.usefixtures("matmul_precision")
def test_exact_products_are_requested_on_every_processor(precision: str) -> None:
    """Check the setting itself: on a processor without bf16 products, the next test cannot fail."""
    torch.set_float32_matmul_precision(precision)
    with exact_products(torch.device("cpu")):
        assert MKLDNN.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("head_kind", ["linear", "lora"])
@pytest.mark.usefixtures("matmul_precision")
def test_a_global_setting_of_fast_products_changes_no_bit_and_is_restored(
    head_kind: str, precision: str, backend: str
) -> None:
    """On a CPU with bf16 products, "medium" rounds the operands of every fp32 product."""
    width = 64
    vocab = 300
    ids = torch.arange(100)[None]
    results = []
    for setting in ("highest", precision):
        torch.set_float32_matmul_precision(setting)
        torch.manual_seed(0)
        hidden = torch.randn(1, 100, width, requires_grad=True)
        head: Any = nn.Linear(width, vocab)
        if head_kind == "lora":
            head = add_adapter_of_width(head)
        old = torch.full((1, 100), -5.5)
        out = gspo_fused_loss(
            hidden,
            head,
            ids,
            torch.ones(1),
            old_log_probs=old,
            ref_log_probs=old,
            objective=EVERYTHING,
            backend=backend,
        )
        out.loss.backward()
        assert torch.get_float32_matmul_precision() == setting
        results.append([out.loss.detach(), out.log_probs, out.log_ratio])
        if head_kind == "linear":
            results[-1] += [hidden.grad, head.weight.grad]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def add_adapter_of_width(head: nn.Linear) -> Any:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": head})
    config = peft.LoraConfig(r=8, target_modules=["lm_head"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    return model["lm_head"]


@pytest.mark.usefixtures("matmul_precision")
def test_a_failed_call_restores_the_setting_of_fast_products(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend != "torch":
        pytest.skip("patches the torch backend")
    from gspo_kernels.backends.torch import tiles as torch_tiles

    def out_of_memory(*_: Any) -> Any:
        raise MemoryError

    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(torch_tiles.Tiles, "logits", out_of_memory)
    ids, mask = targets_and_mask()
    with pytest.raises(MemoryError):
        linear_log_probs(hidden_states(), torch.ones(V, H), ids, mask=mask, backend=backend)
    assert torch.get_float32_matmul_precision() == "medium"
    assert MKLDNN.matmul.fp32_precision == "bf16"


@pytest.mark.usefixtures("matmul_precision")
def test_two_threads_keep_exact_products_and_restore_the_setting(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend != "torch":
        pytest.skip("patches the torch backend")
    from gspo_kernels.backends.torch import tiles as torch_tiles

    compute = torch_tiles.Tiles.logits
    limit = 20
    second_has_entered, first_has_left = threading.Event(), threading.Event()
    precisions: dict[str, str] = {}

    def logits(tiles: Any, *args: Any) -> Tensor:
        name = threading.current_thread().name
        if name == "first":  # this thread enters first, and leaves while the other is inside
            assert second_has_entered.wait(limit)
        else:
            second_has_entered.set()
            assert first_has_left.wait(limit)
            precisions["second"] = MKLDNN.matmul.fp32_precision
        return compute(tiles, *args)

    first_has_entered = threading.Event()
    make_slab = torch_tiles.Tiles.weight_slab

    def weight_slab(tiles: Any, *args: Any) -> Tensor:
        first_has_entered.set()
        return make_slab(tiles, *args)

    monkeypatch.setattr(torch_tiles.Tiles, "logits", logits)
    monkeypatch.setattr(torch_tiles.Tiles, "weight_slab", weight_slab)
    torch.set_float32_matmul_precision("medium")
    before = MKLDNN.matmul.fp32_precision
    ids, mask = targets_and_mask()

    def run() -> None:
        with torch.no_grad():
            linear_log_probs(hidden_states(), torch.ones(V, H), ids, mask=mask, backend=backend)

    first, second = threading.Thread(target=run, name="first"), threading.Thread(target=run, name="second")
    first.start()
    assert first_has_entered.wait(limit)
    second.start()
    first.join(limit)
    first_has_left.set()
    second.join(limit)
    assert precisions == {"second": "ieee"}
    assert MKLDNN.matmul.fp32_precision == before


def test_a_backward_in_another_thread_gives_the_same_gradients(backend: str) -> None:
    sample = make_sample(5, objective=EVERYTHING, bias=True)
    _, expected = run_fused(sample, backend)
    leaves = {name: x.detach().requires_grad_() for name, x in sample.leaves.items()}
    out = gspo_fused_loss(
        leaves["hidden"],
        leaves["weight"],
        sample.target_ids,
        sample.advantages,
        bias=leaves["bias"],
        objective=sample.objective,
        backend=backend,
        **sample.options,
    )
    thread = threading.Thread(target=out.loss.backward)
    thread.start()
    thread.join()
    for name, x in leaves.items():
        assert x.grad is not None and torch.equal(x.grad, expected[name])


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
    call: dict[str, Any] = {"bias": sample.leaves["bias"], "objective": objective, "backend": backend, **sample.options}
    arguments = (sample.leaves["hidden"], sample.leaves["weight"], sample.target_ids, sample.advantages)
    for mode in (torch.no_grad, torch.inference_mode):
        for entropy in (False, True):
            with mode():
                out = gspo_fused_loss(*arguments, entropy=entropy, **call)
            assert not out.loss.requires_grad
            runs.append(out)
    for out in runs:
        for ours, value in zip(outputs(out), outputs(reference), strict=True):
            assert torch.equal(ours, value)
        assert with_entropy.entropy is not None
        assert out.entropy is None or torch.equal(out.entropy, with_entropy.entropy)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_log_probs_and_policy_loss_run_without_gradients(mode: Any, backend: str) -> None:
    ids, mask = targets_and_mask()
    for head in (nn.Linear(H, V), lora(adapters=2)):
        hidden = hidden_states()
        lp = linear_log_probs(hidden, head, ids, mask=mask, entropy=True, backend=backend)
        loss = policy_loss(lp.log_probs, torch.ones(B), mask=mask, backend=backend).loss
        with mode():
            detached = linear_log_probs(hidden, head, ids, mask=mask, backend=backend)
            assert torch.equal(detached.log_probs, lp.log_probs) and not detached.log_probs.requires_grad
            assert torch.equal(policy_loss(detached.log_probs, torch.ones(B), mask=mask, backend=backend).loss, loss)


def test_everything_but_the_loss_is_detached(backend: str) -> None:
    out, _ = run_fused(make_sample(6, objective=EVERYTHING), backend)
    assert out.loss.requires_grad
    others = [out.log_probs, out.entropy, out.log_ratio, *out.metrics.values()]
    assert not any(x.requires_grad for x in others)
    lp = torch.zeros(2, 3, requires_grad=True)
    out = policy_loss(lp, torch.ones(2), entropy=torch.ones(2, 3, requires_grad=True), backend=backend)
    assert out.loss.requires_grad
    others = [out.log_probs, out.entropy, out.log_ratio, *out.metrics.values()]
    assert not any(x.requires_grad for x in others)


def test_an_objective_survives_copy_and_pickle() -> None:
    for objective in (Objective(), EVERYTHING, Objective.preset("dapo", clip_high=0.3), Objective(dual_clip=3.0)):
        for twin in (copy.copy(objective), copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
            assert twin == objective and hash(twin) == hash(objective) and type(twin) is Objective
    with pytest.raises(AttributeError):
        EVERYTHING.kl_coef = 1.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("head_kind", ["linear", "lora"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(head_kind: str, backend: str) -> None:
    torch.manual_seed(0)
    rows, width, vocab = 300, 256, 50
    head: Any = nn.Linear(width, vocab)
    if head_kind == "lora":
        head = add_adapter_of_width(head)
    hidden = torch.randn(rows, width)
    ids = torch.randint(0, vocab, (rows,))
    together = linear_log_probs(hidden, head, ids, backend=backend).log_probs
    for low, high in ((0, 1), (7, 8), (3, 40), (100, 300)):
        alone = linear_log_probs(hidden[low:high], head, ids[low:high], backend=backend).log_probs
        assert torch.equal(alone, together[low:high]), f"rows {low} to {high}"
    mask = torch.arange(rows) % 7 == 3
    assert torch.equal(linear_log_probs(hidden, head, ids, mask=mask, backend=backend).log_probs[mask], together[mask])
