"""Log-probs with the signatures of the functions that trainers on Megatron Core call at the head.

    verl      model_forward_fused.linear_cross_entropy                   = verl_linear_cross_entropy
    verl      model_forward_fused.fused_output_processor                 = verl_output_processor
    NeMo RL   model_utils.from_parallel_hidden_states_to_logprobs        = nemo_rl_logprobs
    SkyRL     model_utils._fused_lm_head_logprob_apply                   = skyrl_fused_logprobs
    SkyRL     megatron_model_wrapper.from_parallel_hidden_to_logprobs    = skyrl_logprobs
    AReaL     megatron_engine.chunked_lm_head_logprobs_entropy           = areal_logprobs_entropy

docs/integrations.md has the complete lines, and the commits of the trainers that these functions were written for. No
trainer is imported. Sizes: S positions, B sequences, hidden size H, V ids. Every rank of the tensor-parallel group has
V / TP rows of the head. Results are fp32 (fp64 for fp64 inputs) and equal on these ranks.

`options` are gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`. Set them by `functools.partial`.
Without vocab_size, Megatron's padding of the vocabulary counts, as in the trainers' own functions. Errors are the same
as in `linear_log_probs`. vocab_start_index is the first id of this rank's rows. `inference_only=True` runs under
`no_grad`. vocab_end_index and chunk sizes are not used.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks

from .output_layer import Targets, gathered, layer_options, output_processor

__all__ = [
    "areal_logprobs_entropy",
    "nemo_rl_logprobs",
    "skyrl_fused_logprobs",
    "skyrl_logprobs",
    "verl_linear_cross_entropy",
    "verl_output_processor",
]


def verl_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies, as verl's `linear_cross_entropy`.

    As in verl, the gradient of hidden is this rank's term of the sum over the tensor-parallel group. Sequence
    parallelism, which verl switches on with tensor parallelism, adds the terms up.

    Args:
        hidden: [..., H], of all tokens of the tensor-parallel group.
        weight: [V / TP, H].
        labels: int64 ids, one for each row of hidden, in the same order.
        reduction: must be "none".

    Returns:
        Log-probs and entropies, [tokens].
    """
    if reduction != "none":
        Checks("verl_linear_cross_entropy").fail("reduction", "'none'", reduction)
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


