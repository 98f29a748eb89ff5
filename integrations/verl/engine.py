"""verl's FSDP engine, with log-probs computed at the model's head and without logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.generic import ModelOutput
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_device_id  # pyright: ignore[reportMissingImports]
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # pyright: ignore[reportMissingImports]

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks

from ..backwards import SKIP_ROWS, BackwardMetrics, HeadSettings, RowShare
from ..huggingface import HeadOutput, fuse_head, skip_rows_without_gradient
from .config import (
    OPTIONS,
    SKIP,
    entropy_is_only_logged,
    head_settings,
    requested_skip,
    warn_of_settings_that_never_clip,
)
from .distillation import distillation_config, divergences, of_this_rank, warn_of_detached_divergence
from .row_checkpoint import reason_against_skipping
from .zero_advantage import LiveBatch, inexact_model, inexact_setting


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="gspo")
class GSPOEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine with log-probs computed without logits. VERL_ENGINE_VENDOR=gspo selects this engine.

    Top-k distillation reads the log-probs at the teacher's ids from the same pass, without verl's metrics of the
    overlap with the student's own top k. Batches whose loss needs logits (sum_pi_squared) run verl's own code.

    The dict model.fused_kernel_options may contain `gradient_budget` and `cache_mib`, arguments of `linear_log_probs`
    for the updates; `skip_zero_advantage`: whether answers with advantage 0 are left out of an update; and
    `skip_rows_without_gradient`: whether answers without a gradient, such as clipped ones, are left out of the backward
    of the layers. By default, they are left out wherever the gradients stay the same.

    The metrics of an update contain gspo/passes, gspo/dropped_gradient_mass and gspo/live_row_share of all tokens that
    ran, on all ranks; with `skip_zero_advantage` gspo/rows_run, the share of the answers that ran; and with
    `skip_rows_without_gradient` gspo/rows_differentiated, the share of these that had a gradient.

    Raises:
        ValueError: `use_fused_kernels` is set; or the budget and the coefficient of the entropy bonus are both nonzero;
            or `skip_zero_advantage` or `skip_rows_without_gradient` is True, but would change gradients or metrics.
        ValueError, TypeError: an option in model.fused_kernel_options is invalid.
        HeadError, TypeError: `fuse_head` does not support the model or its head.

    Warns:
        UserWarning: once each: every rollout gets a single update, so the importance ratio is always 1; the policy
            loss `gspo` or `gspo_kernels` has a clip window made for token ratios.
    """

    _updates = 0  # updates of the current rollout so far
    _settings = HeadSettings()
    _entropy_is_only_logged = False
    _distillation: Any = None  # verl's DistillationLossConfig, with a teacher
    _skip: bool | None = None  # skip_zero_advantage
    _inexact_model: str | None = None  # a part of the model that forbids skipping
    _rows: RowShare | None = None
    _skip_rows = ""  # skip_rows_without_gradient, for the line that is printed
    _printed = ""

    def _build_fsdp_module(self, module: Any) -> Any:
        self._backwards = BackwardMetrics()
        self._settings = head_settings(self.model_config)
        self._skip = requested_skip(self.model_config, SKIP)
        self._inexact_model = "quantization-aware training" if self._qat_enabled else inexact_model(module)
        if self.model_config.use_fused_kernels:
            Checks("GSPOEngine").fail("model.use_fused_kernels", "False (it selects verl's own fused log-probs)", True)
        self._install_row_checkpoint(module)
        module = super()._build_fsdp_module(module)
        fuse_head(module)
        return module

    def _install_row_checkpoint(self, module: Any) -> None:
        requested = requested_skip(self.model_config, SKIP_ROWS)
        reason = reason_against_skipping(self, module)
        if requested and reason:
            Checks(OPTIONS).fail(SKIP_ROWS, f"None or False with {reason}", True)
        is_on = requested is not False and reason is None
        self._skip_rows = f"{SKIP_ROWS}={is_on}{f' ({reason})' if reason and requested is None else ''}"
        if is_on and not self.engine_config.forward_only:
            self._rows = RowShare(skip_rows_without_gradient(module), _sum_over_ranks, get_device_id(), self.rank == 0)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        self._updates += 1
        # verl sets this flag in the last update of each rollout.
        is_last = tu.get_non_tensor_data(data=data, key="update_lr_scheduler", default=False)
        if "old_log_probs" in data:  # not SFT
            warn_of_settings_that_never_clip(data, loss_function, only_update=is_last and self._updates == 1)
        if is_last:
            self._updates = 0
        self._entropy_is_only_logged = entropy_is_only_logged(loss_function, self._settings)
        warn_of_detached_divergence(distillation_config(loss_function))
        self._backwards.begin()
        output = super().train_batch(data, loss_function)
        self._backwards.collect()
        # verl gathers the lists of all data-parallel ranks, which are equal, and averages them.
        metrics = self._backwards.take(dist.group.WORLD)
        if self._rows is not None:
            metrics |= self._rows.take()
        output["metrics"] |= {name: [value] for name, value in metrics.items()}
        return output

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        self._distillation = distillation_config(loss_function)
        if forward_only or not self._skips(data, loss_function):
            return super().forward_backward_batch(data, loss_function, forward_only)
        live = LiveBatch(data, loss_function, self.get_data_parallel_group())
        output = super().forward_backward_batch(live.data, live.loss)
        output["metrics"]["gspo/rows_run"] = [live.share]
        return output

    def _skips(self, data: Any, loss_function: Any) -> bool:
        """Decide whether answers with advantage 0 run in an update. Print the decision whenever it changes."""
        if "advantages" not in data:  # SFT
            return False
        reason = self._inexact_model or inexact_setting(data, loss_function)
        if self._skip and reason:
            expected = f"None or False with {reason}, where skipping would not be exact"
            Checks(OPTIONS).fail(SKIP, expected, True)
        skips = self._skip is not False and not reason
        why = f" ({reason})" if reason and self._skip is None else ""
        line = f"gspo_kernels: {SKIP}={skips}{why}, {self._skip_rows}"
        if line != self._printed and self.rank == 0:
            print(line)
        self._printed = line
        return skips

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        self._backwards.collect()  # the backward of the previous micro-batch
        inputs, args = super().prepare_model_inputs(micro_batch)
        if not self._needs_logits(micro_batch):
            inputs["with_head"] = _Score(micro_batch, args, self._settings, self._entropy_is_only_logged)
        return inputs, args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        if not isinstance(output, HeadOutput):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        # If a batch has use_fused_kernels, verl takes log-probs instead of logits, unpads them and gathers them.
        output = output.result
        micro_batch = micro_batch.copy()
        tu.assign_non_tensor(micro_batch, use_fused_kernels=True)
        results = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if output.extra_log_probs is not None:
            offsets = micro_batch["input_ids"].offsets()
            student = output.extra_log_probs
            is_packed = "temperature_rmpad" in output_args
            if is_packed:
                student = student[0]
            else:
                student = student[torch.arange(student.shape[1], device=student.device) < offsets.diff()[:, None]]
            for name, x in divergences(student, micro_batch, self._distillation).items():
                x = self._gather_and_unpad_packed(x, output_args["pad_size"]) if is_packed else x
                results[name] = torch.nested.nested_tensor_from_jagged(x, offsets)
        return results

    def _needs_logits(self, micro_batch: Any) -> bool:
        """True if the loss for this batch reads the logits, not only log-probs and entropies."""
        if tu.get_non_tensor_data(data=micro_batch, key="calculate_sum_pi_squared", default=False):
            return True
        return _has_teacher(micro_batch) and self._distillation is None


