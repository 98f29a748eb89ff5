"""Answers TRL, which asks the model for log-probs: `model(..., fused_lm_head=True)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from trl.trainer import utils

from gspo_kernels import linear_log_probs

from ..backwards import HeadSettings

_PADDED = {"input_ids", "attention_mask", "use_cache"}  # the model's inputs, if they are no more than a padded batch
Layout = Literal["as given", "aligned", "packed"]


@dataclass
class ExtraIds:
    """Ids [B, C, k] of the last C tokens, whose log-probs the next forward computes too. Negative ids are absent."""

    ids: Tensor
    log_probs: Tensor | None = None  # [B, C, k], written by the forward


class ModelLogProbs(NamedTuple):
    """The log-probs of a model with the settings of a trainer, for `FusedHead.fused_lm_head`.

    `layout`: how the model runs a padded batch. "aligned": rows begin at their first token, so that a batch is as wide
    as its longest row, wherever prompts end. "packed": one row without padding, whose sequences attention takes apart.
    """

    temperature: float
    head: HeadSettings
    layout: Layout = "as given"
    extra: ExtraIds | None = None

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
        batch = extra_ids = None
        if self.extra is not None:
            before = targets.shape[1] - self.extra.ids.shape[1]
            extra_ids = nn.functional.pad(self.extra.ids, (0, 0, before, 0), value=-1)  # [B, T - 1, k]
        if self.layout != "as given" and shift_labels is None and not args and kwargs.keys() == _PADDED:
            batch = rearranged(self.layout, kwargs["input_ids"], kwargs["attention_mask"], targets, extra_ids)

        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            options |= {"temperature": self.temperature, **self.head._asdict()}
            if extra_ids is not None:
                options["extra_ids"] = extra_ids if batch is None else batch.extra_ids
            if batch is not None:
                return linear_log_probs(hidden, lm_head, batch.targets, entropy=True, **options)
            states = hidden if shift_labels is not None else hidden[:, :-1]
            return linear_log_probs(states, lm_head, targets, entropy=True, **options)

        scores, output = run(*args, with_head=score, **(kwargs if batch is None else batch.inputs))
        if batch is not None:
            scores = type(scores)(*(x if x is None else batch.as_given(x) for x in scores))
        log_probs, entropy = scores.log_probs, scores.entropy
        if self.extra is not None:
            self.extra.log_probs = scores.extra_log_probs[:, -self.extra.ids.shape[1] :]
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
    extra_ids: Tensor | None  # in the new layout

    def as_given(self, x: Tensor) -> Tensor:
        """Put numbers of the tokens into zeros [B, T - 1] or [B, T - 1, k]."""
        is_token = self.is_token.view(*self.is_token.shape, *[1] * (x.ndim - 2))
        return torch.where(is_token, x.flatten(0, 1)[self.places], 0)[:, :-1]


def rearranged(
    layout: Layout, ids: Tensor, mask: Tensor, targets: Tensor, extra_ids: Tensor | None = None
) -> Rearranged | None:
    """Align or pack a padded batch. None if a row has gaps, or a target but no token before it.

    Reads the host once. Flash attention would do so in every layer of a packed row without `cu_seq_lens_*` and
    `max_length_*`.

    Args:
        ids, mask: [B, T].
        targets: [B, T - 1], the ids after each token, or -100.
        extra_ids: [B, T - 1, k], or negative.
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
        flat = torch.full((end + 1, *x.shape[2:]), empty, dtype=x.dtype, device=x.device)
        flat[torch.where(is_token, places, end)] = x
        return flat[:end].view(*shape, *x.shape[2:])

    inputs: dict[str, Any] = {"input_ids": moved(ids, 0), "use_cache": False}
    if layout == "aligned":
        inputs["attention_mask"] = moved(mask, 0)
    else:
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(ids.device, torch.int32)
        inputs["position_ids"] = moved(positions, 0)
        inputs |= {f"cu_seq_lens_{x}": offsets for x in "qk"} | {f"max_length_{x}": longest for x in "qk"}
    targets = moved(nn.functional.pad(targets, (0, 1), value=-100), -100)
    if extra_ids is not None:
        extra_ids = moved(nn.functional.pad(extra_ids, (0, 0, 0, 1), value=-1), -1)
    return Rearranged(inputs, targets, places, is_token, extra_ids)