def verl_output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor, context: Any, **_: Any
) -> SimpleNamespace:
    """Compute log-probs and entropies, as verl's `fused_output_processor`, with Megatron Core 0.18 and later.

    Unlike `verl_linear_cross_entropy`, this also sums the gradient of the hidden states without sequence parallelism.

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


def nemo_rl_logprobs(
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
    """Compute log-probs of each next token, as NeMo RL's `from_parallel_hidden_states_to_logprobs`.

    Args:
        tensor_parallel_hidden_states: [S / TP, B, H]. Sequence parallelism is expected if TP > 1, as in NeMo RL.
        output_weight_layer: [V / TP, H].
        target: [B, S] int64, the input ids: this function shifts them.
        cp_group: None, or a group of one rank.
        runtime_gather_output: not used.

    Returns:
        [B, S - 1]. Position s has the log-prob of target[:, s + 1].
    """
    check = Checks("nemo_rl_logprobs")
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        check.fail("cp_group", "None or a group of one rank, as in NeMo RL", f"{dist.get_world_size(cp_group)} ranks")
    ids, mask = _next_tokens(target)
    options |= {"mask": mask.t(), "tp_group": tp_group}
    with torch.no_grad() if inference_only else nullcontext():
        several = dist.get_world_size(tp_group) > 1
        hidden = gathered(tensor_parallel_hidden_states, tp_group) if several else tensor_parallel_hidden_states
        out = _of_shard(check, hidden, output_weight_layer, ids.t(), vocab_start_index, **options)
        return out.t()[:, :-1].contiguous()


def skyrl_fused_logprobs(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
    **options: Any,
) -> Tensor:
    """Compute log-probs, as SkyRL's `_fused_lm_head_logprob_apply`, for packed and padded batches.

    The gradient of hidden is as in `skyrl_logprobs`.

    Args:
        hidden: [B, S, H], cast to the dtype of the weight.
        weight: [V / TP, H], which SkyRL has divided by the temperature.
        target: [B, S] int64, already shifted.
        backend: not used.

    Returns:
        [B, S].
    """
    check = Checks("skyrl_fused_logprobs")
    with torch.no_grad() if inference_only else nullcontext():
        return _of_shard(check, hidden, weight, target, vocab_start_index, tp_group=tp_group, **options)


def skyrl_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
    **options: Any,
) -> Tensor:
    """Compute log-probs of each next token, as SkyRL's `from_parallel_hidden_to_logprobs`.

    As in SkyRL, the gradient of hidden is this rank's term of the sum over the tensor-parallel group. SkyRL gathered
    the hidden states of sequence parallelism before, and the backward of that gather adds the terms up.

    Args:
        hidden: [B, S / CP, H], cast to the dtype of the weight. Under context parallelism, S / CP positions in
            Megatron's order: of 2 CP equal parts, rank r has parts r and 2 CP - 1 - r.
        lm_head_weight: [V / TP, H].
        target: [B, S] int64, the input ids of all ranks: this function shifts them. S may leave out padding at the end.
        fused_backend: not used.

    Returns:
        [B, S - 1], of the tokens of all ranks of cp_group, on each of them. The backward adds up the gradients of these
        ranks, as SkyRL's does.
    """
    check = Checks("skyrl_logprobs")
    ranks = 1 if cp_group is None else dist.get_world_size(cp_group)
    width = target.shape[1]
    if hidden.shape[1] * ranks < width or (ranks > 1 and hidden.shape[1] % 2):
        expected = f"[B, S / CP, H], S / CP even with CP > 1, and S at least the {width} positions of target"
        check.fail("hidden", expected, hidden)
    ids, mask = (torch.nn.functional.pad(x, (0, hidden.shape[1] * ranks - width)) for x in _next_tokens(target))
    order = _order(ids.shape[1], ranks).to(ids.device)  # [CP, S / CP]
    mine = order[0 if cp_group is None else dist.get_rank(cp_group)]
    options |= {"mask": mask[:, mine], "temperature": temperature, "tp_group": tp_group}
    with torch.no_grad() if inference_only else nullcontext():
        own = _of_shard(check, hidden, lm_head_weight, ids[:, mine], vocab_start_index, **options)
        every = own if ranks == 1 else _Gathered.apply(own, cp_group)
    return every[:, order.flatten().argsort()][:, : width - 1]


STATISTICS = ["vocab_min_logits", "vocab_max_logits", "vocab_mean_logits", "vocab_norm_logits"]
ChunkedLMHeadOutput: Any = namedtuple("ChunkedLMHeadOutput", ["logprobs", "entropy", *STATISTICS])  # as AReaL's


def areal_logprobs_entropy(
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
    """Compute log-probs and entropies, as AReaL's `chunked_lm_head_logprobs_entropy`.

    Args:
        output_layer: AReaL's head. Its settings say how hidden states are sharded and who sums their gradient.
        hidden_states: [S, B, H], or [S / TP, B, H] with sequence parallelism.
        weight: [V / TP, H].
        labels: [S, B] or [S * B] int64, already shifted.

    Returns:
        AReaL's ChunkedLMHeadOutput, with fields [S * B]. The entropies have no gradient, as in AReaL. The statistics of
        the logits, which AReaL only logs, are NaN, because the logits are never complete.
    """
    if output_layer.config.defer_embedding_wgrad_compute:
        Checks("areal_logprobs_entropy").fail("defer_embedding_wgrad_compute", "False", True)
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


def _of_shard(check: Checks, hidden: Tensor, weight: Tensor, ids: Tensor, start: int, **options: Any) -> Tensor:
    """Return log-probs in the shape of ids. Raise an error unless this rank's rows of the head begin at id `start`."""
    expected = dist.get_rank(options["tp_group"]) * weight.shape[0]
    if start != expected:
        check.fail("vocab_start_index", f"{expected}, the ranks before this one times the rows of the weight", start)
    return linear_log_probs(hidden.to(weight.dtype), weight, ids, reduce_hidden="none", **options).log_probs


def _next_tokens(target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id after each position, [B, S], and a mask that is False at the last position."""
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[:, -1] = False
    return target.roll(-1, -1), mask


def _order(width: int, ranks: int) -> Tensor:
    """Return the positions of each rank in Megatron's order of context parallelism, [ranks, width / ranks]."""
    if ranks == 1:
        return torch.arange(width)[None]
    parts = torch.arange(width).view(2 * ranks, -1)
    return torch.stack([torch.cat([parts[rank], parts[-1 - rank]]) for rank in range(ranks)])


class _Gathered(torch.autograd.Function):
    """Concatenate [B, S] of all ranks to [B, ranks S]. The backward adds up the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.width = x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.width, 1)[dist.get_rank(ctx.group)], None
