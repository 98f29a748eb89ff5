"""Clip decisions equal float64's, in GSPO's clip window, for fp32 and half-precision inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.device import DEVICE, gspo_fused_loss, linear_log_probs
from helpers.features import divergence
from helpers.marks import slow
from tolerance import (
    DIVERGENCE_BAND,
    LOG_PROB_BIAS,
    LOG_PROB_RMS_BF16X3,
    LOG_PROB_RMS_ON_GPUS,
    LOG_PROB_STD,
    RELATIVE_RMS,
    SHARE_ABSOLUTE,
    decision_band,
    truncation,
)
from torch import Tensor

from gspo_kernels import KeptSets, Objective
from gspo_kernels.distillation import linear_top_k
from gspo_kernels.validation import ROUNDING

pytestmark = pytest.mark.usefixtures("device")

HIDDEN, VOCAB = 32, 64


def batch(seed: int, sequences: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, ids and float64 log-probs [S, length]. |logit| is at most about 30."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sequences, length, HIDDEN, generator=rng).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=rng) * 7 / HIDDEN**0.5).to(dtype)
    logits = hidden.double() @ weight.double().T
    ids = sample_ids(logits, rng)
    return hidden, weight, ids, torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]


def sample_ids(logits: Tensor, rng: torch.Generator) -> Tensor:
    gumbel = -torch.log(-torch.log(torch.rand(logits.shape, generator=rng, dtype=torch.float64)))
    return (logits + gumbel).argmax(-1)


def true_decisions(u: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    s = u.exp()
    return torch.where(advantages > 0, s > 1 + objective.clip_high, s < 1 - objective.clip_low)


SHAPES = [(10_000, 16), (1_000, 128), (128, 1024)]
# An interpreted kernel takes 0.01 s per sequence, so Triton has fewer sequences on a CPU. The wide window runs the same
# kernels as GSPO's, so one case with the wide window is enough.
DECISIONS: list[Any] = [("torch", *shape, window) for shape in SHAPES for window in ("gspo", "wide")]
KERNEL_SHAPES = ((200, 16), (32, 128), (20, 1024)) if DEVICE.type == "cpu" else SHAPES
DECISIONS += [("triton", *KERNEL_SHAPES[0], "gspo"), ("triton", 20, 128, "wide")]
DECISIONS += [slow("triton", sequences, length, "gspo") for sequences, length in KERNEL_SHAPES[1:]]

by_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)], ids=["bf16", "fp16", "fp32"]
)


@by_dtype
@pytest.mark.parametrize(("backend", "sequences", "length", "window_of"), DECISIONS)
def test_ten_thousand_clip_decisions_are_those_of_float64(
    backend: str, sequences: int, length: int, window_of: str, dtype: torch.dtype
) -> None:
    window = {"gspo": (3e-4, 4e-4), "wide": (0.2, 0.2)}[window_of]
    objective = Objective(clip_low=window[0], clip_high=window[1])
    hidden, weight, ids, true_lp = batch(0, sequences, length, dtype)
    rng = torch.Generator().manual_seed(1)
    # The log-ratios spread about as far as the window, as in training: about 15 % of the sequences are clipped.
    u = torch.randn(sequences, generator=rng, dtype=torch.float64) * window[0]
    noise = torch.randn(sequences, length, generator=rng, dtype=torch.float64) * 0.03
    old = (true_lp - u[:, None] - noise + noise.mean(1, keepdim=True)).clamp(max=ROUNDING).float()
    u = (true_lp - old.double()).mean(1)
    advantages = torch.randn(sequences, generator=rng)
    leaf = hidden.requires_grad_()
    out = gspo_fused_loss(leaf, weight, ids, advantages, old_log_probs=old, objective=objective, backend=backend)
    (grad,) = torch.autograd.grad(out.loss * sequences, leaf)
    ours = ~grad.flatten(1).any(1)  # the gradient of a clipped sequence is exactly 0
    truth = true_decisions(u, advantages.double(), objective)
    bounds = torch.tensor([math.log1p(-window[0]), math.log1p(window[1])], dtype=torch.float64)
    clear = (u[:, None] - bounds).abs().amin(1) > decision_band(length)
    assert clear.double().mean() > (0.7 if window[0] < 1e-3 else 0.99)  # few sequences lie too close to a bound
    assert 0.05 < truth.double().mean() < 0.5
    wrong = clear & (ours != truth)
    assert not wrong.any(), f"{int(wrong.sum())} of {int(clear.sum())} decisions differ from float64"
    assert abs(out.metrics["clip_fraction"].item() - ours.double().mean().item()) < SHARE_ABSOLUTE


@by_dtype
@pytest.mark.parametrize(("hidden_size", "vocab"), [(896, 5_003), slow(4096, 1_999)])
def test_log_probs_of_large_heads_are_near_float64(
    hidden_size: int, vocab: int, dtype: torch.dtype, backend: str
) -> None:
    rng = torch.Generator().manual_seed(2)
    rows = 128 if backend == "triton" else 512
    hidden = torch.randn(rows, hidden_size, generator=rng).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=rng) * 7 / hidden_size**0.5).to(dtype)
    logits = hidden.double() @ weight.double().T
    assert 25 < logits.abs().max() < 40
    ids = sample_ids(logits, rng)
    truth = torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]
    error = linear_log_probs(hidden, weight, ids, backend=backend).log_probs.double() - truth
    if DEVICE.type == "cpu":
        assert error.std() <= LOG_PROB_STD, f"std {error.std():.2e}"
        assert error.mean().abs() <= LOG_PROB_BIAS, f"bias {error.mean():.2e}"
    else:
        limit = LOG_PROB_RMS_ON_GPUS + truncation(DEVICE, dtype, hidden_size, logits.abs().max().item())
        assert error.square().mean().sqrt() <= limit


@pytest.mark.parametrize("precision", ["fp32", "bf16x3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)], ids=["fp32", "bf16", "fp16"])
def test_autocast_does_not_round_an_fp32_head(dtype: torch.dtype, precision: str, backend: str) -> None:
    """With operands rounded to bf16, log-probs would be off by 1e-2. Logits are at most 30."""
    rng = torch.Generator().manual_seed(3)
    width, vocab, rows = 1024, 300, 60
    hidden = torch.randn(rows, width, generator=rng).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=rng) * 5 / width**0.5).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = torch.log_softmax(wide[0] @ wide[1].T, -1)
    ids, extra = sample_ids(log_p.detach(), rng), torch.randint(vocab, (rows, 2), generator=rng)
    truth = log_p.gather(-1, ids[:, None])[:, 0]
    kept = KeptSets.from_padded(torch.stack([ids, (ids + 1) % vocab], 1), fill=-1)
    truth_kept = truth - log_p.gather(-1, kept.ids.view(rows, 2)).logsumexp(1)
    d_log_probs = torch.randn(rows, generator=rng)
    truth.backward(d_log_probs.double())
    options: dict[str, Any] = dict(head_precision=precision, backend=backend)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = linear_log_probs(hidden, weight, ids, extra_ids=extra, **options)
        alone = linear_log_probs(hidden[7:30], weight, ids[7:30], **options).log_probs
        of_sets = linear_log_probs(hidden, weight, ids, kept_sets=kept, **options).log_probs
        top = linear_top_k(hidden, weight, 3, head_precision=precision)
        offsets, advantages = torch.tensor([0, 25, rows]), torch.ones(2)
        old = out.log_probs.detach()
        loss = gspo_fused_loss(hidden, weight, ids, advantages, cu_seqlens=offsets, old_log_probs=old, **options)
    assert torch.equal(alone, out.log_probs[7:30]) and torch.equal(loss.log_probs, old)
    assert (loss.log_ratio == 0).all()
    is_split = precision == "bf16x3" and backend == "triton"
    limit = LOG_PROB_RMS_BF16X3 if is_split else LOG_PROB_STD
    if DEVICE.type != "cpu" and is_split:
        limit += truncation(DEVICE, torch.bfloat16, width, 30.0)
    assert out.extra_log_probs is not None
    pairs = [(out.log_probs, truth), (out.extra_log_probs, log_p.gather(-1, extra)), (of_sets, truth_kept)]
    for ours, true in pairs:
        assert (ours.double() - true).square().mean().sqrt() <= limit
    assert (top.log_probs.double() - log_p.topk(3).values).square().mean().sqrt() <= LOG_PROB_STD
    out.log_probs.backward(d_log_probs.to(out.log_probs))
    for x, true, rounds in ((hidden, wide[0], is_split or dtype != torch.float32), (weight, wide[1], is_split)):
        assert x.grad is not None and true.grad is not None and x.grad.dtype == x.dtype
        error = (x.grad.double() - true.grad).norm() / true.grad.norm()
        assert error <= RELATIVE_RMS[torch.bfloat16 if rounds else torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_half_precision_head_is_an_fp32_head_of_its_operands(dtype: torch.dtype, backend: str) -> None:
    """Products of half-precision numbers are exact in fp32. PyTorch adds them in the same order as fp32 operands.

    Kernels for fp32 have other tiles, so only the order of additions differs.
    """
    rng = torch.Generator().manual_seed(4)
    rows, vocab = (60, 601) if backend == "triton" else (200, 5003)
    hidden = torch.randn(rows, 896, generator=rng).to(dtype)
    weight = (torch.randn(vocab, 896, generator=rng) * 5 / 896**0.5).to(dtype)
    ids = torch.randint(vocab, (rows,), generator=rng)
    half, single = (
        linear_log_probs(h, w, ids, backend=backend) for h, w in ((hidden, weight), (hidden.float(), weight.float()))
    )
    difference = (half.log_probs - single.log_probs).double()
    if backend == "torch" and DEVICE.type == "cpu":
        assert not difference.any()
    else:
        limit = 2 * LOG_PROB_STD + truncation(DEVICE, dtype, 896, 30.0)
        assert difference.square().mean().sqrt() <= limit


@by_dtype
@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl"])
def test_tokens_that_leave_the_trust_region_of_dppo_are_those_of_float64(
    surrogate: str, dtype: torch.dtype, backend: str
) -> None:
    """Tokens outside the trust region have a gradient of exactly 0 and cost no backward."""
    sequences, length = (1_000, 16) if backend == "torch" else (40, 16)
    objective = Objective.preset(surrogate)
    objective = replace(objective, clip_low=0.6 * objective.clip_high)
    hidden, weight, ids, true_lp = batch(0, sequences, length, dtype)
    rng = torch.Generator().manual_seed(1)
    noise = torch.randn(true_lp.shape, generator=rng, dtype=torch.float64)
    old = (true_lp - noise).clamp(max=ROUNDING).float()
    advantages = torch.randn(sequences, generator=rng)
    leaf = hidden.requires_grad_()
    out = gspo_fused_loss(leaf, weight, ids, advantages, old_log_probs=old, objective=objective, backend=backend)
    (grad,) = torch.autograd.grad(out.loss * true_lp.numel(), leaf)
    ours = ~grad.any(-1)  # [sequences, length]
    p, q = true_lp.exp(), old.double().clamp(max=0).exp()
    size = divergence(surrogate, true_lp, true_lp - old.double())
    a = advantages[:, None]
    bound = torch.where(a > 0, objective.clip_high, objective.clip_low)
    truth = (size > bound) & torch.where(a > 0, p > q, p < q)
    clear = (size - bound).abs() > DIVERGENCE_BAND
    # A probability of almost 1 has almost no gradient, so only tokens below it are compared.
    clear &= 1 - p > 1e-3
    assert clear.double().mean() > 0.5 and 0.05 < truth[clear].double().mean() < 0.5
    wrong = clear & (ours != truth)
    assert not wrong.any(), f"{int(wrong.sum())} of {int(clear.sum())} decisions differ from float64"
    masked = out.metrics["token_clip_fraction"].item()
    assert masked == pytest.approx(truth.double().mean().item(), abs=(~clear).double().mean().item() + SHARE_ABSOLUTE)
    assert out.metrics["live_row_share"].item() == pytest.approx(1 - masked, abs=SHARE_ABSOLUTE)
