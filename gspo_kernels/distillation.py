"""Teachers next to a policy loss: divergences at k ids, advantages, and the top k ids of a local teacher.

A teacher's server returns log-probs of k ids per token, never logits. `linear_log_probs(extra_ids=ids)` returns the
student's log-probs of the same ids, from the pass over the head that also returns the log-probs for `policy_loss`:

    out = linear_log_probs(hidden, lm_head, target_ids, mask=mask, extra_ids=teacher_ids)
    divergence = topk_divergence(out.extra_log_probs, teacher_log_probs, kind="forward", tail="bucket", mask=mask)
    loss = policy_loss(out.log_probs, advantages, mask=mask, ...).loss + coefficient * divergence.sum() / mask.sum()

The forms of common trainers (p: student, q: teacher, y: sampled token):

    verl forward_kl_topk, before its clamp to >= 0      topk_divergence(kind="forward", tail="drop")
    verl#7855, TRL SDPO, OpenClaw                       ... tail="bucket"
    MOPD, eq. 5 (arXiv 2606.30406), ms-swift#10079      ... kind="generalized", tail="drop"
    ms-swift, top-k                                     ... kind="jensen-shannon", tail="renormalize"
    Tinker: A + c (log q(y) - log p_old(y))             teacher_advantages, with Objective.preset("gspo-token")
    slime#2051, w (mean over teachers of the same + A)  teacher_advantages(log_probs.detach(), ...) with teacher_weights
                                                        1 / M, surrogate "reinforce", and token_weights=w from
                                                        `sampler_mismatch.importance_weights(low=, high=)`
    verl, k1 to k3 of the sampled token                 policy_loss(ref_log_probs=teacher), Objective(kl_coef=c,
                                                        kl_estimator=...)

In verl's form, the expected gradient of "k1" is 0. It is the gradient of the reverse KL for "k2", "k1+" and "k3+", and
of the forward KL for "k3".

A divergence over k ids does not depend on the sampled token. As an advantage, which has no gradient of its own, its
expected gradient is therefore 0 (miles#2362). Add it to the loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .backends.torch.top_k import largest_log_probs
from .inputs.compared import head_values
from .inputs.head import HeadArguments, head_rows
from .inputs.lm_head import device_map, moved, opened, weight_of
from .layout import Layout, packed_layout, padded_layout, segment_sum
from .ranks.agreement import same_on_all_ranks, vocabulary_group
from .ranks.shards import columns_of_all_ranks
from .validation import FLOATS, INDEX_DTYPES, LARGEST, ROUNDING, TensorChecks, up_to_five, warn_once

__all__ = ["TopK", "linear_top_k", "teacher_advantages", "topk_divergence"]

KINDS = ("forward", "reverse", "generalized", "jensen-shannon")
TAILS = ("bucket", "renormalize", "drop")
LEVELS = ("token", "sequence")
_SMALLEST_TAIL = 16  # in eps of the dtype: smaller differences 1 - sum(p) are rounding errors
# Of (1 - Q) / (1 - P), the tail's weight in the gradient of the forward KL. In the gradient of a dominant id it cancels
# against a term of `linear_log_probs`, which bf16 rounds: an error of at most 32 * 2^-9 = 6% of p.
_LARGEST_RATIO = 32.0


# -- divergences at k ids


def topk_divergence(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: str,
    tail: str,
    beta: float = 0.5,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
    teacher_weights: Tensor | None = None,
) -> Tensor:
    """Compute a divergence between student and teacher at k ids of each token. Differentiable in `student`.

    With probabilities p of the student and q of the teacher, their sums P and Q over the k ids, and the mixture
    m = beta q + (1 - beta) p, the sums over the ids are:

        "forward"         q (log q - log p)                                       KL(teacher || student)
        "reverse"         p (log p - log q)                                       KL(student || teacher)
        "generalized"     p (log p - log q) - p + q                               MOPD, arXiv 2606.30406, eq. 5
        "jensen-shannon"  beta q (log q - log m) + (1 - beta) p (log p - log m)   GKD, arXiv 2306.13649

    The tail, which is all other ids, changes what the student learns:

        "bucket"       All other ids are one more outcome, with probabilities 1 - P and 1 - Q. The result is a
                       divergence of k + 1 outcomes, at most that over the vocabulary, and 0 only for p = q. It also
                       teaches how much probability belongs outside of the ids.
        "renormalize"  p / P and q / Q take the places of p and q. P has no gradient: the student learns only the
                       proportions of the ids. At least two ids are needed.
        "drop"         The other ids are left out. "generalized" and "jensen-shannon" are still >= 0, and 0 only for
                       p = q at the ids. The other two may be negative, and p = q is not their minimum: "forward" moves
                       all probability to the ids, and "reverse" is smallest at p = q / e, so it rewards probability
                       outside of the ids.

    Args:
        student: log-probs of the student over the vocabulary, [..., k] fp32 or fp64, such as the extra_log_probs of
            `linear_log_probs`.
        teacher: log-probs of the teacher at the same ids, [..., k], any float dtype. Treated as a constant.
        kind: "forward", "reverse", "generalized" (with tail="drop" only; with a bucket it would equal "reverse") or
            "jensen-shannon".
        tail: "bucket", "renormalize" or "drop".
        beta: weight of the teacher in the mixture, 0 < beta < 1; for "jensen-shannon" only.
        ids: [..., k] int32 or int64; negative ids are absent. None: ids are absent if the teacher's log-prob is -inf.
            An id that is not absent may have the log-prob -inf, which is a probability of 0.
        mask: True or 1 at unmasked tokens, [...]; other tokens may hold any values.
        teacher_weights: for M teachers, with student and teacher [..., M, k] and ids for each teacher: the result is
            the sum of these weights times the divergences. [M], or one row per sequence or token, such as [B, M] or
            [B, T, M]; >= 0. Values of a teacher with weight 0 are not read, so a one-hot row chooses a teacher.

    Returns:
        [...] fp32 (fp64 for fp64 student), in nats; 0 where masked or where no id is present. A tail below 16 eps
        (2e-6 in fp32) is rounding. The teacher's counts as 16 eps then, and the student's logarithm continues as a
        straight line, so that its gradient stays finite and keeps its direction. In the gradient of "forward" with a
        bucket, the tail's weight (1 - Q) / (1 - P) is at most 32, because bf16 loses more than that.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Bad values
            on a GPU raise only if GSPO_CHECK=1. Otherwise they make the result NaN.
    """
    check = TensorChecks("topk_divergence")
    check.choice("kind", kind, KINDS)
    check.choice("tail", tail, TAILS)
    if kind == "generalized" and tail != "drop":
        check.fail("tail", "'drop' for kind='generalized' (otherwise use kind='reverse', which is then the same)", tail)
    beta = check.number("beta", beta, "a number between 0 and 1", lambda x: 0 < x < 1)
    is_dense = isinstance(student, Tensor) and not student.is_nested
    shapes = [tuple(student.shape)] if is_dense and student.ndim else [(None, None)]
    check.log_probs("student", student, shapes=shapes, shape_text="[..., k]")
    shape, device = student.shape, student.device
    like: dict[str, Any] = dict(shapes=[shape], shape_text=lambda: f"{list(shape)} like student", device=device)
    check.tensor("teacher", teacher, dtypes=FLOATS, **like)
    least = 2 if tail == "renormalize" else 1
    if shape[-1] < least:
        check.fail("student", f"[..., k] with k >= {least} (tail={tail!r})", student)
    teacher = teacher.detach().to(student.dtype)
    present = ~teacher.isneginf()
    if ids is not None:
        check.tensor("ids", ids, dtypes=INDEX_DTYPES, **like)
        present = ids >= 0
    weights, tokens = None, shape[:-1]
    if teacher_weights is not None:
        weights, tokens = _weights(check, teacher_weights, student[..., 0]), shape[:-2]
        if torch.is_grad_enabled() and student.requires_grad:
            check.not_made_in_inference_mode(teacher_weights=teacher_weights)
        present = present & (weights != 0)[..., None]
    if mask is not None:
        unmasked = check.mask(mask, shapes=[tokens], shape_text=lambda: f"{list(tokens)}", device=device)
        present = present & unmasked.reshape(*tokens, *[1] * (len(shape) - len(tokens)))
    _check_probabilities(check, "student", student.detach(), present)
    _check_probabilities(check, "teacher", teacher, present)
    if torch.is_grad_enabled() and not student.requires_grad and not torch.compiler.is_compiling():
        warn_once(
            "topk_divergence: student has no gradient, so the result can only be logged. As an advantage, its expected "
            "gradient is 0; pass log-probs with a gradient and add the result to the loss. Call it under "
            "torch.no_grad() for a metric",
            stacklevel=3,
        )

    log_p, log_q = (torch.where(present, x, -torch.inf) for x in (student, teacher))
    if tail == "renormalize":
        none = ~present.any(-1, keepdim=True)
        log_p, log_q = (x - torch.where(none, 0, x).logsumexp(-1, keepdim=True) for x in (log_p, log_q))
    elif tail == "bucket":
        smallest = _SMALLEST_TAIL * torch.finfo(student.dtype).eps
        rest_p, rest_q = _rest(log_p), _rest(log_q).clamp(min=smallest)
        if kind == "forward":
            limit = (_LARGEST_RATIO * rest_p.detach().clamp(min=smallest) / rest_q).clamp(max=1)
            rest_p = rest_p.detach() + limit * (rest_p - rest_p.detach())
        missing = torch.where(rest_p < smallest, rest_p - smallest, 0) / smallest  # the straight line
        log_p = torch.cat([log_p, rest_p.clamp(min=smallest).log() + missing], -1)
        log_q = torch.cat([log_q, rest_q.log()], -1)
    divergence = _terms(log_p, log_q, kind, beta).sum(-1)
    if weights is not None:
        divergence = torch.where(weights == 0, 0, weights * divergence).sum(-1)
    return check.nan_if_invalid(divergence)


def _rest(log_p: Tensor) -> Tensor:
    """1 - sum(p), [..., 1]. The largest p enters as 1 - p, which has few rounding errors if p is near 1."""
    top = log_p.detach().argmax(-1, keepdim=True)
    others = log_p.scatter(-1, top, -torch.inf)
    return -log_p.gather(-1, top).expm1() - others.exp().sum(-1, keepdim=True)


def _terms(log_p: Tensor, log_q: Tensor, kind: str, beta: float) -> Tensor:
    """The terms of a divergence. 0 log 0 is 0, in value and gradient."""
    no_p, no_q = log_p.isneginf(), log_q.isneginf()
    p, q = log_p.exp(), log_q.exp()
    # Finite logarithms, because 0 * inf in a gradient would be NaN.
    log_p, log_q = torch.where(no_p, 0, log_p), torch.where(no_q, 0, log_q)
    if kind == "forward":
        return torch.where(no_p & ~no_q, torch.inf, q * (log_q - log_p))
    if kind == "jensen-shannon":
        m = beta * q + (1 - beta) * p
        log_m = torch.where(m > 0, m, 1).log()
        return beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)
    reverse = torch.where(no_q & ~no_p, torch.inf, p * (log_p - log_q))
    return reverse if kind == "reverse" else reverse - p + q


def _check_probabilities(check: TensorChecks, name: str, x: Tensor, present: Tensor) -> None:
    check.sign(name, x, present)
    total = torch.where(present, x, -torch.inf).exp().sum(-1)
    wrong = total > 1 + ROUNDING
    expected = "log-probs whose probabilities have a sum of at most 1 (mark absent ids by ids < 0)"
    check.flag(name, wrong, expected, lambda: up_to_five(total[wrong]))


def _weights(check: TensorChecks, weights: Any, of_teachers: Tensor) -> Tensor:
    """Check teacher_weights, and expand them to the shape of `of_teachers`, [..., M]."""
    shape = tuple(of_teachers.shape)
    shapes = [(*shape[:n], *shape[-1:]) for n in range(len(shape))]
    text = lambda: " or ".join(str(list(x)) for x in shapes)  # noqa: E731
    device = of_teachers.device
    check.tensor("teacher_weights", weights, dtypes=FLOATS, shapes=shapes, shape_text=text, device=device)
    wrong = ~((weights >= 0) & weights.isfinite())
    check.flag("teacher_weights", wrong, "finite and >= 0", lambda: up_to_five(weights[wrong]))
    weights = weights.detach().to(of_teachers.dtype)
    return weights.reshape(*weights.shape[:-1], *[1] * (len(shape) - weights.ndim), shape[-1]).expand(shape)


# -- advantages


def teacher_advantages(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    advantages: Tensor | None = None,
    coef: float = 1.0,
    level: str = "token",
    bound: float | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    teacher_weights: Tensor | None = None,
) -> Tensor:
    """Compute A + coef (log q(y) - log p(y)) of the sampled tokens y, the teacher as an advantage. Has no gradient.

    Its expected policy gradient is that of A minus that of coef KL(student || teacher) (Thinking Machines, "On-Policy
    Distillation"; Tinker's kl_penalty_coef). Do not put k3 in its place: as an advantage, k3 adds the gradient that
    increases KL(teacher || student).

    With one value per token, use ratio="sequence-token" (GSPO-token) or ratio="token". With GSPO's ratio="sequence",
    the tokens of an answer share one gradient, so that only the mean over the answer is left: level="sequence".

    Args:
        log_probs: log-probs of the sampled tokens under the student, [B, T], or [N] with cu_seqlens; fp32 or fp64.
            Tinker passes those of the sampler, or old_log_probs; slime the current ones.
        teacher_log_probs: of the same tokens under the teacher, over the same ids, in the same shape; any float dtype.
            For M teachers, [B, T, M] or [N, M] with teacher_weights.
        advantages: A of the task, [B], [B, 1] or [B, T]; [S] or [N] with cu_seqlens. None: 0.
        coef: weight of the teacher.
        level: "token", or "sequence": the mean over each sequence's unmasked tokens.
        bound: clamp log q - log p of each teacher and token to [-bound, bound]; None: no clamp.
        mask: True or 1 at unmasked tokens, in the shape of log_probs; other tokens may hold any values.
        cu_seqlens: [S + 1] int32 or int64, for packed input.
        teacher_weights: as in `topk_divergence`. Weights of 1 / M give slime's mean over teachers.

    Returns:
        In the shape of log_probs, 0 where masked; for level="sequence" [B] or [S]; fp32 (fp64 for fp64 log_probs).

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Bad values
            on a GPU raise only if GSPO_CHECK=1. Otherwise they make all advantages NaN.
    """
    check = TensorChecks("teacher_advantages")
    check.choice("level", level, LEVELS)
    check.number("coef", coef, "a finite number within float32", lambda x: abs(x) <= LARGEST)
    if bound is not None:
        check.number("bound", bound, "a finite number > 0, or None", lambda x: 0 < x <= LARGEST)
    text = "[B, T]" if cu_seqlens is None else "[N] with cu_seqlens"
    check.log_probs("log_probs", log_probs, shapes=[(None, None) if cu_seqlens is None else (None,)], shape_text=text)
    shape, device = tuple(log_probs.shape), log_probs.device
    unmasked = torch.ones(shape, dtype=torch.bool, device=device)
    if mask is not None:
        unmasked = check.mask(mask, shapes=[shape], shape_text=lambda: f"{list(shape)}", device=device)
    student, several = log_probs.detach(), teacher_weights is not None
    check.sign("log_probs", student, unmasked)
    wrong = unmasked & (student.isnan() if bound is not None else ~student.isfinite())
    finite = "finite where mask is true (bound= limits -inf)"
    check.flag("log_probs", wrong, finite, lambda: up_to_five(student[wrong]))
    like: dict[str, Any] = dict(shapes=[(*shape, None)] if several else [shape], dtypes=FLOATS, device=device)
    like["shape_text"] = lambda: (
        f"{list(shape)}{' and M, with teacher_weights' if several else ''}, of the sampled tokens (for several "
        "teachers, pass teacher_weights; k ids per token are for topk_divergence, whose expected gradient as an "
        "advantage is 0)"
    )
    check.tensor("teacher_log_probs", teacher_log_probs, **like)
    teacher = teacher_log_probs.detach().to(student.dtype)
    weights = _weights(check, teacher_weights, teacher) if several else None
    used = unmasked if weights is None else unmasked[..., None] & (weights != 0)
    check.sign("teacher_log_probs", teacher, used)
    gap = teacher - (student if weights is None else student[..., None])
    gap = gap if bound is None else gap.clamp(-bound, bound)
    not_finite = used & ~gap.isfinite()
    check.flag("teacher_log_probs", not_finite, finite, lambda: up_to_five(gap[not_finite]))
    gap = torch.where(used, gap, 0)
    gap = coef * (gap if weights is None else (weights * gap).sum(-1))
    layout = _layout(check, shape, cu_seqlens, device)
    if level == "sequence":
        count = segment_sum(unmasked.reshape(-1).to(gap.dtype), layout.offsets).clamp(min=1)
        gap = segment_sum(gap.reshape(-1), layout.offsets) / count
    if advantages is None:
        return check.nan_if_invalid(gap)
    sequences = layout.sequences
    per_sequence = [(sequences,), (sequences, 1)] if layout.padded else [(sequences,)]
    shapes = per_sequence if level == "sequence" else [*per_sequence, shape]
    shape_text = lambda: " or ".join(str(list(x)) for x in shapes)  # noqa: E731
    check.tensor("advantages", advantages, dtypes=FLOATS, shapes=shapes, shape_text=shape_text, device=device)
    task = advantages.detach().to(gap.dtype)
    rows = layout.per_row(task).view(shape)
    infinite = unmasked & ~rows.isfinite()
    check.flag("advantages", infinite, "finite where mask is true", lambda: up_to_five(rows[infinite]))
    total = task.reshape(-1) + gap if level == "sequence" else torch.where(unmasked, rows + gap, 0)
    return check.nan_if_invalid(total)


def _layout(check: TensorChecks, shape: tuple[int, ...], cu_seqlens: Tensor | None, device: torch.device) -> Layout:
    if cu_seqlens is None:
        return padded_layout((shape[0], shape[1]), device)
    check.offsets(cu_seqlens, shape[0], device)
    return packed_layout(shape[0], cu_seqlens)


# -- a local teacher


class TopK(NamedTuple):
    """The likeliest ids of each token, by decreasing log-prob, equal ones by increasing id."""

    ids: Tensor  # [B, T, k] or [N, k] int64, -1 where masked
    log_probs: Tensor  # in the shape of ids, over the vocabulary, fp32 (fp64 for fp64 hidden states); -inf where masked


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    lm_head: Tensor | nn.Module,
    k: int,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    head_precision: str | None = None,
    tp_group: Any = None,
) -> TopK:
    """Find the k likeliest ids of each token and their log-probs, for example a teacher's. They have no gradient.

    The logits are computed slab by slab and never stored. PyTorch multiplies, on any device.

    Args:
        hidden: hidden states, [B, T, H] or [N, H].
        lm_head, bias, logit_scale, logit_softcap, temperature, vocab_size: the head, as in `linear_log_probs`.
        k: from 1 to vocab_size.
        mask: True or 1 at unmasked tokens, [B, T] or [N]. None: all tokens. Masked rows cost nothing.
        head_precision: "fp32" or "bf16x3": autocast does not round the operands, and lm_head may be fp32 while hidden
            is bf16 or fp16, as in `linear_log_probs`. Both values multiply in fp32.
        tp_group: as in `linear_log_probs`. One all-gather of k ids and logits per rank. The result is equal on all
            ranks.

    Returns:
        TopK, whose ids and log-probs are arguments of `linear_log_probs(extra_ids=)` and `topk_divergence`.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("linear_top_k")
    opened_head = opened(lm_head)
    tp_group = vocabulary_group(check, weight_of(opened_head), tp_group)
    shape = hidden.shape[:-1] if isinstance(hidden, Tensor) and not hidden.is_nested else ()
    target_ids = torch.zeros(shape, dtype=torch.int64, device=getattr(hidden, "device", None))  # not used
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
        entropy=False,
        gradient_budget=0.0,
        cache_mib=None,
        backend="torch",
        tp_group=tp_group,
    )
    head_device = device_map(opened_head)
    if head_device is not None:
        arguments = moved(arguments, head_device)
    with same_on_all_ranks(check, {"tp_group": tp_group}, hidden) as compared:
        head = head_rows(check, arguments)
        columns = columns_of_all_ranks(head.rows.shard, head.rows.vocab_size)
        expected = f"an int from 1 to the {columns} columns of the vocabulary"
        k = check.integer("k", k, expected, lambda x: 1 <= x <= columns)
        if compared is not None:
            compared.update(head_values(arguments, head), k=k)

    ids, log_probs = (x.view(*shape, k) for x in largest_log_probs(head.rows, k))
    result = TopK(ids, log_probs)
    return result if head_device is None else moved(result, hidden.device)
