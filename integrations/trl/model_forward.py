"""Answers TRL, which asks the model for log-probs: `model(..., fused_lm_head=True)`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from trl.trainer import utils

from gspo_kernels import linear_log_probs

from ..backwards import BackwardSettings


class ModelLogProbs(NamedTuple):
    """The log-probs of a model with the settings of a trainer, for `FusedHead.fused_lm_head`."""

    temperature: float
    backward: BackwardSettings

    def __call__(
        self,
        run: Any,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute TRL's FusedCausalLMOutput. Log-probs are [B, T - 1] with `labels` and [B, T] with `shift_labels`.

        Raises:
            ValueError: neither `labels` nor `shift_labels` is given.
        """
        if shift_labels is not None:
            targets = shift_labels
        elif labels is not None:
            targets = labels[:, 1:]
        else:
            raise ValueError("fused_lm_head: labels or shift_labels must be given, got neither")

        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            states = hidden if shift_labels is not None else hidden[:, :-1]
            options |= {"temperature": self.temperature, **self.backward._asdict()}
            return linear_log_probs(states, lm_head, targets, entropy=True, **options)

        kwargs["use_cache"] = False
        scores, output = run(*args, with_head=score, **kwargs)
        mask = targets != -100  # [B, T - 1] or [B, T]
        loss = -scores.log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return utils.FusedCausalLMOutput(
            loss=loss,
            log_probs=scores.log_probs,
            entropy=scores.entropy,
            label_mask=mask,
            aux_loss=getattr(output, "aux_loss", None),
        )
