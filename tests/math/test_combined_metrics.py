"""`metrics.combine`: the metrics of any division into micro-batches are those of the undivided batch, by formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.device import gspo_fused_loss, on_device
from helpers.tile_choices import Chosen, choices, d_logits, live_entries, small_tiles
from tolerance import DROPPED_MASS_RELATIVE, FLOAT64_RELATIVE, METRIC_ABSOLUTE, METRIC_RELATIVE
from torch import Tensor

from gspo_kernels import LossOutput, Objective, linear_log_probs
from gspo_kernels.metrics import combine, last_backward
from gspo_kernels.sampler_mismatch import RolloutCorrection, off_policy_mask

LENGTHS = (7, 1, 0, 2, 6, 0, 3, 1)  # two answers are fully masked
DIVISIONS = {
    "one by one": [[i] for i in range(8)],
    "unequal": [[0, 3, 6], [2], [1, 4, 5, 7]],
    "an empty part first": [[2, 5], [7, 1, 0], [3, 4, 6]],
}
CORRECTIONS = (RolloutCorrection("geometric", "gate", 0.9, 1.1), RolloutCorrection("token", "truncate", 0.7, 1.4))


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 7, 16, generator=rng)
    weight = torch.randn(37, 16, generator=rng)
    target_ids = torch.randint(37, (8, 7), generator=rng)
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    log_probs = linear_log_probs(hidden, weight, target_ids).log_probs
    # The shorter an answer is, the farther its policy has moved: means over micro-batches are far from those of tokens.
    drift = 0.2 * torch.randn(8, 7, generator=rng)
    drift += torch.tensor([-0.1, -0.3, 0.0, -0.1, 0.0, 0.0, 0.2, 0.5])[:, None]
    return {
        "hidden": hidden,
        "weight": weight,
        "target_ids": target_ids,
        "mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, 1.0, 1.0]),
        "old_log_probs": (log_probs - drift).clamp(max=0),
        "ref_log_probs": log_probs - 0.5 * torch.rand(8, 7, generator=rng),
        "rollout_log_probs": (log_probs - drift - 0.2 * torch.randn(8, 7, generator=rng)).clamp(max=0),
    }


def loss_of(x: dict[str, Tensor], rows: list[int], objective: Objective, backend: str, **options: Any) -> LossOutput:
    part = {name: value if name == "weight" else value[rows] for name, value in x.items()}
    part["hidden"].requires_grad_()
    operands = [part.pop(name) for name in ("hidden", "weight", "target_ids", "advantages")]
    options |= {"objective": objective, "entropy": True, "normalizer": 6, "backend": backend}
    return gspo_fused_loss(*operands, **part, **options)


def formulas(x: dict[str, Tensor], out: LossOutput, objective: Objective) -> dict[str, Tensor]:
    """Compute the metrics in float64 from the fp32 log-probs and entropies of an undivided batch."""
    assert out.entropy is not None
    mask, filled = x["mask"], x["mask"].any(1)
    lp, old, ref, rollout, entropy = (
        torch.where(mask, value.double(), 0)
        for value in (out.log_probs, x["old_log_probs"], x["ref_log_probs"], x["rollout_log_probs"], out.entropy)
    )
    r, rho = lp - old, old - rollout
    lengths = mask.sum(1).clamp(min=1)
    u = r if objective.ratio == "token" else (r.sum(1) / lengths)[:, None].expand_as(r)
    sign = x["advantages"].sign()[:, None]
    low, high = (edge.log1p() for edge in torch.tensor([-objective.clip_low, objective.clip_high]).double())
    clipped = {"_low": mask & (u < low) & (sign < 0), "_high": mask & (u > high) & (sign > 0)}
    clipped[""] = clipped["_low"] | clipped["_high"]
    ratios = u[mask].exp() if objective.ratio == "token" else u[filled, 0].exp()
    geometric = ((rho.sum(1) / lengths).exp())[:, None].expand_as(rho)
    outside = [(geometric < 0.9) | (geometric > 1.1), (rho.exp() < 0.7) | (rho.exp() > 1.4)]
    w = torch.where(outside[0], 0, rho.exp().clamp(0.7, 1.4))[mask]
    no_gradient = clipped[""] | (sign == 0) | outside[0]
    if objective.ratio == "sequence":  # a gradient reaches every token of an answer unless all of them have none
        no_gradient = no_gradient.logical_or(~mask).all(1, keepdim=True).expand_as(mask)
    d = ref - lp
    live = 1 - no_gradient[mask].double().mean()
    return {
        **{f"clip_fraction{end}": where.any(1)[filled].double().mean() for end, where in clipped.items()},
        **{f"token_clip_fraction{end}": where[mask].double().mean() for end, where in clipped.items()},
        "ratio_mean": ratios.mean(),
        "ratio_min": ratios.min(),
        "ratio_max": ratios.max(),
        "kl_to_old": -r[mask].mean(),
        "kl": (d.exp() - d - 1)[mask].mean(),
        "entropy": entropy[mask].mean(),
        "zero_coefficient_share": 1 - live,
        "live_row_share": live,
        "live_tile_share": live,
        "passes": 1 + 2 * live,  # the head is frozen
        "dropped_gradient_mass": torch.tensor(0.0),
        "gradient_mass": torch.tensor(0.0),
        "tokens": mask.sum(),
        "sequences": filled.sum(),
        "ratios": mask.sum() if objective.ratio == "token" else filled.sum(),
        "invalid": torch.tensor(0),
        "rollout_weight_mean": w.mean(),
        "rollout_weight_square_mean": w.square().mean(),
        "rollout_weight_max": w.max(),
        "rollout_effective_sample_size": w.sum() ** 2 / (len(w) * w.square().sum()),
        "rollout_bound_share": (outside[0] | outside[1])[mask].double().mean(),
        "rollout_bound_share_0": outside[0][mask].double().mean(),
        "rollout_bound_share_1": outside[1][mask].double().mean(),
        "rollout_kl_sampler_trainer": (rho.exp() - 1 - rho)[mask].mean(),
    }


@on_device
@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_metric_of_every_division_equals_its_formula(ratio: str, backend: str) -> None:
    objective = Objective(ratio=ratio, clip_low=0.02, clip_high=0.03, rollout_correction=CORRECTIONS)
    x = batch()
    undivided = loss_of(x, list(range(8)), objective, backend)
    expected = formulas(x, undivided, objective)
    assert undivided.metrics.keys() == expected.keys()
    for name, value in expected.items():
        allowed = METRIC_RELATIVE * abs(value.item()) + METRIC_ABSOLUTE
        assert abs(undivided.metrics[name].item() - value.item()) <= allowed, name
    plain_mean_is_wrong = set()
    for division in DIVISIONS.values():
        outs = [loss_of(x, rows, objective, backend) for rows in division]
        order = [row for rows in division for row in rows]
        assert torch.equal(torch.cat([out.log_probs for out in outs]), undivided.log_probs[order])
        torch.testing.assert_close(sum(out.loss for out in outs), undivided.loss, rtol=METRIC_RELATIVE, atol=1e-7)
        parts = [out.metrics for out in outs]
        combined = combine([combine(parts[:2]), *parts[2:]])  # combining again changes nothing
        assert combined.keys() == expected.keys()
        for name, value in undivided.metrics.items():
            error = (combined[name] - value).abs().item()
            assert error <= FLOAT64_RELATIVE * (1 + value.abs().item()), (name, combined[name], value)
            assert combined[name].dtype == value.dtype
            if abs(sum(part[name].item() for part in parts) / len(parts) - value.item()) > 1e-3:
                plain_mean_is_wrong.add(name)
    constant = {"gradient_mass", "dropped_gradient_mass", "invalid"}
    assert plain_mean_is_wrong >= expected.keys() - constant


def test_a_batch_without_tokens_has_the_metrics_of_its_parts() -> None:
    x = batch()
    objective = Objective(rollout_correction=CORRECTIONS)
    both = loss_of(x, [2, 5], objective, "torch").metrics
    combined = combine([loss_of(x, [i], objective, "torch").metrics for i in (2, 5)])
    assert combined == both and both["ratio_min"] == 1 and both["tokens"] == 0
    for row, extreme in ((7, "ratio_min"), (1, "ratio_max")):  # above and below 1, which a part without tokens reports
        alone = loss_of(x, [row], objective, "torch").metrics
        assert combine([both, alone])[extreme] == alone[extreme] != 1


def mass(chosen: Chosen) -> tuple[float, float]:
    """Return the L1 mass of d_logits in float64, and the dropped part of it."""
    d = d_logits(chosen)[0].abs()
    return d.sum().item(), d[~live_entries(chosen)].sum().item()


@on_device
@pytest.mark.parametrize("seam", ["fused loss", "log-probs"])
def test_dropped_mass_is_weighted_by_the_mass_of_each_micro_batch(seam: str) -> None:
    x = batch()
    x["mask"] = torch.arange(7) < torch.tensor([7, 7, 1, 2, 6, 0, 7, 7])[:, None]
    x["advantages"] = torch.tensor([1.0, -1.0, 30.0, -1.0, 0.0, 1.0, 1.0, 0.1])
    x["weight"] = x["weight"] * 3
    del x["ref_log_probs"], x["rollout_log_probs"], x["old_log_probs"]
    parts = []
    with choices() as decisions, small_tiles(2, 6):
        for rows in ([0, 1], [2], [5], [3, 4, 6, 7]):
            if seam == "fused loss":
                parts.append(loss_of(x, rows, Objective(), "torch", gradient_budget=0.2).metrics)
                continue
            part = {name: value if name == "weight" else value[rows] for name, value in x.items()}
            hidden, mask = part["hidden"].requires_grad_(), part["mask"]
            out = linear_log_probs(hidden, part["weight"], part["target_ids"], mask=mask, gradient_budget=0.2)
            (out.log_probs * part["advantages"][:, None]).sum().backward()
            parts.append(last_backward())
    masses, dropped = zip(*map(mass, decisions), strict=True)
    combined = combine(parts)
    shares = [part["dropped_gradient_mass"].item() for part in parts]
    assert max(shares) > 1.2 * combined["dropped_gradient_mass"] > 0
    assert combined["gradient_mass"].item() == pytest.approx(sum(masses), rel=DROPPED_MASS_RELATIVE)
    share = sum(dropped) / sum(masses)
    assert combined["dropped_gradient_mass"].item() == pytest.approx(share, rel=DROPPED_MASS_RELATIVE)
    assert combined["tokens"] == x["mask"].sum()


def test_masked_shares_combine() -> None:
    x = batch()
    rows = (x["ref_log_probs"], x["old_log_probs"], x["advantages"], x["mask"])
    undivided = off_policy_mask(*rows, threshold=0.1).metrics
    parts = [off_policy_mask(*(value[i : i + 3] for value in rows), threshold=0.1).metrics for i in (0, 3, 6)]
    assert 0 < undivided["masked_share"] < 1
    for name, value in combine(parts).items():
        torch.testing.assert_close(value, undivided[name], rtol=FLOAT64_RELATIVE, atol=0)


def test_your_own_metrics_combine_by_the_divisors_that_you_name() -> None:
    rng = torch.Generator().manual_seed(0)
    kl, reward = torch.rand(4, 7, generator=rng).double(), torch.rand(4, generator=rng).double()
    lengths = torch.tensor([7, 1, 0, 4])
    mask = torch.arange(7) < lengths[:, None]
    turns = torch.tensor([1, 3, 5, 2])

    def metrics(rows: list[int]) -> dict[str, Tensor]:
        return {
            "tokens": mask[rows].sum(),
            "teacher_kl": kl[rows][mask[rows]].mean(),  # NaN without tokens
            "teacher_kl_max": kl[rows][mask[rows]].amax() if mask[rows].any() else torch.tensor(0.0).double(),
            "reward_per_turn": reward[rows].sum() / turns[rows].sum(),
            "turns": turns[rows].sum(),
        }

    divisors = {"teacher_kl": "tokens", "teacher_kl_max": "tokens", "reward_per_turn": "turns", "turns": None}
    combined = combine([metrics(rows) for rows in ([0, 1], [2], [3])], divisors=divisors)
    for name, value in metrics([0, 1, 2, 3]).items():
        torch.testing.assert_close(combined[name], value.double(), rtol=FLOAT64_RELATIVE, atol=0)
    numbers = [{name: value.item() for name, value in metrics(rows).items()} for rows in ([0, 1], [2], [3])]
    assert combine(numbers, divisors=divisors) == combined
