"""Clip decisions that rounding changes in a training, for the option `clip_noise_every`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..huggingface import ClipNoise, LogProbsByPrecision, clip_noise, log_probs_by_precision
from .config import TrainConfig
from .distributed import gather, share
from .policy import Policy, positions_of
from .update import Batch, autocast, take
from .zero_advantage import live_rows

ANSWERS = 8  # per process


class ClipNoiseProbe:
    """Measures clip noise on a few answers of a rollout's last mini-batch, whose policy has moved farthest."""

    def __init__(self, config: TrainConfig, policy: Policy, batch: Batch, last: Tensor) -> None:
        """Score the answers with the weights that the model has before the updates.

        Args:
            last: the rows of the last mini-batch.
        """
        assert batch.advantages is not None
        live = live_rows(batch.advantages, batch.rollout.answer_mask)
        rows: Any = share(last[live[last]])  # type: ignore[type-var]
        self.config = config
        self.policy = policy
        self.rollout_batch = batch
        self.rows: Tensor = rows[:ANSWERS].to(batch.old_log_probs.device)
        self.batch = take(batch, self.rows)
        self.before = self._log_probs() if len(rows) else None

    def measure(self) -> dict[str, float]:
        """Compare with the present weights. Return the metrics, over all processes. All processes must call this."""
        noise = ClipNoise(0, 0, 0, 0, 0.0)
        if self.before is not None:
            old = self.rollout_batch.old_log_probs[self.rows]  # the first update may have written them
            scored = self.before._replace(used=old), self._log_probs()
            mask = self.batch.rollout.answer_mask
            noise = clip_noise(*scored, self.batch.advantages, mask, self.config.objective)
        return ClipNoise(*map(sum, zip(*gather(noise), strict=True))).metrics()

    def _log_probs(self) -> LogProbsByPrecision:
        """Log-probs of the answers [b, T]."""
        rollout = self.batch.rollout
        prompt = rollout.prompt_width
        attended = rollout.attention_mask
        mask = torch.cat([torch.zeros_like(attended[:, :prompt]), rollout.answer_mask.to(attended.dtype)], 1)
        options: dict[str, Any] = {"temperature": self.config.temperature, "position_ids": positions_of(attended)}
        with autocast(self.config, self.policy):
            out = log_probs_by_precision(self.policy.model, rollout.input_ids, attended, mask, **options)
        return LogProbsByPrecision(*(x[:, prompt - 1 :] for x in out))
