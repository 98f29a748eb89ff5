"""Answers with advantage 0: the advantage is exactly 0, and the answers do not run through the model. Nor does padding.

Without KL, entropy bonus and router loss, the gradient of an answer with advantage 0 is exactly 0. `LiveAnswers` runs
the model on the other answers only. TRL's loss still gets the log-probs of all answers, so that its divisors and clip
fractions do not change: an answer that did not run gets its old log-probs, and its ratio is 1.

Live answers are those that run. Within an optimizer step, they are sorted by length, and each micro-batch is as wide as
its longest answer with its prompt, or packed into one row (`model_forward.py`). Every rank runs at least two tokens per
micro-batch, and the slowest rank determines the time of a micro-batch. So every rank gets as many live answers as the
others, of similar length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import ProcessorMixin, TrainerCallback
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from ..huggingface.rows import (
    interaction_of_rows,
    live_tokens,
    may_be_packed,
    positions_are_relative,
    rope_of_longest_row,
)
from .config import LOSS_TYPES, METHOD, check_wanted, wanted
from .logs import method_before, replace_method
from .model_forward import Layout
from .row_checkpoint import LiveRows
from .teacher import Distillation

_COMPUTE_LOSS, _GENERATE, _PREPARE = "_compute_loss", "_generate_and_score_completions", "_prepare_inputs"
_SAMPLE = "_generate"
_OLD = "old_per_token_logps"  # TRL's key
SKIP = "skip_zero_advantage"
TEACHER = "_gspo_teacher"  # the attribute of a trainer with its LocalTeacher, or None
_PROMPTS = ("prompt_ids", "prompt_mask")  # padded on the left
# TRL's metrics that are means over tokens, the second ones with token ratios only.
_TOKEN_MEANS = ("kl",)
_CLIP_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
# TRL's keys whose tensors have a row per answer. With other keys, answers stay on their rank.
_KEYS = {
    *_PROMPTS, "completion_ids", "completion_mask", "tool_mask", "advantages", _OLD, "sampling_per_token_logps",
    "importance_sampling_ratio", "ref_per_token_logps", "teacher_ids", "teacher_log_probs",
}  # fmt: skip  # names


class Skipping(NamedTuple):
    """What does not run through the model.

    `is_on`: answers whose gradient is 0 do not run. With `by_advantage`, those are answers with advantage 0. Otherwise,
    KL, an entropy bonus or a teacher gives these a gradient, and only answers without unmasked tokens have none.
    `crops`: the other answers are cropped to the longest of them.
    `layout`: how a model runs a batch, see `ModelLogProbs`. All but "as given" remove the padding of prompts.
    `moves`: within an optimizer step, they are sorted by length, so that micro-batches have little padding.
    """

    is_on: bool = False
    by_advantage: bool = False
    crops: bool = False
    layout: Layout = "as given"
    moves: bool = False
    description: str = ""  # for the line that the trainer prints


def check_skipping(place: str, trainer: Any, requested: bool | None) -> None:
    """Check the option skip_zero_advantage: see `check_wanted`."""
    value = wanted(trainer, SKIP, requested)

    def reason() -> str | None:
        return _other_gradients_change(trainer) or interaction_of_rows(trainer.model) or _has_gradient(trainer)

    check_wanted(place, SKIP, value, reason, ", where skipping would not be exact")


def skipping(trainer: Any, requested: bool | None, interaction: str | None) -> Skipping:
    """Decide from the current settings of trainer and model, which callbacks may change, what is skipped.

    Args:
        requested: None means the setting of the trainer's GSPOConfig or, if that is None too, wherever it is exact.
        interaction: `interaction_of_rows` of the model.
    """
    value = wanted(trainer, SKIP, requested)
    reason, has_gradient = _other_gradients_change(trainer) or interaction, _has_gradient(trainer)
    if reason or value is False:
        reason = reason or has_gradient
        return Skipping(description=f"{SKIP}=False{f' ({reason})' if value is None else ''}")
    length, order = _dependence_on_length(trainer), _dependence_on_order(trainer)
    models = models_of(trainer)
    layout: Layout = "aligned" if not length and all(map(positions_are_relative, models)) else "as given"
    if layout == "aligned" and all(map(may_be_packed, models)):
        layout = "packed"
    notes = [has_gradient] if has_gradient else []
    if length:
        notes.append(f"padding kept: {length}")
    elif layout == "packed" or has_gradient:
        notes.append("rows packed" if layout == "packed" else "padding cropped")
    notes += [f"order kept: {order}"] if order else []
    description = f"{SKIP}={not has_gradient}" + (f" ({', '.join(notes)})" if notes else "")
    return Skipping(True, not has_gradient, not length, layout, not order, description)


def _has_gradient(trainer: Any) -> str | None:
    """Name a term of the loss that gives answers with advantage 0 a gradient."""
    if coef := getattr(trainer.args, "distillation_coef", 0):
        return f"distillation_coef={coef}"
    if trainer.beta != 0:
        return f"beta={trainer.beta}"
    return "an entropy bonus" if trainer._entropy_bonus_enabled else None


def _other_gradients_change(trainer: Any) -> str | None:
    """Name a setting with which gradients depend on the answers that run, or on their padding."""
    args = trainer.args
    names = (_COMPUTE_LOSS, "compute_loss", METHOD)
    overrides = [name for name in names if method_before(trainer, name) is not getattr(GRPOTrainer, name)]
    reasons = {
        f"an override of {', '.join(overrides)}": overrides,
        f"router_aux_loss_coef={args.router_aux_loss_coef}": trainer.aux_loss_enabled,
        f"top_entropy_quantile={trainer.top_entropy_quantile}": trainer.top_entropy_quantile < 1,
        f"loss_type={trainer.loss_type!r}": trainer.loss_type not in LOSS_TYPES,
        f"neftune_noise_alpha={args.neftune_noise_alpha}": args.neftune_noise_alpha,
        "fp8": trainer.accelerator.mixed_precision == "fp8",  # the scale of a tensor depends on all rows
        "a processor of images": isinstance(trainer.processing_class, ProcessorMixin),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def models_of(trainer: Any) -> list[Any]:
    """The policy, the reference model and the local teacher, as far as a trainer has them."""
    local = vars(trainer).get(TEACHER)
    models = trainer.model, trainer.ref_model, None if local is None else local.model
    return [model for model in models if model is not None]


def _dependence_on_length(trainer: Any) -> str | None:
    """Name what forbids cropping answers to the longest one that runs."""
    if trainer.pad_to_multiple_of:
        return f"pad_to_multiple_of={trainer.pad_to_multiple_of}"
    return next(filter(None, map(rope_of_longest_row, models_of(trainer))), None)


def _dependence_on_order(trainer: Any) -> str | None:
    """Name what forbids moving answers to another micro-batch of the same optimizer step.

    All loss types but bnpo give an answer a weight that does not depend on its micro-batch. They divide by the number
    of answers, which all micro-batches share, by `max_completion_length`, or by the tokens of the whole rollout.
    """
    if trainer.loss_type == "bnpo":  # divides by the tokens of the micro-batch
        return f"loss_type={trainer.loss_type!r}"
    if trainer._entropy_bonus_enabled:  # a mean over the tokens of the micro-batch
        return "an entropy bonus"
    if method_before(trainer, _PREPARE) is not getattr(GRPOTrainer, _PREPARE):
        return f"an override of {_PREPARE}"
    return None


def loss_mask(batch: Mapping[str, Any]) -> Tensor:
    """Mask [B, C] of the completion tokens in TRL's loss."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def live_rows(batch: Mapping[str, Any], loss_type: str, by_advantage: bool = True) -> Tensor:
    """Find the answers with a token whose mask and, `by_advantage`, whose advantage and weight are not 0. Bool [B]."""
    if not by_advantage:
        return loss_mask(batch).ne(0).any(1)
    live = live_tokens(batch["advantages"], loss_mask(batch))  # advantages are [B, C] in some subclasses
    if "importance_sampling_ratio" in batch and loss_type != "vespo":  # vespo does not multiply by it
        live = live & batch["importance_sampling_ratio"].ne(0)  # [B, C] or [B, 1]
    return live.any(1)


