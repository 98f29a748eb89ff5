"""Test the memory and the matrix products of the torch backend, and the metrics of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes, product_flops
from helpers.head_rows import NEEDS, head_rows
from helpers.marks import slow
from helpers.samples import make_sample, run_fused
from tolerance import METRIC_ABSOLUTE, METRIC_RELATIVE

from gspo_kernels import Objective
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends.rows import NeedsGradient
from gspo_kernels.backends.torch import tiles as torch_tiles


@pytest.mark.parametrize("mebibytes", [slow(1), 4])
@pytest.mark.parametrize(
    "options", [{}, {"logit_softcap": 5.0, "temperature": torch.ones(3000)}], ids=["plain", "tail"]
)
@pytest.mark.parametrize("entropy", [slow(False), True])
def test_logits_stay_within_the_workspace(mebibytes: int, options: dict[str, Any], entropy: bool) -> None:
    workspace = mebibytes * 2**20
    n, h, v = 3000, 8, 20_000
    head = head_rows(n, h, v, entropy, workspace=workspace, **options)
    slabs = -(-v // torch_tiles.tile_shape(torch.device("cpu"), torch.float32, workspace)[1])
    rows, columns = 4 * (n + 256), 4 * v
    with LiveBytes() as forward:
        result = torch_backend.head_forward(head)
    # Allowed beside the workspace, per row: three partial results per slab with two temporaries of each, the hidden
    # state twice, and 24 other numbers.
    assert forward.peak <= workspace + rows * (3 * 3 * slabs + 2 * h + 24)
    with LiveBytes() as backward:
        d_entropy = torch.ones(n) if entropy else None
        torch_backend.head_backward(head, result, torch.ones(n), d_entropy, NEEDS)
    # Allowed beside the workspace: five tensors of the size of hidden (gathered rows, d_hidden gathered and scattered,
    # and temporaries), 24 numbers per row, and two tensors of the size of the weight (d_weight and its slabs).
    assert backward.peak <= workspace + rows * (5 * h + 24) + columns * 2 * h
    assert forward.peak < 4 * n * v / 8  # an eighth of the full logits


def test_masked_rows_are_never_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_tiles, "tile_shape", lambda *_: (4, 24))
    head = head_rows(40, 8, 48)
    for kept in (0, 4, 12, 40):
        mask = torch.zeros(40, dtype=torch.bool)
        mask[torch.randperm(40)[:kept]] = True
        flops = product_flops(lambda mask=mask: torch_backend.head_forward(head._replace(mask=mask)))
        assert flops == 2 * kept * 8 * 48


def test_rows_without_gradient_cost_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_tiles, "tile_shape", lambda *_: (4, 24))
    head = head_rows(40, 8, 48)
    result = torch_backend.head_forward(head)
    for live in (0, 4, 12, 40):
        d = torch.zeros(40)
        d[torch.randperm(40)[:live]] = 1.0
        for d_hidden, d_weight, passes in ((True, True, 3), (True, False, 2), (False, True, 2)):
            needs = NeedsGradient(d_hidden, d_weight, bias=False, adapter_hidden=False, adapter_weight=False)
            flops = product_flops(lambda d=d, needs=needs: torch_backend.head_backward(head, result, d, None, needs))
            assert flops == passes * 2 * live * 8 * 48


def test_clipped_and_zero_advantage_sequences_have_no_gradient() -> None:
    sample = make_sample(0, holes=False)
    out, grads = run_fused(sample)
    live = grads["hidden"].flatten(1).any(1)
    mask = sample.options["mask"]
    share = (mask & ~live[:, None]).sum().double() / mask.sum()
    assert 0.2 < share < 0.8  # the sample has rows with and without a gradient
    assert not live[sample.advantages == 0].any()
    torch.testing.assert_close(out.metrics["zero_coefficient_share"], share)


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_metrics_equal_their_definitions(ratio: str, backend: str) -> None:
    """The batch has masked tokens, a sequence without tokens, and tokens clipped at both bounds.

    If ratios are per token, some sequences have tokens clipped at both bounds.
    """
    objective = Objective(ratio=ratio, clip_low=0.02, clip_high=0.03)
    sample = make_sample(1, objective=objective, per_token_advantages=ratio == "token")
    mask = sample.options["mask"]
    mask[3] = False
    if ratio == "token":  # so that the ratios of a sequence are on both sides of the window
        noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
        sample = sample.with_options(old_log_probs=sample.options["old_log_probs"] + 0.05 * noise)
    out, _ = run_fused(sample, backend, entropy=True)
    lp = out.log_probs.double()
    old = sample.options["old_log_probs"]
    ref = sample.options["ref_log_probs"]
    r = torch.where(mask, lp - old, 0)
    u = r if ratio == "token" else (r.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand_as(r)
    advantages = sample.advantages if ratio == "token" else sample.advantages[:, None]
    s = u.exp()
    filled = mask.any(1)
    tokens = mask.sum()
    low = mask & (advantages < 0) & (s < 1 - sample.objective.clip_low)
    high = mask & (advantages > 0) & (s > 1 + sample.objective.clip_high)
    ratios = s[mask] if ratio == "token" else s[filled, 0]
    d = (lp - ref)[mask]
    assert low.any() and high.any() and low.sum() != high.sum() and out.entropy is not None
    assert (low.any(1) & high.any(1)).any() == (ratio == "token")
    expected = {
        "clip_fraction": (low | high).any(1)[filled].double().mean(),
        "clip_fraction_low": low.any(1)[filled].double().mean(),
        "clip_fraction_high": high.any(1)[filled].double().mean(),
        "token_clip_fraction": (low | high).sum() / tokens,
        "token_clip_fraction_low": low.sum() / tokens,
        "token_clip_fraction_high": high.sum() / tokens,
        "ratio_mean": ratios.mean(),
        "ratio_min": ratios.min(),
        "ratio_max": ratios.max(),
        "kl_to_old": -r[mask].mean(),
        "kl": (torch.exp(-d) + d - 1).mean(),
        "entropy": out.entropy[mask].mean(),
        "zero_coefficient_share": (mask & (low | high | (advantages == 0))).sum() / tokens,
        "invalid": torch.tensor(0),
        "dropped_gradient_mass": torch.tensor(0.0),
        "gradient_mass": torch.tensor(0.0),  # not computed without a budget
        "tokens": tokens,
        "sequences": filled.sum(),
        "ratios": torch.tensor(len(ratios)),
    }
    live = 1 - expected["zero_coefficient_share"]
    expected |= {"live_row_share": live, "live_tile_share": live, "passes": 1 + 3 * live}
    assert set(expected) == set(out.metrics)
    for name, value in expected.items():
        torch.testing.assert_close(
            out.metrics[name].double(), value.double(), rtol=METRIC_RELATIVE, atol=METRIC_ABSOLUTE, msg=name
        )
        assert out.metrics[name].ndim == 0 and not out.metrics[name].requires_grad
    cached = run_fused(sample, backend, entropy=True, cache_mib=8.0)[0].metrics  # recomputes nothing
    for name, value in {**expected, "passes": 1 + 2 * live}.items():
        torch.testing.assert_close(
            cached[name].double(), value.double(), rtol=METRIC_RELATIVE, atol=METRIC_ABSOLUTE, msg=name
        )
