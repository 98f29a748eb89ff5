"""`accelerate_trainer`, which replaces the log-probs of a GRPOTrainer, and `restore_trainer`, which undoes it."""

from __future__ import annotations

import contextlib
import inspect
import os
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from trl.trainer import grpo_trainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks, Unquoted, warn_once

from ..backwards import BackwardSettings
from ..huggingface import HeadError, base_model, fuse_head, is_fused
from ..huggingface.fused_head import fused_head_of
from .config import (
    ASKS_THE_MODEL,
    LEVELS,
    METHOD,
    GSPOConfig,
    backward_settings,
    check_trainer,
    overrides_log_probs,
    warn_of_settings_that_never_clip,
)
from .logs import call_before_each_batch, log_backwards, print_settings, replace_method, restore_methods
from .model_forward import ModelLogProbs
from .zero_advantage import EqualRewards, LiveAnswers, check_skipping

_SETTINGS = "_gspo_settings"  # the attribute of a trainer that holds its BackwardSettings
_TEMPERATURE = "_gspo_temperature"  # the temperature of TRL 1.15 and later, which read it once
_MODELS = "_gspo_models"  # the attribute of a trainer that holds its transformers models
_LIVE = "_gspo_live"  # the attribute of a trainer that holds its LiveAnswers
_USERS = "_gspo_users"  # the attribute of a model that holds its Users
Trainer = TypeVar("Trainer", bound=GRPOTrainer)


class Users:
    """The accelerated trainers of a model. A copy of the model has none."""

    def __init__(self, fused_before: bool) -> None:
        self.fused_before = fused_before  # by the user
        self._trainers: list[weakref.ref[Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"fused_before": self.fused_before, "_trainers": []}

    def trainers(self) -> list[Any]:
        """The trainers that still exist."""
        return [trainer for ref in self._trainers if (trainer := ref()) is not None]

    def add(self, trainer: Any) -> None:
        """Add a trainer, once."""
        self.remove(trainer)
        self._trainers.append(weakref.ref(trainer))

    def remove(self, trainer: Any) -> None:
        """Remove a trainer, and all trainers that no longer exist."""
        self._trainers = [weakref.ref(x) for x in self.trainers() if x is not trainer]


class GSPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose log-probs come from `linear_log_probs`.

    Takes the same arguments as GRPOTrainer, but `args` defaults to a GSPOConfig. The head may have a LoRA adapter. From
    TRL 1.15 on, GRPOTrainer refuses such a head, because TRL's own log-probs would ignore the adapter.

    Groups with bitwise equal rewards get an advantage of exactly 0, unless `zero_equal_rewards` of its GSPOConfig is
    False. TRL's rounding gives twelve rewards of 0.7 an advantage of 1.2e-3.

    The model card names GSPO and its paper, or GRPO if `args` does not select a sequence-level ratio.

    Raises:
        ValueError, TypeError: `accelerate_trainer` would refuse the settings or the class, `args` is not a GRPOConfig,
            GRPOTrainer's loss does not know its `importance_sampling_level`, or `model` is a path to a missing folder.
            These errors come before the model is loaded.
        HeadError, TypeError, ValueError: `fuse_head` does not support the model or its head.

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

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **kwargs: Any) -> None:
        args = GSPOConfig(output_dir="gspo") if args is None else args
        settings = _settings_of_gspo_trainer(type(self), args)
        if isinstance(model, str) and model.startswith(("/", ".")) and not os.path.isdir(model):  # no hub id
            Checks("GSPOTrainer").fail("model", "a folder that exists, a hub id or a model", model)
        if args.importance_sampling_level == "token":
            for name in ("_tag_names", "_name", "_paper"):  # of the model card
                setattr(self, name, getattr(GRPOTrainer, name))
        with _head_adapters_allowed():
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.importance_sampling_level != "sequence":
            level = self.importance_sampling_level
            warnings.warn(
                f"GSPOTrainer: importance_sampling_level={level!r} is not GSPO (GSPOConfig has the paper's settings)",
                stacklevel=2,
            )
        _warn_of_overridden_log_probs("GSPOTrainer", type(self), stacklevel=3)
        warn_of_settings_that_never_clip(self, stacklevel=4)
        check_skipping("GSPOTrainer", self, None)
        _accelerate("GSPOTrainer", self, settings, None)


