"""TRL's GRPOTrainer with every log-prob from `gspo_kernels`: one class or one line.

    trainer = GSPOTrainer(model, reward_funcs, args=GSPOConfig(...), train_dataset=...)
    accelerate_trainer(trainer)  # or a trainer, of any subclass of GRPOTrainer, that you have

Log-probs, old, reference and new, come from `linear_log_probs` inside the head module's own call: one kernel for all,
logits never less than fp32 and never held, and tokens whose gradient the loss makes zero cost no backward. The loss,
its options and its metrics are TRL's own code, so that there is no option of it to be left out.

Since 1.15 TRL asks its model for log-probs (`model(..., fused_lm_head=True)`): that call is answered. Before, from 0.29
on, its trainer makes them of logits in `_get_per_token_logps_and_entropies`, which is replaced on the instance.
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

from . import missing

try:
    from trl.trainer import grpo_trainer, utils
    from trl.trainer.grpo_trainer import GRPOTrainer
except ModuleNotFoundError as error:
    raise missing(error, "trl") from None

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Field, Said, warn_once

from .huggingface import base_model, fuse_head
from .trl_settings import GSPOConfig, warn_of_idle_clipping

__all__ = ["GSPOConfig", "GSPOTrainer", "accelerate_trainer"]

_ATTRIBUTE = "_gspo_log_probs"
_ASKS_THE_MODEL = hasattr(utils, "add_fused_lm_head")  # TRL 1.15 and later
_METHOD = "_get_per_token_logps_and_entropies"


class GSPOTrainer(GRPOTrainer):
    """GRPOTrainer whose log-probs are ours; arguments as TRL's, but no `args` are GSPOConfig's.

    A LoRA may be on the head too, which TRL 1.15 and later refuses in its constructor, since its own log-probs would
    leave it out. Warns where `args` have no sequence-level ratio, and as `accelerate_trainer` does.
    """

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        args = GSPOConfig(output_dir="gspo") if args is None else args
        with _head_adapters_allowed():
            super().__init__(model, reward_funcs, args, *others, **kwargs)
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
    """TRL's constructor asks whether the head is a BaseTunerLayer; while it runs, nothing is one."""
    known = getattr(grpo_trainer, "BaseTunerLayer", None)
    if known is None:  # no PEFT, or a TRL that does not ask
        yield
        return
    setattr(grpo_trainer, "BaseTunerLayer", type("NothingIsOne", (), {}))  # noqa: B010 - not exported
    try:
        yield
    finally:
        setattr(grpo_trainer, "BaseTunerLayer", known)  # noqa: B010


def accelerate_trainer(trainer: GRPOTrainer) -> None:
    """Let every log-prob of `trainer`, its model's and its reference model's, be ours; a second time nothing happens.

    Before TRL 1.15 image inputs are left to TRL, with a warning. From 1.15 on a subclass with a
    `_get_per_token_logps_and_entropies` of its own is warned of: only what it asks TRL or the model for is ours.

    Raises:
        TypeError: no GRPOTrainer.
        ValueError: `cast_lm_head_to_fp32`, which makes a head of another dtype than the hidden states; before TRL 1.14
            `use_liger_kernel`, whose loss reads no log-probs; before 1.15 a subclass with log-probs of its own.
        HeadError, TypeError, ValueError: of `fuse_head`, for a model or a head that is not understood.

    Warns, once each:
        UserWarning: each rollout gets one update, so the importance ratio is always 1; a sequence-level ratio has a
            clip window for token ratios, such as TRL's default of 0.2.
    """
    _check(trainer)
    warn_of_idle_clipping(trainer, stacklevel=4)
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            base: Any = base_model(trainer.accelerator.unwrap_model(model))
            fuse_head(base)
            if _ASKS_THE_MODEL and not _answers(base):
                _answer(base, trainer.temperature)
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
        own = f"one of {type(trainer).__name__}'s own"
        if not _ASKS_THE_MODEL:
            check.fail(_METHOD, "GRPOTrainer's before TRL 1.15 (or call linear_log_probs there)", Said(own))
        warnings.warn(
            f"accelerate_trainer: {_METHOD} is {own}: log-probs that it makes of logits itself stay so", stacklevel=3
        )


