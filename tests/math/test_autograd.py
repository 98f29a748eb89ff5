"""Gradients compared with finite differences, and checks of the operators (opcheck, fake tensors, torch.compile)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers.array import arguments_of, leaves_of, of_function
from helpers.captured import arguments_of as arguments_of_call
from helpers.device import gspo_fused_loss, linear_log_probs, on_device, policy_loss
from helpers.features import make
from helpers.marks import slow, triton_is_slow
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import gspo_kernels
from gspo_kernels import Objective, fused_loss, log_probs, policy
from gspo_kernels.ops import head as head_operators
from gspo_kernels.ops import loss as loss_operators
from gspo_kernels.sampler_mismatch import RolloutCorrection

HEADS = {
    "plain": "",
    "all options": "bias=argument logit_softcap=5.0 logit_scale=0.6 temperature=per_token vocab_size=padded",
}


@on_device
@triton_is_slow
def test_losses_pass_gradcheck(backend: str) -> None:
    """Gradcheck also passes undefined gradients. tests/math/test_array.py compares other objectives with formulas."""
    case = make(f"dtype=fp64 window=wide entropy_coef=0.02 backend={backend}", 1)

    def fused(*operands: Tensor) -> Tensor:
        return gspo_fused_loss(**arguments_of(case, dict(zip(("hidden", "weight"), operands, strict=True)))).loss

    leaves = list(leaves_of(case).values())
    of_policy = of_function(policy_loss, arguments_of(case, leaves_of(case)))

    def policy(log_probs: Tensor, entropies: Tensor) -> Tensor:
        return policy_loss(log_probs, **of_policy | {"entropy": entropies}).loss

    lp = torch.where(case.mask, of_policy["old_log_probs"] - 0.05, -1.0)
    assert torch.autograd.gradcheck(fused, leaves, fast_mode=True)
    operands = lp.requires_grad_(), lp.detach().abs().requires_grad_()
    assert torch.autograd.gradcheck(policy, operands, fast_mode=backend == "triton")


OPERATORS = {
    "linear_log_probs": head_operators.linear_log_probs_op,
    "policy_loss": loss_operators.policy_loss_op,
    "fused_loss": loss_operators.fused_loss_op,
}


def operator_arguments(name: str, settings: str) -> tuple[Any, ...]:
    """Return the arguments with which a public function calls its operator `name`."""
    case = make(settings, 3)
    arguments = arguments_of(case, leaves_of(case))
    lp = (-torch.rand(case.mask.shape)).requires_grad_()
    of_policy = {"entropy": lp.abs() if case.objective.entropy_coef else None}
    calls = {
        "linear_log_probs": lambda: linear_log_probs(**of_function(linear_log_probs, arguments)),
        "policy_loss": lambda: policy_loss(lp, **of_function(policy_loss, arguments) | of_policy),
        "fused_loss": lambda: gspo_fused_loss(**arguments),
    }
    modules = {"linear_log_probs": log_probs, "policy_loss": policy, "fused_loss": fused_loss}
    return arguments_of_call(modules[name], f"{name}_op", calls[name])


@on_device
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_pass_opcheck(name: str, head: str, backend: str) -> None:
    objective = "kl=term ratio=token" if head == "plain" else "entropy_coef=0.02"
    operator = OPERATORS[name]
    args = operator_arguments(name, f"{objective} {HEADS[head]}")
    torch.library.opcheck(operator.op, finite(operator.flatten((*args[:-1], backend))))
    if name != "policy_loss":  # with a budget and a cache; only rows with a gradient are kept, so all have one
        rows = args[0]._replace(mask=torch.ones_like(args[0].mask), target_ids=args[0].target_ids.clamp(0, 40))
        policy = [x._replace(advantages=torch.ones_like(x.advantages)) for x in args[1:-3] if hasattr(x, "advantages")]
        # A budget cannot be combined with an entropy bonus.
        others = [replace(x, entropy_coef=0.0) for x in args[1:-3] if isinstance(x, Objective)]
        flat = operator.flatten((rows, *policy, *others, 0.1, 2**20, backend))
        assert "\n" not in flat[-1], "inductor would write a comment of several lines"
        torch.library.opcheck(operator.op, finite(flat))


def finite(flat: list[Any]) -> tuple[Any, ...]:
    """Replace the NaN and 1e30 of masked positions, because opcheck compares inputs before and after the call."""
    return tuple(
        x.detach().nan_to_num(1).clamp(-9, 9).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in flat
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "",
        "ratio=token layout=packed",
        "entropy_coef=0.02",
        "layout=packed gradient_budget=0.3",
        "backend=triton entropy_coef=0.02",
        "backend=triton layout=packed gradient_budget=0.3",
    ],
)
def test_compiled_without_a_graph_break_equals_eager_at_every_shape(settings: str) -> None:
    def loss(arguments: dict[str, Any]) -> Tensor:
        return gspo_kernels.gspo_fused_loss(**arguments).loss

    def run(fn: Any, case: Any) -> list[Tensor]:
        leaves = leaves_of(case)
        leaves["hidden"] = leaves["hidden"].detach().requires_grad_()  # the compiler fixes the shape of a Parameter
        value = fn(arguments_of(case, leaves))
        return [value, *torch.autograd.grad(value, list(leaves.values()))]

    torch.compiler.reset()
    graphs: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return make_boxed_func(module)

    backend_that_counts = aot_autograd(fw_compiler=count, bw_compiler=lambda module, inputs: make_boxed_func(module))
    compiled = torch.compile(loss, fullgraph=True, backend=backend_that_counts)
    shapes = [(3, 4), (2, 6), (4, 7), (5, 9), (1, 4), (2, 1), (3, 8), (3, 2), (6, 5), (7, 11)]
    for seed, (sequences, tokens) in enumerate(shapes):
        case = make(f"{settings} temperature=tensor normalizer=tensor", seed).take(list(range(sequences)), tokens)
        for a, b in zip(run(loss, case), run(compiled, case), strict=True):
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
