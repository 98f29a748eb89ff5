"""ms-swift's loss, and its log-probs without logits. Set them as methods in a subclass of its GRPOTrainer.

_compute_loss_and_metrics = ms_swift.loss
_get_logps_via_local_forward = ms_swift.log_probs
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs

from ..huggingface import fuse_head
from .common import GSPO, USE_CORRECTION, check_settings, loss_of_log_probs

__all__ = ["log_probs", "loss"]


def loss(
    trainer: Any, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, *, objective: Objective = GSPO
) -> tuple[Tensor, dict[str, Any]]:
    """Compute the GSPO loss. Replaces the method `_compute_loss_and_metrics` of ms-swift's GRPOTrainer.

    As in ms-swift, the loss is a mean over all answers, including entirely masked ones. `objective` sets the KL term.

    Args:
        trainer: the GRPOTrainer, which is `self` if this function is a method of its class.
        model, model_inputs: ms-swift's arguments.
        grpo_batch: ms-swift's batch, with tensors [B, T] and truncated_mask [B].

    Returns:
        The loss [], and ms-swift's dictionary of metrics over all processes.

    Raises:
        ValueError: a setting of ms-swift disagrees with `objective`.
    """
    check_settings("ms_swift.loss", objective, _settings(trainer, objective))
    mask = grpo_batch.completion_mask
    if trainer.overlong_filter:
        mask = mask & ~grpo_batch.truncated_mask[:, None]
    log_probs, _ = trainer._get_per_token_logps_and_entropies(model, model_inputs, grpo_batch)
    old = log_probs.detach() if grpo_batch.old_per_token_logps is None else grpo_batch.old_per_token_logps
    out = loss_of_log_probs(
        log_probs,
        grpo_batch.advantages,
        mask,
        old_log_probs=old,
        rollout=grpo_batch.rollout_per_token_logps,
        ref_log_probs=grpo_batch.ref_per_token_logps,
        normalizer=float(len(mask)),
        objective=objective,
    )
    names = ["token_clip_fraction_low", "token_clip_fraction_high", "token_clip_fraction", "kl"]
    metrics = torch.stack([out.metrics[name] for name in names if name in out.metrics])  # [metrics]
    gathered = trainer.accelerator.gather_for_metrics(metrics[None])  # [processes, metrics]
    low, high, region, *kl = gathered.mean(0).tolist()
    clipping = {
        "low_clip_mean": low,
        "low_clip_min": gathered[:, 0].min().item(),
        "high_clip_mean": high,
        "high_clip_max": gathered[:, 1].max().item(),
        "region_clip_mean": region,
    }
    return out.loss, {
        "mode": "train" if trainer.model.training else "eval",
        "entropy": {},
        "completion_mask": mask,
        "completion_token_count": mask.sum().clamp(min=1),
        "clipping": clipping,
        **({"kl": kl[0]} if kl else {}),
    }


def _settings(trainer: Any, objective: Objective) -> dict[str, tuple[Any, Any]]:
    """ms-swift's settings of the loss by flag: the value, and the value that `objective` requires."""
    return {
        "--importance_sampling_level": (trainer.importance_sampling_level, objective.ratio.replace("-", "_")),
        "--loss_type": (trainer.loss_type, "grpo"),
        "--epsilon": (trainer.epsilon_low, objective.clip_low),
        "--epsilon_high": (trainer.epsilon_high, objective.clip_high),
        "--delta": (trainer.args.delta, objective.delta),
        "--beta": (0.0 if trainer.kl_in_reward else trainer.beta, objective.kl_coef),
        "--top_entropy_quantile": (trainer.top_entropy_quantile, 1.0),
        "--log_entropy": (trainer.args.log_entropy, False),
        "--off_policy_sequence_mask_delta": (trainer.off_policy_sequence_mask_delta, None),
        "--sdar_loss_coef": (trainer.sdar_loss_coef, 0.0),
        "--chord_sft_dataset": (trainer.chord_sft_iterator, None),
        "objective.entropy_coef": (objective.entropy_coef, 0.0),
        f"--rollout_importance_sampling_mode {USE_CORRECTION}": (trainer.rollout_importance_sampling_mode, None),
    }


def log_probs(
    trainer: Any,
    model: Any,
    model_inputs: dict[str, Any],
    logits_to_keep: int,
    input_ids: Tensor,
    compute_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs without logits. Replaces the method `_get_logps_via_local_forward` of ms-swift's GRPOTrainer.

    ms-swift calls this method for old, reference and new log-probs.

    Args:
        model: a transformers model, plain or wrapped by PEFT or DDP. Raises the errors of `fuse_head`.
        input_ids: [B, L], or packed without padding, [1, tokens].

    Returns:
        The log-probs of the last logits_to_keep tokens, and their entropies or None: fp32, [B, logits_to_keep].
    """
    fuse_head(trainer.accelerator.unwrap_model(model))

    def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return linear_log_probs(
            hidden[:, -logits_to_keep - 1 : -1],
            lm_head,
            input_ids[:, -logits_to_keep:],
            temperature=trainer.temperature,
            entropy=compute_entropy,
            **options,
        )

    scores, _ = model(**{**model_inputs, "use_cache": False}, with_head=score)
    return scores.log_probs, scores.entropy
