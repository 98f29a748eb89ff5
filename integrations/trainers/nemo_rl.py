"""NeMo RL's log-probs at the head of a Megatron model.

    model_utils.from_parallel_hidden_states_to_logprobs = nemo_rl.log_probs

`options` are gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`; set them by `functools.partial`.
Without vocab_size, Megatron's padding of the vocabulary counts, as in NeMo RL's function. Results are fp32
(fp64 for fp64 inputs) and equal on the ranks of the tensor-parallel group.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_kernels.validation import Checks

from ..megatron.output_layer import gathered
from .shards import log_probs_of_shard, next_tokens

__all__ = ["log_probs"]


def log_probs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    **options: Any,
) -> Tensor:
    """Compute log-probs of each next token. Replaces NeMo RL's `from_parallel_hidden_states_to_logprobs`.

    Args:
        tensor_parallel_hidden_states: [S / TP, B, H]. Sequence parallelism is expected if TP > 1, as in NeMo RL.
        output_weight_layer: [V / TP, H], this rank's rows of the head.
        target: [B, S] int64, the input ids: this function shifts them.
        vocab_start_index: the first id of this rank's rows.
        inference_only: run under `no_grad`.
        cp_group: None, or a group of one rank.
        runtime_gather_output, vocab_end_index, chunk_size: not used.

    Returns:
        [B, S - 1]. Position s has the log-prob of target[:, s + 1].
    """
    check = Checks("nemo_rl.log_probs")
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        check.fail("cp_group", "None or a group of one rank, as in NeMo RL", f"{dist.get_world_size(cp_group)} ranks")
    ids, mask = next_tokens(target)
    options |= {"mask": mask.t(), "tp_group": tp_group}
    with torch.no_grad() if inference_only else nullcontext():
        several = dist.get_world_size(tp_group) > 1
        hidden = gathered(tensor_parallel_hidden_states, tp_group) if several else tensor_parallel_hidden_states
        out = log_probs_of_shard(check, hidden, output_weight_layer, ids.t(), vocab_start_index, **options)
        return out.t()[:, :-1].contiguous()
