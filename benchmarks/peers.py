"""Call other packages as trainers call them. Each package is imported when it is first measured.

Functions named `*_log_probs` take hidden [N, H], weight [V, H], ids [N] and a soft-cap, and return log-probs [N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .workloads import CLIP_HIGH, CLIP_LOW, KL_COEF, Workload

if TYPE_CHECKING:
    from .workloads import Old


def trl_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run TRL's fused head without entropies. (TRL's GRPO trainer computes entropies too, which costs more.)"""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    return ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, COLUMNS, softcap, 1.0, ())[0]


def trl_fp32_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run TRL's fused head on fp32 casts of its inputs, as `cast_lm_head_to_fp32=True` does in TRL 1.16.

    No full logits are made (TRL 1.13 and earlier made them, in fp32). TRL casts the head once, when the trainer starts.
    Here each call casts the head, so the step's memory includes the fp32 copy and its time includes the cast.
    """
    return trl_log_probs(hidden.float(), weight.float(), ids, softcap)


def liger_loss(w: Workload, old: Old, hidden: Tensor, weight: Tensor) -> Tensor:
    """Run Liger's GRPO loss, configured as by `use_liger_kernel` until TRL 1.13. The loss loops over the sequences."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0 if old.ref_log_probs is None else KL_COEF, use_ref_model=old.ref_log_probs is not None,
        epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_type="grpo", importance_sampling_level="sequence",
    )  # fmt: skip  # lines by subject
    mask = torch.ones_like(w.target_ids)
    return loss(
        hidden, weight, w.target_ids, mask, w.advantages, ref_per_token_logps=old.ref_log_probs,
        old_per_token_logps=old.log_probs,
    )[0]  # fmt: skip  # lines by subject


def liger_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run the log-prob function inside Liger's GRPO loss, to compute the old log-probs that the loss takes."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _selective_logprob_forward

    return _selective_logprob_forward(hidden, weight, ids)[0]


def liger_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses = liger_fused_linear_cross_entropy(hidden, weight, ids, reduction="none", softcap=softcap)
    assert isinstance(losses, Tensor)  # with other options the result would be a tuple
    return -losses


def cut_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None, **options: Any) -> Tensor:
    """Run cut-cross-entropy. By default it skips gradient entries below a threshold (`filter_eps`)."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, ids, softcap=softcap, reduction="none", **options)


def verl_torch_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run verl's `impl_backend: torch`, which always computes entropies as well."""
    from verl.utils.experimental.torch_functional import (  # pyright: ignore[reportMissingImports] - conflicts with .venv
        FusedLinearForPPOFunction,
    )

    return FusedLinearForPPOFunction.apply(hidden, weight, ids, 1.0)[0]


def verl_triton_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run verl's `impl_backend: triton`."""
    from verl.utils.kernel.linear_cross_entropy import (  # pyright: ignore[reportMissingImports] - conflicts with .venv
        linear_cross_entropy,
    )

    return linear_cross_entropy(hidden, weight, ids, 1.0, "none")[0]


def torch_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Run PyTorch's own fused head, new in 2.13.

    On a CPU the default chunk is a few rows, and each chunk reads the whole head. So chunks have 512 rows, as in verl.
    """
    chunks = {} if hidden.is_cuda else {"batch_chunk_size": 512, "chunking_method": None}
    options = torch.nn.LinearCrossEntropyOptions(**chunks)
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)