def _sum_over_ranks(counts: Tensor) -> Tensor:
    dist.all_reduce(counts)
    return counts


def _has_teacher(micro_batch: Any) -> bool:
    return tu.get_non_tensor_data(data=micro_batch, key="distillation_use_topk", default=False)


class _Score:
    """A function for `with_head`: it computes the log-probs of one micro-batch, [1, N] if packed, [B, T] if padded.

    Args:
        args: the second result of verl's `prepare_model_inputs`.
        entropy_is_only_logged: return entropies without a gradient.
    """

    def __init__(
        self, micro_batch: Any, args: dict[str, Any], settings: HeadSettings, entropy_is_only_logged: bool
    ) -> None:
        self.settings = settings
        # verl adds the entropies to the loss even with a coefficient of 0. Their gradients would be zeros, but would
        # select a slower kernel, and a gradient budget does not allow gradients of entropies.
        self.detach_entropy = entropy_is_only_logged
        self.entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        self.targets = args["input_ids_rmpad_rolled"]  # [N], the next token of every position
        self.mask = _predicts_response(micro_batch, len(self.targets))
        self.offsets = None
        temperature = args.get("temperature_rmpad")
        if temperature is None:  # verl pads this batch and has one temperature per sequence
            temperature = args["temperature"][:, None]
            self.offsets = micro_batch["input_ids"].offsets()
        self.extra_ids = of_this_rank(micro_batch["teacher_ids"]) if _has_teacher(micro_batch) else None  # [N, k]
        self.temperature: Tensor | None = None if args["temperature_is_one"] else temperature

    def __call__(self, hidden: Tensor, lm_head: Any, **options: Any) -> ModelOutput:
        shape = hidden.shape[:-1]
        out = linear_log_probs(
            hidden,
            lm_head,
            self._in_shape(self.targets, shape),
            mask=self._in_shape(self.mask, shape),
            temperature=1.0 if self.temperature is None else self.temperature.expand(shape),
            entropy=self.entropy,
            extra_ids=None if self.extra_ids is None else self._in_shape(self.extra_ids, shape),
            **self.settings._asdict(),
            **options,
        )
        entropy = out.entropy.detach() if self.detach_entropy and out.entropy is not None else out.entropy
        return ModelOutput(log_probs=out.log_probs, entropy=entropy, extra_log_probs=out.extra_log_probs)

    def _in_shape(self, flat: Tensor, shape: torch.Size) -> Tensor:
        """Reshape [N, ...] to [1, N, ...] if verl packs the batch; otherwise pad it with 0 to `shape` [B, T]."""
        if self.offsets is None:
            return flat[None]
        nested = torch.nested.nested_tensor_from_jagged(flat.long(), self.offsets)
        return torch.nested.to_padded_tensor(nested, padding=0, output_size=(*shape, *flat.shape[1:]))


