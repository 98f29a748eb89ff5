"""Derivatives beyond one backward: second derivatives, forward mode and the transforms of `torch.func`.

Each test holds a line of docs/limits.md: what is supported is compared with the float64 oracle, and what is not raises
an error that names the function and what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.array import arguments_of, leaves_of, of_function
from helpers.device import on_device, to_device
from helpers.features import make
from tolerance import FLOAT64_RELATIVE
from torch import Tensor, nn
from torch.autograd import functional

import gspo_kernels
from gspo_kernels import Objective, gspo_fused_loss, reference

OBJECTIVE = Objective(ratio="token", clip_low=0.2, clip_high=0.2, kl_coef=0.1)
BATCHES = 3  # of a vmap
REPLACEMENTS = {
    "gspo_fused_loss": "gspo_kernels.reference.gspo_reference_loss",
    "linear_log_probs": "gspo_kernels.reference.token_log_probs",
    "policy_loss": "gspo_kernels.reference.log_ratios_of_sequence and surrogate",
}
each_function = pytest.mark.parametrize("name", REPLACEMENTS)


def arguments(seed: int, name: str) -> dict[str, Any]:
    """Return the tensor arguments of a public function, in float64. The first is differentiable, as is lm_head."""
    case = make("dtype=fp64 ratio=token window=wide kl=term token_weights=per_token temperature=per_token", seed)
    tensors = arguments_of(case, {"hidden": case.lay_out("hidden"), **case.leaves})
    tensors["normalizer"] = torch.tensor(2.5 + seed, dtype=torch.float64)
    tensors["log_probs"] = torch.where(case.mask, tensors["old_log_probs"] - 0.05, -1.0)
    # Masked positions hold NaN and bad ids. A vmap over another mask would unmask them, so they are replaced.
    tensors["target_ids"] = tensors["target_ids"].clamp(0, case.vocab - 1)
    given = of_function(getattr(gspo_kernels, name), tensors)
    first = {k: x for k, x in given.items() if k in ("hidden", "log_probs")}
    tensors = {k: x for k, x in (first | given).items() if isinstance(x, Tensor)}
    values = {k: x.detach().double().nan_to_num(1) for k, x in tensors.items() if x.is_floating_point()}
    cleaned = {k: x.clamp(-9, 0 if k.endswith("log_probs") else 9) for k, x in values.items()}
    return tensors | cleaned


def scalar(name: str, backend: str, tensors: dict[str, Any]) -> Tensor:
    """Return the loss, or the sum of squares of the log-probs."""
    function = getattr(gspo_kernels, name)
    options = {} if name == "linear_log_probs" else {"objective": OBJECTIVE}
    out = to_device(function(**to_device(tensors), backend=backend, **options), "cpu")
    return out.log_probs.square().sum() if name == "linear_log_probs" else out.loss


def oracle(tensors: dict[str, Any]) -> Tensor:
    """Compute `scalar` of the fused loss with the function of gspo_kernels.reference that the error message names."""
    tensors = dict(tensors)
    tensors["weight"] = tensors.pop("lm_head")
    return reference.gspo_reference_loss(**tensors, objective=OBJECTIVE).loss


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_the_oracle_takes_the_options_of_the_fused_loss(ratio: str) -> None:
    """To get second derivatives, call `gspo_reference_loss` with the same arguments."""
    case = make(
        f"dtype=fp64 bias=argument logit_scale=0.6 logit_softcap=5.0 vocab_size=padded ratio={ratio} kl=term "
        "kl_aggregation=token-mean kl_ratio_factor=True normalizer=number kl_normalizer=number"
    )
    given = arguments_of(case, leaves_of(case))
    ours = gspo_fused_loss(**given)
    of_oracle = of_function(reference.gspo_reference_loss, {"weight": given["lm_head"], **given})
    truth = reference.gspo_reference_loss(**of_oracle)
    assert_equal(ours.loss.detach(), truth.loss.detach())
    assert_equal(ours.log_ratio, truth.log_ratio.detach())


def test_the_oracle_reads_advantages_per_sequence_even_if_there_are_as_many_tokens() -> None:
    arguments = torch.ones(2, 3), torch.eye(4, 3), torch.tensor([0, 3]), torch.tensor([5.0, 1.0])
    offsets = torch.tensor([0, 0, 2])
    options: dict[str, Any] = {"cu_seqlens": offsets, "objective": Objective()}
    ours, truth = (f(*arguments, **options).loss for f in (gspo_fused_loss, reference.gspo_reference_loss))
    assert_equal(ours, truth)


def of_first(name: str, backend: str, seed: int = 0) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the scalar as a function of the first argument, and that argument."""
    tensors = arguments(seed, name)
    first = next(iter(tensors))
    return lambda x: scalar(name, backend, {**tensors, first: x}), tensors[first]


def assert_equal(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE * truth.abs().max().item())


def gradient_penalty(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    loss = function(leaf)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (loss + grad.norm()).backward()


TWICE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "gradient penalty": gradient_penalty,
    "hessian": functional.hessian,
}


@on_device
@each_function
@pytest.mark.parametrize("how", TWICE)
def test_a_second_backward_raises_an_error_that_says_what_to_use(how: str, name: str, backend: str) -> None:
    function, x = of_first(name, backend)
    with pytest.raises(RuntimeError) as caught:
        TWICE[how](function, x)
    text = str(caught.value)
    assert text.startswith(f"{name}: the gradient is not differentiable") and REPLACEMENTS[name] in text


