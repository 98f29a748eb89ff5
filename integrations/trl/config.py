"""`GSPOConfig`, TRL's GRPOConfig with the settings of GSPO's paper; and checks of a trainer's settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels import distillation
from gspo_kernels.backends.dispatch import backend_variable
from gspo_kernels.backends.workspace import cache_variable
from gspo_kernels.objective import TOKEN_WINDOW
from gspo_kernels.validation import Checks, Unquoted, warn_once

from ..backwards import HeadSettings

UPDATES_PER_ROLLOUT = 4  # GSPO's paper splits every batch of rollouts into four mini-batches
# These loss types clip the ratio to [1 - epsilon, 1 + epsilon_high]. cispo is missing: its upper bound is epsilon_high.
CLIPPING_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPING_LOSS_TYPES, "cispo", "sapo", "vespo")  # of TRL 1.15 and 1.16
LEVELS = ("token", "sequence")
METHOD = "_get_per_token_logps_and_entropies"


@dataclass
class GSPOConfig(GRPOConfig):
    """GRPOConfig with the settings of GSPO's paper (arXiv 2507.18071, section 5.1).

    The settings are one ratio per sequence, equal weight for every sequence, a clip window of 3e-4 and 4e-4, and four
    updates per rollout. In contrast, GRPOConfig(importance_sampling_level="sequence") means LUSPO (loss_type="dapo"), a
    clip window of 0.2, and one update per rollout. With one update the ratio is always 1 and nothing is clipped.

    The four updates come from `steps_per_generation`, which defaults to 4 * gradient_accumulation_steps. A rollout is
    therefore four times as large as GRPOConfig's, and each update trains on a quarter of it. A rollout is generated at
    once, from generation_batch_size / num_generations prompts. At the end of an epoch, TRL drops prompts that do not
    fill a rollout. If you set `steps_per_generation` or `generation_batch_size`, your value is used, as in GRPOConfig.

    `num_iterations` repeats the updates: with 2, a rollout gets eight updates, and each completion is trained on twice.
    For one update per rollout, set steps_per_generation=gradient_accumulation_steps. The trainer then warns once that
    nothing is clipped.

    GRPOConfig refuses `generation_batch_size` together with `steps_per_generation`. GSPOConfig accepts both if they
    agree, so `GSPOConfig(**config.to_dict())` and `dataclasses.replace(config, ...)` work.

    `gradient_budget`, `cache_mib` and `head_precision` are arguments of `linear_log_probs`. The first two apply to the
    training steps of the policy only.
    `skip_zero_advantage` and `skip_rows_without_gradient` are arguments of `accelerate_trainer`. `zero_equal_rewards`
    gives groups with bitwise equal rewards an advantage of exactly 0.

    `distillation_coef` times the mean divergence from a teacher, in nats per token, joins the loss of GSPOTrainer. For
    every `loss_type`, the mean divides by the tokens of the rollout per optimizer step. `distillation_kind` and
    `distillation_tail` are arguments of `topk_divergence`.

    Raises:
        ValueError, TypeError: GRPOConfig refuses a setting; `generation_batch_size` and `steps_per_generation`
            disagree; `gradient_budget`, `cache_mib` or `head_precision` is invalid; or a setting of the loss is:
            `loss_type`, `importance_sampling_level`, `epsilon`, `epsilon_high`, `delta`, `beta`, `temperature`,
            `sapo_temperature_pos`, `sapo_temperature_neg`, `vespo_k_pos`, `vespo_lambda_pos`, `vespo_k_neg`,
            `vespo_lambda_neg`, or one that begins with `distillation_`.
    """

    importance_sampling_level: str = field(default="sequence", metadata={"help": "One ratio per sequence."})
    loss_type: str = field(default="grpo", metadata={"help": "A mean over tokens, then over sequences."})
    epsilon: float = field(default=3e-4, metadata={"help": "1 minus the lower clip bound (GSPO paper, section 5.1)."})
    epsilon_high: float | None = field(
        default=4e-4, metadata={"help": "Upper clip bound minus 1 (GSPO paper, section 5.1)."}
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Number of steps per generation. If `None`, it defaults to 4 * `gradient_accumulation_steps`."
        },
    )
    gradient_budget: float = field(
        default=0.0,
        metadata={"help": "Share of the L1 mass of the logits' gradient that the backward may leave out. 0 is exact."},
    )
    cache_mib: float | None = field(
        default=None,
        metadata={
            "help": "Memory in MiB for exponentials of logits that the backward then does not recompute. If `None`, "
            "it is the environment variable GSPO_CACHE_MIB or, if that is not set, the device's default."
        },
    )
    head_precision: str | None = field(
        default=None,
        metadata={
            "help": "`'fp32'` or `'bf16x3'`: autocast does not round the head's operands, see `linear_log_probs`. If "
            "`None`, it is `'fp32'` with `cast_lm_head_to_fp32`; otherwise autocast casts them."
        },
    )
    skip_zero_advantage: bool | None = field(
        default=None,
        metadata={
            "help": "Whether answers with advantage 0 do not run through the model. If `None`, wherever this does not "
            "change the gradients."
        },
    )
    skip_rows_without_gradient: bool | None = field(
        default=None,
        metadata={
            "help": "Whether checkpointed layers are not differentiated for answers without a gradient, such as "
            "clipped ones. If `None`, wherever this does not change the other gradients."
        },
    )
    zero_equal_rewards: bool = field(
        default=True,
        metadata={
            "help": "Whether groups with equal rewards get an advantage of exactly 0. `False` keeps TRL's advantages, "
            "which contain rounding errors. Only GSPOTrainer changes them; `accelerate_trainer` only reports them."
        },
    )

    distillation_coef: float = field(
        default=0.0, metadata={"help": "Weight of the divergence from a teacher, a mean over tokens. 0: no teacher."}
    )
    distillation_schedule: str = field(
        default="constant", metadata={"help": "'linear' decreases `distillation_coef` to 0 over the training."}
    )
    distillation_k: int = field(
        default=16, metadata={"help": "Number of the likeliest ids of each token that a local teacher returns."}
    )
    distillation_kind: str = field(default="forward", metadata={"help": "Divergence, see `topk_divergence`."})
    distillation_tail: str = field(
        default="bucket", metadata={"help": "Treatment of the other ids, see `topk_divergence`."}
    )

    def __post_init__(self) -> None:
        HeadSettings(self.gradient_budget, self.cache_mib, self.head_precision).check("GSPOConfig")
        for name in ("skip_zero_advantage", "skip_rows_without_gradient"):
            if getattr(self, name) is not None:
                Checks("GSPOConfig").boolean(name, getattr(self, name))
        Checks("GSPOConfig").boolean("zero_equal_rewards", self.zero_equal_rewards)
        for name in ("steps_per_generation", "generation_batch_size"):
            if getattr(self, name) is not None:
                expected = "an int from 1 to below 2**31, or None"
                Checks("GSPOConfig").integer(name, getattr(self, name), expected, lambda x: 1 <= x < 2**31)
        _check_loss(self)
        _check_distillation(self)
        batch_size = self.generation_batch_size
        if self.steps_per_generation is not None:
            self.generation_batch_size = None  # TRL computes a value, which is compared with batch_size below
        elif batch_size is None:
            self.steps_per_generation = UPDATES_PER_ROLLOUT * self.gradient_accumulation_steps
        super().__post_init__()
        if batch_size is not None and batch_size != self.generation_batch_size:
            factors = (self.per_device_train_batch_size, self.world_size, self.steps_per_generation)
            Checks("GSPOConfig").fail(
                "generation_batch_size",
                f"None or {self.generation_batch_size} (per_device_train_batch_size * processes * steps_per_generation "
                f"= {' * '.join(map(str, factors))})",
                batch_size,
            )


def _check_loss(config: GSPOConfig) -> None:
    """Check the settings of the loss, which TRL checks in the first training step, if at all.

    Raises:
        ValueError, TypeError: the message names the setting.
    """
    check = Checks("GSPOConfig")
    loss_type = config.loss_type
    check.choice("importance_sampling_level", config.importance_sampling_level, LEVELS)
    check.choice("loss_type", loss_type, LOSS_TYPES)
    if loss_type in CLIPPING_LOSS_TYPES:
        expected = f"a number from 0 to 1 with loss_type={loss_type!r}, whose lower clip bound is 1 - epsilon"
        check.number("epsilon", config.epsilon, expected, lambda x: 0 <= x <= 1)
    else:
        check.number("epsilon", config.epsilon, "a number >= 0", lambda x: x >= 0)
    if config.epsilon_high is not None:
        expected = "a number >= 0, or None for epsilon"
        check.number("epsilon_high", config.epsilon_high, expected, lambda x: x >= 0)
    bound = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if loss_type == "cispo" and bound < 1:
        expected = "at least 1 with loss_type='cispo', where it bounds the ratio itself (MiniMax-M1: 5.0)"
        check.fail("epsilon_high", expected, config.epsilon_high)
    if config.delta is not None:
        expected = "a number > 1, or None (it bounds the ratio where the advantage is negative)"
        check.number("delta", config.delta, expected, lambda x: x > 1)
    check.number("beta", config.beta, "a finite number >= 0", lambda x: 0 <= x < math.inf)
    for name in ("temperature", "sapo_temperature_pos", "sapo_temperature_neg"):
        check.number(name, getattr(config, name), "a finite number > 0", lambda x: 0 < x < math.inf)
    if loss_type == "vespo":
        for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            check.number(name, getattr(config, name), "a finite number >= 0", lambda x: 0 <= x < math.inf)


def _check_distillation(config: GSPOConfig) -> None:
    check = Checks("GSPOConfig")
    check.number("distillation_coef", config.distillation_coef, "a finite number >= 0", lambda x: 0 <= x < math.inf)
    check.choice("distillation_schedule", config.distillation_schedule, ("constant", "linear"))
    check.integer("distillation_k", config.distillation_k, "an int from 1 to below 2**31", lambda x: 1 <= x < 2**31)
    check.choice("distillation_kind", config.distillation_kind, distillation.KINDS)
    tails = distillation.TAILS if config.distillation_kind != "generalized" else ("drop",)
    check.choice("distillation_tail", config.distillation_tail, tails)


def wanted(trainer: Any, name: str, argument: bool | None) -> bool | None:
    """The argument `name` of `accelerate_trainer` or, if that is None, the setting of the trainer's GSPOConfig."""
    return getattr(trainer.args, name, None) if argument is None else argument


