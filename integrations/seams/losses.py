"""Policy losses that a trainer calls with its log-probs: of prime-rl, SkyRL and OpenRLHF."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gspo_kernels import Objective, policy_loss
from gspo_kernels.validation import Field, positive

from .common import GSPO, USE_CORRECTION, check_settings, logged_metrics, loss_of_log_probs, offsets


class PrimeRLInputs(Protocol):
    """prime-rl's LossInputs: one sequence, each tensor [T]."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class PrimeRLOutputs(NamedTuple):
    """The fields of prime-rl's LossOutputs that it reads, each tensor []."""

    loss: Tensor
    metrics: dict[str, Tensor]


def prime_rl(inputs: PrimeRLInputs, preset: str = "gspo", mean_length: float = 1.0, **changes: Any) -> PrimeRLOutputs:
    """Compute prime-rl's custom loss of one sequence. The ratio is against the engine's log-probs (GSPO's paper, 5.4).

    prime-rl divides the sum over sequences by the step's tokens (or by the sum of loss_weights), GSPO by its sequences.
    Sequences still have equal weight, but the gradient is GSPO's divided by the step's mean length.

    Args:
        inputs: loss_weights multiply the policy term. ref_logprobs are needed for kl_coef > 0.
        preset: a name of `Objective.preset`, and `changes` its fields: the keys of [trainer.loss.kwargs].
        mean_length: multiplies the loss. With the mean length that you expect, in tokens, gradients have GSPO's size,
            which a bound on their norm needs. Leave it at 1 for an aggregation that sums tokens: prime-rl's division
            makes that a mean.
    """
    Field("prime_rl").number("mean_length", mean_length, "a number > 0 of tokens", positive)
    log_probs = inputs.trainer_logprobs
    out = policy_loss(
        log_probs,
        inputs.advantages,
        mask=inputs.loss_mask,
        cu_seqlens=offsets([len(log_probs)], log_probs),
        old_log_probs=inputs.inference_logprobs,
        ref_log_probs=inputs.ref_logprobs,
        token_weights=inputs.loss_weights,
        objective=Objective.preset(preset, **changes),
        normalizer=1 / mean_length,
    )
    return PrimeRLOutputs(out.loss, logged_metrics(out, is_clipped="token_clip_fraction"))


def skyrl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_logprobs: Tensor | None = None,
    *,
    objective: Objective = GSPO,
) -> tuple[Tensor, dict[str, float]]:
    """Compute SkyRL's policy loss: a sum over a micro-batch, whose advantages SkyRL has divided.

    SkyRL adds KL and entropy. SkyRL's own GSPO is the token form, ratio="sequence-token". Both are equal where the
    tokens of an answer have one advantage and one weight.

    Args:
        log_probs, old_log_probs, rollout_logprobs, loss_mask: [B, T], fp32.
        advantages: [B, T], divided by (sequences of the mini-batch * tokens of the row), as SkyRL's
            loss_reduction="sequence_mean" does.
        config: SkyRL's AlgorithmConfig.

    Returns:
        The loss [], and numbers for SkyRL's log, on the host.

    Raises:
        ValueError: a setting of SkyRL's disagrees with `objective`.
    """
    correction = config.off_policy_correction
    switches = [f.name for f in fields(correction) if f.default is None]
    settings = {
        "trainer.algorithm.eps_clip_low": (config.eps_clip_low, objective.clip_low),
        "trainer.algorithm.eps_clip_high": (config.eps_clip_high, objective.clip_high),
        "trainer.algorithm.loss_reduction": (config.loss_reduction, "sequence_mean"),
        "objective.kl_coef": (objective.kl_coef, 0.0),
        "objective.entropy_coef": (objective.entropy_coef, 0.0),
    }
    for name in switches:
        setting = f"trainer.algorithm.off_policy_correction.{name} {USE_CORRECTION}"
        settings[setting] = (getattr(correction, name), None)
    check_settings("skyrl", objective, settings)
    lengths = (loss_mask != 0).sum(1, keepdim=True)
    out = loss_of_log_probs(
        log_probs,
        advantages * lengths,
        loss_mask,
        old_log_probs=old_log_probs,
        rollout=rollout_logprobs,
        normalizer=1.0,
        objective=objective,
    )
    metrics = logged_metrics(out, clip_ratio="token_clip_fraction")
    return out.loss, dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))


class OpenRLHFPolicyLoss(nn.Module):
    """OpenRLHF's PolicyLoss for --actor.policy_loss_type gspo, with the same arguments and results.

    OpenRLHF adds KL and entropy. As in its own GSPO, an is_correction_level makes the ratio one against vLLM's
    log-probs; token_level_loss, is_correction_mode, is_correction_gating and is_correction_threshold are ignored. With
    Objective(rollout_correction=...), vLLM's log-probs are used for that correction instead.

    Raises:
        ValueError: a setting of OpenRLHF's disagrees with `objective`.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
        *,
        objective: Objective = GSPO,
    ) -> None:
        super().__init__()
        settings = {
            "--actor.policy_loss_type": (policy_loss_type, "gspo"),
            "--actor.eps_clip_low_high": ((clip_eps_low, clip_eps_high), (objective.clip_low, objective.clip_high)),
            "--actor.dual_clip": (dual_clip, objective.dual_clip),
            "objective.kl_coef": (objective.kl_coef, 0.0),
            "objective.entropy_coef": (objective.entropy_coef, 0.0),
        }
        check_settings("OpenRLHFPolicyLoss", objective, settings)
        self.objective = objective
        self.against_engine = is_correction_level != "off" and objective.rollout_correction is None

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Any = None,
        global_batch_size: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the loss [], clip_ratio [], ppo_kl [], None, None of tensors [B, T].

        The loss is the sum over answers divided by global_batch_size / dp_size; without a global_batch_size their mean.

        Raises:
            ValueError: rollout_log_probs are missing, with an is_correction_level.
        """
        old = rollout_log_probs if self.against_engine else old_log_probs
        if old is None:
            Field("OpenRLHFPolicyLoss").fail("rollout_log_probs", "given, with an is_correction_level", None)
        normalizer = None if global_batch_size is None else global_batch_size / dp_size
        out = loss_of_log_probs(
            log_probs,
            advantages,
            action_mask,
            old_log_probs=old,
            rollout=rollout_log_probs,
            normalizer=normalizer,
            objective=self.objective,
        )
        return out.loss, out.metrics["token_clip_fraction"], out.metrics["kl_to_old"], None, None
