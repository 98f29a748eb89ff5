"""Log-probs and entropies for verl's Megatron engine, as functions with the names that verl gives them.

    model_forward_fused.linear_cross_entropy   = linear_cross_entropy
    model_forward_fused.fused_output_processor = fused_output_processor

`options` are gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`; set them by `functools.partial`.
Without vocab_size, Megatron's padding of the vocabulary counts, as in verl's functions. Results are fp32
(fp64 for fp64 inputs) and equal on the ranks of the tensor-parallel group.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks

from ..megatron.output_layer import Targets, output_processor

__all__ = ["fused_output_processor", "linear_cross_entropy", "linear_topk_log_probs"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies. Replaces verl's `linear_cross_entropy`.

    As in verl, the gradient of hidden is only this rank's term of the sum over the tensor-parallel group. Sequence
    parallelism, which verl enables together with tensor parallelism, adds up the terms.

    Args:
        hidden: [..., H], of all tokens of the tensor-parallel group.
        weight: [V / TP, H].
        labels: int64 ids, one for each row of hidden, in the same order.
        reduction: must be "none".

    Returns:
        Log-probs and entropies, [tokens].
    """
    if reduction != "none":
        Checks("verl.megatron.linear_cross_entropy").fail("reduction", "'none'", reduction)
    out: Any = linear_log_probs(
        hidden.flatten(0, -2),
        weight,
        labels.flatten(),
        temperature=temperature,
        entropy=True,
        tp_group=dist_process_group,
        reduce_hidden="none" if dist_process_group is not None else "all",
        **options,
    )
    return out.log_probs, out.entropy


def linear_topk_log_probs(
    hidden: Tensor,
    weight: Tensor,
    topk_ids: Tensor,
    temperature: float = 1.0,
    dist_process_group: Any = None,
    chunk_size: int | None = None,
    **options: Any,
) -> Tensor:
    """Compute log-probs over the vocabulary at k ids per token. Replaces verl's `linear_topk_log_probs` (distillation).

    Args:
        hidden: [..., H].
        weight: [V / TP, H].
        topk_ids: ids of the full vocabulary, [..., k].
        chunk_size: not used.

    Returns:
        Log-probs, in the shape of topk_ids.
    """
    flat = topk_ids.flatten(0, -2)
    out = linear_log_probs(
        hidden.flatten(0, -2),
        weight,
        flat[:, 0].long(),
        temperature=temperature,
        extra_ids=flat,
        tp_group=dist_process_group,
        reduce_hidden="none" if dist_process_group is not None else "all",
        **options,
    )
    assert out.extra_log_probs is not None
    return out.extra_log_probs.view(topk_ids.shape)


def fused_output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor, context: Any, **_: Any
) -> SimpleNamespace:
    """Compute log-probs and entropies with Megatron Core 0.18 and later. Replaces verl's `fused_output_processor`.

    Unlike `linear_cross_entropy`, this also sums the gradient of the hidden states without sequence parallelism.

    Args:
        hidden_states: [S, 1, H], or [S / TP, 1, H] with sequence parallelism.
        output_layer, output_weight: as in `megatron.output_processor`.
        labels: [1, S], of packed sequences.
        context: has verl's temperature. Fields named after options of `Targets`, such as gradient_budget, are used.

    Returns:
        log_probs and entropy, [S], which is what verl reads from its CausalLMOutputForPPO.
    """
    names = ("vocab_size", "gradient_budget", "cache_mib", "backend")
    options = {name: getattr(context, name) for name in names if hasattr(context, name)}
    targets = Targets(labels, temperature=context.temperature, entropy=True, **options)
    out: Any = output_processor(
        hidden_states=hidden_states, output_layer=output_layer, output_weight=output_weight, context=targets
    )
    return SimpleNamespace(log_probs=out.log_probs.flatten(), entropy=out.entropy.flatten())
