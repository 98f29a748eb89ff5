"""`linear_log_probs`: hidden states and a head to the log-probs of given ids, without holding the logits.

What a head may be stands in `head.py`; here its arguments are checked, cast as autocast would, and flattened to rows.
"""

from __future__ import annotations

from torch import Tensor, nn

from . import ops
from .inputs.head import HeadArguments, head_rows
from .outputs import LogProbOutput
from .validation import Call


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
    entropy: bool = False,
    backend: str = "auto",
) -> LogProbOutput:
    """Log-probability of each target id under `softmax(softcap(logit_scale * (h W^T + bias)) / temperature)`.

    Differentiable with respect to hidden states, head, bias and LoRA adapter; the backward recomputes the logits and
    skips rows whose upstream gradient is zero. A row's value does not depend, in any bit, on the other rows, on
    `entropy` or on whether gradients are recorded. A second derivative raises.

    Args:
        hidden: [B, T, H] or [N, H], fp32, bf16, fp16 or fp64. hidden[t] predicts target_ids[t]: nothing is shifted
            here.
        lm_head: weight [V, H] of the same dtype, an `nn.Linear`, or PEFT's LoRA, modules_to_save or
            trainable_token_indices around one; the last costs a copy of the weight.
        target_ids: [B, T] or [N] int64. Where masked anything may stand; it is never used as an index.
        mask: [B, T] or [N], bool or 0/1: the tokens that count. None: target_ids != -100. Masked rows cost nothing.
        bias: [V], if it is not the module's own.
        logit_scale: multiplies the logits (Cohere, Granite).
        logit_softcap: c in c * tanh(logits / c) (Gemma 2), None for none.
        temperature: divides the capped logits; a number, a tensor with no dimension, or one value per token.
        vocab_size: columns from here on are padding and get no probability. None: all V.
        entropy: also return the entropy of each distribution, in nats, differentiable.
        backend: "triton", "torch" or "auto"; an explicit choice never falls back.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. On accelerators an id out of range
            is not looked for (unless GSPO_CHECK=1); its log-prob is NaN.
    """
    call = Call("linear_log_probs")
    arguments = HeadArguments(
        hidden, lm_head, target_ids, mask, bias, logit_scale, logit_softcap, temperature, vocab_size, entropy, backend
    )
    head = head_rows(call, arguments)
    out = ops.linear_log_probs(head.rows, head.backend)
    shape = target_ids.shape
    return LogProbOutput(out.log_probs.view(shape), out.entropy.view(shape) if entropy else None)
