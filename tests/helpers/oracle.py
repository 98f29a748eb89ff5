"""Objectives, heads, layouts and dtypes of the parity tests, and the comparison with the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from helpers.samples import Sample, call_oracle, run_fused, run_oracle, run_plain
from tolerance import LOG_RATIO_RELATIVE, check, check_loss

from gspo_kernels import LossOutput

WIDE = {"clip_low": 0.2, "clip_high": 0.28}
# The window, which these objectives do not read, sets the log-ratios of the samples: +-0.1 per token.
PRODUCT = {"ratio": "sequence-product", "clip_low": 0.05, "clip_high": 0.05}


OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {},
    "gspo-wide": WIDE,
    "gspo-token": {"ratio": "sequence-token"},
    "grpo": {"ratio": "token", **WIDE},
    "grpo-narrow": {"ratio": "token"},
    "dual-clip": {"dual_clip": 1.0005},
    "dual-clip-wide": {**WIDE, "dual_clip": 1.4},
    "delta": {"delta": 1.0006},
    "both-ceilings": {**WIDE, "dual_clip": 1.5, "delta": 1.35},
    "grpo-dual-clip": {"ratio": "token", **WIDE, "dual_clip": 1.3},
    "none": {"surrogate": "none"},
    "cispo": {"surrogate": "cispo", "ratio": "token", **WIDE},
    "cispo-no-floor": {"surrogate": "cispo", "ratio": "token", "clip_low": 1.0, "clip_high": 1.5},
    "cispo-sequence": {"surrogate": "cispo", "kl_coef": 0.1, "kl_ratio_factor": True},
    "sapo": {"surrogate": "sapo", "ratio": "token", **WIDE},
    "sapo-sequence": {"surrogate": "sapo", **WIDE, "sapo_temperature_pos": 2.0, "kl_coef": 0.1},
    "gmpo": {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.3},
    "gmpo-k3-ratio": {"surrogate": "gmpo", **WIDE, "kl_coef": 0.1, "kl_ratio_factor": True},
    "reinforce": {"surrogate": "reinforce", "ratio": "token", "aggregation": "seq-mean-token-sum"},
    "dppo-tv": {"surrogate": "dppo_tv", "ratio": "token", "clip_low": 0.02, "clip_high": 0.04},
    "dppo-tv-dual-clip": {"surrogate": "dppo_tv", "ratio": "token", **WIDE, "dual_clip": 1.5, "kl_coef": 0.1},
    "dppo-kl": {"surrogate": "dppo_kl", "ratio": "token", "clip_low": 0.01, "clip_high": 0.03},
    "dppo-kl-bonus": {"surrogate": "dppo_kl", "ratio": "token", **WIDE, "entropy_coef": 0.02},
    "vespo": {"surrogate": "vespo", **PRODUCT, "aggregation": "token-mean"},
    "vespo-other-weights": {
        "surrogate": "vespo",
        **PRODUCT,
        "vespo_k_pos": 0.0,
        "vespo_lambda_pos": 0.5,
        "vespo_k_neg": 1.0,
        "vespo_lambda_neg": 0.5,
        "aggregation": "seq-mean-token-sum",
        "kl_coef": 0.1,
        "kl_estimator": "unbiased",
        "entropy_coef": 0.02,
    },
    "topr": {"surrogate": "topr", **PRODUCT, "aggregation": "seq-mean-token-sum"},
    "topr-sequence": {"surrogate": "topr", **WIDE, "kl_coef": 0.1, "kl_ratio_factor": True},
    "topr-token": {"surrogate": "topr", "ratio": "token", **WIDE},
    "token-mean": {"aggregation": "token-mean"},
    "seq-sum": {"aggregation": "seq-mean-token-sum"},
    "seq-sum-norm": {"aggregation": "seq-mean-token-sum-norm", "length_norm": 11},
    "k1": {"kl_coef": 0.1, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.1, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.1},
    "abs": {"kl_coef": 0.1, "kl_estimator": "abs"},
    "k1+": {"kl_coef": 0.1, "kl_estimator": "k1+"},
    "k3+": {"kl_coef": 0.1, "kl_estimator": "k3+", "ratio": "token", **WIDE},
    "unbiased": {"kl_coef": 0.1, "kl_estimator": "unbiased"},
    "k3-ratio": {"kl_coef": 0.1, "kl_ratio_factor": True},
    "k3-ratio-token": {"kl_coef": 0.1, "kl_ratio_factor": True, "ratio": "token", **WIDE},
    "k2-ratio-gspo-token": {"kl_coef": 0.1, "kl_estimator": "k2", "kl_ratio_factor": True, "ratio": "sequence-token"},
    "k3-token-mean": {"kl_coef": 0.1, "kl_aggregation": "token-mean"},
    "entropy-bonus": {"entropy_coef": 0.02},
    "everything": {**WIDE, "kl_coef": 0.1, "kl_ratio_factor": True, "entropy_coef": -0.02, "aggregation": "token-mean"},
}


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale-softcap": {"logit_scale": 0.6, "logit_softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "temperature-per-token": {"temperature": "per-token"},
    "padded-vocab": {"padded_vocab": 11},
    "all": {
        "bias": True,
        "logit_scale": 0.6,
        "logit_softcap": 5.0,
        "temperature": "per-token",
        "padded_vocab": 11,
    },
}


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packed": True},
    "no-holes": {"holes": False},
    "per-token-advantages": {"per_token_advantages": True},
    "token-weights": {"token_weights": True},
    "packed-per-token-weights": {"packed": True, "per_token_advantages": True, "token_weights": True},
    "on-policy": {"on_policy": True},
}


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def size_of_loss(sample: Sample) -> float:
    """Return mean |advantage| or, if larger, the sum of |terms| of the loss (times L), for `check_loss`.

    All policy terms with one sign of the advantage have the same sign. So the sum is that of two losses.
    """
    sample = sample.cast(torch.float64)
    sample = replace(sample, objective=replace(sample.objective, kl_coef=0.0, kl_ratio_factor=False, entropy_coef=0.0))
    sides = (sample.advantages.clamp(min=0), sample.advantages.clamp(max=0))
    terms = sum(call_oracle(replace(sample, advantages=side)).loss.abs().item() for side in sides)
    if sample.objective.ratio == "sequence-product":
        mask, offsets = sample.options["mask"], sample.options.get("cu_seqlens")
        rows = mask if offsets is None else mask.split(offsets.diff().tolist())
        terms *= max(int(row.sum()) for row in rows)
    return max(sample.advantages.abs().mean().item(), terms)


def assert_equals_oracle(
    sample: Sample, dtype: torch.dtype, backend: str, run: Callable[..., Any] = run_fused
) -> LossOutput:
    """Assert that values and gradients of the fused loss equal the float64 oracle's within `tolerance.py`.

    `run` computes the loss. Return its output.
    """
    truth, true_grads = run_oracle(sample)
    plain, plain_grads = run_plain(sample, dtype, truth, true_grads)
    out, grads = run(sample, backend, entropy=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    check_loss(out.loss, truth.loss, size_of_loss(sample))
    assert out.loss.dtype == out.log_probs.dtype == wide
    mask = sample.options["mask"]
    check("log_probs", out.log_probs, plain.log_probs, truth.log_probs, wide)
    assert out.entropy is not None
    check("entropy", out.entropy, plain.entropy, truth.entropy, wide)
    error = (out.log_ratio - truth.log_ratio)[mask if out.log_ratio.shape == mask.shape else ...].abs().max()
    assert error <= LOG_RATIO_RELATIVE[wide] * max(truth.log_probs.abs().max().item(), 1)
    for name, grad in grads.items():
        assert grad.dtype == dtype
        flat = lambda g: g.reshape(-1, g.shape[-1]) if g.ndim == 3 else g  # noqa: E731
        check(f"d_{name}", flat(grad), flat(plain_grads[name]), flat(true_grads[name]), dtype)
    return out
