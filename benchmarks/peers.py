"""How the others are called, as their own trainers call them. Each is imported when it is first measured.

hidden [N, H], weight [V, H], ids [N] -> log-probs [N], unless said otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .workloads import CLIP_HIGH, CLIP_LOW, KL_COEF, Workload

if TYPE_CHECKING:
    from .workloads import Old


def trl_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """TRL's fused head without the entropy that its GRPO trainer logs: the least it can do."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    return ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, COLUMNS, softcap, 1.0, ())[0]


def liger_loss(w: Workload, old: Old, hidden: Tensor, weight: Tensor) -> Tensor:
    """Liger's whole GRPO loss, as TRL's `use_liger_kernel` set it up until 1.13. It goes sequence by sequence."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0 if old.ref_log_probs is None else KL_COEF,
        use_ref_model=old.ref_log_probs is not None,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )
    return loss(
        hidden,
        weight,
        w.target_ids,
        torch.ones_like(w.target_ids),
        w.advantages,
        ref_per_token_logps=old.ref_log_probs,
        old_per_token_logps=old.log_probs,
    )[0]


def liger_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """What Liger's GRPO loss computes inside, for the old log-probs that it wants to be given."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _selective_logprob_forward

    return _selective_logprob_forward(hidden, weight, ids)[0]


def liger_cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses = liger_fused_linear_cross_entropy(hidden, weight, ids, reduction="none", softcap=softcap)
    assert isinstance(losses, Tensor)  # nothing else was asked for
    return -losses


def cut_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """As it comes: its backward leaves out entries under a threshold of its own, a gradient budget of a kind."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, ids, softcap=softcap, reduction="none")


def uncut_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """The same with all entries."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, ids, softcap=softcap, reduction="none", filter_eps=None)


def verl_torch_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """verl's `impl_backend: torch`. It computes entropies too, wanted or not."""
    from verl.utils.experimental.torch_functional import (  # pyright: ignore[reportMissingImports] - conflicts with .venv
        FusedLinearForPPOFunction,
    )

    return FusedLinearForPPOFunction.apply(hidden, weight, ids, 1.0)[0]


def verl_triton_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """verl's `impl_backend: triton`."""
    from verl.utils.kernel.linear_cross_entropy import (  # pyright: ignore[reportMissingImports] - conflicts with .venv
        linear_cross_entropy,
    )

    return linear_cross_entropy(hidden, weight, ids, 1.0, "none")[0]


def torch_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """PyTorch's own (from 2.13 on). On a CPU in chunks as large as verl's: its automatic choice there is a few rows, of
    which each reads the whole head."""
    chunks = {} if hidden.is_cuda else {"batch_chunk_size": 512, "chunking_method": None}
    options = torch.nn.LinearCrossEntropyOptions(**chunks)
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)
