"""Answers TRL, which asks the model for log-probs: `model(..., fused_lm_head=True)`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from trl.trainer import utils

from gspo_kernels import linear_log_probs

from ..backwards import BackwardSettings

_PADDED = {"input_ids", "attention_mask", "use_cache"}  # the model's inputs, if they are no more than a padded batch
Layout = Literal["as given", "aligned", "packed"]


class ModelLogProbs(NamedTuple):
    """The log-probs of a model with the settings of a trainer, for `FusedHead.fused_lm_head`.

    `layout`: how the model runs a padded batch. "aligned": rows begin at their first token, so that a batch is as wide
    as its longest row, wherever prompts end. "packed": one row without padding, whose sequences attention takes apart.
    """

    temperature: float
    backward: BackwardSettings
    layout: Layout = "as given"

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
        batch = None
        if self.layout != "as given" and shift_labels is None and not args and kwargs.keys() == _PADDED:
            batch = rearranged(self.layout, kwargs["input_ids"], kwargs["attention_mask"], targets)

        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            options |= {"temperature": self.temperature, **self.backward._asdict()}
            if batch is not None:
                return linear_log_probs(hidden, lm_head, batch.targets, entropy=True, **options)
            states = hidden if shift_labels is not None else hidden[:, :-1]
            return linear_log_probs(states, lm_head, targets, entropy=True, **options)

        scores, output = run(*args, with_head=score, **(kwargs if batch is None else batch.inputs))
        log_probs, entropy = scores.log_probs, scores.entropy
        if batch is not None:
            log_probs, entropy = batch.as_given(log_probs), batch.as_given(entropy)
        mask = targets != -100  # [B, T - 1] or [B, T]
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return utils.FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy,
            label_mask=mask,
            aux_loss=getattr(output, "aux_loss", None),
        )


class Rearranged(NamedTuple):
    """The tokens of a padded batch [B, T] in another layout, [B, longest row] or [1, N]."""

    inputs: dict[str, Any]  # of the model
    targets: Tensor  # in the new layout
    places: Tensor  # [B, T], in the flattened new layout. Those of padding are arbitrary
    is_token: Tensor  # bool [B, T]

    def as_given(self, x: Tensor) -> Tensor:
        """Put numbers of the tokens into zeros [B, T - 1]."""
        return torch.where(self.is_token, x.flatten()[self.places], 0)[:, :-1]


def rearranged(layout: Layout, ids: Tensor, mask: Tensor, targets: Tensor) -> Rearranged | None:
    """Align or pack a padded batch. None if a row has gaps, or a target but no token before it.

    Reads the host once. Flash attention would do so in every layer of a packed row without `cu_seq_lens_*` and
    `max_length_*`.

    Args:
        ids, mask: [B, T].
        targets: [B, T - 1], the ids after each token, or -100.
    """
    is_token = mask != 0
    rows, width = is_token.shape
    starts_again = (is_token[:, 1:] & ~is_token[:, :-1]).sum(1) + is_token[:, 0] > 1
    cannot = (starts_again.any() | ((targets != -100) & ~is_token[:, :-1]).any())[None]
    *counts, cannot = torch.cat([is_token.sum(1), cannot]).tolist()
    lengths = torch.tensor([count for count in counts if count])
    if cannot or not len(lengths):
        return None
    longest, number = int(lengths.max()), int(lengths.sum())
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    if layout == "aligned":
        shape = rows, longest
        places = positions + torch.arange(rows, device=ids.device)[:, None] * longest
    else:
        shape = 1, number
        places = (is_token.flatten().cumsum(0) - 1).clamp(min=0).view(rows, width)

    def moved(x: Tensor, empty: int) -> Tensor:
        # Padding is written to a place behind the last, which is dropped.
        end = shape[0] * shape[1]
        flat = torch.full((end + 1,), empty, dtype=x.dtype, device=x.device)
        return flat.scatter(0, torch.where(is_token, places, end).flatten(), x.flatten())[:end].view(shape)

    inputs: dict[str, Any] = {"input_ids": moved(ids, 0), "use_cache": False}
    if layout == "aligned":
        inputs["attention_mask"] = moved(mask, 0)
    else:
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(ids.device, torch.int32)
        inputs["position_ids"] = moved(positions, 0)
        inputs |= {f"cu_seq_lens_{x}": offsets for x in "qk"} | {f"max_length_{x}": longest for x in "qk"}
    return Rearranged(inputs, moved(nn.functional.pad(targets, (0, 1), value=-100), -100), places, is_token)
