"""Call other packages as trainers call them. Each package is imported when it is first measured.

All functions except `liger_loss` take hidden [N, H], weight [V, H], ids [N] and a soft-cap, and return log-probs [N].
The functions for Liger's GRPO loss, verl and PyTorch ignore the soft-cap. They are not measured on heads that have one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .workloads import CLIP_HIGH, CLIP_LOW, Workload


def trl_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run TRL's fused head without entropies. TRL's GRPO trainer also computes entropies, which costs more."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    return ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, COLUMNS, softcap, 1.0, ())[0]


def trl_fp32_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run TRL's fused head on fp32 casts of its inputs, as `cast_lm_head_to_fp32=True` does in TRL 1.16.

    TRL 1.13 and earlier made full fp32 logits; the fused head does not. TRL casts the head once, when the trainer
    starts. Here each call casts it, so the measured time includes the cast, and the measured memory the fp32 copy.
    """
    return trl_log_probs(hidden.float(), weight.float(), ids, softcap)


def liger_loss(w: Workload, old_log_probs: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Run Liger's GRPO loss as TRL up to 1.13 did for `use_liger_kernel=True`. It loops over the sequences."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_type="grpo",
        importance_sampling_level="sequence",
    )  # fmt: skip  # related arguments share a line
    mask = torch.ones_like(w.target_ids)
    return loss(hidden, weight, w.target_ids, mask, w.advantages, old_per_token_logps=old_log_probs)[0]


def liger_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run the log-prob function that Liger's GRPO loss uses internally. It computes the old log-probs for the loss."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _selective_logprob_forward

    return _selective_logprob_forward(hidden, weight, ids)[0]


def liger_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses = liger_fused_linear_cross_entropy(hidden, weight, ids, reduction="none", softcap=softcap)
    assert isinstance(losses, Tensor)  # with other options the result would be a tuple
    return -losses


def liger_scaled_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run Liger's log-prob function for reinforcement learning. On Hopper, its kernels are written in CuTe DSL."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids)


def cut_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None, **options: Any) -> Tensor:
    """Run cut-cross-entropy. By default it leaves out gradient entries below a threshold (`filter_eps`)."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, ids, softcap=softcap, reduction="none", **options)


def verl_torch_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run the head that verl uses with `impl_backend: torch`. It always computes entropies as well."""
    from verl.utils.experimental.torch_functional import (  # pyright: ignore[reportMissingImports] - verl's requirements conflict with .venv's
        FusedLinearForPPOFunction,
    )

    return FusedLinearForPPOFunction.apply(hidden, weight, ids, 1.0)[0]


def verl_triton_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run the head that verl uses with `impl_backend: triton`."""
    from verl.utils.kernel.linear_cross_entropy import (  # pyright: ignore[reportMissingImports] - verl's requirements conflict with .venv's
        linear_cross_entropy,
    )

    return linear_cross_entropy(hidden, weight, ids, 1.0, "none")[0]


def torch_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run `linear_cross_entropy` of PyTorch 2.13 and later.

    Its default chunks on a CPU have a few rows, and each chunk reads the entire head. We set 512 rows, as verl does.
    """
    chunks = {} if hidden.is_cuda else {"batch_chunk_size": 512, "chunking_method": None}
    options = torch.nn.LinearCrossEntropyOptions(**chunks)
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)