def _settings_of_gspo_trainer(kind: type[GRPOTrainer], args: Any) -> BackwardSettings:
    """Check a GSPOTrainer by its class and its arguments, before it is constructed."""
    check = Checks("GSPOTrainer")
    if not isinstance(args, GRPOConfig):
        check.fail("args", "a GSPOConfig or GRPOConfig", Unquoted(f"a {type(args).__name__}"), TypeError)
    check_trainer("GSPOTrainer", kind, args)
    if kind._compute_loss is GRPOTrainer._compute_loss:  # a subclass may know other levels
        check.choice("importance_sampling_level", args.importance_sampling_level, LEVELS)
    has_bonus = getattr(args, "entropy_coef", 0.0) != 0 or getattr(args, "use_adaptive_entropy", False)
    return backward_settings("GSPOTrainer", args, has_bonus)


@contextlib.contextmanager
def _head_adapters_allowed() -> Iterator[None]:
    """Hide PEFT's BaseTunerLayer from GRPOTrainer's constructor, which refuses a head of that class."""
    tuner_layer = getattr(grpo_trainer, "BaseTunerLayer", None)
    if tuner_layer is None:  # PEFT is missing, or this release of TRL does not check the head
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
    skip_zero_advantage: bool | None = None,
) -> Trainer:
    """Compute the log-probs of the trainer's model and reference model with `linear_log_probs`.

    The main process prints one line with backend, head and settings. A second call replaces the settings. With TRL
    before 1.15, TRL's own code still computes the log-probs of inputs with images, and a UserWarning says so.

    The trainer logs gspo/passes, gspo/dropped_gradient_mass and gspo/live_row_share of all tokens that its process has
    trained on since the last log. `gspo_kernels.LossOutput` documents them. With `skip_zero_advantage`, it also logs
    gspo/rows_run, the share of the answers on all ranks that ran through the model, and TRL's `entropy` is the mean
    over these answers. `restore_trainer` undoes this function.

    The settings on which skipping depends are read before each optimizer step, so callbacks may change them. The
    advantages stay TRL's. If rounding gives groups with equal rewards an advantage other than 0, the main process
    prints one line.

    Args:
        gradient_budget, cache_mib: arguments of `linear_log_probs` for the training steps of the policy. None: the
            setting of the trainer's GSPOConfig; otherwise a budget of 0, and the default of `cache_mib`.
        skip_zero_advantage: whether answers with advantage 0 do not run through the model. None: the setting of the
            trainer's GSPOConfig; otherwise wherever this does not change the gradients.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is not a GRPOTrainer.
        ValueError: `cast_lm_head_to_fp32` is set, so that head and hidden states have different dtypes; the budget is
            not 0 and TRL adds an entropy bonus; `use_liger_kernel` is set on a CPU (Liger's kernels need a GPU) or
            before TRL 1.14 (Liger's loss reads no log-probs); before TRL 1.15, a subclass overrides
            `_get_per_token_logps_and_entropies`.
        ValueError: `skip_zero_advantage` is True, and skipping would change gradients, for example with `beta`.
        ValueError, TypeError: `gradient_budget`, `cache_mib` or `skip_zero_advantage` is invalid.
        HeadError, TypeError, ValueError: `fuse_head` does not support the model or its head.

    Warns:
        UserWarning: with TRL 1.15 or later, a subclass overrides `_get_per_token_logps_and_entropies`. Log-probs that
            the override computes from logits are not replaced.
        UserWarning, once each: every rollout gets a single update, so the importance ratio is always 1; a
            sequence-level ratio has a clip window made for token ratios, such as TRL's default of 0.2; the dataset is
            smaller than a rollout.
    """
    place = "accelerate_trainer"
    if not isinstance(trainer, GRPOTrainer):
        Checks(place).fail("trainer", "a GRPOTrainer", Unquoted(f"a {type(trainer).__name__}"), TypeError)
    check_trainer(place, type(trainer), trainer.args)
    has_bonus = getattr(trainer, "_entropy_bonus_enabled", False)
    settings = backward_settings(place, trainer.args, has_bonus, gradient_budget, cache_mib)
    check_skipping(place, trainer, skip_zero_advantage)
    _warn_of_overridden_log_probs(place, type(trainer), stacklevel=3)
    warn_of_settings_that_never_clip(trainer, stacklevel=4)
    return _accelerate(place, trainer, settings, skip_zero_advantage)


