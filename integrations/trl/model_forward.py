"""Answers TRL, which asks the model for log-probs: `model(..., fused_lm_head=True)`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trl.trainer import utils

from gspo_kernels import linear_log_probs

from ..backwards import BackwardSettings

_PADDED = {"input_ids", "attention_mask", "use_cache"}  # the model's inputs, if they are no more than a padded batch


class ModelLogProbs(NamedTuple):
    """The log-probs of a model with the settings of a trainer, for `FusedHead.fused_lm_head`.

    `packs`: the model runs a padded batch as one row without padding, where attention takes sequences apart.
    """

    temperature: float
    backward: BackwardSettings
    packs: bool = False

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
        kwargs["use_cache"] = False
        row = None
        if self.packs and shift_labels is None and not args and kwargs.keys() == _PADDED:
            row = _pack(kwargs["input_ids"], kwargs["attention_mask"], targets)

        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            options |= {"temperature": self.temperature, **self.backward._asdict()}
            if row is not None:
                return linear_log_probs(hidden, lm_head, row.targets, entropy=True, **options)
            states = hidden if shift_labels is not None else hidden[:, :-1]
            return linear_log_probs(states, lm_head, targets, entropy=True, **options)

        scores, output = run(*args, with_head=score, **(kwargs if row is None else row.inputs))
        log_probs, entropy = scores.log_probs, scores.entropy
        if row is not None:
            log_probs, entropy = row.padded(log_probs), row.padded(entropy)
        mask = targets != -100  # [B, T - 1] or [B, T]
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return utils.FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy,
            label_mask=mask,
            aux_loss=getattr(output, "aux_loss", None),
        )


class _PackedRow(NamedTuple):
    """The N tokens of a padded batch [B, T], one sequence after another."""

    inputs: dict[str, Any]  # of the model
    targets: Tensor  # [1, N]
    places: Tensor  # [N], in the flattened batch
    shape: torch.Size  # of the batch

    def padded(self, x: Tensor) -> Tensor:
        """Put numbers of the tokens, [1, N], into zeros [B, T - 1]."""
        flat = x.new_zeros(self.shape.numel()).index_copy(0, self.places, x[0])
        return flat.view(self.shape)[:, :-1]


def _pack(ids: Tensor, mask: Tensor, targets: Tensor) -> _PackedRow | None:
    """Remove the padding of a batch. None if a row has gaps, or a target but no token before it.

    Reads the host twice. Flash attention would do so in every layer without `cu_seq_lens_*` and `max_length_*`.

    Args:
        ids, mask: [B, T].
        targets: [B, T - 1], the ids after each token, or -100.
    """
    is_token = mask != 0
    begins = is_token & ~nn.functional.pad(is_token, (1, 0))[:, :-1]
    cannot = (begins.sum(1) > 1).any() | ((targets != -100) & ~is_token[:, :-1]).any()
    *counts, cannot = torch.cat([is_token.sum(1), cannot[None]]).tolist()
    lengths = [count for count in counts if count]
    if cannot or not lengths:
        return None
    places = is_token.flatten().nonzero()[:, 0]

    def row(x: Tensor) -> Tensor:
        return x.flatten()[places][None]

    offsets = nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(ids.device, torch.int32)
    inputs = {
        "input_ids": row(ids),
        "position_ids": row(is_token.cumsum(1) - 1),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }
    return _PackedRow(inputs, row(nn.functional.pad(targets, (0, 1), value=-100)), places, ids.shape)
