"""OpenRLHF's policy loss.

openrlhf.trainer.ray.ppo_actor.PolicyLoss = openrlhf.PolicyLoss, in every worker of the actor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels import Objective
from gspo_kernels.validation import Checks

from .common import GSPO, check_settings, loss_of_log_probs, outside_window

__all__ = ["PolicyLoss"]


class PolicyLoss(nn.Module):
    """A replacement for OpenRLHF's PolicyLoss for --actor.policy_loss_type gspo, with the same arguments and results.

    OpenRLHF adds the KL term and the entropy bonus. As in OpenRLHF's own GSPO, token_level_loss, is_correction_mode,
    is_correction_gating and is_correction_threshold are ignored. Any is_correction_level but "off" makes vLLM's
    log-probs the old log-probs of the loss. ppo_kl stays the KL to the policy's own old log-probs. With
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
        check_settings("openrlhf.PolicyLoss", objective, settings)
        Checks("openrlhf.PolicyLoss").choice("is_correction_level", is_correction_level, ("off", "token", "seq"))
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
        check = Checks("openrlhf.PolicyLoss")
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
        clip_ratio = out.metrics["token_clip_fraction"]
        if self.objective.dual_clip is not None:  # OpenRLHF does not count tokens at this bound
            ratio = out.log_ratio.exp()
            ratio = ratio[:, None] if ratio.ndim == 1 else ratio
            clipped = outside_window(ratio, advantages, self.objective) & (action_mask != 0)
            clip_ratio = clipped.sum() / (action_mask != 0).sum().clamp(min=1)
        return out.loss, clip_ratio.to(out.loss.dtype), ppo_kl.to(out.loss.dtype), None, None