def _answers(model: Any) -> bool:
    """Whether nothing of TRL's is above our answer. accelerate keeps what its autocast is above."""
    ours = vars(model).get(_ATTRIBUTE)
    return ours is not None and ours in (model.forward, vars(model).get("_original_forward"))


def _answer(model: Any, temperature: float) -> None:
    """Let `model` answer TRL's `fused_lm_head=True`; all other calls are as before."""
    below = model.forward

    @functools.wraps(type(model).forward)
    def forward(_: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return below(*args, **kwargs)
        return _log_probs(below, temperature, *args, **kwargs)

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
    """What TRL's fused head returns, [B, T - 1] from labels, or [B, T] from labels that are shifted already."""
    targets = shift_labels if shift_labels is not None else None if labels is None else labels[:, 1:]
    if targets is None:
        raise ValueError("fused_lm_head: labels must be given, got None")

    def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        states = hidden if shift_labels is not None else hidden[:, :-1]
        return linear_log_probs(states, lm_head, targets, temperature=temperature, entropy=True, **options)

    kwargs["use_cache"] = False
    found, output = forward(*args, with_head=score, **kwargs)
    mask = targets != -100
    loss = -found.log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return utils.FusedCausalLMOutput(
        loss=loss, log_probs=found.log_probs, entropy=found.entropy, label_mask=mask,
        aux_loss=getattr(output, "aux_loss", None),
    )  # fmt: skip


class _LogProbs:
    """`_get_per_token_logps_and_entropies` of TRL before 1.15, for text: log-probs of the last `logits_to_keep` tokens.

    What it returns is TRL's: log-probs and entropies [B, C], and since 1.7 the auxiliary loss of a mixture of experts.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.stock = trainer, getattr(trainer, _METHOD)
        self.returns_aux_loss = "compute_aux_loss" in inspect.signature(self.stock).parameters

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[Any, ...]:
        images = [name for name, x in others.items() if x is not None and name != "compute_aux_loss"]
        if images:
            names = ", ".join(images)
            warn_once(f"accelerate_trainer: before TRL 1.15 log-probs with {names} are TRL's own", stacklevel=4)
            return self.stock(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size,
                compute_entropy=compute_entropy, **others,
            )  # fmt: skip
        want_aux_loss = others.get("compute_aux_loss", False)
        router = {"output_router_logits": True} if want_aux_loss else {}
        found, aux_losses = [], []
        step = batch_size or len(input_ids)
        for ids, attended in zip(input_ids.split(step), attention_mask.split(step), strict=True):
            score = self._score(ids[:, -logits_to_keep:], attended[:, -logits_to_keep:], compute_entropy)
            out = model(input_ids=ids, attention_mask=attended, use_cache=False, with_head=score, **router)
            found.append(out.result)
            aux_losses.append(getattr(out.model_output, "aux_loss", None))
        log_probs = torch.cat([x.log_probs for x in found])
        entropy = torch.cat([x.entropy for x in found]) if compute_entropy else None
        if not self.returns_aux_loss:
            return log_probs, entropy
        return log_probs, entropy, torch.stack(aux_losses).mean() if want_aux_loss else None

    def _score(self, targets: Tensor, mask: Tensor, entropy: bool) -> Callable[..., Any]:
        def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
            states = hidden[:, :-1][:, -targets.shape[1] :]
            out = linear_log_probs(
                states, lm_head, targets, mask=mask, temperature=self.trainer.temperature, entropy=entropy, **options
            )
            # Only a bonus wants the entropy's gradient; before TRL had one it did not detach what it logs.
            bonus = getattr(self.trainer, "_entropy_bonus_enabled", False)
            return out if bonus or out.entropy is None else out._replace(entropy=out.entropy.detach())

        return score
