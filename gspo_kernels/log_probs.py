"""`linear_log_probs`: log-probs of target ids from hidden states and a head, without materializing the logits.

`inputs/lm_head.py` says which modules are accepted as a head. `inputs/head.py` checks and flattens the arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .inputs.compared import head_values, pair_values
from .inputs.head import HeadArguments, head_rows
from .inputs.lm_head import device_map, moved, opened, weight_of
from .inputs.pairs import extra_pairs, kept_rows
from .kept_sets import KeptSets
from .ops.head import linear_log_probs_op
from .ops.pairs import extra_log_probs, kept_log_probs
from .outputs import LogProbOutput
from .ranks.agreement import same_on_all_ranks, vocabulary_group
from .validation import TensorChecks


def linear_log_probs(
    hidden: Tensor,
    lm_head: Tensor | nn.Module,
    target_ids: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    head_precision: str | None = None,
    entropy: bool = False,
    kept_sets: KeptSets | None = None,
    extra_ids: Tensor | None = None,
    gradient_budget: float = 0.0,
    cache_mib: float | None = None,
    tp_group: Any = None,
    reduce_hidden: str = "all",
    backend: str = "auto",
) -> LogProbOutput:
    """Compute the log-prob of each target id under `softmax(softcap(logit_scale * (h W^T + bias)) / temperature)`.

    The result is differentiable with respect to hidden states, head, bias and LoRA adapter. The backward recomputes
    logits only for rows with a nonzero upstream gradient. A row's log-prob has the same bits in any batch, with or
    without `entropy`, and with or without autograd. Double backward raises an error.

    Args:
        hidden: hidden states, [B, T, H] or [N, H], fp32, bf16, fp16 or fp64. hidden[t] predicts target_ids[t]; this
            function does not shift them. Under autocast, hidden and lm_head are cast as F.linear would cast them,
            unless head_precision is given.
        lm_head: weight [V, H] in the dtype of hidden (or fp32, with head_precision), an `nn.Linear`, or an `nn.Linear`
            wrapped by PEFT (LoRA, modules_to_save or trainable_token_indices). With trainable_token_indices, the weight
            is copied. If accelerate has placed the module (`device_map`), all tensors are moved to its device, and the
            result is moved to the device of hidden.
        target_ids: [B, T] or [N] int64. Masked positions may hold any value, which is never used as an index.
        mask: True or 1 at unmasked tokens, [B, T] or [N], bool or 0/1. None: target_ids != -100. Masked rows cost
            nothing.
        bias: [V]. If lm_head is a module with a bias, that bias is used, and this argument must be None.
        logit_scale: multiplies the logits (Cohere, Granite).
        logit_softcap: c in c * tanh(logits / c) (Gemma 2); None: no soft-cap.
        temperature: divides the capped logits; a number, a 0-dim tensor, or one value per token.
        vocab_size: number of vocabulary columns that are not padding; later columns get probability 0. None: all V.
        head_precision: "fp32" or "bf16x3": autocast does not round the operands, and lm_head may be fp32 while hidden
            is bf16 or fp16. Each gradient has the dtype of its operand. "fp32" multiplies fp32 operands in fp32. With
            "bf16x3", the Triton kernels use tensor cores: three bf16 products per logit (two if hidden is bf16), with
            an error of 3e-5 nats in log-probs. In the backward, d_logits, weight and hidden are rounded to bf16, as
            for a bf16 head, and sums are fp32. An inf in an operand gives NaN. Log-probs of extra_ids are fp32
            products, so a probability below 1e-4 of all other ids is rounding. The torch backend multiplies in fp32
            either way. If both operands are bf16, or both fp16 or fp64, the option only keeps autocast from casting
            them: their products are exact without it.
        entropy: also return the entropy of each row's distribution, in nats, differentiable.
        kept_sets: the ids that the sampler kept for each token (top-k, top-p, min-p), which must contain its target id.
            Log-probs and entropies are then those of the softmax over these ids. No pass over the vocabulary is needed,
            except for tokens with an empty set if `kept_sets.empty` is "vocabulary".
        extra_ids: [B, T, k] or [N, k] int32 or int64, more ids for each token; negative ids are absent. Their log-probs
            over the vocabulary are also returned, differentiable. With kept_sets, use a second call for them.
        gradient_budget: see `gspo_fused_loss`. `metrics.last_backward()` tells how much the backward left out. If the
            entropies also have a gradient, the backward raises a ValueError.
        cache_mib: see `gspo_fused_loss`.
        tp_group: process group or one-dimensional DeviceMesh whose ranks share the vocabulary. lm_head, bias and LoRA's
            B are then this rank's rows, V / ranks each, in rank order. LoRA's A is replicated. All other arguments must
            be equal on all ranks; target_ids and vocab_size refer to the full vocabulary. V may include padding.
            Instead of tp_group, you may pass an lm_head that is a DTensor with Shard(0) over one mesh dimension. The
            forward performs one all-gather. Log-probs are equal on all ranks. They are bit-identical to a single
            process's if every shard begins at a vocabulary tile; otherwise one warning is given.
        reduce_hidden: "all": the gradient of hidden is summed over the ranks, by one all-reduce. "none": each rank
            keeps its own term of that sum, for callers that reduce it themselves (Megatron's sequence parallelism).
        backend: see `gspo_fused_loss`.

    Returns:
        LogProbOutput: log-probs and, on request, entropies, in the shape of target_ids, and log-probs of extra_ids.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Bad values
            inside GPU tensors raise only if GSPO_CHECK=1. Otherwise the log-prob of an id out of range is NaN.
    """
    check = TensorChecks("linear_log_probs")
    opened_head = opened(lm_head)
    tp_group = vocabulary_group(check, weight_of(opened_head), tp_group)
    arguments = HeadArguments(
        hidden=hidden,
        lm_head=opened_head,
        target_ids=target_ids,
        mask=mask,
        bias=bias,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        temperature=temperature,
        vocab_size=vocab_size,
        head_precision=head_precision,
        entropy=entropy,
        gradient_budget=gradient_budget,
        cache_mib=cache_mib,
        backend=backend,
        tp_group=tp_group,
        reduce_hidden=reduce_hidden,
    )
    head_device = device_map(opened_head)
    if head_device is not None:
        arguments = moved(arguments, head_device)
        kept_sets = kept_sets.to(head_device) if isinstance(kept_sets, KeptSets) else kept_sets
        extra_ids = extra_ids.to(head_device) if isinstance(extra_ids, Tensor) else extra_ids

    with same_on_all_ranks(check, {"tp_group": tp_group}, hidden) as compared:
        check.boolean("entropy", entropy)
        head = head_rows(check, arguments)
        kept = None if kept_sets is None else kept_rows(check, kept_sets, arguments.target_ids, head.rows)
        if kept is not None and extra_ids is not None:
            calls = (
                "call linear_log_probs twice: with kept_sets for the ratio, then with extra_ids for the teacher. Only "
                "the second call passes over the vocabulary; its log_probs are for kl_log_probs"
            )
            check.fail("extra_ids", f"None with kept_sets ({calls})", extra_ids)
        extra = None if extra_ids is None else extra_pairs(check, extra_ids, arguments.target_ids, head.rows)
        if compared is not None:
            compared.update(head_values(arguments, head))
            compared.update(pair_values(kept, extra, head.rows))

    if kept is not None:
        options = head.gradient_budget, head.cache_bytes, head.backend
        log_probs, entropies = kept_log_probs(head.rows, kept, *options)
    else:
        out = linear_log_probs_op(head.rows, head.gradient_budget, head.cache_bytes, head.backend).head
        log_probs, entropies = out.log_probs, out.entropy

    shape = target_ids.shape
    extra_result = None
    if extra is not None and extra_ids is not None:
        extra_result = extra_log_probs(head.rows, extra, log_probs, head.backend).view(extra_ids.shape)
    result = LogProbOutput(log_probs.view(shape), entropies.view(shape) if entropy else None, extra_result)
    return result if head_device is None else moved(result, hidden.device)
