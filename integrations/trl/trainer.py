"""`GSPOTrainer`, and `accelerate_trainer`, which replaces the log-probs of an existing GRPOTrainer."""

from __future__ import annotations

import contextlib
import functools
import os
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

from trl.trainer import grpo_trainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels.validation import Checks, Unquoted, warn_once

from ..backwards import HeadSettings
from ..huggingface import base_model, fuse_head
from ..huggingface.fused_head import fused_head_of
from .config import LEVELS, METHOD, GSPOConfig, check_trainer, head_settings, warn_of_settings_that_never_clip
from .logs import log_backwards, print_settings, replace_method
from .model_forward import ModelLogProbs
from .row_checkpoint import LiveRows, check_rows
from .teacher import Distillation, LocalTeacher
from .zero_advantage import TEACHER, EqualRewards, LiveAnswers, check_skipping, models_of

# Attributes of a trainer.
_LOG_PROBS = "_gspo_log_probs"  # its ModelLogProbs
_MODELS = "_gspo_models"  # its transformers models
_LIVE = "_gspo_live"  # its LiveAnswers
Trainer = TypeVar("Trainer", bound=GRPOTrainer)


class GSPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose log-probs come from `linear_log_probs`.

    Takes the same arguments as GRPOTrainer, but `args` defaults to a GSPOConfig. The head may have a LoRA adapter.
    GRPOTrainer refuses such a head, because TRL's own log-probs would ignore the adapter.

    Groups with bitwise equal rewards get an advantage of exactly 0, unless `zero_equal_rewards` of its GSPOConfig is
    False. TRL's rounding gives twelve rewards of 0.7 an advantage of 1.2e-3.

    `teacher` is a transformers model, which is frozen, or the folder or hub id of one. While answers are trained on, it
    scores them with `linear_top_k`, and `distillation_coef` times the divergence from it joins the loss. With a
    `distillation_coef` and no `teacher`, the `rollout_func` returns `teacher_ids` and `teacher_log_probs`, [T, k] for
    each answer, at the trainer's temperature.

    The model card names GSPO and its paper, or GRPO if `args` does not select a sequence-level ratio.

    Raises:
        ValueError, TypeError: `accelerate_trainer` would refuse the settings or the class, `args` is not a GRPOConfig,
            GRPOTrainer's loss does not know its `importance_sampling_level`, `model` is a path to a missing folder, or
            `teacher` is given without a `distillation_coef`. These errors come before the model is loaded.
        HeadError, TypeError, ValueError: `fuse_head` does not support the model, the teacher or a head.
        ValueError: the teacher has another vocabulary.

    Warns:
        UserWarning: `args` does not select a sequence-level ratio. The warnings of `accelerate_trainer` also apply.
    """

    _tag_names = ["trl", "gspo"]  # noqa: RUF012 - TRL's attributes are lists and dicts, too
    _name = "GSPO"
    _paper = {  # noqa: RUF012
        "title": "Group Sequence Policy Optimization",
        "id": "2507.18071",
        "citation": textwrap.dedent("""\
            @article{zheng2025gspo,
                title  = {{Group Sequence Policy Optimization}},
                author = {Chujie Zheng and Shixuan Liu and Mingze Li and Xiong-Hui Chen and Bowen Yu and Chang Gao and Kai Dang and Yuqiong Liu and Rui Men and An Yang and Jingren Zhou and Junyang Lin},
                year   = 2025,
                eprint = {arXiv:2507.18071},
            }"""),  # noqa: E501
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        teacher: Any = None,
        **kwargs: Any,
    ) -> None:
        args = GSPOConfig(output_dir="gspo") if args is None else args
        settings = _settings_of_gspo_trainer(type(self), args)
        if isinstance(model, str) and model.startswith(("/", ".")) and not os.path.isdir(model):  # no hub id
            Checks("GSPOTrainer").fail("model", "a folder that exists, a hub id or a model", model)
        coef = getattr(args, "distillation_coef", 0)
        if teacher is not None and not coef:
            Checks("GSPOTrainer").fail("distillation_coef", "a number > 0 with teacher", coef)
        if args.importance_sampling_level == "token":
            for name in ("_tag_names", "_name", "_paper"):  # of the model card
                setattr(self, name, getattr(GRPOTrainer, name))
        # With cast_lm_head_to_fp32, TRL would replace the forward of a head by one without its adapter.
        with contextlib.nullcontext() if args.cast_lm_head_to_fp32 else _head_adapters_allowed():
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.importance_sampling_level != "sequence":
            level = self.importance_sampling_level
            warnings.warn(
                f"GSPOTrainer: importance_sampling_level={level!r} is not GSPO (GSPOConfig has the paper's settings)",
                stacklevel=2,
            )
        _warn_of_overridden_log_probs("GSPOTrainer", type(self), stacklevel=3)
        warn_of_settings_that_never_clip(self, stacklevel=4)
        setattr(self, TEACHER, None if teacher is None else LocalTeacher(self, teacher))
        check_skipping("GSPOTrainer", self, None)
        check_rows("GSPOTrainer", self, None)
        _accelerate("GSPOTrainer", self, settings, None, None)


def _settings_of_gspo_trainer(kind: type[GRPOTrainer], args: Any) -> HeadSettings:
    """Check a GSPOTrainer by its class and its arguments, before it is constructed."""
    check = Checks("GSPOTrainer")
    if not isinstance(args, GRPOConfig):
        check.fail("args", "a GSPOConfig or GRPOConfig", Unquoted(f"a {type(args).__name__}"), TypeError)
    check_trainer("GSPOTrainer", args)
    if kind._compute_loss is GRPOTrainer._compute_loss:  # a subclass may know other levels
        check.choice("importance_sampling_level", args.importance_sampling_level, LEVELS)
    return head_settings("GSPOTrainer", args, has_bonus=args.entropy_coef != 0 or args.use_adaptive_entropy)


@contextlib.contextmanager
def _head_adapters_allowed() -> Iterator[None]:
    """Hide PEFT's BaseTunerLayer from GRPOTrainer's constructor, which refuses a head of that class."""
    tuner_layer = getattr(grpo_trainer, "BaseTunerLayer", None)
    if tuner_layer is None:  # PEFT is not installed
        yield
        return
    # Use setattr, because TRL does not export the name and type checkers would refuse an assignment.
    setattr(grpo_trainer, "BaseTunerLayer", type("NoInstances", (), {}))  # noqa: B010
    try:
        yield
    finally:
        setattr(grpo_trainer, "BaseTunerLayer", tuner_layer)  # noqa: B010


def accelerate_trainer(
    trainer: Trainer,
    *,
    gradient_budget: float | None = None,
    cache_mib: float | None = None,
    head_precision: str | None = None,
    skip_zero_advantage: bool | None = None,
    skip_rows_without_gradient: bool | None = None,
) -> Trainer:
    """Compute the log-probs of the trainer's model and reference model with `linear_log_probs`.

    The main process prints one line with backend, head and settings. A second call replaces the settings. Other
    trainers may share the model: each uses its own settings, and one that is not accelerated TRL's own log-probs.

    The trainer logs gspo/passes, gspo/dropped_gradient_mass and gspo/live_row_share of all tokens that its process has
    trained on since the last log. `gspo_kernels.LossOutput` documents them. With `skip_zero_advantage`, it also logs
    gspo/rows_run, the share of the answers on all ranks that ran through the model. TRL's `entropy` is the mean over
    the tokens of these answers.

    The settings on which skipping depends are read before each optimizer step, so callbacks may change them. The
    advantages stay TRL's. If rounding gives groups with equal rewards an advantage other than 0, the main process
    prints one line.

    Args:
        gradient_budget, cache_mib: arguments of `linear_log_probs` for the training steps of the policy. None: the
            setting of the trainer's GSPOConfig; otherwise a budget of 0, and the default of `cache_mib`.
        head_precision: argument of `linear_log_probs`, also for old log-probs, reference model and teacher. None: the
            setting of the trainer's GSPOConfig; otherwise "fp32" with TRL's `cast_lm_head_to_fp32`.
        skip_zero_advantage: whether answers with advantage 0 do not run through the model. None: the setting of the
            trainer's GSPOConfig; otherwise wherever this does not change the gradients.
        skip_rows_without_gradient: whether checkpointed layers are not differentiated for answers without a gradient,
            such as clipped ones (`huggingface.skip_rows_without_gradient`). None: as for `skip_zero_advantage`.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is not a GRPOTrainer.
        ValueError: the budget is not 0 and TRL adds an entropy bonus; `distillation_coef` is not 0 (use GSPOTrainer);
            `use_liger_kernel` is set on a CPU (Liger's kernels need a GPU).
        ValueError: `skip_zero_advantage` or `skip_rows_without_gradient` is True, and skipping would change gradients,
            for example with `beta` or with dropout.
        ValueError, TypeError: `gradient_budget`, `cache_mib`, `head_precision` or one of these two is invalid.
        HeadError, TypeError, ValueError: `fuse_head` does not support the model or its head.

    Warns:
        UserWarning: a subclass overrides `_get_per_token_logps_and_entropies`. Log-probs that the override computes
            from logits are not replaced.
        UserWarning, once each: every rollout gets a single update, so the importance ratio is always 1; a
            sequence-level ratio has a clip window made for token ratios, such as TRL's default of 0.2; the dataset is
            smaller than a rollout.
    """
    place = "accelerate_trainer"
    if not isinstance(trainer, GRPOTrainer):
        Checks(place).fail("trainer", "a GRPOTrainer", Unquoted(f"a {type(trainer).__name__}"), TypeError)
    check_trainer(place, trainer.args)
    coef = getattr(trainer.args, "distillation_coef", 0)
    if coef and not isinstance(trainer, GSPOTrainer):
        Checks(place).fail("distillation_coef", "0 (GSPOTrainer takes a teacher)", coef)
    bonus = trainer._entropy_bonus_enabled
    settings = head_settings(place, trainer.args, bonus, gradient_budget, cache_mib, head_precision)
    check_skipping(place, trainer, skip_zero_advantage)
    check_rows(place, trainer, skip_rows_without_gradient)
    _warn_of_overridden_log_probs(place, type(trainer), stacklevel=3)
    warn_of_settings_that_never_clip(trainer, stacklevel=4)
    return _accelerate(place, trainer, settings, skip_zero_advantage, skip_rows_without_gradient)


def _accelerate(
    place: str, trainer: Trainer, settings: HeadSettings, skip_answers: bool | None, skip_rows: bool | None
) -> Trainer:
    """Fuse the trainer's models and replace its methods. `place` is the function or class that the user called."""
    unwrapped = (base_model(trainer.accelerator.unwrap_model(model)) for model in models_of(trainer))
    models: list[Any] = list(dict.fromkeys(unwrapped))
    heads = [fuse_head(base) for base in models]
    for head in heads:
        if not head.is_outermost():
            head.install()
    previous: ModelLogProbs | None = vars(trainer).get(_LOG_PROBS)
    temperature = trainer.temperature if previous is None else previous.temperature  # TRL reads it only once, too
    log_probs = ModelLogProbs(temperature, settings)
    vars(trainer).update({_MODELS: models, _LOG_PROBS: log_probs})
    if teacher := vars(trainer).get(TEACHER):
        teacher.head_precision = settings.head_precision
    if previous is None:
        log_backwards(trainer)
        _use_log_probs(trainer)
        distillation = None
        if getattr(trainer.args, "distillation_coef", 0):
            distillation = Distillation(trainer, vars(trainer).get(TEACHER))
        setattr(trainer, _LIVE, LiveAnswers(trainer, LiveRows(trainer), distillation))
        if getattr(trainer.args, "zero_equal_rewards", True):
            EqualRewards(trainer, zeroes=isinstance(trainer, GSPOTrainer))
    live: LiveAnswers = vars(trainer)[_LIVE]
    rows = live.rows
    before = live.skipping, rows.description
    live.requested, rows.requested = skip_answers, skip_rows
    live.decide()
    if previous != log_probs or (live.skipping, rows.description) != before:
        print_settings(place, trainer, heads[0], settings, f"{live.skipping.description}, {rows.description}")
    return trainer


def _warn_of_overridden_log_probs(place: str, kind: type[GRPOTrainer], stacklevel: int) -> None:
    if getattr(kind, METHOD) is not getattr(GRPOTrainer, METHOD):
        warnings.warn(
            f"{place}: {METHOD} is an override in {kind.__name__}. If the override computes log-probs from logits, "
            "they are not replaced",
            stacklevel=stacklevel,
        )


@contextlib.contextmanager
def log_probs_of(trainer: Any) -> Iterator[None]:
    """Make the trainer's models compute log-probs with its settings inside this context.

    Outside it, other trainers may ask the same models for log-probs.
    """
    heads = [fused_head_of(model) for model in vars(trainer)[_MODELS]]
    if not all(head is not None and head.is_outermost() for head in heads):
        warn_once(
            "accelerate_trainer: the forward of the model was replaced after the call, for example by another "
            "trainer of the model. Call accelerate_trainer(trainer) again",
            stacklevel=6,
        )
    present = [head for head in heads if head is not None]
    live: LiveAnswers = vars(trainer)[_LIVE]
    extra = None if live.distillation is None else live.distillation.extra
    for head in present:
        head.fused_lm_head = vars(trainer)[_LOG_PROBS]._replace(layout=live.skipping.layout, extra=extra)
    try:
        yield
    finally:
        for head in present:
            head.fused_lm_head = None


def _use_log_probs(trainer: Any) -> None:
    """Replace the method by which the trainer asks its models for log-probs."""
    method = getattr(trainer, METHOD)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with log_probs_of(trainer):
            return method(*args, **kwargs)

    replace_method(trainer, METHOD, call)
