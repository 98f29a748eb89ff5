"""Read verl's settings for the head, and warn of settings with which nothing is ever clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gspo_kernels.objective import TOKEN_WINDOW
from gspo_kernels.validation import Checks, Unquoted, warn_once

from ..backwards import SKIP_ROWS, HeadSettings

OPTIONS = "actor_rollout_ref.model.fused_kernel_options"
SKIP = "skip_zero_advantage"
KEYS = (*HeadSettings._fields, SKIP, SKIP_ROWS, "impl_backend")  # impl_backend: of verl's own fused kernels
LOSS_MODE = "gspo_kernels"
SEQUENCE_MODES = ("gspo", LOSS_MODE)  # losses that clip a sequence ratio by clip_ratio_low and _high
NO_RATIO_MODES = ("gpg",)  # losses without an importance ratio


def _options(model_config: Any) -> Mapping[str, Any]:
    """Read model.fused_kernel_options, a dict that verl passes on and reads only with its own fused kernels."""
    options = model_config.fused_kernel_options or {}
    if unknown := [name for name in options if name not in KEYS]:
        Checks("GSPOEngine").fail(OPTIONS, f"a dict with no keys but {', '.join(KEYS)}", unknown)
    return options


def head_settings(model_config: Any) -> HeadSettings:
    """Read `gradient_budget`, `cache_mib` and `head_precision` from model.fused_kernel_options.

    Raises:
        ValueError, TypeError: one of them is invalid, or the options have an unknown key.
    """
    options = _options(model_config)
    settings = HeadSettings(**{name: options[name] for name in HeadSettings._fields if name in options})
    settings.check(OPTIONS)
    return settings


def requested_skip(model_config: Any, name: str) -> bool | None:
    """Read the option `name`, SKIP or SKIP_ROWS, from model.fused_kernel_options. None means: wherever it is exact.

    Raises:
        TypeError: it is not a bool or None.
    """
    skip = _options(model_config).get(name)
    if skip is not None:
        Checks(OPTIONS).boolean(name, skip)
    return skip


def actor_config(loss_function: Any) -> Any:
    """The ActorConfig of a worker's loss, functools.partial(ppo_loss, config=...); None for other losses."""
    return getattr(loss_function, "keywords", {}).get("config")


def entropy_is_only_logged(loss_function: Any, settings: HeadSettings) -> bool:
    """True if verl's loss multiplies the entropies by a coefficient of 0.

    Raises:
        ValueError: both the coefficient and the gradient budget are nonzero.
    """
    coefficient = getattr(actor_config(loss_function), "entropy_coeff", None)
    if coefficient and settings.gradient_budget > 0:
        expected = f"0 with actor.entropy_coeff={coefficient:g}, because the budget does not bound the bonus's error"
        Checks("GSPOEngine").fail("gradient_budget", expected, Unquoted(f"{settings.gradient_budget:g}"))
    return coefficient == 0


def warn_of_settings_that_never_clip(data: Any, loss_function: Any, only_update: bool) -> None:
    """Warn once if the importance ratio is always 1, and once if the clip window is too wide for a sequence ratio.

    Args:
        only_update: the batch is the only update of its rollout.
    """
    config = actor_config(loss_function)
    loss_mode = config.policy_loss.get("loss_mode") if hasattr(config, "policy_loss") else None
    if only_update and loss_mode not in NO_RATIO_MODES and not _old_log_probs_are_the_samplers(data):
        warn_once(
            "gspo_kernels: ppo_epochs=1 with data.train_batch_size equal to actor.ppo_mini_batch_size gives each "
            "rollout one update, so the importance ratio is always 1 and nothing is clipped. GSPO's paper makes four "
            "updates per rollout: set data.train_batch_size to 4 * actor.ppo_mini_batch_size, or raise "
            "actor.ppo_epochs. (Ignore this warning if your trainer computes old log-probs with earlier weights, as "
            "verl's asynchronous trainers do.)",
            stacklevel=4,
        )
    if loss_mode in SEQUENCE_MODES:
        warn_of_wide_window(*clip_window(config), stacklevel=5)


def _old_log_probs_are_the_samplers(data: Any) -> bool:
    """True if old_log_probs equal rollout_log_probs (verl's `bypass_mode`), in which case ratios can differ from 1."""
    if "rollout_log_probs" not in data:
        return False
    old, sampled = (x.values() if x.is_nested else x for x in (data["old_log_probs"], data["rollout_log_probs"]))
    return torch.equal(old, sampled)


def clip_window(config: Any) -> tuple[float, float]:
    """(clip_low, clip_high) of an ActorConfig."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def warn_of_wide_window(low: float, high: float, stacklevel: int) -> None:
    """Warn once if a clip bound is wide enough for token ratios."""
    if max(low, high) >= TOKEN_WINDOW:
        warn_once(
            f"gspo_kernels: actor.clip_ratio_low={low:g}, actor.clip_ratio_high={high:g} is a clip window for token "
            "ratios (verl's default is 0.2). A sequence ratio hardly ever leaves it. GSPO's paper uses 3e-4 and 4e-4",
            stacklevel,
            kind="clip_low",  # the same kind as Objective's warning, so that only one of the two is shown
        )
