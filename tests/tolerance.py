"""Every limit the tests hold the library to, in one file. Loosening one takes its own commit and reason.

The law: truth is float64. With r the error of the same computation in plain PyTorch in the same dtype (PLAIN_ORDERS)
and floor = eps(dtype) * max|truth|, ours may err by at most 2 * (r + floor); besides, the relative RMS error has a
limit per dtype, NaN and inf stand where they stand in the truth, and every row points where the true row points.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What plain fp32 errs by depends on the order in which a logit's terms are added: one gradient was off by 1.4 to 4.2
# eps in six orders of the same numbers. Of one order r is a draw, which ours lost 7 times in 512 gradients, or 12 with
# another NumPy's products, on every processor for other samples; to the largest r of four orders it never lost. Half
# precision keeps one: of more orders some would take a wrong clip decision, and that excuses any gradient.
PLAIN_ORDERS = {torch.float32: 4}

RELATIVE_RMS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-12}
ROW_COSINE = 0.999

# fp64 against the fp64 oracle: rounding in another order is all that may differ.
FLOAT64_RELATIVE = 1e-11

# Log-probs of the same inputs against float64, |logit| <= 30, H <= 4096, on CPU: per-token standard deviation and bias.
LOG_PROB_STD = 1e-5
LOG_PROB_BIAS = 2e-6
# The same on a GPU, root mean square: tensor cores truncate where they add.
LOG_PROB_RMS_ON_TENSOR_CORES = 3e-5
# A sum of half products, relative RMS: rounded to fp16 it errs by 2e-4 and to bf16 by 1.7e-3, in fp32 by far less.
ACCUMULATED_IN_FP32 = 1e-4
# Of exact logits, in units of the last place, root mean square: one rounding is 0.29, two are 0.41.
LOG_PROB_UNIT_RMS = 0.35

# fp32 advantages of rewards far from zero, against float64.
ADVANTAGE_RELATIVE = 1e-6

# On-policy GSPO's loss is about 0, so losses are compared on the scale of the advantages.
LOSS_PER_ADVANTAGE = 1e-6

# Gradients of two trainers on one batch, in float64 (some add 1e-8 to what they divide by), over their norm.
PARITY_GRADIENT_RELATIVE = 1e-6

# Another fp32 implementation from hidden states: two roundings of every logit.
LIGER_GRADIENT_RELATIVE = 1e-5

# Gradients of a whole model, its own logits against its head fused, over their norm, by the model's dtype.
MODEL_GRADIENT_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-5}
# The same of one process and of several that share the model, in float64.
SHARDED_GRADIENT_RELATIVE = 1e-10
# A trainer's log after a few steps of fp32 SGD with its own log-probs and with ours; its parameters and log-probs; its
# gradient norm for the first four updates, past which both have drifted by rounding.
TRAINER_LOG_RELATIVE, TRAINER_LOG_ABSOLUTE, TRAINER_ABSOLUTE = 1e-4, 2e-6, 1e-5
TRAINER_GRADIENT_RELATIVE = 1e-6

# A log-ratio is a difference of log-probs: its error is on their scale, per dtype of the accumulators.
LOG_RATIO_RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-12}

# Means over a batch, in fp32, against fp64.
METRIC_RELATIVE, METRIC_ABSOLUTE = 1e-5, 1e-7
SHARE_ABSOLUTE = 1e-6

# The L1 mass of d_logits that a gradient budget drops, in fp32, against fp64.
DROPPED_MASS_RELATIVE = 1e-4
# Norm of what a gradient of the kept entries is off, over its norm: which entries is in question, not rounding.
KEPT_GRADIENT_RELATIVE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5, torch.float64: 1e-11}

# Parameters after the same few updates, in one batch or in micro-batches.
PARAMETER_ABSOLUTE = 1e-6

# How near a ratio may lie to a bound before fp64 rounding may move it across.
FLOAT64_BOUND = 1e-9

# What benchmarks compare: fp32 candidates against float64, gradients (norm over norm) and losses; two float64 losses.
CANDIDATE_GRADIENT = 1e-5
CANDIDATE_LOSS = 1e-6
FLOAT64_LOSS_RELATIVE = 1e-12


def softcap_slope(softcap: float | None, dtype: torch.dtype) -> float:
    """What the slope of a soft-cap, 1 - tanh^2, may be off by, whatever its size: an eps of the accumulators' dtype."""
    return 0.0 if softcap is None else torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def decision_band(length: int) -> float:
    """How near u may lie to a clip bound before its decision may differ from float64's."""
    return 3e-6 if length >= 1024 else 3e-6 + 6e-5 / length**0.5


def check(name: str, ours: Tensor | None, same_dtype: Tensor | None, truth: Tensor | None, dtype: torch.dtype) -> float:
    """Assert the law for one output; returns our error over the allowed one."""
    assert ours is not None and same_dtype is not None and truth is not None, f"{name} is absent"
    ours, same_dtype = ours.detach().double(), same_dtype.detach().double()
    truth = truth.detach().double()
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert torch.equal(ours.isnan(), truth.isnan()), f"{name}: NaN in other places than in float64"
    assert torch.equal(ours.isinf(), truth.isinf()), f"{name}: inf in other places than in float64"
    finite = truth.isfinite()
    if not finite.any():
        return 0.0
    o, t, s = ours[finite], truth[finite], same_dtype[finite]
    largest = t.abs().max().item()
    error = (o - t).abs().max().item()
    if dtype == torch.float64:
        allowed = FLOAT64_RELATIVE * max(largest, 1e-30)
    else:
        allowed = 2 * ((s - t).abs().max().item() + torch.finfo(dtype).eps * largest)
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (largest value {largest:.3e})"
    rms = (o - t).square().mean().sqrt() / t.square().mean().sqrt().clamp(min=1e-300)
    if largest > 0:
        limit = RELATIVE_RMS[dtype]
        assert rms <= limit, f"{name}: relative RMS error {rms:.3e}, allowed {limit:.0e}"
    if truth.ndim == 2 and finite.all():
        _check_rows(name, ours, truth, torch.finfo(dtype).eps * largest)
    return error / allowed if allowed else 0.0


def _check_rows(name: str, ours: Tensor, truth: Tensor, floor: float) -> None:
    # One huge entry must not hide many wrong rows.
    counts = truth.norm(dim=1) > floor * truth.shape[1] ** 0.5
    cosine = torch.cosine_similarity(ours[counts], truth[counts], dim=1, eps=1e-300)
    assert (cosine >= ROW_COSINE).all(), f"{name}: a row is off by cosine {cosine.min().item():.6f}"


def check_loss(ours: Tensor, truth: Tensor, advantages: Tensor) -> None:
    limit = LOSS_PER_ADVANTAGE * max(advantages.abs().mean().item(), truth.abs().item(), 1e-12)
    difference = abs(ours.item() - truth.item())
    assert difference <= limit, f"loss off by {difference:.3e}, allowed {limit:.3e}"
