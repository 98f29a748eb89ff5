"""Shared by the loss functions for other trainers: check settings, call `policy_loss`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import LossOutput, Objective, policy_loss
from gspo_kernels.validation import Checks

GSPO = Objective()
USE_CORRECTION = "(use Objective(rollout_correction=...) instead)"  # appended to names of settings for sampler weights


def check_settings(place: str, objective: Objective, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that the trainer's settings describe the same loss as `objective`.

    Args:
        place: the name of the loss function, for the message.
        settings: the name of each setting as the user writes it, its value, and the value that `objective` requires.

    Raises:
        ValueError: a setting does not agree. The message names the first such setting.
    """
    aggregation = {"objective.aggregation": (objective.aggregation, "seq-mean-token-mean")}
    for name, (value, expected) in {**settings, **aggregation}.items():
        if value != expected:
            Checks(place).fail(name, f"{expected!r} with this objective", value)


def loss_of_log_probs(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, *, rollout: Tensor | None, objective: Objective, **options: Any
) -> LossOutput:
    """Call `policy_loss`. Pass the engine's log-probs `rollout` only if the objective reads them.

    vLLM reports NaN for a token that it cannot score. As in TRL, such a token gets the weight 1.
    """
    if rollout is None or not objective.rollout_correction:
        rollout = None
    elif options.get("old_log_probs") is not None:
        rollout = torch.where(rollout.isnan(), options["old_log_probs"], rollout)
    return policy_loss(log_probs, advantages, mask=mask, rollout_log_probs=rollout, objective=objective, **options)


def outside_window(ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """Mark the tokens at which the clip window decides the loss. Tokens at `dual_clip` do not count."""
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return bounded != ratio if objective.surrogate == "cispo" else bounded * advantages < ratio * advantages


def offsets(lengths: Sequence[int], like: Tensor) -> Tensor:
    """cu_seqlens [S + 1] of packed sequences with these lengths, on the device of `like`."""
    return torch.tensor([0, *accumulate(lengths)], device=like.device)