def _predicts_response(micro_batch: Any, positions: int) -> Tensor:
    """Mark the positions that predict a token of a response, [positions] bool.

    All positions are True in three cases: the batch does not contain prompts and responses; the caller asks for all
    log-probs; or sequence parallelism pads the packed batch or splits it over ranks, so that positions do not match
    input_ids.
    """
    input_ids = micro_batch["input_ids"]
    return_all = tu.get_non_tensor_data(data=micro_batch, key="return_model_output", default=False)
    has_responses = "responses" in micro_batch and "prompts" in micro_batch
    if return_all or not has_responses or positions != len(input_ids.values()):
        return torch.ones(positions, dtype=torch.bool, device=input_ids.device)
    prompts = micro_batch["prompts"]
    responses = micro_batch["responses"]
    ends = input_ids.offsets()[1:]
    if responses.is_nested:
        lengths = responses.offsets().diff()
    else:
        lengths = micro_batch["attention_mask"][:, prompts.shape[1] :].sum(1)
    # A sequence ends before the index `ends`. Position ends - lengths - 1 predicts the first token of its response, and
    # position ends - 1 predicts nothing. `change` is +1 at the first position that predicts a token of the response,
    # and -1 after the last such position. The cumulative sum of `change` is the mask.
    change = torch.zeros(positions + 1, dtype=torch.long, device=input_ids.device)
    change.index_add_(0, (ends - lengths - 1).clamp(min=0), torch.ones_like(ends))
    change.index_add_(0, ends - 1, -torch.ones_like(ends))
    return change.cumsum(0)[:-1] > 0