def check_wanted(
    place: str, name: str, value: bool | None, find_reason: Callable[[], str | None], consequence: str = ""
) -> None:
    """Check an option that is on by default wherever nothing speaks against it.

    Args:
        place: the function or class that the user called, for messages.
        value: `wanted(trainer, name, ...)`.
        find_reason: names what speaks against the option; None if nothing does.
        consequence: follows the reason in the message.

    Raises:
        TypeError: the value is not a bool or None.
        ValueError: it is True, and there is a reason against it. The message names the reason.
    """
    check = Checks(place)
    if value is not None:
        check.boolean(name, value)
    if value and (reason := find_reason()):
        check.fail(name, f"None or False with {reason}{consequence}", True)


def check_trainer(place: str, args: Any) -> None:
    """Check that a trainer with the settings `args` can be accelerated.

    Args:
        place: the function or class that the user called, for messages.

    Raises:
        ValueError: a setting is not supported.
    """
    check = Checks(place)
    if args.use_liger_kernel and args.device.type == "cpu":  # otherwise Triton fails in the first step
        check.fail("use_liger_kernel", "False on a CPU (Liger's layers are Triton kernels, which need a GPU)", True)


def head_settings(
    place: str,
    args: Any,
    has_bonus: bool,
    gradient_budget: float | None = None,
    cache_mib: float | None = None,
    head_precision: str | None = None,
) -> HeadSettings:
    """Check the arguments of `accelerate_trainer`. None means the setting of `args`, a GSPOConfig, or its default.

    Args:
        place: the function or class that the user called, for messages.
        has_bonus: the trainer adds an entropy bonus to its loss.

    Raises:
        ValueError, TypeError: a value is invalid, or the trainer has an entropy bonus and the budget is not 0.
    """
    config: Any = args if isinstance(args, GSPOConfig) else HeadSettings()
    precision = config.head_precision if head_precision is None else head_precision
    settings = HeadSettings(
        config.gradient_budget if gradient_budget is None else gradient_budget,
        config.cache_mib if cache_mib is None else cache_mib,
        "fp32" if precision is None and args.cast_lm_head_to_fp32 else precision,
    )
    settings.check(place)
    for check_variable in (backend_variable, cache_variable):  # before a model is loaded
        check_variable()
    if settings.gradient_budget > 0 and has_bonus:
        expected = "0 with an entropy bonus (entropy_coef, use_adaptive_entropy), whose error it would not bound"
        Checks(place).fail("gradient_budget", expected, Unquoted(f"{settings.gradient_budget:g}"))
    return settings


