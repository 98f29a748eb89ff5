"""The forward of a model in TRL 1.15 and later, which asks it for log-probs: `model(..., fused_lm_head=True)`."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

from torch import Tensor
from trl.trainer import utils

from gspo_kernels import linear_log_probs

from ..backwards import BackwardSettings
from ..huggingface.fused_head import lost_to_pickle

SETTINGS = "_gspo_settings"  # the attribute of a model that holds its ModelSettings
_ATTRIBUTE = "_gspo_log_probs"


class ModelSettings(NamedTuple):
    """Settings of the trainer that uses the model."""

    temperature: float
    backward: BackwardSettings


def is_wrapped(model: Any) -> bool:
    """True if `wrap_forward` installed the model's forward, also if accelerate's wrapper encloses it."""
    wrapper = vars(model).get(_ATTRIBUTE)
    if wrapper is None or lost_to_pickle(wrapper):
        return False
    # accelerate stores the forward inside its wrapper as `_original_forward`.
    return wrapper in (model.forward, vars(model).get("_original_forward"))


def wrap_forward(model: Any) -> None:
    """Make the model's forward handle TRL's `fused_lm_head=True`. Other calls do not change."""
    wrapped = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        call = _method_of(self, wrapped)
        if not fused_lm_head:
            return call(*args, **kwargs)
        settings = vars(self).get(SETTINGS)
        if settings is None:  # after `unwrap_forward`
            return call(*args, fused_lm_head=True, **kwargs)
        return _log_probs(call, settings, *args, **kwargs)

    forward.wrapped = wrapped  # pyright: ignore[reportAttributeAccessIssue] - a function
    model.forward = types.MethodType(forward, model)
    setattr(model, _ATTRIBUTE, model.forward)


def unwrap_forward(model: Any) -> None:
    """Undo `wrap_forward`. A forward inside another wrapper stays, but without settings it passes all calls on."""
    vars(model).pop(SETTINGS, None)
    wrapper = vars(model).get(_ATTRIBUTE)
    if wrapper is not None and vars(model).get("forward") == wrapper:
        model.forward = _method_of(model, wrapper.wrapped)
        delattr(model, _ATTRIBUTE)


def _method_of(model: Any, forward: Any) -> Any:
    """Return the forward as a method of `model`, which may be a deep copy of the model that it belongs to."""
    function = getattr(forward, "__func__", None)
    return forward if function is None else types.MethodType(function, model)


def _log_probs(
    forward: Any,
    settings: ModelSettings,
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
        options |= {"temperature": settings.temperature, **settings.backward._asdict()}
        return linear_log_probs(states, lm_head, targets, entropy=True, **options)

    kwargs["use_cache"] = False
    scores, output = forward(*args, with_head=score, **kwargs)
    mask = targets != -100  # [B, T - 1] or [B, T]
    loss = -scores.log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return utils.FusedCausalLMOutput(
        loss=loss,
        log_probs=scores.log_probs,
        entropy=scores.entropy,
        label_mask=mask,
        aux_loss=getattr(output, "aux_loss", None),
    )
