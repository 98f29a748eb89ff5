"""Cases of tests/distributed: ranks with different arguments or environment variables raise, all of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.sharded_cases import Context, case
from helpers.sharded_features import raises, rows
from helpers.sharded_runs import rank_in, shard_rows
from torch import Tensor, nn

from gspo_kernels import KeptSets, Objective, gspo_fused_loss, linear_log_probs, policy_loss, validation
from gspo_kernels.inputs.compared import ENVIRONMENT
from gspo_kernels.ranks import agreement
from gspo_kernels.sampler_mismatch import RolloutCorrection

V, S = 64, 3
FUNCTIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (gspo_fused_loss, "tp_group"),
    (gspo_fused_loss, "cp_group"),
    (linear_log_probs, "tp_group"),
    (policy_loss, "cp_group"),
)


def arguments(function: Callable[..., Any], kind: str, group: Any) -> dict[str, Any]:
    """Return every argument of the function but the other group: a packed batch of three sequences."""
    hidden, weight, ids = rows(V)
    rng = torch.Generator().manual_seed(1)
    old, ref, rollout, weights = (torch.rand(len(ids), generator=rng) for _ in range(4))
    sharded = shard_rows if kind == "tp_group" else lambda x, _: x
    every: dict[str, Any] = {
        "hidden": hidden.requires_grad_(),
        "lm_head": sharded(weight, group).requires_grad_(),
        "target_ids": ids.clamp(max=58),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "mask": torch.arange(len(ids)) % 5 != 0,
        "cu_seqlens": torch.tensor([0, 7, 12, 20]),
        "old_log_probs": -old,
        "ref_log_probs": -ref,
        "rollout_log_probs": -rollout,
        "token_weights": weights,
        "bias": sharded(torch.zeros(V), group),
        "logit_scale": 1.0,
        "logit_softcap": 3.0,
        "temperature": 0.7,
        "vocab_size": 60,
        "head_precision": None,
        "objective": Objective(kl_coef=0.1, rollout_correction=RolloutCorrection() if kind == "tp_group" else None),
        "normalizer": 3.0,
        "kl_normalizer": 2.0,
        "entropy": False,
        "gradient_budget": 0.0,
        "cache_mib": 0.0,
        "reduce_hidden": "all",
        "backend": "torch",
        kind: group,
    }
    if kind == "cp_group":
        del every["rollout_log_probs"]
    if function is policy_loss:
        every |= {"log_probs": (-old).requires_grad_(), "entropy": ref}
    return {name: every[name] for name in inspect.signature(function).parameters if name in every}


OPTIONAL = ("kept_sets", "extra_ids", "kl_log_probs")  # not in `arguments`, because two of them exclude each other


def optional_values(name: str, mine: dict[str, Any]) -> tuple[Any, Any]:
    """Return two values of an argument of `OPTIONAL`, for the arguments `mine`."""
    if name == "kl_log_probs":
        one = mine["log_probs"].detach().clone()
        return one, one - 0.1
    ids = mine["target_ids"].clamp(0, V - 1)[:, None]  # masked tokens may have any id
    one, other = torch.cat([ids, (ids + 1) % 50], 1), torch.cat([ids, (ids + 2) % 50], 1)
    if name == "extra_ids":
        return one, other
    return KeptSets.from_padded(one, fill=-1), KeptSets.from_padded(other, fill=-1)


def run(function: Callable[..., Any], mine: dict[str, Any], **changes: Any) -> Any:
    return function(**{**mine, **changes})


def other_value(name: str, x: Any) -> Any:
    """Return another valid value of an argument: a tensor with one value changed as little as possible."""
    if name == "objective":
        return Objective(kl_coef=0.1, clip_low=2e-4, rollout_correction=x.rollout_correction)
    if isinstance(x, Tensor) and x.is_floating_point():
        changed = x.detach().clone()
        changed.view(-1)[-1] = torch.nextafter(changed.view(-1)[-1], torch.tensor(2.0))
        return changed.requires_grad_(x.requires_grad)
    if name == "target_ids":
        return x[[*range(17), 18, 17, 19]]  # two tokens change places
    return {
        "mask": torch.arange(len(rows(V)[2])) % 6 != 0,
        "cu_seqlens": torch.tensor([0, 8, 12, 20]),
        "logit_scale": 1.5,
        "logit_softcap": None,
        "temperature": 0.8,
        "vocab_size": 61,
        "head_precision": "fp32",
        "normalizer": 4.0,
        "kl_normalizer": None,
        "entropy": True,
        "gradient_budget": 0.1,
        "cache_mib": 1.0,
        "reduce_hidden": "none",
        "backend": "triton",
    }[name]


for _function, _kind in FUNCTIONS:

    @case(f"{_function.__name__} with other arguments of a rank, {_kind}", 2)
    def _others(context: Context, function: Callable[..., Any] = _function, kind: str = _kind) -> None:
        group = context.group(2)
        mine = arguments(function, kind, group)
        last = rank_in(group) == 1
        parameters = inspect.signature(function).parameters.keys()
        assert mine.keys() | {"tp_group", "cp_group", "rollout_log_probs", *OPTIONAL} >= parameters
        optional = {"bias", "token_weights", *(("old_log_probs", "entropy") if kind == "cp_group" else ())}
        for name, x in mine.items():
            if name == kind:
                continue
            if name in optional and isinstance(x, Tensor):
                with raises(f"{function.__name__}: {name} must be equal on all ranks of {kind}"):
                    run(function, mine, **{name: None} if last else {})
            change = {name: other_value(name, x)} if last else {}
            if name in agreement.EXCUSED[kind] and isinstance(x, Tensor) and name != "advantages":
                run(function, mine, **change)
            else:
                with raises(f"{function.__name__}: {name}", f"must be equal on all ranks of {kind}"):
                    run(function, mine, **change)
        for name in (x for x in OPTIONAL if x in parameters):  # in the same order on all ranks
            one, other = optional_values(name, mine)
            if kind == "cp_group":  # tokens of this rank
                run(function, mine, **{name: other if last else one})
            with raises(f"{function.__name__}: {name} must be equal on all ranks of {kind}"):
                run(function, mine, **{name: one if not last else None if kind == "cp_group" else other})
        differentiated = next(iter(mine))  # hidden or log_probs
        with raises("need", "a gradient", f"must be equal on all ranks of {kind}"):
            run(function, mine, **{differentiated: mine[differentiated].detach()} if last else {})
        if "kept_sets" in parameters and kind == "tp_group":
            one, _ = optional_values("kept_sets", mine)
            with raises("kept_sets.empty must be equal on all ranks of tp_group"):
                run(function, mine, kept_sets=one._replace(empty="vocabulary") if last else one)
        run(function, mine)  # the ranks are still in step


@case("tokens of a cp_group read per sequence or per token", 2)
def _readings(context: Context) -> None:
    group = context.group(2)
    last = rank_in(group) == 1
    log_probs = torch.full((2, 1 if last else 3), -1.0)
    for advantages in (torch.tensor([1.0, -1.0]), torch.tensor([[1.0], [-1.0]]), log_probs * (2 if last else 3)):
        policy_loss(log_probs, advantages, cp_group=group)
    with raises("advantages (one value per sequence) must be equal"):
        policy_loss(
            torch.full((2, 2 if last else 3), -1.0), torch.tensor([[1.0], [2.0 if last else -1.0]]), cp_group=group
        )
    with raises("token_weights (one value per sequence) must be equal"):
        weights = torch.tensor([[1.0], [2.0 if last else 1.0]])
        policy_loss(torch.full((2, 4), -1.0), torch.ones(2), token_weights=weights, cp_group=group)
    # As many tokens as sequences: the last rank reads advantages per sequence, although they are per token.
    offsets = torch.tensor([0, 2, 2, 3] if last else [0, 2, 3, 5])
    tokens = torch.full((int(offsets[-1]),), -1.0)
    per_token = torch.arange(len(tokens)).float()
    with raises("advantages (one value per sequence) must be equal", "one value per token"):
        policy_loss(tokens, per_token, cu_seqlens=offsets, cp_group=group)
    # Both readings are the same at unmasked tokens.
    mask = per_token != 1
    policy_loss(
        tokens, torch.where(per_token == 2, 1.0, 0.5), mask=mask & (per_token < 2), cu_seqlens=offsets, cp_group=group
    )


@case("adapters of ranks", 2)
def _adapters(context: Context) -> None:
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    group = context.group(2)
    last = rank_in(group) == 1
    hidden, weight, ids = rows(V)

    def log_probs(change: float = 0.0, rank: int = 4, dropout: float = 0.0) -> Any:
        base = nn.Linear(weight.shape[1], V // 2, bias=False)
        base.weight.data = shard_rows(weight, group)
        torch.manual_seed(0)
        head = Linear(base, "default", LoraConfig(r=rank, lora_dropout=dropout), r=rank, lora_alpha=8)
        left: Any = head.lora_A["default"].weight
        left.data[0, 0] += change
        torch.manual_seed(group.rank())  # of the dropout
        return linear_log_probs(hidden, head, ids, tp_group=group)

    log_probs()
    with raises("the rank of the adapter must be equal on all ranks of tp_group, got [4, 3]"):
        log_probs(rank=3 if last else 4)
    with raises("h A^T of the adapter must be equal"):
        log_probs(change=1e-3 if last else 0.0)
    with raises("h A^T of the adapter must be equal"):
        log_probs(dropout=0.5)
    log_probs()


# -- environment


@case("environment variables of ranks", 2)
def _environment(context: Context) -> None:
    group = context.group(2)
    last = rank_in(group) == 1
    values = dict.fromkeys(ENVIRONMENT, "17") | {"GSPO_SELF_CHECK": "0", "GSPO_BACKEND": "torch"}
    del values["GSPO_CHECK"]  # on a CPU, it changes nothing
    for function, kind in FUNCTIONS:
        mine = arguments(function, kind, group)
        for name, value in values.items():
            with (
                mock.patch.dict(os.environ, {name: value} if last else {}),
                raises(f"environment variable {name} must be equal on all ranks of {kind}"),
            ):
                run(function, mine)
        run(function, mine)


# -- which calls are compared


@case("only the first call on an accelerator is compared", 2)
def _first_call(context: Context) -> None:
    group = context.group(2)
    last = rank_in(group) == 1
    mine = arguments(policy_loss, "cp_group", group)
    exchanges = []
    gather = dist.all_gather_object

    def counted(*args: Any, **options: Any) -> None:
        exchanges.append(args)
        gather(*args, **options)

    with (
        mock.patch.object(agreement, "_met", {}),
        mock.patch.object(agreement, "compares_every_call", lambda device: False),
        mock.patch.object(validation, "values_are_checked", lambda device: False),
        mock.patch.object(dist, "all_gather_object", counted),
    ):
        for _ in range(2):  # a call that raised is not counted as the first
            with raises("normalizer must be equal on all ranks of cp_group, got [3.0, 4.0]"):
                run(policy_loss, mine, normalizer=4.0 if last else 3.0)
        run(policy_loss, mine)
        assert len(exchanges) == 3
        run(policy_loss, mine, normalizer=4.0 if last else 3.0)
        assert len(exchanges) == 3
        with (
            mock.patch.object(agreement, "_met", {}),
            mock.patch.object(validation, "values_are_checked", lambda device: last),
            raises("GSPO_CHECK must be equal on all ranks of cp_group, got [False, True]"),
        ):
            run(policy_loss, mine)


@case("ranks of a mesh raise together", 4)
def _mesh(context: Context) -> None:
    groups = context.square()
    mine = arguments(gspo_fused_loss, "tp_group", groups.tp) | {"cp_group": groups.cp, "rollout_log_probs": None}
    mine["objective"] = Objective(kl_coef=0.1)
    run(gspo_fused_loss, mine)
    invalid = {"target_ids": torch.full_like(mine["target_ids"], 99)}
    changes = [invalid, *({name: other_value(name, mine[name])} for name in ("normalizer", "advantages"))]
    for change in changes:
        with raises(*change):
            run(gspo_fused_loss, mine, **change if context.rank == 3 else {})
    run(gspo_fused_loss, mine)
