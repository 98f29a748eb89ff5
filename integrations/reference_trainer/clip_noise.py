"""Clip decisions that rounding changes in a training, for the option `clip_noise_every`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..huggingface import ClipNoise, LogProbsByPrecision, clip_noise, log_probs_by_precision
from .config import TrainConfig
from .distributed import gather, share
from .policy import Policy
from .update import Batch, autocast, take

ANSWERS = 8  # per process


class ClipNoiseProbe:
    """Measures clip noise on a few answers of a rollout's last mini-batch, whose policy has moved farthest."""

    def __init__(self, config: TrainConfig, policy: Policy, batch: Batch, last: Tensor) -> None:
        """Compute log-probs with the weights before the updates.

        Args:
            last: the rows of the last mini-batch.
        """
        assert batch.advantages is not None
        live = batch.advantages.flatten(1).any(1) if batch.advantages.ndim > 1 else batch.advantages != 0
        rows: Any = share(last[live.to(last.device)[last]])  # type: ignore[type-var]
        self.config, self.policy, self.rollout_batch = config, policy, batch
        self.rows: Tensor = rows[:ANSWERS].to(batch.old_log_probs.device)
        self.batch = take(batch, self.rows)
        self.before = self._log_probs() if len(rows) else None

    def measure(self) -> dict[str, float]:
        """Compare with the present weights. Return the metrics, over all processes. All processes must call this."""
        if self.before is None:
            return metrics_of(gather(ClipNoise(0, 0, 0, 0, math.nan)))
        old = self.rollout_batch.old_log_probs[self.rows]  # the first update may have written them
        scored = self.before._replace(used=old), self._log_probs()
        mask = self.batch.rollout.answer_mask
        return metrics_of(gather(clip_noise(*scored, self.batch.advantages, mask, self.config.objective)))

    def _log_probs(self) -> LogProbsByPrecision:
        """Log-probs of the answers [b, T]."""
        rollout = self.batch.rollout
        prompt = rollout.prompt_width
        attended = rollout.attention_mask
        mask = torch.cat([torch.zeros_like(attended[:, :prompt]), rollout.answer_mask.to(attended.dtype)], 1)
        positions = (attended.cumsum(-1) - 1).clamp(min=0)  # as in `Policy.run`
        options: dict[str, Any] = {"temperature": self.config.temperature, "position_ids": positions}
        with autocast(self.config, self.policy):
            out = log_probs_by_precision(self.policy.model, rollout.input_ids, attended, mask, **options)
        return LogProbsByPrecision(*(x[:, prompt - 1 :] for x in out))


def metrics_of(parts: list[ClipNoise]) -> dict[str, float]:
    """Shares of changed decisions and the error of log-ratios, of the measurements of all processes; {} without any."""
    count = sum(part.decisions for part in parts)
    if not count:
        return {}
    square = sum(part.error**2 * part.decisions for part in parts if part.decisions)
    return {
        "clip_noise": sum(part.changed for part in parts) / count,
        "clip_noise_body": sum(part.changed_by_body for part in parts) / count,
        "clip_noise_head": sum(part.changed_by_head for part in parts) / count,
        "clip_noise_log_ratio": (square / count) ** 0.5,
    }
