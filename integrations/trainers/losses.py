"""Policy losses for prime-rl, SkyRL and OpenRLHF, which pass their log-probs as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gspo_kernels import Objective, policy_loss
from gspo_kernels.validation import Checks, positive

from .common import GSPO, USE_CORRECTION, check_settings, logged_metrics, loss_of_log_probs, offsets


class PrimeRLInputs(Protocol):
    """prime-rl's LossInputs of one sequence. Each tensor is [T]."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class PrimeRLOutputs(NamedTuple):
    """The fields of LossOutputs that prime-rl reads. Each tensor is []."""

    loss: Tensor
    metrics: dict[str, Tensor]


def prime_rl(inputs: PrimeRLInputs, preset: str = "gspo", mean_length: float = 1.0, **changes: Any) -> PrimeRLOutputs:
    """Compute the GSPO loss of one sequence, as prime-rl's custom loss.

    The sampling engine computed the old log-probs, which section 5.4 of GSPO's paper allows. prime-rl divides the sum
    over sequences by the number of tokens of the step, or by the sum of loss_weights. GSPO divides by the number of
    sequences. So sequences have equal weight, as in GSPO, but the gradient is GSPO's divided by the step's mean length.

    Args:
        inputs: prime-rl's inputs. The policy term is multiplied by loss_weights. kl_coef > 0 requires ref_logprobs.
        preset, changes: a name of `Objective.preset`, and the fields that differ from the preset. Set them in
            [trainer.loss.kwargs].
        mean_length: a factor of the loss. Set it to the mean length that you expect, in tokens, so that gradients have
            GSPO's size and gradient clipping acts as with GSPO. Leave it at 1 for an aggregation that sums tokens:
            prime-rl's division turns the sum into a mean.
    """
    Checks("prime_rl").number("mean_length", mean_length, "a number of tokens > 0", positive)
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
    """Compute the GSPO loss of a micro-batch, as SkyRL's policy loss.

    The loss is a sum, because SkyRL has already divided the advantages. SkyRL adds the KL term and the entropy bonus.
    SkyRL's own GSPO is the token form, ratio="sequence-token". The default here is the sequence form. The two are equal
    if all tokens of an answer have the same advantage and the same weight.

    Args:
        log_probs, old_log_probs, rollout_logprobs, loss_mask: [B, T], fp32.
        advantages: [B, T], divided by (sequences of the mini-batch * unmasked tokens of the answer), as SkyRL does with
            loss_reduction="sequence_mean".
        config: SkyRL's AlgorithmConfig.

    Returns:
        The loss [], and Python numbers for SkyRL's log.

    Raises:
        ValueError: a setting of SkyRL disagrees with `objective`.
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
    lengths = (loss_mask != 0).sum(1, keepdim=True)  # [B, 1]
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
    """A replacement of OpenRLHF's PolicyLoss for --actor.policy_loss_type gspo, with the same arguments and results.

    OpenRLHF adds the KL term and the entropy bonus. As in OpenRLHF's own GSPO, token_level_loss, is_correction_mode,
    is_correction_gating and is_correction_threshold are ignored, and any is_correction_level but "off" makes vLLM's
    log-probs the old log-probs of the loss, while ppo_kl stays the KL to the policy's own old log-probs. With
    Objective(rollout_correction=...), vLLM's log-probs serve only that correction.

    Raises:
        ValueError: a setting of OpenRLHF disagrees with `objective`.
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
        Checks("OpenRLHFPolicyLoss").choice("is_correction_level", is_correction_level, ("off", "token", "seq"))
        self.objective = objective
        self.old_from_engine = is_correction_level != "off" and objective.rollout_correction is None

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
        """Compute the loss [], clip_ratio [] and ppo_kl [] of tensors [B, T]. The last two results are None.

        The loss is the sum over answers divided by global_batch_size / dp_size. Without a global_batch_size it is the
        mean over answers. ppo_kl is the mean of old_log_probs - log_probs over unmasked tokens.

        Raises:
            ValueError: is_correction_level is not "off", but rollout_log_probs are missing.
        """
        check = Checks("OpenRLHFPolicyLoss")
        if not isinstance(old_log_probs, Tensor) or old_log_probs.shape != log_probs.shape:
            check.fail("old_log_probs", f"a tensor {list(log_probs.shape)} like log_probs", old_log_probs)
        old = rollout_log_probs if self.old_from_engine else old_log_probs
        if old is None:
            check.fail("rollout_log_probs", "given unless is_correction_level is 'off'", None)
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
        ppo_kl = out.metrics["kl_to_old"]
        if self.old_from_engine:  # then it is the KL to the engine
            mask = action_mask != 0
            ppo_kl = torch.where(mask, old_log_probs - log_probs.detach(), 0).sum() / mask.sum().clamp(min=1)
        return out.loss, out.metrics["token_clip_fraction"], ppo_kl, None, None