def _accelerate(place: str, trainer: Trainer, settings: BackwardSettings, skip_zero_advantage: bool | None) -> Trainer:
    """Fuse the trainer's models and replace its methods. `place` is the function or class that the user called."""
    models: list[Any] = [x for x in (trainer.model, getattr(trainer, "ref_model", None)) if x is not None]
    models = list(dict.fromkeys(base_model(trainer.accelerator.unwrap_model(model)) for model in models))
    fused_before = [is_fused(base) for base in models]
    heads = [fuse_head(base) for base in models]
    for base, was_fused in zip(models, fused_before, strict=True):
        if _USERS not in vars(base) or not was_fused:
            setattr(base, _USERS, Users(was_fused))
        vars(base)[_USERS].add(trainer)
    earlier = vars(trainer).get(_MODELS, [])  # `trainer.model` may be a new one
    setattr(trainer, _MODELS, list(dict.fromkeys([*models, *earlier])))
    for head in heads:
        if ASKS_THE_MODEL and not head.is_outermost():
            head.install()
    if not ASKS_THE_MODEL and METHOD not in vars(trainer):
        replace_method(trainer, METHOD, _LogProbs(trainer))
    previous = vars(trainer).get(_SETTINGS)
    setattr(trainer, _SETTINGS, settings)
    vars(trainer).setdefault(_TEMPERATURE, trainer.temperature)
    _use_settings(trainer, models)
    if previous is None:
        log_backwards(trainer)
        call_before_each_batch(trainer, lambda: _use_settings(trainer, vars(trainer)[_MODELS]))
        setattr(trainer, _LIVE, LiveAnswers(trainer))
        if getattr(trainer.args, "zero_equal_rewards", True):
            EqualRewards(trainer, zeroes=isinstance(trainer, GSPOTrainer))
    live: LiveAnswers = vars(trainer)[_LIVE]
    before = live.skipping
    live.requested = skip_zero_advantage
    live.decide()
    if previous != settings or live.skipping != before:
        print_settings(place, trainer, heads[0], settings, live.skipping.description)
    return trainer


def restore_trainer(trainer: Trainer) -> Trainer:
    """Undo `accelerate_trainer` or the acceleration of a GSPOTrainer: TRL's own code computes the log-probs again.

    This restores the methods, attributes and logs of trainer and models, with two exceptions. If another
    accelerated trainer uses the model, the model keeps our log-probs, with the settings of that trainer. If another
    wrapper encloses our forward of the model, such as accelerate's autocast after `trainer.train()`, our forward stays
    inside it and passes all calls on. `accelerate_trainer(trainer)` may be called again.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is not a GRPOTrainer.
        ValueError: `trainer` is not accelerated; one of its methods was replaced after `accelerate_trainer`; with TRL
            1.15 or later, the head has an adapter, which TRL's own log-probs would ignore. Nothing is changed.
    """
    check = Checks("restore_trainer")
    if not isinstance(trainer, GRPOTrainer):
        check.fail("trainer", "a GRPOTrainer", Unquoted(f"a {type(trainer).__name__}"), TypeError)
    if _MODELS not in vars(trainer):
        got = Unquoted(f"a {type(trainer).__name__} that is not accelerated")
        check.fail("trainer", "one that accelerate_trainer or GSPOTrainer has accelerated", got)
    tuner_layer = getattr(grpo_trainer, "BaseTunerLayer", ())
    models = vars(trainer)[_MODELS]
    if ASKS_THE_MODEL and any(isinstance(base.get_output_embeddings(), tuner_layer) for base in models):
        check.fail("trainer", "of a model without an adapter on its head", Unquoted("one, which TRL would ignore"))
    restore_methods(trainer, check)
    vars(trainer)[_LIVE].leave()
    for name in (_SETTINGS, _TEMPERATURE, _LIVE, _MODELS):
        delattr(trainer, name)
    for base in models:
        users = vars(base)[_USERS]
        users.remove(trainer)
        others = users.trainers()
        if others:
            _use_settings(others[0], [base])
            continue
        delattr(base, _USERS)
        fused = fused_head_of(base)
        if fused is None:
            continue
        fused.fused_lm_head = None
        fused.uninstall()
        if not users.fused_before:
            with contextlib.suppress(HeadError):  # enclosed by another wrapper
                fused.remove()
    return trainer


