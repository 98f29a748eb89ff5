"""Answers with advantage 0 do not run through the model, because their gradient is exactly 0."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..huggingface.rows import live_tokens, rope_of_longest_row, separate_experts
from .config import InputError, TrainConfig
from .distributed import world
from .policy import Policy


class Skipping(NamedTuple):
    """Whether answers with advantage 0 skip the model."""

    is_on: bool
    reuses_first: bool  # the first update computes the old log-probs of its own mini-batch
    description: str  # for the line that a run prints


def skipping(config: TrainConfig, policy: Policy) -> Skipping:
    """Decide whether answers with advantage 0 skip the model. By default, they do if all other gradients stay the same.

    Raises:
        InputError: skip_zero_advantage is true, and skipping would change gradients. The message names the reason.
    """
    wanted = config.skip_zero_advantage
    reason = inexact_setting(config, policy)
    if wanted and reason:
        raise InputError(f"skip_zero_advantage: expected false or none with {reason}, got true")
    if reason or wanted is False:
        return Skipping(False, False, f"skip_zero_advantage=false{f' ({reason})' if wanted is None else ''}")
    # The sampler correction needs old log-probs before the first update.
    reuses_first = config.old_log_probs == "trainer" and config.objective.rollout_correction is None
    description = "skip_zero_advantage=true: answers with advantage 0 do not run through the model"
    return Skipping(True, reuses_first, description)


def inexact_setting(config: TrainConfig, policy: Policy) -> str | None:
    """Name a setting that gives answers with advantage 0 a gradient, or changes other gradients if they do not run.

    Dropout is not among them, because policies train in evaluation mode.
    """
    of = config.objective
    reasons = {
        f"kl_coef={of.kl_coef:g}": of.kl_coef > 0,
        f"entropy_coef={of.entropy_coef:g}": of.entropy_coef != 0,
        "a teacher": policy.teacher is not None,
        "advantages that contain a KL": config.needs_reference,  # and so depend on the log-probs of all answers
        f"router_aux_loss_coef={policy.router_loss_weight:g}": policy.router_loss_weight != 0,
    }
    named = next((reason for reason, applies in reasons.items() if applies), None)
    return named or separate_experts(policy.model) or rope_of_longest_row(policy.model)


def live_rows(advantages: Tensor, mask: Tensor) -> Tensor:
    """Find the answers with an unmasked token whose advantage is not 0. Returns bool [B], in CPU memory.

    Args:
        advantages: [B] or [B, T].
        mask: bool [B, T], True at tokens that the policy sampled.
    """
    return live_tokens(advantages, mask).any(1).cpu()


def rows_to_run(live: Tensor | None, rows: Tensor) -> Tensor:
    """Select the rows of a mini-batch that run through the model.

    These are the live rows, filled up with other rows until every process has the same number of rows, at least one.
    So all processes call the model equally often, and no gradient is None.

    Args:
        live: bool [B], for all rows of the rollout; None means that all rows run.
    """
    if live is None:
        return rows
    is_live = live[rows]
    count = max(1, -(-int(is_live.sum()) // world())) * world()
    live_first = is_live.int().argsort(descending=True, stable=True)
    return rows[live_first[:count].sort().values]
