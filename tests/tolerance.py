"""All error limits of the tests. To loosen a limit, make a separate commit that gives the reason.

Limits that the library itself needs, for the self-check and `gspo doctor`, are in gspo_kernels/tolerance.py.

`check` compares with float64, the truth. Let r be the largest error of plain PyTorch in the same dtype (see
PLAIN_ORDERS), and floor = eps(dtype) * max|truth|. Our largest error must be at most 2 * (r + floor). The relative RMS
error has a limit per dtype, NaN and inf must be in the same places, and the cosine of each row with the true row must
be at least ROW_COSINE.

The relative error of a gradient is the norm of the difference divided by the norm of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.tolerance import (
    DROPPED_MASS_RELATIVE,
    FLOAT64_RELATIVE,
    LIVE_GRADIENT_RELATIVE,
    LOG_PROB_RMS_ON_GPUS,
    LOSS_PER_ADVANTAGE,
    METRIC_ABSOLUTE,
    METRIC_RELATIVE,
    RELATIVE_RMS,
    ROW_COSINE,
)

__all__ = [
    "DROPPED_MASS_RELATIVE",
    "FLOAT64_RELATIVE",
    "LIVE_GRADIENT_RELATIVE",
    "LOG_PROB_RMS_ON_GPUS",
    "LOSS_PER_ADVANTAGE",
    "METRIC_ABSOLUTE",
    "METRIC_RELATIVE",
    "RELATIVE_RMS",
    "ROW_COSINE",
]

# Plain PyTorch runs in this many orders of additions, and r is the largest error. In fp32 the error depends on the
# order in which a logit's terms are added: a gradient was off by 1.4 to 4.2 eps in six orders of the same numbers. With
# one order, 7 of 512 gradients failed the check, 12 failed with another NumPy, and each processor had other failures.
# With four orders, none failed. Half precision uses one order: with more orders, one of them would take a wrong clip
# decision, and its large r would allow any gradient.
PLAIN_ORDERS = {torch.float32: 4}

# Error of log-probs on a CPU, for |logit| <= 30 and H <= 4096: standard deviation and bias per token.
LOG_PROB_STD = 1e-5
LOG_PROB_BIAS = 2e-6
# RMS error of log-probs if fp32 operands are split into two bf16 numbers ("bf16x3"). Rounding to bf16 has a relative
# RMS error of 1.7e-3. A product of the sums hi + lo lacks lo lo and has two rounded lo, each (1.7e-3)^2 of it. So a
# logit is off by sqrt(3) (1.7e-3)^2 = 5e-6 times the standard deviation of logits. If |logit| <= 30 is six standard
# deviations, that is 2.5e-5. The limit is twice as large, because terms of a logit may be correlated.
LOG_PROB_RMS_BF16X3 = 5e-5
# Relative RMS error of sums of half-precision products that are accumulated in fp32. Sums rounded to fp16 would have an
# error of 2e-4, and sums rounded to bf16 an error of 1.7e-3.
ACCUMULATED_IN_FP32 = 1e-4
# RMS error of log-probs computed from exact logits, in units in the last place. One rounding has an error of 0.29, two
# roundings of 0.41.
LOG_PROB_UNIT_RMS = 0.35

# Error of fp32 advantages of rewards far from zero, compared with float64.
ADVANTAGE_RELATIVE = 1e-6
# gdpo_advantages in float64. If the rewards nearly cancel, the last division amplifies their rounding errors.
GDPO_RELATIVE = 1e-9
GDPO_ABSOLUTE = 1e-7
# Metrics of float64 importance weights.
WEIGHT_METRIC_RELATIVE = 1e-9

# Gradients of our loss and of another trainer's, for the same batch in float64. Some trainers add 1e-8 to a divisor.
PARITY_GRADIENT_RELATIVE = 1e-6


# Gradients of a model with a fused head and with materialised logits, by the model's dtype.
MODEL_GRADIENT_RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-5}
# Gradients of one process and of several processes that shard the model, in float64.
SHARDED_GRADIENT_RELATIVE = 1e-10
# Expected gradients over a vocabulary, as sums over all tokens in float64. Terms may cancel to 0.
EXPECTED_GRADIENT_RELATIVE, EXPECTED_GRADIENT_ABSOLUTE = 1e-10, 1e-12
# Two runs of a trainer for a few steps of fp32 SGD, with its own log-probs and with ours. The first two limits are for
# the trainer's log, the third for parameters and log-probs.
TRAINER_LOG_RELATIVE, TRAINER_LOG_ABSOLUTE, TRAINER_ABSOLUTE = 1e-4, 2e-6, 1e-5
# Gradient norms of the first four updates in such runs. After four updates, rounding has made the runs drift apart.
TRAINER_GRADIENT_RELATIVE = 1e-6

# Results of another trainer's function and of ours in fp32, as the norm of the difference divided by the norm.
FUNCTION_RELATIVE = 1e-6

# Error of log-ratios relative to the largest |log-prob|, by dtype of the accumulators.
LOG_RATIO_RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-12}

# Shares of a batch in fp32, compared with fp64.
SHARE_ABSOLUTE = 1e-6

# Loss and gradients of a long sequence of equal tokens in fp32. Sums in fp32 would have a relative error of 2e-5.
EQUAL_TOKENS_RELATIVE, EQUAL_TOKENS_ABSOLUTE = 3e-7, 1e-7
# The same with sequences that are sharded over ranks: gradients, and kl_to_old.
SHARDED_EQUAL_TOKENS_RELATIVE = 1e-6

# Gradients whose products our kernels compute from cells, compared with those that PyTorch multiplies, by dtype.
CELL_PRODUCTS_RELATIVE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
# fp32 products of copies of half-precision operands, compared with fp64.
PRODUCT_OF_COPIES_RELATIVE, PRODUCT_OF_COPIES_ABSOLUTE = 1e-5, 1e-4

# Error of log-ratios against an fp32 forward, compared with that against float64.
CLIP_NOISE_ERROR_RELATIVE = 0.05
# A small model trained by verl in fp16, compared with fp32: log-probs of its answers, and norms of its gradients.
FP16_LOG_PROB_ABSOLUTE = 5e-3
FP16_NORM_RELATIVE = 1e-2
# Log-probs of a small model's answers in fp32, compared with fp64.
MODEL_LOG_PROB_ABSOLUTE = 1e-5

# Parameters after a few updates, each from one batch or from the same batch in micro-batches.
PARAMETER_ABSOLUTE = 1e-6

# Logits of a model with an adapter and of the merged model.
MERGED_LOGIT_ABSOLUTE = 1e-3

# fp32 log-probs over kept sets and of extra ids, compared with a formula or with another trainer's.
KEPT_VALUE_RELATIVE, KEPT_VALUE_ABSOLUTE = 1e-5, 1e-6
# The same function, compiled and not.
COMPILED_RELATIVE = 1e-6

# Benchmarks: gradients and losses of fp32 candidates, compared with float64.
CANDIDATE_GRADIENT = 1e-5
CANDIDATE_LOSS = 1e-6
# Benchmarks: two computations of a loss in float64.
FLOAT64_LOSS_RELATIVE = 1e-12


def softcap_slope(dtype: torch.dtype) -> float:
    """The error allowed in the slope of a soft-cap, 1 - tanh^2, with accumulators of `dtype`.

    tanh is computed from a capped logit, which was rounded up to four times. Where tanh is near 1, these errors may be
    the same for all tokens, and then they add up in a gradient.
    """
    return 4 * torch.finfo(dtype).eps


def decision_band(length: int) -> float:
    """Return the distance of the log-ratio u from a clip bound within which our decision may differ from float64's."""
    return 3e-6 if length >= 1024 else 3e-6 + 6e-5 / length**0.5