def test_a_second_backward_of_an_adapter_raises(backend: str) -> None:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": nn.Linear(17, 41, bias=False, dtype=torch.float64)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False), model)
    tensors = arguments(0, "linear_log_probs") | {"lm_head": model["lm_head"].to(torch.float64)}
    adapter = [x for x in model.parameters() if x.requires_grad]
    for x in adapter:
        (grad,) = torch.autograd.grad(scalar("linear_log_probs", backend, tensors), x, create_graph=True)
        with pytest.raises(RuntimeError, match="linear_log_probs: the gradient is not differentiable"):
            torch.autograd.grad(grad.square().sum(), x)


@on_device
@each_function
def test_create_graph_alone_changes_no_gradient(name: str, backend: str) -> None:
    function, x = of_first(name, backend)
    plain, with_graph = x.clone().requires_grad_(), x.clone().requires_grad_()
    function(plain).backward()
    (grad,) = torch.autograd.grad(function(with_graph), with_graph, create_graph=True)
    jacobian: Any = functional.jacobian(function, x, create_graph=True)
    batched: Any = functional.jacobian(function, x, vectorize=True)
    assert plain.grad is not None and plain.grad.norm() > 0
    assert all(torch.equal(plain.grad, other) for other in (grad.detach(), jacobian.detach(), batched))


# -- torch.func

FUNC: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None]),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(y[None]).sum())(x),
}


@each_function
@pytest.mark.parametrize("how", FUNC)
def test_reverse_mode_of_torch_func_is_refused(how: str, name: str) -> None:
    function, x = of_first(name, "torch")
    with pytest.raises(RuntimeError, match=rf"^{name}: torch.func.grad, vjp, .* torch.autograd.grad"):
        FUNC[how](function, x)


@each_function
def test_forward_mode_is_refused(name: str) -> None:
    function, x = of_first(name, "torch")
    with pytest.raises(TypeError, match=rf"^{name}: (hidden|log_probs) must be a tensor without forward-mode tangent"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))


def test_log_probs_without_a_gradient_are_computed_inside_torch_func_grad() -> None:
    tensors = arguments(0, "linear_log_probs")
    expected = scalar("linear_log_probs", "torch", tensors)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = scalar("linear_log_probs", "torch", {**tensors, "hidden": x})
        return x.sum() * constant

    x = tensors["hidden"].nan_to_num()  # masked positions hold NaN
    torch.testing.assert_close(torch.func.grad(function)(x), torch.full_like(x, expected.item()))


MAPPED = [("torch", name, mapped) for name in REPLACEMENTS for mapped in [*arguments(0, name), "all"]]


@on_device
@pytest.mark.parametrize(("backend", "name", "mapped"), [*MAPPED, *(("triton", name, "all") for name in REPLACEMENTS)])
def test_vmap_equals_the_oracle_or_a_loop_over_the_entries(name: str, mapped: str, backend: str) -> None:
    batches = [arguments(seed, name) for seed in range(BATCHES)]
    chosen = list(batches[0]) if mapped == "all" else [mapped]
    tensors = {k: torch.stack([b[k] for b in batches]) if k in chosen else x for k, x in batches[0].items()}
    leaves = [x.requires_grad_() for k, x in tensors.items() if k in ("hidden", "log_probs", "lm_head")]
    in_dims = {k: 0 if k in chosen else None for k in tensors}
    out = torch.func.vmap(lambda x: scalar(name, backend, x), in_dims=(in_dims,))(tensors)
    loss_of_entry = oracle if name == "gspo_fused_loss" else partial(scalar, name, backend)
    entries = [{k: x[i] if k in chosen else x for k, x in tensors.items()} for i in range(BATCHES)]
    truth = torch.stack([loss_of_entry(entry) for entry in entries])
    assert_equal(out, truth)
    upstream = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for ours, true in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (out, truth)), strict=True):
        assert_equal(ours, true)


def test_vmap_over_packed_batches_with_a_budget_and_a_cache(backend: str) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(BATCHES, 6, 4, generator=rng), torch.randn(300, 4, generator=rng).requires_grad_()
    ids = torch.randint(0, 300, (BATCHES, 6), generator=rng)
    advantages = torch.randn(BATCHES, 2, generator=rng)
    offsets = torch.tensor([[0, 2, 6], [0, 3, 6], [0, 1, 6]])

    def loss(*mapped: Tensor) -> Tensor:
        x, targets, of_sequences, cu_seqlens = mapped
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "gradient_budget": 0.1, "cache_mib": 1, "backend": backend}
        return gspo_fused_loss(x, weight, targets, of_sequences, **options).loss

    tensors = (hidden, ids, advantages, offsets)
    out = torch.func.vmap(loss)(*tensors)
    loop = torch.stack([loss(*entry) for entry in zip(*tensors, strict=True)])
    assert torch.equal(out, loop)
    assert torch.equal(*(torch.autograd.grad(x.sum(), weight)[0] for x in (out, loop)))


@pytest.mark.parametrize("name", ["gspo_fused_loss", "policy_loss"])
def test_under_vmap_invalid_values_are_counted(name: str) -> None:
    """A value of a mapped tensor cannot be read, so it raises no error on a CPU either."""
    tensors = arguments(0, name)
    advantages = tensors.pop("advantages").expand(BATCHES, -1).clone()
    advantages[1, 0] = torch.nan
    function = getattr(gspo_kernels, name)

    def loss_and_count(x: Tensor) -> tuple[Tensor, Tensor]:
        out = function(**tensors, advantages=x, objective=OBJECTIVE)
        return out.loss, out.metrics["invalid"]

    loss, invalid = torch.func.vmap(loss_and_count)(advantages)
    assert loss.isnan().tolist() == [False, True, False]
    assert (invalid > 0).tolist() == [False, True, False]