def warn_of_settings_that_never_clip(trainer: GRPOTrainer, stacklevel: int) -> None:
    """Warn, once each, if the dataset fills no rollout, the importance ratio is always 1, or a clip bound is too wide.

    Args:
        stacklevel: as in warnings.warn, counted from `warn_once`: 3 is the caller of this function.
    """
    args: Any = trainer.args
    steps = args.steps_per_generation
    iterations = args.num_iterations
    accumulation = args.gradient_accumulation_steps
    _warn_of_few_prompts(trainer, stacklevel + 1)
    # Under this condition TRL uses the current log-probs as the old log-probs. With vLLM, TRL may compute the old
    # log-probs separately, but with the same weights. In both cases every ratio is 1.
    if accumulation % (steps * iterations) == 0:
        warn_once(
            f"gspo_kernels: with steps_per_generation={steps}, num_iterations={iterations} and "
            f"gradient_accumulation_steps={accumulation}, each rollout gets one update, so the importance ratio is "
            f"always 1 and nothing is clipped (on-policy training). GSPO's paper makes four updates per rollout: "
            f"steps_per_generation={UPDATES_PER_ROLLOUT * accumulation}",
            stacklevel,
        )
    bounds = {"epsilon": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high}
    level = trainer.importance_sampling_level
    wide = [f"{name}={bound:g}" for name, bound in bounds.items() if bound >= TOKEN_WINDOW]
    if level == "sequence" and trainer.loss_type in CLIPPING_LOSS_TYPES and wide:
        warn_once(
            f"gspo_kernels: {', '.join(wide)} is a clip window for token ratios. The sequence ratio of "
            f"importance_sampling_level={level!r} hardly ever gets that far from 1. GSPO's paper uses epsilon=3e-4 and "
            "epsilon_high=4e-4",
            stacklevel,
            kind="epsilon",
        )


def _warn_of_few_prompts(trainer: GRPOTrainer, stacklevel: int) -> None:
    """Warn once if the dataset is smaller than a rollout: TRL drops incomplete rollouts, so nothing is trained."""
    args: Any = trainer.args
    dataset: Any = trainer.train_dataset
    needed = args.generation_batch_size // args.num_generations
    if hasattr(dataset, "__len__") and len(dataset) < needed:
        warn_once(
            f"gspo_kernels: train_dataset has {len(dataset)} prompts and a rollout needs {needed} "
            f"(generation_batch_size={args.generation_batch_size} / num_generations={args.num_generations}), so "
            "TRL makes no step. Use more prompts, or a smaller steps_per_generation",
            stacklevel,
            kind="train_dataset",
        )