# Distance of DPPO's divergence from its bound within which our decision may differ from float64's. Per nat of the
# log-prob, the divergence moves by at most 1 / (1 - p).
DIVERGENCE_BAND = 1e-4


def truncation(device: torch.device, dtype: torch.dtype, width: int, largest_logit: float) -> float:
    """Return the RMS error of log-probs and entropies that the truncation of a GPU's tensor cores may cause.

    Tensor cores multiply half-precision operands. They add 8 (Ampere) or 16 (Hopper) products at a time to the fp32 sum
    of a logit, and truncate the new sum toward zero. In the model of tests/math/test_truncation.py, an addition loses
    about 2^-26 of the sum. The sum is rarely larger than the largest logit. So H / 8 additions move a logit by at most

        H / 8 * 2^-26 * max|z|

    All logits move toward zero by the same share, so a log-prob moves by this share of the target's distance from the
    mean logit. In the model, Hopper's additions cause a quarter of this error, and Ampere's less than half. On an H200,
    log-probs of models' heads stayed below LOG_PROB_RMS_ON_GPUS plus this limit.
    """
    on_tensor_cores = device.type != "cpu" and dtype.itemsize == 2
    return width / 8 * 2.0**-26 * largest_logit if on_tensor_cores else 0.0


def check(
    name: str,
    ours: Tensor | None,
    same_dtype: Tensor | None,
    truth: Tensor | None,
    dtype: torch.dtype,
    more_rms: float = 0.0,
) -> float:
    """Assert that an output is within its limits (module docstring); return our error divided by the allowed error.

    `more_rms` is added to the allowed RMS error. It is absolute.
    """
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
    true_rms = t.square().mean().sqrt().clamp(min=1e-300)
    rms = (o - t).square().mean().sqrt() / true_rms
    if largest > 0:
        limit = RELATIVE_RMS[dtype] + more_rms / true_rms
        assert rms <= limit, f"{name}: relative RMS error {rms:.3e}, allowed {limit:.1e}"
    if truth.ndim == 2 and finite.all():
        _check_rows(name, ours, truth, torch.finfo(dtype).eps * largest)
    return error / allowed if allowed else 0.0