def widths_of(mask: Tensor) -> Tensor:
    """Count the columns of each row [B, C] up to its last unmasked one. Returns [B]."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (columns * (mask != 0)).amax(1)


def rows_by_length(lengths: Tensor) -> Tensor:
    """Order the rows of an optimizer step by length, so that a micro-batch has little padding.

    The k-th micro-batches of all ranks get rows of similar length. Rows that do not run come first, the longest rows
    last: ranks exchange gradients during the backward of the last micro-batch, which hides more of it if the
    micro-batch is large. Rows of the same length stay in their order.

    Args:
        lengths: of all rows, [ranks, micro-batches, rows]. Rows that do not run have length 0.

    Returns:
        The old places of the rows in the flattened `lengths`, [ranks, micro-batches * rows].
    """
    order = lengths.flatten().argsort(stable=True).view(-1, len(lengths))
    order[1::2] = order[1::2].flip(1)  # otherwise the last rank would always get the longest row
    return order.t()


def tokens_of_slowest(lengths: Tensor, packs: bool = False) -> Tensor:
    """Count the tokens of the slowest rank in each micro-batch, with padding unless `packs`: [micro-batches]."""
    return (lengths.sum(2) if packs else (lengths > 0).sum(2) * lengths.amax(2)).amax(0)


class _Steps(TrainerCallback):
    """Records where the current optimizer step and the current rollout began."""

    def __init__(self, trainer: Any, forget: Callable[[], None]) -> None:
        self.trainer = trainer
        self.forget = forget
        self.number = 0  # TRL's number of the first micro-batch of the optimizer step
        self.generated = 0  # optimizer steps before the rollout

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if 0 < state.global_step != self.generated:  # a checkpoint with other weights than the rollout's
            self.forget()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.number = self.trainer._step

    on_step_end = on_step_begin  # transformers omits on_step_begin after a change of gradient_accumulation_steps


class LiveAnswers:
    """Runs a trainer's model on the answers that have a gradient, and computes old log-probs where they are needed.

    TRL computes the old log-probs of all answers when it has generated them. Until the first optimizer step, the new
    log-probs are the old ones. So batches that are trained before it keep theirs. Those of the other batches are
    computed just before that step, by the same calls of the model as in training: same rows, same width.
    """

    def __init__(self, trainer: Any, rows: LiveRows, distillation: Distillation | None = None) -> None:
        """Replace methods of the trainer. Before training, call `decide`."""
        self.trainer = trainer
        self.rows = rows
        self.distillation = distillation
        self.requested: bool | None = None
        self.skipping = Skipping()
        self._batch: Mapping[str, Any] | None = None  # the batch whose log-probs are computed, if rows are skipped
        self._log_probs: Tensor | None = None  # the latest, [B, C]
        self._sums = torch.zeros(4)  # of entropies, tokens and rows that ran, and all rows, in the latest batch
        self._means: dict[str, tuple[float, float]] = {}  # sums and counts of token means since the last log
        self._defers = False  # the old log-probs of the rollout that is being made are computed later
        self._is_rollout = False  # the next log-probs are these old log-probs
        self._is_deferred = False  # the old log-probs of this rollout are computed later
        self._orders: list[Tensor] = []  # of the rows of each optimizer step of this rollout, by `rows_by_length`
        self._steps = _Steps(trainer, self._forget_rollout)
        trainer.add_callback(self._steps)
        self._replaced: dict[str, Any] = {}
        for name, ours in {
            _COMPUTE_LOSS: self._compute_loss,
            METHOD: self._compute_log_probs,
            _GENERATE: self._generate,
            _SAMPLE: self._sample,
            _PREPARE: self._prepare_inputs,
        }.items():
            self._replaced[name] = getattr(trainer, name)
            replace_method(trainer, name, ours)

    def decide(self) -> None:
        """Decide again about skipping, cropping, moving and the backward, for the next optimizer step."""
        interaction = interaction_of_rows(self.trainer.model)  # takes 20 ms for 3,000 modules
        self.skipping = skipping(self.trainer, self.requested, interaction)
        self.rows.decide(interaction)

    def _live(self, batch: Mapping[str, Any]) -> Tensor:
        return live_rows(batch, self.trainer.loss_type, self.skipping.by_advantage)

    def _skips(self) -> bool:
        return self.skipping.is_on and self.trainer.model.training

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        skips = self._skips()
        self._batch = inputs if skips else None
        distillation = self.distillation if self.trainer.model.training else None
        if distillation is not None:
            distillation.batch = inputs
        try:
            loss = self._replaced[_COMPUTE_LOSS](model, inputs)
            if distillation is not None:
                loss = loss + distillation.term()
        finally:
            self._batch = None
            if distillation is not None:
                distillation.forget()
        if self._is_deferred and self.trainer.model.training:
            inputs.setdefault(_OLD, self._log_probs)
        if skips:
            self._log(inputs)
        return loss

    def _compute_log_probs(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> tuple[Any, ...]:
        if self._is_rollout:
            self._is_rollout, self._is_deferred = False, True
            placeholder = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return placeholder, None, None
        if self._batch is None:
            given = {name for name, x in options.items() if x is not None}
            is_rollout = given == {"batch_size"} and not args and self.skipping.crops and not torch.is_grad_enabled()
            run = self._run_by_length if is_rollout else self._replaced[METHOD]
            if self.distillation is not None and self.distillation.batch is not None:
                rows, unmasked = torch.arange(len(input_ids)), loss_mask(self.distillation.batch)
                self._ask(rows, input_ids, attention_mask, unmasked, logits_to_keep)
            out = run(model, input_ids, attention_mask, logits_to_keep, *args, **options)
        else:
            out = self._run_live_rows(self._batch, model, input_ids, attention_mask, **options)
        self._log_probs = out[0].detach()
        return out

    def _run_live_rows(
        self, batch: Mapping[str, Any], model: Any, input_ids: Tensor, attention_mask: Tensor, **options: Any
    ) -> tuple[Any, ...]:
        """Compute log-probs [B, C] and entropies [B, C] with the live rows of a batch. Other entropies are 0."""
        mask, live = loss_mask(batch), self._live(batch)
        prompt = input_ids.shape[1] - mask.shape[1]
        rows, width = self._extent(mask, live)
        # Rows that do not run need a ratio of 1: 0 * exp(new - old) is NaN if the exponential overflows.
        full = batch.get(_OLD, torch.zeros(mask.shape, device=mask.device))
        if len(rows) == 0:
            # All ranks must call the model, and AdamW must get gradients of 0 instead of None. Two tokens are enough.
            ids = input_ids[:1, prompt - 1 : prompt + 1] if self.skipping.crops else input_ids[:1]
            keep = 1 if self.skipping.crops else width
            self._ask(rows, ids, torch.ones_like(ids), mask, keep)
            with self.rows.uncounted():
                log_probs, entropy, *rest = self._replaced[METHOD](model, ids, torch.ones_like(ids), keep, **options)
            full = full + 0 * log_probs.sum()
            place = None
        else:
            ids, attended = (x[rows, : prompt + width] for x in (input_ids, attention_mask))
            self._ask(rows, ids, attended, mask, width)
            log_probs, entropy, *rest = self._replaced[METHOD](model, ids, attended, width, **options)
            place = rows[:, None], torch.arange(width, device=rows.device)
            full = full.to(log_probs.dtype).index_put(place, log_probs)
        if entropy is not None:
            entropies = torch.zeros_like(full)
            entropy = entropies if place is None else entropies.index_put(place, entropy)
            ran = mask * live[:, None]
            sums = (entropy.detach() * ran).sum(), ran.sum(), live.sum(), torch.ones_like(live).sum()
            self._sums = torch.stack([x.float() for x in sums])
        return full, entropy, *rest

    def _ask(self, rows: Tensor, ids: Tensor, attended: Tensor, unmasked: Tensor, width: int) -> None:
        if self.distillation is not None:
            self.distillation.ask(rows, ids, attended, unmasked, width, self.skipping.layout)

    def _run_by_length(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int, **_: None
    ) -> tuple[Tensor, None, None]:
        """Compute the log-probs [B, C] of a rollout, `batch_size` rows of similar length at a time."""
        prompt = input_ids.shape[1] - logits_to_keep
        mask = attention_mask[:, prompt:]
        parts = []
        order = self._lengths(attention_mask[:, :prompt], mask).argsort(stable=True)
        for rows in order.split(batch_size):
            width = max(int(widths_of(mask[rows]).max()), 1)
            ids, attended = (x[rows, : prompt + width] for x in (input_ids, attention_mask))
            log_probs = self._replaced[METHOD](model, ids, attended, width)[0]
            parts.append(nn.functional.pad(log_probs, (0, logits_to_keep - width)))
        return torch.cat(parts)[order.argsort()], None, None

    def _lengths(self, prompt_mask: Tensor, mask: Tensor) -> Tensor:
        """Count the columns [B] that each row needs, if it runs alone."""
        prompts = prompt_mask.shape[1] if self.skipping.layout == "as given" else prompt_mask.sum(1)
        return prompts + widths_of(mask)

    def _extent(self, mask: Tensor, live: Tensor) -> tuple[Tensor, int]:
        """Find the live rows, and the width of their answers. Reads the host once."""
        width, *runs = torch.cat([(widths_of(mask) * live).amax(0, True), live]).tolist()
        rows = torch.tensor([i for i, run in enumerate(runs) if run], dtype=torch.long, device=mask.device)
        return rows, width if self.skipping.crops else mask.shape[1]

    def _log(self, batch: Mapping[str, Any]) -> None:
        """Log the share of rows that ran, and make means over tokens independent of the order of rows.

        TRL averages the means of micro-batches, and its entropy counts rows that did not run as 0.
        """
        trainer = self.trainer
        sums = torch.cat([self._sums, loss_mask(batch).sum()[None]])
        entropy, ran_tokens, ran, rows, tokens = trainer.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = trainer._metrics["train"]
        if not metrics["gspo/rows_run"]:  # first micro-batch since the last log
            self._means = {}
        metrics["gspo/rows_run"].append(ran / rows)
        values = {"entropy": (entropy, ran_tokens)}
        names = (*_TOKEN_MEANS, *(_CLIP_MEANS if trainer.importance_sampling_level == "token" else ()))
        values |= {name: (metrics[name][-1] * tokens, tokens) for name in names if metrics.get(name)}
        for name, value in values.items():
            total, count = map(sum, zip(value, self._means.get(name, (0.0, 0.0)), strict=True))
            self._means[name] = total, count
            metrics[name] = [total / max(count, 1)]
        if self._means["entropy"][1] == 0:
            del metrics["entropy"]

    def _generate(self, inputs: Any) -> dict[str, Any]:
        if not self.trainer.model.training:
            return self._replaced[_GENERATE](inputs)
        self._is_deferred = False
        self._defers = self._skips() and self._can_defer()
        self._steps.generated = self.trainer.state.global_step
        try:
            output = self._replaced[_GENERATE](inputs)
        finally:
            self._defers = self._is_rollout = False
        if self._is_deferred:
            del output[_OLD]
        if self.distillation is not None:
            self.distillation.collect(inputs, output)
        return output

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        output = self._replaced[_SAMPLE](*args, **kwargs)  # a rollout_func may compute log-probs, too
        self._is_rollout = self._defers
        return output

    def _can_defer(self) -> bool:
        """True if TRL would compute old log-probs for a rollout, and nothing but the loss would read them."""
        trainer, args = self.trainer, self.trainer.args
        is_aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
        needs_all = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        is_trls = self._generates_as_trl() and method_before(trainer, _PREPARE) is getattr(GRPOTrainer, _PREPARE)
        return is_trls and not is_aligned and not needs_all

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer = self.trainer
        previous = trainer._buffered_inputs
        if trainer._step == self._steps.number:
            self.decide()
        inputs = self._replaced[_PREPARE](generation_batch)
        if not trainer.model.training:
            return inputs
        if trainer._buffered_inputs is not previous:
            self._orders = []
            has_moved = self._sort_rows()
            self._forget_old_log_probs(has_moved)
        elif self._orders and trainer._step == self._steps.number:
            size = len(trainer._buffered_inputs) // len(self._orders)
            if not (self.skipping.moves and self._steps_consist_of(size)):
                self._move_rows_back()
        inputs = trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
        if self._is_deferred and trainer.accelerator.sync_gradients:
            for batch in trainer._buffered_inputs:
                if batch is not inputs and _OLD not in batch:  # in the first optimizer step of the rollout only
                    batch[_OLD] = self._old_log_probs(batch)
        return inputs

    def _sort_rows(self) -> bool:
        """Sort the rows of each optimizer step of a new rollout by length.

        Returns:
            True if rows have moved to other ranks.
        """
        trainer, args = self.trainer, self.trainer.args
        per_update = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        if not (self.skipping.moves and self._steps_consist_of(per_update)):
            return False
        batches = trainer._buffered_inputs
        lengths = [self._lengths(batch[_PROMPTS[1]], loss_mask(batch)) * self._live(batch) for batch in batches]
        lengths = torch.stack(lengths)[None]
        shares = False
        if trainer.accelerator.num_processes > 1 and self._can_share():
            of_all = trainer.accelerator.gather(lengths)  # [ranks, batches, rows]
            alone, shared = torch.zeros((), device=lengths.device), torch.zeros((), device=lengths.device)
            again = torch.zeros((), device=lengths.device)  # tokens of `_forget_old_log_probs`
            packs = self.skipping.layout == "packed"
            for i, part in enumerate(of_all.split(per_update, 1)):
                alone += tokens_of_slowest(part.flatten(1).sort(1).values.view_as(part), packs).sum()
                cost = tokens_of_slowest(part.flatten()[rows_by_length(part)].view_as(part), packs).sum()
                shared += cost
                again += cost * (i > 0 and _OLD in batches[0])
            shares = bool(3 * (alone - shared) > again)  # a forward and backward take as long as three forwards
            lengths = of_all if shares else lengths
        self._orders = [rows_by_length(part) for part in lengths.split(per_update, 1)]
        self._reorder(self._orders)
        return shares

    def _can_share(self) -> bool:
        """True if rows may move to other ranks, where prompts may have more padding on the left. All ranks must ask."""
        trainer, batch = self.trainer, self.trainer._buffered_inputs[0]
        rows = {name: x for name, x in batch.items() if not (x is None or (isinstance(x, Tensor) and x.ndim == 0))}
        parallel = getattr(trainer.accelerator, "parallelism_config", None)
        can = (
            self.skipping.crops
            and all(name in _KEYS and isinstance(x, Tensor) for name, x in rows.items())
            and not any(getattr(parallel, f"{kind}_size", 1) > 1 for kind in ("tp", "cp", "sp"))  # equal rows
            and (_OLD not in batch or self._generates_as_trl())
        )
        kinds = [(name, str(x.dtype), x.ndim, x.shape[2:]) for name, x in sorted(rows.items())] if can else None
        every = gather_object([(kinds, rows[_PROMPTS[0]].shape[1] if can else 0)])
        widths = {width for _, width in every}
        is_alike = kinds is not None and all(other == kinds for other, _ in every)
        return is_alike and (len(widths) == 1 or positions_are_relative(trainer.model))

    def _generates_as_trl(self) -> bool:
        """True if TRL's own code makes the rollout, so that its old log-probs come from the model that generated it."""
        return method_before(self.trainer, _GENERATE) is getattr(GRPOTrainer, _GENERATE)

    def _forget_old_log_probs(self, everywhere: bool) -> None:
        """Remove old log-probs that TRL has computed with other rows and padding than training has.

        Other rows and padding change roundings, and so the ratios of the first optimizer step, which are 1. There, the
        new log-probs are the old ones. `everywhere`: those of later steps are removed too, and computed again.
        """
        trainer = self.trainer
        if self._skips() and self._generates_as_trl() and _OLD in trainer._buffered_inputs[0]:
            left = trainer.args.gradient_accumulation_steps - (trainer._step - self._steps.number)
            for batch in trainer._buffered_inputs[: None if everywhere else left]:
                del batch[_OLD]
            self._is_deferred = True

    def _move_rows_back(self) -> None:
        self._reorder([order.flatten().argsort().view_as(order) for order in self._orders])
        self._orders = []

    def _reorder(self, orders: list[Tensor]) -> None:
        """Reorder the rows of each optimizer step.

        `orders` has one order per step: [ranks, rows] if rows change ranks, otherwise [1, rows].
        """
        batches, moved = self.trainer._buffered_inputs, []
        size = len(batches) // len(orders)
        for i, order in enumerate(orders):
            group = batches[i * size : (i + 1) * size]
            # Until the first optimizer step of a rollout, some batches may lack old log-probs. Then all are recomputed.
            names = sorted(name for name in group[0] if all(name in batch for batch in group))
            names.sort(key=_PROMPTS[0].__ne__)  # split_tensor_dict counts the rows of the first one
            rows = {name: self._rows(name, [batch[name] for batch in group], order) for name in names}
            moved += split_tensor_dict(rows, size)
        self.trainer._buffered_inputs = moved

    def _rows(self, name: str, values: list[Any], order: Tensor) -> Any:
        """Join what batches have for a key, and put the rows in order. Numbers of a rollout have no rows."""
        accelerator = self.trainer.accelerator
        if values[0] is None or (isinstance(values[0], Tensor) and values[0].ndim == 0):
            return values[0]
        if not isinstance(values[0], Tensor):
            rows = [row for value in values for row in value]
            return [rows[i] for i in order[0].tolist()]
        joined = torch.cat(values)
        if len(order) == 1:
            return joined[order[0]]
        if joined.ndim > 1:
            filled = self.trainer.processing_class.pad_token_id if name.endswith("_ids") else 0
            padded = accelerator.pad_across_processes(joined, 1, filled, pad_first=name in _PROMPTS)
            joined = padded.to(joined.dtype)  # accelerate makes int64 of bool if it pads
        return accelerator.gather(joined)[order[accelerator.process_index]]

    def _steps_consist_of(self, size: int) -> bool:
        """True if an optimizer step is made of groups of `size` batches of the rollout, within which rows may move.

        Steps begin elsewhere after training was interrupted within a step, or have another length after a callback has
        changed gradient_accumulation_steps.
        """
        return self._steps.number % size == 0 and self.trainer.args.gradient_accumulation_steps % size == 0

    def _old_log_probs(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the log-probs [B, C] of a batch with the present weights."""
        model, checkpointing = self.trainer.model, self.trainer.args.gradient_checkpointing_kwargs
        ids, attended = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        with torch.no_grad(), disable_gradient_checkpointing(model, checkpointing):
            return self._run_live_rows(batch, model, ids, attended)[0]

    def _forget_rollout(self) -> None:
        """Make TRL generate a new rollout if old log-probs of the current one are still missing."""
        buffered = self.trainer._buffered_inputs
        if buffered is not None and self._is_deferred and any(_OLD not in batch for batch in buffered):
            self.trainer._buffered_inputs = None


class EqualRewards:
    """Sets the advantages of groups with bitwise equal rewards to exactly 0, or only says once that they are not 0.

    TRL rounds the mean of a group. Eight rewards of 0.7 get an advantage of 6e-4, and AdamW moves the weights by such
    advantages as fast as by any others.
    """

    def __init__(self, trainer: Any, zeroes: bool) -> None:
        """Replace methods of the trainer."""
        self.trainer = trainer
        self.zeroes = zeroes
        self._rewards = torch.empty(0)  # [answers of all ranks, functions]
        self._is_announced = False
        self._calculate, self._generate = trainer._calculate_rewards, getattr(trainer, _GENERATE)
        if method_before(trainer, _GENERATE) is not getattr(GRPOTrainer, _GENERATE):
            return  # with advantages of its own, which may differ where rewards are equal
        replace_method(trainer, "_calculate_rewards", self._calculate_rewards)
        replace_method(trainer, _GENERATE, self._generate_and_score)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards = self._calculate(*args, **kwargs)
        return self._rewards

    def _generate_and_score(self, inputs: Any) -> dict[str, Any]:
        output = self._generate(inputs)
        trainer = self.trainer
        mode = "train" if trainer.model.training else "eval"
        equal = self._equal(trainer.num_generations if mode == "train" else trainer.num_generations_eval)
        logged = trainer._logs["advantages"]
        latest = equal.tolist()[-len(logged) :]  # TRL keeps as many advantages as a rollout has
        places = [i for i, is_equal in enumerate(latest, -len(latest)) if is_equal]
        largest = max((abs(logged[i]) for i in places), default=0.0)
        if self.zeroes:
            first = trainer.accelerator.process_index * len(output["advantages"])
            local = equal[first : first + len(output["advantages"])]
            output["advantages"] = output["advantages"].masked_fill(local, 0)
            for i in places:
                logged[i] = 0.0
            if trainer.scale_rewards != "batch" and trainer.multi_objective_aggregation == "sum_then_normalize":
                shares = trainer._metrics[mode]["frac_reward_zero_std"]
                shares[-1] = max(shares[-1], equal.float().mean().item())
        if largest and not self._is_announced and trainer.accelerator.is_main_process:
            self._is_announced = True
            print(f"gspo_kernels: {self._announcement(largest)}", flush=True)
        return output

    def _announcement(self, largest: float) -> str:
        noise = f"groups with equal rewards had advantages from rounding, up to {largest:.1e}."
        if self.zeroes:
            return f"{noise} They are set to 0, unless GSPOConfig(zero_equal_rewards=False) keeps them"
        return (
            f"{noise} frac_reward_zero_std may miss these groups, they run through the model, and their noise "
            "moves the weights. GSPOTrainer sets such advantages to 0; accelerate_trainer keeps TRL's"
        )

    def _equal(self, group: int) -> Tensor:
        """Find the answers whose groups have equal rewards. Returns bool [answers of all ranks]."""
        rewards = self._rewards
        if self.trainer.multi_objective_aggregation == "sum_then_normalize":
            is_scored = ~rewards.isnan().all(1, keepdim=True)
            totals = (rewards * self.trainer.reward_weights.to(rewards.device)).nansum(1, keepdim=True)
            rewards = torch.where(is_scored, totals, torch.nan)
        groups = rewards.reshape(-1, group, rewards.shape[1])
        first = groups[:, :1]
        is_equal = (groups == first) | (groups.isnan() & first.isnan())
        return is_equal.all(2).all(1).repeat_interleave(group)
