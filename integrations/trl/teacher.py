"""On-policy distillation: a divergence between the policy and a teacher joins TRL's loss.

The policy's log-probs at the teacher's ids come from the forward that computes those of the answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import create_model_from_path

from gspo_kernels.distillation import TopK, linear_top_k, topk_divergence
from gspo_kernels.validation import Checks

from ..huggingface.teacher import shared_vocabulary
from .logs import add_to_logs
from .model_forward import ExtraIds, Layout, rearranged

PLACE = "GSPOTrainer"
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"  # of a rollout_func


class LocalTeacher:
    """A frozen model that scores answers, on the same device as the policy."""

    def __init__(self, trainer: Any, teacher: Any) -> None:
        """Load a teacher, or freeze the caller's, and prepare it as TRL prepares its reference model.

        Args:
            teacher: a transformers model, its folder or its hub id.

        Raises:
            ValueError, TypeError: it is not a model, it is the policy, or has another vocabulary.
        """
        check = Checks(PLACE)
        policy = trainer.model
        tokenizer = None
        if isinstance(teacher, str | os.PathLike):
            options = dict(trainer.args.model_init_kwargs or {})
            if trainer.args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
                options["device_map"] = None  # otherwise "auto"
            options.setdefault("trust_remote_code", trainer.args.trust_remote_code)
            options.setdefault("dtype", policy.dtype)
            options.setdefault("attn_implementation", policy.config._attn_implementation)
            tokenizer = AutoTokenizer.from_pretrained(teacher, trust_remote_code=options["trust_remote_code"])
            teacher = create_model_from_path(os.fspath(teacher), **options)
        if not isinstance(teacher, nn.Module):
            check.fail("teacher", "a transformers model, its folder or its hub id", teacher, TypeError)
        if teacher is trainer.accelerator.unwrap_model(policy):
            check.fail("teacher", "another model than the policy, which it would freeze", teacher)
        processor = trainer.processing_class
        try:
            self.columns = shared_vocabulary(policy, teacher, getattr(processor, "tokenizer", processor), tokenizer)
        except ValueError as error:
            raise ValueError(f"{PLACE}: teacher must be {error}") from error
        teacher.requires_grad_(False).eval()
        if trainer.is_deepspeed_enabled:
            teacher = prepare_deepspeed(teacher, trainer.accelerator)
        elif trainer.is_fsdp_enabled:
            teacher = prepare_fsdp(teacher, trainer.accelerator)
        else:
            teacher = trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
        self.trainer = trainer
        self.model = teacher
        self.temperature = trainer.temperature  # read once, like the policy's
        self.head_precision: str | None = None  # as for the policy

    @torch.no_grad()
    def top_k(self, input_ids: Tensor, attention_mask: Tensor, mask: Tensor, layout: Layout) -> TopK:
        """Find the likeliest ids [B, C, k] of the last C tokens.

        Args:
            input_ids, attention_mask: [B, T].
            mask: bool [B, C].
        """
        trainer, width = self.trainer, mask.shape[1]
        scored = nn.functional.pad(mask, (input_ids.shape[1] - 1 - width, 0))  # [B, T - 1]
        targets = torch.where(scored, input_ids[:, 1:], -100)
        batch = None if layout == "as given" else rearranged(layout, input_ids, attention_mask, targets)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}

        def score(hidden: Tensor, lm_head: Any, vocab_size: int | None = None, **options: Any) -> TopK:
            states, unmasked = (hidden[:, :-1], scored) if batch is None else (hidden, batch.targets != -100)
            options |= {"mask": unmasked, "temperature": self.temperature, "head_precision": self.head_precision}
            columns = self.columns if vocab_size is None else min(vocab_size, self.columns)
            return linear_top_k(states, lm_head, trainer.args.distillation_k, vocab_size=columns, **options)

        with trainer.accelerator.autocast():
            top = self.model(**(inputs if batch is None else batch.inputs), with_head=score).result
        return TopK(*((x if batch is None else batch.as_given(x))[:, -width:] for x in top))


class Distillation:
    """Adds `distillation_coef` times the mean divergence per token to the loss of a trainer, and logs it.

    The mean divides by the tokens of the rollout per optimizer step, like TRL's loss_type "dapo", whatever the
    loss_type is. So micro-batches add up, and rows may move between them.
    """

    def __init__(self, trainer: Any, teacher: LocalTeacher | None) -> None:
        """`teacher`: None if each rollout has the teacher's ids and log-probs."""
        self.trainer = trainer
        self.teacher = teacher
        self.batch: Mapping[str, Any] | None = None  # during a training loss
        self.extra: ExtraIds | None = None  # for the next forward of the policy
        self._mask = self._log_probs = torch.empty(0)  # of the teacher, [b, C] and [b, C, k]
        self._sums = torch.zeros(3, device=trainer.accelerator.device)  # divergence, teacher's probability, tokens
        add_to_logs(trainer, self._take)

    def ask(
        self, rows: Tensor, input_ids: Tensor, attention_mask: Tensor, unmasked: Tensor, width: int, layout: Layout
    ) -> None:
        """Make the next forward compute log-probs of the teacher's ids. Only inside a training loss.

        Args:
            rows: of the batch, which the forward gets as input_ids [b, T]; none if it gets part of the first row only.
            unmasked: mask [B, C] of the batch.
            width: columns of the answers in the forward.
        """
        if self.batch is None:
            return
        taken = rows if len(rows) else rows.new_zeros(1)
        self._mask = unmasked[taken, :width].ne(0) & (len(rows) > 0)
        if self.teacher is None:
            top = TopK(self.batch[IDS][taken, :width], self.batch[LOG_PROBS][taken, :width])
        else:
            top = self.teacher.top_k(input_ids, attention_mask, self._mask, layout)
        self.extra = ExtraIds(torch.where(self._mask[..., None], top.ids, -1))
        self._log_probs = top.log_probs

    def term(self) -> Tensor:
        """Compute the term of the batch, after the forward."""
        trainer, args, batch, extra = self.trainer, self.trainer.args, self.batch, self.extra
        assert batch is not None
        if extra is None or extra.log_probs is None:
            raise RuntimeError(f"{PLACE}: a teacher needs log-probs from the model's head, which an override replaces")
        options = {"kind": args.distillation_kind, "tail": args.distillation_tail, "ids": extra.ids, "mask": self._mask}
        total = topk_divergence(extra.log_probs, self._log_probs, **options).sum()
        inside = torch.where(extra.ids >= 0, self._log_probs, -torch.inf).exp().sum()
        self._sums += torch.stack([total.detach(), inside, self._mask.sum()])
        per_step = trainer.current_gradient_accumulation_steps / args.steps_per_generation
        tokens = batch["num_items_in_batch"].clamp(min=1) / trainer.accelerator.num_processes * per_step
        return self._coef() * total / tokens

    def forget(self) -> None:
        """End the training loss."""
        self.batch = self.extra = None
        self._mask = self._log_probs = torch.empty(0)

    def collect(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> None:
        """Add what the rollout has of the teacher to `output`: ids [B, C, k], -1 where absent, and log-probs.

        Raises:
            ValueError: an answer has no ids or log-probs, or not one row per token.
        """
        if self.teacher is not None:
            return
        check, mask = Checks(PLACE), output["completion_mask"]
        lengths = mask.sum(1).tolist()  # 0 for masked truncated answers
        for name, empty, dtype in ((IDS, -1, torch.int64), (LOG_PROBS, -torch.inf, torch.float32)):
            values = []
            for i, (example, length) in enumerate(zip(inputs, lengths, strict=True)):
                expected = f"[{length or 'tokens'}, k] for answer {i}, returned by rollout_func (or pass teacher=)"
                if example.get(name) is None:
                    check.fail(name, expected, None)
                x = torch.as_tensor(example[name], dtype=dtype)
                if x.ndim != 2 or len(x) != (length or len(x)):
                    check.fail(name, expected, x)
                values.append(x[: mask.shape[1]])
            joined = torch.full((*mask.shape, max(x.shape[1] for x in values)), empty, dtype=dtype)
            for row, x in zip(joined, values, strict=True):
                row[: len(x), : x.shape[1]] = x
            output[name] = joined.to(mask.device)
        if output[IDS].shape != output[LOG_PROBS].shape:
            check.fail(LOG_PROBS, f"{list(output[IDS].shape)} like {IDS}", output[LOG_PROBS])

    def _coef(self) -> float:
        args, state = self.trainer.args, self.trainer.state
        left = 1 - state.global_step / state.max_steps if args.distillation_schedule == "linear" else 1.0
        return args.distillation_coef * left

    def _take(self) -> dict[str, float]:
        """The metrics since the last call, over all ranks; {} without tokens."""
        divergence, inside, tokens = self.trainer.accelerator.reduce(self._sums, reduction="sum").tolist()
        self._sums.zero_()
        return {"gspo/distillation": divergence / tokens, "gspo/teacher_mass": inside / tokens} if tokens else {}