def _check_rows(name: str, ours: Tensor, truth: Tensor, floor: float) -> None:
    """Assert the direction of every row above the rounding floor, so that a huge entry cannot hide wrong rows."""
    above_floor = truth.norm(dim=1) > floor * truth.shape[1] ** 0.5
    cosine = torch.cosine_similarity(ours[above_floor], truth[above_floor], dim=1, eps=1e-300)
    assert (cosine >= ROW_COSINE).all(), f"{name}: a row has cosine {cosine.min().item():.6f} with the true row"


def check_loss(ours: Tensor, truth: Tensor, size: float) -> None:
    """Assert that a loss is off by at most LOSS_PER_ADVANTAGE times the larger of `size` and |loss|.

    `size` is the mean |advantage| or, for any objective, the sum of the absolute terms whose sum is the loss. An fp32
    log-prob is off by a few eps of the largest logit, here at most 1e-6. A term with the factor exp(log-ratio) or
    log-prob changes by at most this share of itself. If the log-ratio is a sum of L log-probs, it changes by L times
    this share (`helpers.array.policy_of`).
    """
    limit = LOSS_PER_ADVANTAGE * max(size, truth.abs().item(), 1e-12)
    difference = abs(ours.item() - truth.item())
    assert difference <= limit, f"loss off by {difference:.3e}, allowed {limit:.3e}"


# Mean share of rows over 100 simulated rollouts, whose random numbers may differ between versions of PyTorch.
# Gradients of checkpointed layers in float64, differentiated for some rows: sums over rows in another order.
ROW_CHECKPOINT_RELATIVE = 1e-13
# The same if a model computes in fp32 in parts, in fp32 throughout, or under bf16 autocast.
ROW_CHECKPOINT_IN_PART_FP32 = 1e-6
ROW_CHECKPOINT_FP32 = 1e-4
ROW_CHECKPOINT_BF16 = 2**-8