def _warn_of_overridden_log_probs(place: str, kind: type[GRPOTrainer], stacklevel: int) -> None:
    if overrides_log_probs(kind):
        warnings.warn(
            f"{place}: {METHOD} is an override in {kind.__name__}. If the override computes log-probs from logits, "
            "they are not replaced",
            stacklevel=stacklevel,
        )


def _use_settings(trainer: Any, models: list[Any]) -> None:
    """Make the models use the trainer's settings. Another trainer may share them."""
    for model in models:
        fused = fused_head_of(model)
        if fused is not None and ASKS_THE_MODEL:
            fused.fused_lm_head = ModelLogProbs(vars(trainer)[_TEMPERATURE], vars(trainer)[_SETTINGS])
        if ASKS_THE_MODEL and (fused is None or not fused.is_outermost()):
            warn_once(
                "accelerate_trainer: the forward of the model was replaced after the call, for example by another "
                "trainer of the model. Call accelerate_trainer(trainer) again",
                stacklevel=4,
            )


class _LogProbs:
    """Replaces `_get_per_token_logps_and_entropies` before TRL 1.15. Inputs with images go to TRL's method.

    A call with ids [B, T] returns the same as TRL's method: log-probs of the last C = logits_to_keep tokens, [B, C]
    fp32; their entropies, [B, C] fp32, or None; and since TRL 1.7 the auxiliary loss of a mixture of experts, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.trl_method = getattr(trainer, METHOD)
        self.returns_aux_loss = "compute_aux_loss" in inspect.signature(self.trl_method).parameters

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **options: Any,
    ) -> tuple[Any, ...]:
        images = [name for name, x in options.items() if x is not None and name != "compute_aux_loss"]
        if images:
            names = ", ".join(images)
            warn_once(
                f"accelerate_trainer: TRL before 1.15 computes the log-probs of inputs with {names} with its own code",
                stacklevel=4,
            )
            options |= {"batch_size": batch_size, "compute_entropy": compute_entropy}
            return self.trl_method(model, input_ids, attention_mask, logits_to_keep, **options)
        want_aux_loss = options.get("compute_aux_loss", False)
        router = {"output_router_logits": True} if want_aux_loss else {}
        scores = []
        aux_losses = []
        chunk_size = batch_size or len(input_ids)
        for ids, attended in zip(input_ids.split(chunk_size), attention_mask.split(chunk_size), strict=True):
            score = self._score(ids[:, -logits_to_keep:], attended[:, -logits_to_keep:], compute_entropy)
            out = model(input_ids=ids, attention_mask=attended, use_cache=False, with_head=score, **router)
            scores.append(out.result)
            aux_losses.append(getattr(out.model_output, "aux_loss", None))
        log_probs = torch.cat([x.log_probs for x in scores])
        entropy = torch.cat([x.entropy for x in scores]) if compute_entropy else None
        if not self.returns_aux_loss:
            return log_probs, entropy
        return log_probs, entropy, torch.stack(aux_losses).mean() if want_aux_loss else None

    def _score(self, targets: Tensor, mask: Tensor, entropy: bool) -> Callable[..., Any]:
        """Make a `with_head` function that computes the log-probs of targets [B, C] where mask [B, C] is not 0."""

        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            states = hidden[:, :-1][:, -targets.shape[1] :]  # [B, C, H]
            options |= vars(self.trainer).get(_SETTINGS, BackwardSettings())._asdict()
            out = linear_log_probs(
                states, lm_head, targets, mask=mask, temperature=self.trainer.temperature, entropy=entropy, **options
            )
            # Only an entropy bonus needs the entropy's gradient. TRL releases without the bonus log the entropy
            # without detaching it, so detach it here.
            bonus = getattr(self.trainer, "_entropy_bonus_enabled", False)
            return out if bonus or out.entropy is None else out._replace(entropy=out.entropy.detach())

        return score
