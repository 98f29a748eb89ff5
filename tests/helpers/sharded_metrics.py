"""Cases of tests/distributed: metrics of all ranks, compared with float64 formulas over all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.samples import Sample, make_sample
from helpers.sharded_cases import Context, case
from helpers.sharded_runs import Groups, contiguous, rank_in, run_sharded, size_of
from helpers.tile_choices import Chosen, choices, live_entries, small_tiles
from tolerance import DROPPED_MASS_RELATIVE, FLOAT64_RELATIVE, METRIC_ABSOLUTE, METRIC_RELATIVE
from torch import Tensor

from gspo_kernels import Objective, policy_loss
from gspo_kernels.metrics import combine

BUDGET = 0.05
HEADS: dict[str, dict[str, Any]] = {
    "softcap": {"logit_softcap": 6.0},
    "softcap temperature": {"logit_softcap": 6.0, "temperature": "per-token", "logit_scale": 1.3},
}


def uneven(head: dict[str, Any]) -> Sample:
    """Return a batch in whose second half of tokens logits are small and temperatures high: it has most of the mass."""
    sample = make_sample(
        2, dtype=torch.float64, lengths=(32,) * 16, hidden_size=64, vocab=512, logit_std=9.0, on_policy=True, **head
    )
    second = torch.arange(32) >= 16
    hidden = sample.leaves["hidden"].detach() * torch.where(second, 0.4, 1.0)[:, None]
    likeliest = (hidden @ sample.leaves["weight"].t()).argmax(-1)
    likely = torch.rand(likeliest.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    ids = torch.where(likely & sample.options["mask"], likeliest, sample.target_ids)
    temperature = sample.options.get("temperature")
    if isinstance(temperature, Tensor):
        sample = sample.with_options(temperature=temperature * torch.where(second, 2.0, 0.5))
    return replace(sample, leaves={**sample.leaves, "hidden": hidden}, target_ids=ids)


def masses(chosen: Chosen, sample: Sample, groups: Groups) -> Tensor:
    """Return sums over this rank's tokens and columns, in float64 [7].

    The sums: dropped mass; dropped mass without the slope of the soft-cap; mass; least mass; unmasked rows; live rows;
    pairs that the backward computes.
    """
    head = chosen.head
    keep = live_entries(chosen)
    columns = sample.leaves["weight"].shape[0] // size_of(groups.tp)
    first = columns * rank_in(groups.tp)
    capped = head.logit_scale * (head.hidden @ sample.leaves["weight"].t()).detach()
    slope = torch.ones_like(capped)
    if head.logit_softcap is not None:
        capped = head.logit_softcap * torch.tanh(capped / head.logit_softcap)
        slope = 1 - (capped / head.logit_softcap) ** 2
    temperature = torch.ones(1) if head.temperature is None else head.temperature.double().reshape(-1)
    ids = torch.where(head.mask, head.target_ids + first, 0)[:, None]
    live = head.mask & (chosen.coefficient != 0)
    factor = torch.where(live, chosen.coefficient.abs() * abs(head.logit_scale) / temperature, 0)[:, None]
    p = (capped / temperature[:, None]).softmax(1)
    mass = factor * p.scatter_add(1, ids, -torch.ones_like(p[:, :1])).abs()
    least = (mass * slope).gather(1, ids).sum() if head.logit_softcap is not None else mass.sum()
    own = slice(first, first + columns)
    dropped = mass[:, own] * (~keep & live[:, None])
    return torch.stack(
        [
            (dropped * slope[:, own]).sum(),
            dropped.sum(),
            (mass * slope)[:, own].sum(),
            least / size_of(groups.tp),
            head.mask.sum().double() / size_of(groups.tp),
            live.sum().double() / size_of(groups.tp),
            (keep & live[:, None]).sum().double(),
        ]
    )


for _head in HEADS:
    for _backend in ("torch", "triton"):
        for _mesh, _ranks in (("cp", 2), ("tp x cp", 4)):

            @case(f"work {_mesh} {_backend} {_head}", _ranks)
            def _work(context: Context, name: str = _head, backend: str = _backend, ranks: int = _ranks) -> None:
                groups = Groups(cp=context.group(2)) if ranks == 2 else context.square()
                sample = uneven(HEADS[name])
                with choices() as decisions, small_tiles(64, 32):
                    owner = contiguous(sample.target_ids.shape, 2)
                    out, _ = run_sharded(sample, backend, groups, owner, gradient_budget=BUDGET)
                sums = masses(decisions[0], sample, groups)
                for group in (groups.tp, groups.cp):
                    if group is not None:
                        dist.all_reduce(sums, group=group)
                dropped, unsloped, total, least, unmasked, live, pairs = sums.tolist()
                reported = out.metrics["dropped_gradient_mass"].item()
                assert 0 < dropped / total <= reported * (1 + METRIC_RELATIVE) <= BUDGET, (dropped / total, reported)
                assert abs(reported - unsloped / least) <= DROPPED_MASS_RELATIVE * reported, (reported, least)
                share = pairs / (unmasked * sample.leaves["weight"].shape[0])
                assert share < live / unmasked < 1
                expected = {"live_row_share": live / unmasked, "live_tile_share": share, "passes": 1 + 3 * share}
                for metric, value in expected.items():
                    ours = out.metrics[metric].item()
                    assert abs(ours - value) <= METRIC_RELATIVE * value + METRIC_ABSOLUTE, (metric, ours, value)


# -- metrics of the loss


def expected_metrics(x: dict[str, Tensor], objective: Objective) -> dict[str, Tensor]:
    """Compute metrics by their definitions in float64, from tensors [B, T] of all ranks."""
    mask = x["mask"]
    lengths = x["mask"].sum(1)
    r = torch.where(mask, x["log_probs"] - x["old_log_probs"], 0)
    d = x.get("kl_log_probs", x["log_probs"]) - x["ref_log_probs"]
    by_token = objective.ratio == "token"
    u = r if by_token else (r.sum(1) / lengths.clamp(min=1))[:, None].expand_as(r)
    low, high = objective.log_window
    sign = x["advantages"].sign()[:, None]
    clipped = {"_low": mask & (u < low) & (sign < 0), "_high": mask & (u > high) & (sign > 0)}
    clipped[""] = clipped["_low"] | clipped["_high"]
    ratios = u[mask].exp() if by_token else u[lengths > 0, 0].exp()
    shares = {f"clip_fraction{end}": where.any(1)[lengths > 0].double().mean() for end, where in clipped.items()}
    tokens = {f"token_clip_fraction{end}": where[mask].double().mean() for end, where in clipped.items()}
    if "kl_log_probs" in x:
        tokens["kept_mass"] = (x["kl_log_probs"] - x["log_probs"])[mask].exp().mean()
    return {
        **shares,
        **tokens,
        "ratio_mean": ratios.mean(),
        "ratio_min": ratios.amin(),
        "ratio_max": ratios.amax(),
        "kl_to_old": -r[mask].mean(),
        "zero_coefficient_share": (clipped[""] | (sign == 0))[mask].double().mean(),
        "kl": (torch.exp(-d) + d - 1)[mask].mean(),
        "entropy": x["entropy"][mask].mean(),
        "tokens": mask.sum(),
        "sequences": (lengths > 0).sum(),
        "ratios": torch.tensor(ratios.numel()),
        "invalid": torch.tensor(0),
    }


def tokens_of_all_ranks(shift: float | Tensor) -> dict[str, Tensor]:
    """Return random tensors [6, 10]. `shift` is the largest difference between log-probs and old log-probs."""
    rng = torch.Generator().manual_seed(0)
    log_probs, ref, entropy, size = -torch.rand(4, 6, 10, generator=rng, dtype=torch.float64) - 0.1
    x = {"log_probs": log_probs, "old_log_probs": log_probs + shift * size}
    return x | {"ref_log_probs": ref, "entropy": -entropy, "mask": torch.rand(6, 10, generator=rng) < 0.7}


ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0], dtype=torch.float64)

for _ratio in ("sequence", "token"):

    @case(f"metrics of the loss, {_ratio} ratios", 2)
    def _loss_metrics(context: Context, ratio: str = _ratio) -> None:
        objective = Objective(ratio=ratio, clip_low=0.01, clip_high=0.01)
        group = context.group(2)
        mine = slice(0, 5) if rank_in(group) == 0 else slice(5, 10)
        of_kl = {"kl_log_probs": tokens_of_all_ranks(0.0)["ref_log_probs"] / 2}  # a KL term over other ids
        # All ratios are above 1, or all below, because masked tokens have a ratio of 1.
        for side, more in ((-1.0, {}), (1.0, of_kl)):
            x = tokens_of_all_ranks(side * 0.02) | more
            mask = x["mask"]
            mask[2, :5], mask[4] = False, False  # masked on the first rank, masked on both
            garbage = torch.tensor([torch.nan, -torch.inf, 1e30]).repeat(20).view(6, 10).double()
            x = {name: torch.where(mask, value, garbage) for name, value in x.items()} | {"mask": mask}
            own: dict[str, Any] = {name: value[:, mine].clone() for name, value in x.items()}
            out = policy_loss(
                own.pop("log_probs").requires_grad_(), ADVANTAGES, objective=objective, cp_group=group, **own
            )
            expected = expected_metrics(x | {"advantages": ADVANTAGES}, objective)
            assert 0 < expected["token_clip_fraction"] < 1
            check_metrics(out.metrics, expected)

    @case(f"metrics of ranks are combined, {_ratio} ratios", 2)
    def _combined_metrics(context: Context, ratio: str = _ratio) -> None:
        """Ranks have 1 and 3 micro-batches. The first micro-batch of the second rank is empty."""
        objective = Objective(ratio=ratio, clip_low=0.01, clip_high=0.01)
        group = context.group(2)
        x = tokens_of_all_ranks(-0.02 * torch.arange(-2, 4)[:, None]) | {"advantages": ADVANTAGES}
        x["mask"] = torch.arange(10) < torch.tensor([3, 10, 0, 1, 7, 2])[:, None]
        parts = []
        for rows in [[0, 4]] if rank_in(group) == 0 else [[2], [1], [3, 5]]:
            own: dict[str, Any] = {name: value[rows] for name, value in x.items()}
            operands = own.pop("log_probs").requires_grad_(), own.pop("advantages")
            parts.append(policy_loss(*operands, objective=objective, **own).metrics)
        check_metrics(combine(parts, group), expected_metrics(x, objective))
        wrong: dict[str, Tensor] = parts[0] if rank_in(group) else {"tokens": parts[0]["tokens"]}
        with pytest.raises(ValueError, match="combine: the keys of parts must be equal on all ranks of group"):
            combine([wrong], group)


def check_metrics(computed: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        error = (computed[name] - value).abs()
        assert error <= FLOAT64_RELATIVE * (1 + value.abs()), (name, computed[name], value)
