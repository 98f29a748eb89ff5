"""TRL's GRPOTrainer with every log-prob from `gspo_kernels`: one class or one line.

    trainer = GSPOTrainer(model, reward_funcs, args=GSPOConfig(...), train_dataset=...)
    accelerate_trainer(trainer)  # or a trainer, of any subclass of GRPOTrainer, that you have

Since 1.15 TRL asks its model for log-probs (`model(..., fused_lm_head=True)`) and computes the loss from them. That
call is answered here by `linear_log_probs`, from inside the head module's own call: old, reference and new log-probs
come from the same kernel, logits never are less than fp32, and tokens whose gradient the loss makes zero cost no
backward. The loss, its options and its metrics are TRL's own code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from trl.trainer import utils
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels import linear_log_probs

from .huggingface import base_model, fuse_head

_ATTRIBUTE = "_gspo_log_probs"


@dataclass
class GSPOConfig(GRPOConfig):
    """GRPOConfig with GSPO as in its paper: one ratio per sequence, every sequence of equal weight, 3e-4 and 4e-4.

    TRL's own defaults with importance_sampling_level="sequence" are LUSPO (loss_type="dapo") and a window of 0.2.
    """

    importance_sampling_level: str = field(default="sequence", metadata={"help": "One ratio per sequence."})
    loss_type: str = field(default="grpo", metadata={"help": "A mean over tokens, then over sequences."})
    epsilon: float = field(default=3e-4, metadata={"help": "Lower bound of the window, arXiv 2507.18071, 5.1."})
    epsilon_high: float | None = field(default=4e-4, metadata={"help": "Upper bound of the window."})


class GSPOTrainer(GRPOTrainer):
    """GRPOTrainer whose log-probs are ours; arguments as TRL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        accelerate_trainer(self)


def accelerate_trainer(trainer: GRPOTrainer) -> None:
    """Answer the log-prob calls of `trainer`'s model and of its reference model; a second time nothing happens.

    Raises:
        RuntimeError: a TRL that does not ask its model for log-probs (before 1.15).
        ValueError: `cast_lm_head_to_fp32`, which makes a head of another dtype than the hidden states.
        HeadError, TypeError, ValueError: of `fuse_head`, for a model or a head that is not understood.
    """
    if not hasattr(utils, "add_fused_lm_head"):
        raise RuntimeError("accelerate_trainer: TRL must be 1.15 or later, which asks its model for log-probs")
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            "accelerate_trainer: cast_lm_head_to_fp32 must be False, got True (logits are fp32 here in any dtype)"
        )
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            _answer(base_model(trainer.accelerator.unwrap_model(model)), trainer.temperature)


def _answer(model: Any, temperature: float) -> None:
    if getattr(model, _ATTRIBUTE, False):
        return
    fuse_head(model)
    below = model.forward

    @functools.wraps(below)
    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return below(*args, **kwargs)
        return _log_probs(below, temperature, *args, **kwargs)

    model.forward = forward
    setattr(model, _ATTRIBUTE, True)


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
