"""`metrics.combine`: the metrics of any division into micro-batches are those of the undivided batch, by formulas."""

from __future__ import annotations

import torch
from tolerance import FLOAT64_RELATIVE
from torch import Tensor

from gspo_kernels.metrics import combine
from gspo_kernels.sampler_mismatch import off_policy_mask


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
            # A part without tokens reports 0, which must not become the minimum or the maximum.
            "teacher_kl_min": kl[rows][mask[rows]].amin() if mask[rows].any() else torch.tensor(0.0).double(),
            "log_prob_max": (kl - 2)[rows][mask[rows]].amax() if mask[rows].any() else torch.tensor(0.0).double(),
            "reward_per_turn": reward[rows].sum() / turns[rows].sum(),
            "turns": turns[rows].sum(),
        }

    divisors: dict[str, str | None] = dict.fromkeys(("teacher_kl", "teacher_kl_min", "log_prob_max"), "tokens")
    divisors |= {"reward_per_turn": "turns", "turns": None}
    combined = combine([metrics(rows) for rows in ([0, 1], [2], [3])], divisors=divisors)
    for name, value in metrics([0, 1, 2, 3]).items():
        torch.testing.assert_close(combined[name], value.double(), rtol=FLOAT64_RELATIVE, atol=0)
    numbers = [{name: value.item() for name, value in metrics(rows).items()} for rows in ([0, 1], [2], [3])]
    assert combine(numbers, divisors=divisors) == combined


def test_masked_shares_combine() -> None:
    rng = torch.Generator().manual_seed(0)
    log_probs, rollout = -torch.rand(2, 8, 7, generator=rng)
    rows = (log_probs, rollout, -torch.ones(8), torch.rand(8, 7, generator=rng) > 0.3)
    undivided = off_policy_mask(*rows, threshold=0.0).metrics
    parts = [off_policy_mask(*(value[i : i + 3] for value in rows), threshold=0.0).metrics for i in (0, 3, 6)]
    assert 0 < undivided["masked_share"] < 1
    for name, value in combine(parts).items():
        torch.testing.assert_close(value, undivided[name], rtol=FLOAT64_RELATIVE, atol=0)


def test_the_combined_count_of_invalid_values_is_an_integer() -> None:
    combined = combine({"invalid": torch.tensor(x)} for x in (2, 3))["invalid"]
    assert combined == 5 and combined.dtype == torch.int64
