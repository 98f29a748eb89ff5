"""Answers with advantage 0: the advantage is exactly 0, and the answers do not run through the model.

Without KL, entropy bonus and router loss, the gradient of an answer with advantage 0 is exactly 0. `LiveAnswers` runs
the model on the other answers only. TRL's loss still gets the log-probs of all answers, so that its divisors and clip
fractions do not change: an answer that did not run gets its old log-probs, and its ratio is 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import ProcessorMixin
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels.validation import Checks

from .config import LOSS_TYPES, METHOD
from .logs import method_before, replace_method

_COMPUTE_LOSS, _GENERATE, _PREPARE = "_compute_loss", "_generate_and_score_completions", "_prepare_inputs"
_OLD = "old_per_token_logps"  # TRL's key


class Skipping(NamedTuple):
    """Whether answers with advantage 0 skip the model, and the setting as the trainer prints it."""

    is_on: bool
    description: str


def skipping(place: str, trainer: Any, requested: bool | None) -> Skipping:
    """Decide whether answers with advantage 0 skip the model.

    Args:
        place: the function or class that the user called, for messages.
        requested: None means the setting of the trainer's GSPOConfig or, if that is None too, wherever it is exact.

    Raises:
        TypeError: the setting is not a bool or None.
        ValueError: it is True, and skipping would not be exact. The message names the reason.
    """
    check = Checks(place)
    wanted = getattr(trainer.args, "skip_zero_advantage", None) if requested is None else requested
    if wanted is not None:
        check.boolean("skip_zero_advantage", wanted)
    reason = why_inexact(trainer)
    if wanted and reason:
        check.fail("skip_zero_advantage", f"None or False with {reason}, where skipping would not be exact", True)
    if reason or wanted is False:
        return Skipping(False, f"skip_zero_advantage=False{f' ({reason})' if wanted is None else ''}")
    uncropped = why_uncropped(trainer)
    return Skipping(True, f"skip_zero_advantage=True{f' (padding kept: {uncropped})' if uncropped else ''}")


def why_inexact(trainer: Any) -> str | None:
    """Name what gives answers with advantage 0 a gradient or lets them change other answers' gradients, or None."""
    args = trainer.args
    names = (_COMPUTE_LOSS, "compute_loss", METHOD)
    replaced = [name for name in names if method_before(trainer, name) is not getattr(GRPOTrainer, name)]
    reasons = {
        f"an override of {', '.join(replaced)}": bool(replaced),
        f"beta={trainer.beta}": trainer.beta != 0,
        "an entropy bonus": getattr(trainer, "_entropy_bonus_enabled", False),
        f"router_aux_loss_coef={getattr(args, 'router_aux_loss_coef', 0)}": getattr(trainer, "aux_loss_enabled", False),
        f"top_entropy_quantile={trainer.top_entropy_quantile}": trainer.top_entropy_quantile < 1,
        f"loss_type={trainer.loss_type!r}": trainer.loss_type not in LOSS_TYPES,
        f"neftune_noise_alpha={args.neftune_noise_alpha}": bool(args.neftune_noise_alpha),
        "fp8": trainer.accelerator.mixed_precision == "fp8",  # the scales of a tensor depend on all rows
        "a processor of images": isinstance(trainer.processing_class, ProcessorMixin),
    }
    return next((reason for reason, applies in reasons.items() if applies), None) or _why_rows_interact(trainer.model)


def _why_rows_interact(model: nn.Module) -> str | None:
    """Name what makes the gradient of a row depend on the other rows that run, or None."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"dropout={module.p} in {name}"
        # Models also keep the rate of functional dropout and of router noise in such attributes.
        for key, value in vars(module).items():
            if any(word in key for word in ("drop", "jitter")) and _is_positive(value):
                return f"{key}={value} in {name}"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"batch normalization in {name}"
        # An expert that only skipped rows use would have no gradient instead of 0, and AdamW would leave it out.
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            return f"experts that are separate modules in {name}"
    return None


def _is_positive(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and x > 0


def why_uncropped(trainer: Any) -> str | None:
    """Name what forbids answers to be cropped to the longest that runs, or return None."""
    if getattr(trainer, "pad_to_multiple_of", None):
        return f"pad_to_multiple_of={trainer.pad_to_multiple_of}"
    for module in trainer.model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if kind in ("dynamic", "longrope"):  # the frequencies depend on the longest row
                return f"rope_type={kind!r}"
    return None


def loss_mask(batch: Mapping[str, Any]) -> Tensor:
    """Mask [B, C] of the completion tokens in TRL's loss."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def live_rows(batch: Mapping[str, Any], loss_type: str) -> Tensor:
    """Find the answers of which a token has a mask, an advantage and a weight that are not 0. Returns bool [B]."""
    advantages = batch["advantages"]  # [B], or [B, C] in some subclasses
    live = (loss_mask(batch) != 0) & (advantages if advantages.ndim == 2 else advantages[:, None]).ne(0)
    if "importance_sampling_ratio" in batch and loss_type != "vespo":  # vespo does not multiply by it
        live = live & batch["importance_sampling_ratio"].ne(0)  # [B, C] or [B, 1]
    return live.any(1)


