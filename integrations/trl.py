"""Compute every log-prob of TRL's GRPOTrainer with `gspo_kernels`: one class or one line.

    trainer = GSPOTrainer(model, reward_funcs, args=GSPOConfig(...), train_dataset=...)
    accelerate_trainer(trainer)  # or, for an existing trainer of any subclass of GRPOTrainer

Old, reference and new log-probs come from `linear_log_probs`, called at the model's head: one kernel for all three,
logits in fp32 and never in memory, and no backward for tokens whose gradient the loss makes zero. The loss, its options
and its metrics stay TRL's code, so every option of TRL's works.

TRL 1.15 and later asks the model for log-probs (`model(..., fused_lm_head=True)`): the model's forward is wrapped to
answer. Earlier ones, from 0.29, compute them from logits in the trainer's `_get_per_token_logps_and_entropies`, which
is replaced on the instance.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import linear_log_probs
from gspo_kernels.extras import needs
from gspo_kernels.validation import Field, Said, warn_once

from .huggingface import base_model, fuse_head

with needs(__name__, "trl", "trl"):
    from trl.trainer import grpo_trainer, utils
    from trl.trainer.grpo_trainer import GRPOTrainer

    from .trl_config import GSPOConfig, warn_of_idle_clipping

__all__ = ["GSPOConfig", "GSPOTrainer", "accelerate_trainer"]

_ATTRIBUTE = "_gspo_log_probs"
_ASKS_THE_MODEL = hasattr(utils, "add_fused_lm_head")  # TRL 1.15 and later calls model(..., fused_lm_head=True)
_METHOD = "_get_per_token_logps_and_entropies"


class GSPOTrainer(GRPOTrainer):
    """GRPOTrainer with log-probs from `linear_log_probs`. It takes TRL's arguments; `args` defaults to GSPOConfig's.

    The head may have a LoRA adapter. TRL 1.15 and later refuses one in its constructor, as its own log-probs would
    ignore it. Warns if `args` has no sequence-level ratio, and as `accelerate_trainer` does.
    """

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        args = GSPOConfig(output_dir="gspo") if args is None else args
        with _head_adapters_allowed():
            super().__init__(model, reward_funcs, args, *more, **kwargs)
        if self.importance_sampling_level != "sequence":
            level = self.importance_sampling_level
            warnings.warn(
                f"GSPOTrainer: importance_sampling_level={level!r} is not GSPO (GSPOConfig has its paper's settings)",
                stacklevel=2,
            )
        warn_of_idle_clipping(self, stacklevel=4)
        accelerate_trainer(self)


@contextlib.contextmanager
def _head_adapters_allowed() -> Iterator[None]:
    """Hide PEFT's BaseTunerLayer from TRL's constructor, which refuses a head that is an instance of it."""
    tuner_layer = getattr(grpo_trainer, "BaseTunerLayer", None)
    if tuner_layer is None:  # no PEFT, or a TRL without that check
        yield
        return
    setattr(grpo_trainer, "BaseTunerLayer", type("NoInstances", (), {}))  # noqa: B010 - not exported
    try:
        yield
    finally:
        setattr(grpo_trainer, "BaseTunerLayer", tuner_layer)  # noqa: B010


def accelerate_trainer(trainer: GRPOTrainer) -> None:
    """Compute the log-probs of the trainer's model and reference model with `linear_log_probs`.

    A second call changes nothing. Before TRL 1.15, inputs with images stay with TRL's code, with a warning. From 1.15
    on, a subclass that overrides `_get_per_token_logps_and_entropies` gets a warning: log-probs that it computes from
    logits stay its own.

    Raises:
        TypeError: `trainer` is not a GRPOTrainer.
        ValueError: `cast_lm_head_to_fp32` is set, which gives the head another dtype than the hidden states; before TRL
            1.14 `use_liger_kernel` is set, whose loss reads no log-probs; before TRL 1.15 a subclass overrides
            `_get_per_token_logps_and_entropies`.
        HeadError, TypeError, ValueError: `fuse_head` does not support the model or its head.

    Warns, once each:
        UserWarning: each rollout gets one update, so the importance ratio is always 1; a sequence-level ratio has a
            clip window for token ratios, such as TRL's default of 0.2; the dataset does not fill a rollout.
    """
    _check(trainer)
    warn_of_idle_clipping(trainer, stacklevel=4)
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            base: Any = base_model(trainer.accelerator.unwrap_model(model))
            fuse_head(base)
            if _ASKS_THE_MODEL and not _is_wrapped(base):
                _wrap_forward(base, trainer.temperature)
    if not _ASKS_THE_MODEL and _METHOD not in vars(trainer):
        setattr(trainer, _METHOD, _LogProbs(trainer))


def _check(trainer: GRPOTrainer) -> None:
    check = Field("accelerate_trainer")
    if not isinstance(trainer, GRPOTrainer):
        check.fail("trainer", "a GRPOTrainer", Said(f"a {type(trainer).__name__}"), TypeError)
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        check.fail("cast_lm_head_to_fp32", "False (logits are fp32 here in any dtype)", True)
    if hasattr(GRPOTrainer, "compute_liger_loss") and trainer.args.use_liger_kernel:
        check.fail("use_liger_kernel", "False before TRL 1.14 (its loss reads no log-probs)", True)
    if getattr(type(trainer), _METHOD) is not getattr(GRPOTrainer, _METHOD):
        override = f"one of {type(trainer).__name__}'s own"
        if not _ASKS_THE_MODEL:
            check.fail(_METHOD, "GRPOTrainer's before TRL 1.15 (or call linear_log_probs there)", Said(override))
        warnings.warn(
            f"accelerate_trainer: {_METHOD} is {override}: log-probs that it makes of logits itself stay so",
            stacklevel=3,
        )


def _is_wrapped(model: Any) -> bool:
    """Return whether `_wrap_forward` made the model's outermost forward, accelerate's autocast aside."""
    wrapper = vars(model).get(_ATTRIBUTE)
    return wrapper is not None and wrapper in (model.forward, vars(model).get("_original_forward"))  # accelerate's name


def _wrap_forward(model: Any, temperature: float) -> None:
    """Let the model's forward answer TRL's `fused_lm_head=True`; other calls are unchanged."""
    wrapped = model.forward

    @functools.wraps(type(model).forward)
    def forward(_: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return wrapped(*args, **kwargs)
        return _log_probs(wrapped, temperature, *args, **kwargs)

    model.forward = types.MethodType(forward, model)
    setattr(model, _ATTRIBUTE, model.forward)


def _log_probs(
    forward: Any,
    temperature: float,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Any:
    """Return TRL's FusedCausalLMOutput; its log-probs are [B, T - 1] from `labels`, [B, T] from `shift_labels`.

    Raises:
        ValueError: there are no labels.
    """
    targets = shift_labels if shift_labels is not None else None if labels is None else labels[:, 1:]
    if targets is None:
        raise ValueError("fused_lm_head: labels must be given, got None")

    def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        states = hidden if shift_labels is not None else hidden[:, :-1]
        return linear_log_probs(states, lm_head, targets, temperature=temperature, entropy=True, **options)

    kwargs["use_cache"] = False
    scores, output = forward(*args, with_head=score, **kwargs)
    mask = targets != -100
    loss = -scores.log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return utils.FusedCausalLMOutput(
        loss=loss,
        log_probs=scores.log_probs,
        entropy=scores.entropy,
        label_mask=mask,
        aux_loss=getattr(output, "aux_loss", None),
    )


class _LogProbs:
    """Stands in for `_get_per_token_logps_and_entropies` of TRL before 1.15; inputs with images go to TRL's method.

    Called with ids [B, T], it returns what TRL's method returns: log-probs of the last C = logits_to_keep tokens and
    their entropies, or None, both [B, C] fp32, and since TRL 1.7 the auxiliary loss of a mixture of experts, or None.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.trl_method = trainer, getattr(trainer, _METHOD)
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
            warn_once(f"accelerate_trainer: before TRL 1.15 log-probs with {names} are TRL's own", stacklevel=4)
            options |= {"batch_size": batch_size, "compute_entropy": compute_entropy}
            return self.trl_method(model, input_ids, attention_mask, logits_to_keep, **options)
        want_aux_loss = options.get("compute_aux_loss", False)
        router = {"output_router_logits": True} if want_aux_loss else {}
        scores, aux_losses = [], []
        step = batch_size or len(input_ids)
        for ids, attended in zip(input_ids.split(step), attention_mask.split(step), strict=True):
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
        """Return a `with_head` that computes the log-probs of targets [B, C] where mask [B, C] is not 0."""

        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            states = hidden[:, :-1][:, -targets.shape[1] :]
            out = linear_log_probs(
                states, lm_head, targets, mask=mask, temperature=self.trainer.temperature, entropy=entropy, **options
            )
            # Only an entropy bonus needs the gradient. TRL before the bonus logs the entropy without detaching it.
            bonus = getattr(self.trainer, "_entropy_bonus_enabled", False)
            return out if bonus or out.entropy is None else out._replace(entropy=out.entropy.detach())

        return score
