"""Gradients compared with finite differences, and checks of the operators (opcheck, fake tensors, torch.compile)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers.captured import arguments_of
from helpers.device import linear_log_probs, on_device, policy_loss
from helpers.marks import slow, triton_is_slow
from helpers.samples import call_fused, make_sample, new_leaves
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import gspo_kernels
from gspo_kernels import Objective, fused_loss, log_probs, policy
from gspo_kernels.ops import head as head_operators
from gspo_kernels.ops import loss as loss_operators
from gspo_kernels.sampler_mismatch import RolloutCorrection

SMALL: dict[str, Any] = {"lengths": (3, 2, 4), "hidden_size": 4, "vocab": 6, "dtype": torch.float64}
WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": WIDE,
    "grpo": {**WIDE, "ratio": "token"},
    "entropy": {**WIDE, "entropy_coef": 0.1},
}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias-softcap-temperature": {
        "bias": True,
        "logit_softcap": 3.0,
        "logit_scale": 0.8,
        "temperature": "per-token",
        "padded_vocab": 2,
    },
}


def gradcheck(fn: Any, inputs: Any, backend: str) -> bool:
    """Check every entry of the Jacobian. For interpreted kernels, which are slow, check random projections instead."""
    return torch.autograd.gradcheck(fn, inputs, fast_mode=backend == "triton")


@on_device
@triton_is_slow
def test_losses_pass_gradcheck(backend: str) -> None:
    """Gradcheck also passes undefined gradients. Other objectives are compared with the oracle's gradients."""
    sample = make_sample(1, objective=Objective(**OBJECTIVES["entropy"]), spread=0.3, **SMALL)

    def fused(*operands: Tensor) -> Tensor:
        return call_fused(sample, dict(zip(sample.leaves, operands, strict=True)), backend).loss

    def policy(log_probs: Tensor, entropies: Tensor) -> Tensor:
        options = {name: sample.options[name] for name in ("mask", "old_log_probs")}
        options |= {"objective": sample.objective, "backend": backend}
        return policy_loss(log_probs, sample.advantages, entropy=entropies, **options).loss

    lp = torch.where(sample.options["mask"], sample.options["old_log_probs"].double() - 0.05, -1.0)
    assert gradcheck(fused, list(new_leaves(sample).values()), backend)
    assert gradcheck(policy, (lp.requires_grad_(), lp.detach().abs().requires_grad_()), backend)


OPERATORS = {
    "linear_log_probs": head_operators.linear_log_probs_op,
    "policy_loss": loss_operators.policy_loss_op,
    "fused_loss": loss_operators.fused_loss_op,
}


def operator_arguments(name: str, **options: Any) -> tuple[Any, ...]:
    """Return the arguments with which a public function calls its operator `name`."""
    sample = make_sample(3, **{**SMALL, "dtype": torch.float32}, **options)
    leaves, ids = sample.leaves, sample.target_ids
    of_head = {k: x for k, x in sample.options.items() if not k.endswith("_log_probs")}
    of_policy = {k: sample.options[k] for k in ("mask", "old_log_probs", "ref_log_probs")}
    lp = (-torch.rand(ids.shape)).requires_grad_()
    of_policy |= {"objective": sample.objective, "entropy": lp.abs() if sample.objective.entropy_coef else None}
    calls = {
        "linear_log_probs": lambda: linear_log_probs(
            leaves["hidden"], leaves["weight"], ids, bias=leaves.get("bias"), **of_head
        ),
        "policy_loss": lambda: policy_loss(lp, sample.advantages, **of_policy),
        "fused_loss": lambda: call_fused(sample, leaves),
    }
    modules = {"linear_log_probs": log_probs, "policy_loss": policy, "fused_loss": fused_loss}
    return arguments_of(modules[name], f"{name}_op", calls[name])


@on_device
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_opcheck(name: str, head: str, backend: str) -> None:
    objective = Objective(kl_coef=0.1, ratio="token") if head == "plain" else Objective(entropy_coef=0.1)
    operator = OPERATORS[name]
    args = operator_arguments(name, objective=objective, **HEADS[head])
    torch.library.opcheck(operator.op, finite(operator.flatten((*args[:-1], backend))))
    if name != "policy_loss":  # with a budget and a cache; only rows with a gradient are kept, so all have one
        rows = args[0]._replace(mask=torch.ones_like(args[0].mask), target_ids=args[0].target_ids.clamp(0, 5))
        policy = [x._replace(advantages=torch.ones_like(x.advantages)) for x in args[1:-3] if hasattr(x, "advantages")]
        # A budget cannot be combined with an entropy bonus.
        others = [replace(x, entropy_coef=0.0) for x in args[1:-3] if isinstance(x, Objective)]
        flat = operator.flatten((rows, *policy, *others, 0.1, 2**20, backend))
        assert "\n" not in flat[-1], "inductor would write a comment of several lines"
        torch.library.opcheck(operator.op, finite(flat))


