"""Turn rewards into advantages, by functions of `gspo_kernels.advantages`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import advantages as library
from gspo_kernels.advantages import RunningMoments
from gspo_kernels.validation import LARGEST, Checks

from ..tasks import RewardBatch
from .config import TrainConfig
from .update import Batch, take

KL: dict[str, Callable[[Tensor], Tensor]] = {  # estimators, of old minus reference log-prob
    "k1": lambda d: d,
    "abs": torch.abs,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: (-d).exp() + d - 1,
}


FINITE = ("a finite number, within float32", lambda x: abs(x) <= LARGEST)
GROUP_SIZE = ("an integer from 2 to 2**32", lambda n: 2 <= n <= 2**32)


def advantages_of(config: TrainConfig, batch: Batch, rewards: RewardBatch, running: RunningMoments) -> Tensor:
    """Apply the functions that `config.advantages` names, in order.

    Args:
        running: the moments of all rewards so far, for normalize_rewards with by="running".

    Returns:
        [B] or [B, T]. Answers to which no reward applies get 0, and are left out of means and standard deviations.
    """
    device = batch.old_log_probs.device
    total = torch.tensor(rewards.total, device=device)  # [B]
    rows = torch.tensor(rewards.scored, device=device).nonzero()[:, 0]  # of the answers to which a reward applies
    if len(rows) == 0:
        return torch.zeros_like(total)
    scored = batch if len(rows) == len(total) else take(batch, rows)
    advantages = advantages_of_scored(config, scored, total[rows], rows, running)
    return advantages.new_zeros(len(total), *advantages.shape[1:]).index_copy(0, rows, advantages)


def advantages_of_scored(config: TrainConfig, batch: Batch, x: Tensor, rows: Tensor, running: RunningMoments) -> Tensor:
    """Apply the functions that `config.advantages` names to rewards `x` [b] of the answers `rows` [b] of a rollout."""

    def kl(check: Checks, estimator: Any) -> Tensor:  # of each token, [B, T]
        check.choice("the KL's estimator", estimator, tuple(KL))
        assert batch.ref_log_probs is not None, "TrainConfig.needs_reference is true for every kl_coef"
        return KL[estimator](batch.old_log_probs - batch.ref_log_probs)

    mask = batch.rollout.answer_mask
    for name, options in config.advantages:  # x becomes [b] or [b, T]
        check = Checks(name)
        options = dict(options)
        if name in ("group_advantages", "normalize_rewards") and options.get("by", "group") == "group":
            if "group_ids" in options:
                check.fail("group_ids", "absent, because answers to one prompt are a group", options["group_ids"])
            size = check.integer("group_size", options.pop("group_size", config.group_size), *GROUP_SIZE)
            options["group_ids"] = rows // size
        if options.get("by") == "running":
            options["by"] = running
        if name == "token_returns" and "kl_coef" in options:
            estimator = str(options.pop("kl", "k1")).split(",")[0]
            if options["kl_coef"]:
                options["kl"] = kl(check, estimator)
        if name == "clamp":
            if not options or not options.keys() <= {"min", "max"}:
                raise TypeError(f"clamp takes min, max or both, got {names(options)}")
            x = x.clamp(**{key: check.number(key, value, *FINITE) for key, value in options.items()})
        elif name == "subtract_kl":
            if options.keys() != {"kl_coef", "kl_estimator"}:
                raise TypeError(f"subtract_kl takes kl_coef and kl_estimator, got {names(options)}")
            if x.ndim > 1:
                raise ValueError("subtract_kl must come before the calls that make an advantage of each token")
            coef = check.number("kl_coef", options["kl_coef"], *FINITE)
            if coef:
                x = x - coef * (kl(check, options["kl_estimator"]) * mask).sum(1)
        else:
            arguments = (x, mask) if name in ("token_returns", "whiten") else (x,)
            x = getattr(library, name)(*arguments, **options)
    return x


def names(options: dict[str, Any]) -> str:
    return ", ".join(map(str, options)) or "neither"


def check_steps(config: TrainConfig) -> None:
    """Apply the functions that `config.advantages` names to rewards of one group.

    Raises:
        TypeError, ValueError, OverflowError, RuntimeError: a function refuses its options.
    """
    zeros = torch.zeros(config.group_size, config.group_size + 1)  # [b, T]
    rollout = SimpleNamespace(answer_mask=zeros == 0)
    batch: Any = SimpleNamespace(rollout=rollout, old_log_probs=zeros, ref_log_probs=zeros)
    rewards = torch.arange(float(config.group_size))
    advantages_of_scored(config, batch, rewards, torch.arange(config.group_size), RunningMoments())
