"""GSPO's token form as a policy loss of verl, for `policy_loss.loss_mode=gspo_kernels`. It works with every engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss  # pyright: ignore[reportMissingImports]

from gspo_kernels import Objective, policy_loss
from gspo_kernels.validation import HALF, Checks, warn_once

from .config import LOSS_MODE, clip_window, warn_of_wide_window


@register_policy_loss(LOSS_MODE)
def gspo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute GSPO's token form with `policy_loss`, for use as a policy loss of verl.

    Args:
        old_log_prob, log_prob, advantages, response_mask: [B, R]; the mask is bool or 0/1.
        loss_agg_mode: GSPO's is "seq-mean-token-mean". The default of verl 0.9.1, "token-mean", weights answers by
            length.
        config: verl's ActorConfig with its global_batch_info. clip_ratio_low and clip_ratio_high set the clip window.
        rollout_is_weights: [B, R], factors of the policy term.

    Returns:
        The loss [], and the metrics that verl's policy losses return. verl adds the KL term and the entropy bonus.

    Raises:
        ValueError: there are several ranks, but global_batch_info has no global size to divide by; or `loss_agg_mode`
            is unknown.

    Warns:
        UserWarning: once each: `loss_agg_mode` weights answers by length; log-probs are in half precision; the clip
            window is made for token ratios, such as verl's default clip_ratio of 0.2.
    """
    batch = config.global_batch_info
    ranks = batch.get("dp_size") or 1
    norm = loss_agg_mode == "seq-mean-token-sum-norm"
    size = "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size"
    total = 1 if loss_agg_mode == "token-sum" else batch.get(size)
    if total is None and ranks > 1:
        Checks("gspo_policy_loss").fail(f"config.global_batch_info[{size!r}]", "given with more than one rank", None)
    if log_prob.dtype in HALF:
        warn_once(
            f"gspo_kernels: log-probs are {log_prob.dtype}, too coarse for a clip window of 3e-4 "
            "(VERL_ENGINE_VENDOR=gspo computes them in fp32)",
            stacklevel=3,
        )
    low, high = clip_window(config)
    warn_of_wide_window(low, high, stacklevel=4)
    out = policy_loss(
        log_prob.float(),
        advantages,
        mask=response_mask,
        old_log_probs=old_log_prob.float(),
        token_weights=rollout_is_weights,
        objective=_objective(
            low,
            high,
            "token-mean" if loss_agg_mode == "token-sum" else loss_agg_mode,
            float(batch.get("loss_scale_factor") or response_mask.shape[1]) if norm else None,
        ),
        # verl averages gradients over ranks. If the total is 0, every term of the loss is 0, whatever the divisor.
        normalizer=None if total is None else max(float(total), 1.0) / ranks,
    )
    return out.loss, {
        "actor/pg_clipfrac": out.metrics["token_clip_fraction"].item(),
        "actor/ppo_kl": out.metrics["kl_to_old"].item(),
        "actor/pg_clipfrac_lower": 0.0,
    }


def _objective(clip_low: float, clip_high: float, aggregation: str, length_norm: float | None) -> Objective:
    """Make the Objective of the token form. Warn once if its aggregation weights answers by length."""
    if aggregation != "seq-mean-token-mean":
        warn_once(
            f"gspo_kernels: loss_agg_mode={aggregation!r} weights answers by their length (LUSPO). GSPO's paper "
            "uses actor.loss_agg_mode=seq-mean-token-mean, which is not verl 0.9.1's default",
            stacklevel=4,
        )
    # The preset "luspo" omits Objective's warning about weights by length, which would repeat the one above.
    window = {"clip_low": clip_low, "clip_high": clip_high}
    return Objective.preset("luspo", ratio="sequence-token", aggregation=aggregation, length_norm=length_norm, **window)