class LiveAnswers:
    """Runs a trainer's model on the answers that have a gradient, and computes old log-probs only where they are needed.

    TRL computes the old log-probs of a rollout when it is generated. Until the first optimizer step, the new log-probs
    are the old ones. So the batches that are trained before it keep theirs, and those of the other batches are computed
    just before that step, by the same calls of the model as in training: same rows, same width.
    """

    is_on = False  # set by `accelerate_trainer`

    def __init__(self, trainer: Any) -> None:
        """Replace methods of the trainer until `restore_trainer`."""
        self.trainer = trainer
        self.returns_aux_loss = "compute_aux_loss" in inspect.signature(getattr(trainer, METHOD)).parameters
        self._batch: Mapping[str, Any] | None = None  # whose log-probs are computed
        self._log_probs: Tensor | None = None  # the latest, [B, C]
        self._sums: list[Tensor] = []  # of entropies, tokens, rows that ran and rows of the batch
        self._is_rollout = False  # the next log-probs are those of a rollout, which are computed later
        self._is_deferred = False  # the old log-probs of this rollout are computed later
        self._trl: dict[str, Any] = {}
        for name, ours in {
            _COMPUTE_LOSS: self._compute_loss,
            METHOD: self._compute_log_probs,
            _GENERATE: self._generate,
            _PREPARE: self._prepare_inputs,
        }.items():
            self._trl[name] = getattr(trainer, name)
            replace_method(trainer, name, ours)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if not self.trainer.model.training:
            return self._trl[_COMPUTE_LOSS](model, inputs)
        skips = self.is_on and why_inexact(self.trainer) is None
        self._batch = inputs if skips else None
        try:
            loss = self._trl[_COMPUTE_LOSS](model, inputs)
        finally:
            self._batch = None
        if self._is_deferred:
            inputs.setdefault(_OLD, self._log_probs)
        if skips:
            self._log()
        return loss

    def _compute_log_probs(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> Any:
        if self._is_rollout:
            self._is_rollout, self._is_deferred = False, True
            placeholder = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return (placeholder, None, None) if self.returns_aux_loss else (placeholder, None)
        if self._batch is None:
            out = self._trl[METHOD](model, input_ids, attention_mask, logits_to_keep, *args, **options)
        else:
            out = self._run_live_rows(self._batch, model, input_ids, attention_mask, *args, **options)
        self._log_probs = out[0].detach()
        return out

    def _run_live_rows(
        self,
        batch: Mapping[str, Any],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Compute log-probs [B, C] and entropies [B, C] with the live rows of a batch. Other entropies are 0."""
        mask, live = loss_mask(batch), live_rows(batch, self.trainer.loss_type)
        rows = live.nonzero()[:, 0]
        width = mask.shape[1]
        prompt = input_ids.shape[1] - width
        crops = why_uncropped(self.trainer) is None
        old = batch.get(_OLD)
        # An arbitrary log-prob would not do: 0 * exp(new - old) is NaN if the exponential overflows.
        full = torch.zeros(mask.shape, device=mask.device) if old is None else old
        if len(rows) == 0:
            # All ranks must call the model, and AdamW must get gradients of 0 instead of None. Two tokens are enough.
            ids = input_ids[:1, prompt - 1 : prompt + 1] if crops else input_ids[:1]
            keep = ids.shape[1] - (1 if crops else prompt)
            log_probs, entropy, *rest = self._trl[METHOD](model, ids, torch.ones_like(ids), keep, *args, **options)
            full = full + 0 * log_probs.sum()
            entropies = torch.zeros_like(full).detach()
        else:
            if crops:
                width = int(mask[rows].any(0).nonzero().max()) + 1
            end = prompt + width
            ids, attended = input_ids[rows, :end], attention_mask[rows, :end]
            log_probs, entropy, *rest = self._trl[METHOD](model, ids, attended, width, *args, **options)
            place = rows[:, None], torch.arange(width, device=rows.device)
            full = full.to(log_probs.dtype).index_put(place, log_probs)
            entropies = torch.zeros_like(full).detach()
            if entropy is not None:
                entropies = entropies.index_put(place, entropy.detach())
        ran = mask * live[:, None]
        self._sums = [(entropies * ran).sum(), ran.sum(), live.sum(), torch.ones_like(live).sum()]
        return full, None if entropy is None else entropies, *rest

    def _log(self) -> None:
        """Log the share of rows that ran, and correct the entropy, which TRL has just logged as a mean over all rows."""
        sums = torch.stack([x.float() for x in self._sums])
        entropy, tokens, ran, rows = self.trainer.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = self.trainer._metrics["train"]
        metrics["gspo/rows_run"].append(ran / rows)
        if ran < rows:
            metrics["entropy"].pop()
            metrics["entropy"] += [entropy / tokens] if tokens else []
            if not metrics["entropy"]:  # TRL would divide by 0
                del metrics["entropy"]

    def _generate(self, inputs: Any) -> dict[str, Any]:
        self._is_deferred = False
        self._is_rollout = self.is_on and self._can_defer()
        try:
            output = self._trl[_GENERATE](inputs)
        finally:
            self._is_rollout = False
        if self._is_deferred:
            del output[_OLD]
        return output

    def _can_defer(self) -> bool:
        """True if TRL would compute old log-probs for the rollout, and only the loss would read them."""
        trainer, args = self.trainer, self.trainer.args
        is_aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
        needs_all = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        is_trls = all(method_before(trainer, name) is getattr(GRPOTrainer, name) for name in (_GENERATE, _PREPARE))
        return trainer.model.training and is_trls and not is_aligned and not needs_all and why_inexact(trainer) is None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = self._trl[_PREPARE](generation_batch)
        trainer = self.trainer
        if self._is_deferred and trainer.model.training and trainer.accelerator.sync_gradients:
            for batch in trainer._buffered_inputs:
                if batch is not inputs and _OLD not in batch:  # in the first optimizer step of the rollout only
                    batch[_OLD] = self._old_log_probs(batch)
        return inputs

    def _old_log_probs(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the log-probs [B, C] of a batch with the present weights."""
        model = self.trainer.model
        ids, attended = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        self._batch = batch
        try:
            with (
                torch.no_grad(),
                disable_gradient_checkpointing(model, self.trainer.args.gradient_checkpointing_kwargs),
            ):
                log_probs, *_ = self._compute_log_probs(model, ids, attended, batch["completion_ids"].shape[1])
        finally:
            self._batch = None
        return log_probs

    def forget_rollout(self) -> None:
        """Make TRL generate a new rollout if the present one has no old log-probs yet."""
        buffered = self.trainer._buffered_inputs
        if self._is_deferred and buffered is not None and any(_OLD not in batch for batch in buffered):
            self.trainer._buffered_inputs = None


class EqualRewards:
    """Sets the advantages of groups with bitwise equal rewards to exactly 0.

    TRL rounds the mean of a group. Eight rewards of 0.7 get an advantage of -6e-4, and AdamW moves the weights by such
    advantages as fast as by any others.
    """

    def __init__(self, trainer: Any) -> None:
        """Replace methods of the trainer until `restore_trainer`."""
        self.trainer = trainer
        self._rewards = torch.empty(0)  # [answers of all ranks, functions]
        self._is_announced = False
        self._calculate, self._generate = trainer._calculate_rewards, getattr(trainer, _GENERATE)
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
        first = trainer.accelerator.process_index * len(output["advantages"])
        local = equal[first : first + len(output["advantages"])]
        output["advantages"] = output["advantages"].masked_fill(local, 0)
        logged, largest = trainer._logs["advantages"], 0.0
        for i, is_equal in enumerate(reversed(equal.tolist()[-len(logged) :]), 1):
            if is_equal:
                largest = max(largest, abs(logged[-i]))
                logged[-i] = 0.0
        if trainer.scale_rewards != "batch" and trainer.multi_objective_aggregation == "sum_then_normalize":
            shares = trainer._metrics[mode]["frac_reward_zero_std"]
            shares[-1] = max(shares[-1], equal.float().mean().item())
        if largest and not self._is_announced and trainer.accelerator.is_main_process:
            self._is_announced = True
            print(
                f"gspo_kernels: groups with equal rewards get the advantage 0. TRL's rounding had given up to {largest:.1e}; "
                "GSPOConfig(zero_equal_rewards=False) keeps it",
                flush=True,
            )
        return output

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
