"""AReaL's log-probs and entropies at the head of a Megatron model.

    megatron_engine.chunked_lm_head_logprobs_entropy = areal.log_probs_and_entropy

`options` are gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`; set them by `functools.partial`.
Without vocab_size, Megatron's padding of the vocabulary counts, as in AReaL's function. Results are fp32
(fp64 for fp64 inputs) and equal on the ranks of the tensor-parallel group.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks

from ..megatron.output_layer import gathered, layer_options

__all__ = ["log_probs_and_entropy"]

STATISTICS = ["vocab_min_logits", "vocab_max_logits", "vocab_mean_logits", "vocab_norm_logits"]
ChunkedLMHeadOutput: Any = namedtuple("ChunkedLMHeadOutput", ["logprobs", "entropy", *STATISTICS])  # like AReaL's


def log_probs_and_entropy(
    output_layer: Any,
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    logit_scale: float = 1.0,
    **options: Any,
) -> Any:
    """Compute log-probs and entropies. Replaces AReaL's `chunked_lm_head_logprobs_entropy`.

    Args:
        output_layer: AReaL's head. Its settings say how hidden states are sharded and who sums their gradient.
        hidden_states: [S, B, H], or [S / TP, B, H] with sequence parallelism.
        weight: [V / TP, H].
        labels: [S, B] or [S * B] int64, already shifted.
        chunk_size: not used.

    Returns:
        AReaL's ChunkedLMHeadOutput, with fields [S * B]. The entropies have no gradient, as in AReaL. The statistics of
        the logits, which AReaL only logs, are NaN, because the logits are never complete.
    """
    if output_layer.config.defer_embedding_wgrad_compute:
        Checks("areal.log_probs_and_entropy").fail("defer_embedding_wgrad_compute", "False", True)
    if getattr(output_layer, "fp32_operands", False):
        hidden_states, weight = hidden_states.float(), weight.float()
    if output_layer.sequence_parallel:
        hidden_states = gathered(hidden_states, output_layer.tp_group)
    out: Any = linear_log_probs(
        hidden_states.flatten(0, -2),
        weight,
        labels.flatten(),
        temperature=temperature,
        logit_scale=logit_scale,
        entropy=True,
        **layer_options(output_layer),
        **options,
    )
    unknown = torch.full_like(out.log_probs, torch.nan, requires_grad=False)
    kind = getattr(
        sys.modules.get("areal.models.mcore.vocab_parallel_head"), "ChunkedLMHeadOutput", ChunkedLMHeadOutput
    )
    return kind(out.log_probs, out.entropy.detach(), unknown, unknown, unknown, unknown)
