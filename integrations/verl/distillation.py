"""verl's top-k distillation, from log-probs at the teacher's ids instead of logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.trainer.distillation.fsdp.losses import kl_divergence  # pyright: ignore[reportMissingImports]
from verl.trainer.distillation.losses import distillation_ppo_loss  # pyright: ignore[reportMissingImports]
from verl.utils.ulysses import (  # pyright: ignore[reportMissingImports]
    get_ulysses_sequence_parallel_world_size,
    slice_input_tensor,
)

from gspo_kernels.validation import warn_once


def distillation_config(loss_function: Any) -> Any:
    """The DistillationLossConfig of a worker's loss, functools.partial(distillation_ppo_loss, ...); None for others."""
    if getattr(loss_function, "func", None) is not distillation_ppo_loss:
        return None
    return loss_function.keywords["distillation_config"].distillation_loss


def of_this_rank(nested: Tensor) -> Tensor:
    """The positions of a packed batch that this rank of the sequence-parallel group runs, [N, k] of [B, j, k]."""
    flat = nested.values()
    return slice_input_tensor(flat, dim=0) if get_ulysses_sequence_parallel_world_size() > 1 else flat


def divergences(student: Tensor, micro_batch: Any, config: Any) -> dict[str, Tensor]:
    """Compute what verl's `compute_forward_kl_topk` computes from logits, [N] each, except the overlap.

    Args:
        student: log-probs at the teacher's ids, [N, k].
        config: verl's DistillationLossConfig.
    """
    teacher = of_this_rank(micro_batch["teacher_logprobs"])
    masses = {"student_mass": student.detach().exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    if config.log_prob_min_clamp is not None:
        student, teacher = (x.clamp_min(config.log_prob_min_clamp) for x in (student, teacher))
    return {"distillation_losses": kl_divergence(log_q=student, log_p=teacher), **masses}


def warn_of_detached_divergence(config: Any) -> None:
    """Warn once if the divergence at k ids is an advantage."""
    if config is not None and config.loss_settings.use_topk and config.use_policy_gradient:
        warn_once(
            f"gspo_kernels: distillation_loss.use_policy_gradient=True makes {config.loss_mode} an advantage. It does "
            "not depend on the sampled token, so its expected gradient is 0. Set use_policy_gradient=False",
            stacklevel=4,
        )