def finite(flat: list[Any]) -> tuple[Any, ...]:
    """Replace the NaN and 1e30 of masked positions, because opcheck compares inputs before and after the call."""
    return tuple(
        x.detach().nan_to_num().clamp(-9, 9).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in flat
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name", "packed", "budget"),
    [
        ("torch", "gspo", False, 0.0),
        ("torch", "grpo", True, 0.0),
        ("torch", "entropy", False, 0.0),
        ("torch", "gspo", True, 0.1),
        ("triton", "entropy", False, 0.0),
        ("triton", "gspo", True, 0.1),
    ],
)
def test_compiled_without_a_graph_break_equals_eager_at_every_shape(
    backend: str, name: str, packed: bool, budget: float
) -> None:
    objective = Objective(**OBJECTIVES[name])

    def loss(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, options: dict[str, Any]) -> Tensor:
        return gspo_kernels.gspo_fused_loss(
            hidden, weight, ids, advantages, objective=objective, gradient_budget=budget, backend=backend, **options
        ).loss

    def run(fn: Any, sample: Any) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in sample.leaves.values()]
        value = fn(*leaves, sample.target_ids, sample.advantages, sample.options)
        return [value, *torch.autograd.grad(value, leaves)]

    torch.compiler.reset()
    graphs: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module)

    backend_that_counts = aot_autograd(fw_compiler=count, bw_compiler=lambda module, inputs: make_boxed_func(module))
    compiled = torch.compile(loss, fullgraph=True, backend=backend_that_counts)
    shapes = [(3, 2, 4), (5, 6), (2, 7, 3, 4), (9, 1, 1, 2, 6), (4,), (1, 1), (3, 3, 8), (8, 8, 2), (6, 5), (12, 1, 3)]
    for seed, lengths in enumerate(shapes):
        sample = make_sample(
            seed, objective=objective, packed=packed, lengths=lengths, hidden_size=4, vocab=6
        ).with_options(temperature=torch.tensor(0.5 + seed / 10), normalizer=torch.tensor(1.0 + seed))
        for a, b in zip(run(loss, sample), run(compiled, sample), strict=True):
            assert torch.equal(a, b)
    # One graph for the first shape, one for any shape, and more for sizes of 1, which the compiler specialises.
    assert len(graphs) <= 5


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("preset", ["gspo", *map(slow, ("cispo", "sapo", "gmpo", "reinforce"))])
def test_equal_objectives_share_a_graph(preset: str, dynamic: bool | None) -> None:
    """The compiler guards on the values of an objective's numbers, not on the identity of the objects."""
    graphs: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    def loss(lp: Tensor, rollout: Tensor, objective: Objective) -> Tensor:
        old = lp.detach() - 0.1
        kwargs = {"old_log_probs": old, "rollout_log_probs": rollout, "objective": objective}
        return gspo_kernels.policy_loss(lp, torch.ones(4), **kwargs).loss

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=count, dynamic=dynamic)
    lp = -torch.rand(4, 5)
    objectives = []  # keeps all numbers alive, so that no two have the same address
    for _ in range(10):
        correction = RolloutCorrection(high=float("2.5"))
        objective = Objective.preset(preset, clip_high=float("0.03"), length_norm=9, rollout_correction=correction)
        objectives.append(objective)
        assert torch.equal(compiled(lp, lp - 0.2, objective), loss(lp, lp - 0.2, objective))
    assert len(graphs) == 1


def test_an_objective_made_inside_a_compiled_function_is_read() -> None:
    def loss(log_probs: Tensor, clip: float) -> Tensor:
        objective = gspo_kernels.Objective(clip_low=clip, clip_high=float("inf"), kl_coef=0.0)
        return gspo_kernels.policy_loss(log_probs, torch.tensor([-1.0, 1.0]), objective=objective, backend="torch").loss

    log_probs = -torch.rand(2, 5)
    assert torch.equal(torch.compile(loss, fullgraph=True, backend="aot_eager")(log_probs, 2e-3), loss(log_probs, 2e-3))
