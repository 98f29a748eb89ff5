"""The mathematics in plain PyTorch, written to be read: start here.

Each function computes one step of the loss on full logits, one sequence at a time, with autograd. This file imports
nothing else from the library. With float64 inputs, it is the oracle for the tests of both backends.

The policy in training gives each sampled token a log-prob `lp`; the policy that sampled it gave `old`. For an answer
y_i of L_i tokens, GSPO (arXiv 2507.18071, eq. 5-7) forms one importance ratio

    u_i = mean over the tokens of y_i of (lp - old),        s_i = exp(u_i) = (p_new(y_i) / p_old(y_i)) ^ (1 / L_i)

and minimizes, over answers with advantage A_i,

    l_i = -min(s_i * A_i,  clip(s_i, 1 - clip_low, 1 + clip_high) * A_i).

The clip window is [1 - 3e-4, 1 + 4e-4], so u_i must be accurate to a few 1e-6. Log-probs from logits that were rounded
to bf16 are too coarse for this.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ReferenceOutput",
    "aggregation_weight",
    "bounded",
    "default_normalizer",
    "gspo_reference_loss",
    "kl_to_reference",
    "log_ratios_of_sequence",
    "mask_of_sets",
    "projection_log_probs",
    "score",
    "surrogate",
    "token_log_probs",
]


class ReferenceOutput(NamedTuple):
    """Loss, log-probs, entropies and log-ratios, all differentiable. Shapes as in `gspo_kernels.LossOutput`."""

    loss: Tensor  # []
    log_probs: Tensor  # shape of target_ids, 0 at masked positions
    entropy: Tensor  # shape of target_ids, 0 at masked positions
    log_ratio: Tensor  # [sequences], or the shape of target_ids for ratio="token"


def token_log_probs(
    hidden: Tensor,  # [L, H]
    weight: Tensor,  # [V, H]
    target_ids: Tensor,  # [L]
    bias: Tensor | None = None,  # [V]
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,  # scalar or [L]
    vocab_size: int | None = None,
    kept: Tensor | None = None,  # [L, V] bool
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target id and the entropy of each row's distribution, both [L].

    With `kept`, the distribution is the softmax over the ids where it is True.
    """
    projection = F.linear(hidden, weight, bias)
    return projection_log_probs(projection, target_ids, logit_scale, logit_softcap, temperature, vocab_size, kept)


def projection_log_probs(
    projection: Tensor,  # [L, V]: h W^T + bias
    target_ids: Tensor,  # [L]
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,  # scalar or [L]
    vocab_size: int | None = None,
    kept: Tensor | None = None,  # [L, V] bool
) -> tuple[Tensor, Tensor]:
    """Compute the results of `token_log_probs` from the product of hidden states and weight."""
    logits = logit_scale * projection
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature[:, None]
    logits = (logits / temperature)[:, :vocab_size]  # columns past the real vocabulary are padding
    if kept is not None:
        logits = logits.masked_fill(~kept[:, :vocab_size], -math.inf)
    log_p = torch.log_softmax(logits, dim=-1)
    # Replace -inf before the product, because 0 * -inf is NaN.
    entropy = -(log_p.exp() * torch.where(log_p == -math.inf, 0.0, log_p)).sum(-1)
    return log_p.gather(-1, target_ids[:, None])[:, 0], entropy


def surrogate(log_ratio: Tensor, advantages: Tensor, objective: Any) -> Tensor:
    """Compute the surrogate per element, for the ratio s = exp(log_ratio) and the advantage A.

    "clip": -min(s A, clip(s) A). "none" and "gmpo": -s A. "sapo": -(4 / tau) sigmoid(tau (s - 1)) A, where tau depends
    on the sign of A.

    With "clip", a positive advantage clips ratios above 1 + clip_high. A negative advantage clips ratios below
    1 - clip_low, and ratios above the smaller of dual_clip and delta. The exp of a clipped log-ratio may be inf, for
    which autograd would compute 0 * inf = NaN. So clipped log-ratios are replaced by 0 before exp. A token with
    advantage 0 contributes exactly 0.
    """
    ratio = log_ratio.exp()
    if objective.surrogate == "sapo":
        # Cut off at 80: the sigmoid is flat above 80, and exp overflows fp32 above 88.
        ratio = torch.where(advantages == 0, 0.0, log_ratio).clamp(max=80).exp()
        tau = torch.full_like(ratio, objective.sapo_temperature_neg)
        tau = tau.masked_fill(advantages > 0, objective.sapo_temperature_pos)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    ceiling = min((c for c in (objective.dual_clip, objective.delta) if c is not None), default=math.inf)
    bound = torch.full_like(ratio, math.nan)  # replaces s where the clip binds; NaN elsewhere
    if objective.surrogate == "clip":
        bound = torch.where((advantages > 0) & (ratio > high), high, bound)
        bound = torch.where((advantages < 0) & (ratio < low), low, bound)
        bound = torch.where((advantages < 0) & (ratio > ceiling), ceiling, bound)
    constant = ~bound.isnan() | (advantages == 0)
    free_ratio = torch.where(constant, 0.0, log_ratio).exp()
    effective = torch.where(bound.isnan(), free_ratio, bound)
    return torch.where(advantages == 0, 0.0, -effective * advantages)


def score(log_ratio: Tensor, advantages: Tensor, log_probs: Tensor, objective: Any) -> Tensor:
    """Compute -weight A log p per element, for surrogates with a gradient through the log-prob, not the ratio.

    The weight has no gradient. With the ratio s, it is 1 for "reinforce", the clipped s for "cispo" (arXiv 2506.13585),
    min(s, 1) for "topr" where the advantage is negative, otherwise 1 (arXiv 2503.14286), and e^lambda s^k e^(-lambda s)
    for "vespo" (arXiv 2602.10693), with s from 1e-8 to e^20, and k and lambda by the sign of the advantage.
    """
    weight = torch.ones_like(log_ratio)
    negative = advantages < 0
    if objective.surrogate == "cispo":
        weight = log_ratio.detach().exp().clamp(1 - objective.clip_low, 1 + objective.clip_high)
    elif objective.surrogate == "topr":
        weight = torch.where(negative, log_ratio.detach().clamp(max=0).exp(), 1.0)
    elif objective.surrogate == "vespo":
        log_s = log_ratio.detach().clamp(math.log(1e-8), 20)
        k = torch.where(negative, objective.vespo_k_neg, objective.vespo_k_pos)
        rate = torch.where(negative, objective.vespo_lambda_neg, objective.vespo_lambda_pos)
        weight = (rate + k * log_s - rate * log_s.exp()).exp()
    return torch.where(advantages == 0, 0.0, -weight * advantages * log_probs)


def dppo(log_ratio: Tensor, advantages: Tensor, log_probs: Tensor, objective: Any) -> Tensor:
    """Compute -s A per token, and 0 where a token has left the trust region (DPPO, arXiv 2602.04879).

    A token leaves it if its probability moves in the direction of the advantage, and D exceeds clip_high (A > 0) or
    clip_low (A < 0). D is a divergence of two Bernoulli distributions: the token is sampled with probability p now, and
    was sampled with probability q. "dppo_tv" takes the total variation |p - q|, "dppo_kl" takes KL(q || p). With
    dual_clip, the factor s is at most dual_clip, also in the gradient (verl).
    """
    p, q = (x.detach().clamp(max=0).exp() for x in (log_probs, log_probs - log_ratio))
    divergence = (p - q).abs()
    if objective.surrogate == "dppo_kl":
        # xlogy(x, y) is 0 for x = 0, also if y is 0 or inf.
        divergence = torch.xlogy(q, q / p) + torch.xlogy(1 - q, (1 - q) / (1 - p))
    outside = (advantages > 0) & (p > q) & (divergence > objective.clip_high)
    outside |= (advantages < 0) & (p < q) & (divergence > objective.clip_low)
    constant = outside | (advantages == 0)
    u = torch.where(constant, 0.0, log_ratio)
    ratio = u.exp()
    if objective.dual_clip is not None:
        ratio = ratio.detach().clamp(max=objective.dual_clip) * (u - u.detach()).exp()
    return torch.where(constant, 0.0, -ratio * advantages)


def bounded(token_log_ratio: Tensor, advantages: Tensor, objective: Any) -> Tensor:
    """Bound token log-ratios as in GMPO (arXiv 2507.20673): at most clip_high if A > 0, at least -clip_low if A < 0.

    Their mean is the log-ratio of the sequence.
    """
    capped = token_log_ratio.clamp(max=objective.clip_high)
    raised = token_log_ratio.clamp(min=-objective.clip_low)
    return torch.where(advantages > 0, capped, torch.where(advantages < 0, raised, token_log_ratio))


def log_ratios_of_sequence(
    log_probs: Tensor, old_log_probs: Tensor | None, advantages: Tensor, objective: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token log-ratios [L], their mean or sum u [], and the surrogate's log-ratios [L].

    u is the mean, or the sum for ratio="sequence-product". For gmpo, u is the mean of the `bounded` log-ratios. For
    vespo, the log-ratios in the sum are bounded to [-20, 20].
    """
    token_log_ratio = log_probs - (log_probs.detach() if old_log_probs is None else old_log_probs)
    summed = token_log_ratio
    if objective.surrogate == "gmpo":
        summed = bounded(token_log_ratio, advantages, objective)
    elif objective.surrogate == "vespo":
        summed = token_log_ratio.clamp(-20, 20)
    u = summed.sum() if objective.ratio == "sequence-product" else summed.sum() / max(len(summed), 1)
    if objective.ratio == "token":
        return token_log_ratio, u, token_log_ratio
    if objective.ratio in ("sequence", "sequence-product"):
        return token_log_ratio, u, u.expand(len(summed))
    # sequence-token: each token has the value u, but a gradient only with respect to its own log-prob (eq. 13-14).
    return token_log_ratio, u, u.detach() + log_probs - log_probs.detach()


def kl_to_reference(log_probs: Tensor, ref_log_probs: Tensor, token_log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token (Schulman, "Approximating KL divergence").

    "k1+" and "k3+" have the values of k1 and k3, but the gradient of k2. "unbiased" is k3 times the token's ratio.
    """
    d = log_probs - ref_log_probs
    k2, k3 = 0.5 * d**2, torch.expm1(-d) + d
    if estimator == "unbiased":
        return k3 * token_log_ratio.exp()
    value = {"k1": d, "k2": k2, "k3": k3, "abs": d.abs()}[estimator.removesuffix("+")]
    return value.detach() + k2 - k2.detach() if estimator.endswith("+") else value


def aggregation_weight(aggregation: str, length: int, length_norm: float | None) -> float:
    """Return the weight of a token in a sequence of `length` unmasked tokens, before division by the normalizer."""
    if aggregation == "seq-mean-token-mean":
        return 1.0 / length
    if aggregation == "seq-mean-token-sum-norm":
        assert length_norm is not None
        return 1.0 / length_norm
    return 1.0  # token-mean, seq-mean-token-sum


def default_normalizer(aggregation: str, lengths: list[int]) -> float:
    """Return the number of unmasked tokens for "token-mean", else the number of non-empty sequences; at least 1."""
    if aggregation == "token-mean":
        return max(sum(lengths), 1)
    return max(sum(length > 0 for length in lengths), 1)


def gspo_reference_loss(
    hidden: Tensor,  # [B, T, H], or [N, H] with cu_seqlens
    weight: Tensor,  # [V, H]
    target_ids: Tensor,  # [B, T] or [N]
    advantages: Tensor,  # [sequences], or per token like target_ids
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    token_weights: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    kept_sets: Any = None,
    objective: Any,
    normalizer: float | None = None,
    kl_normalizer: float | None = None,
) -> ReferenceOutput:
    """Compute `gspo_kernels.gspo_fused_loss` from full logits with autograd, in the dtype of `hidden`."""
    mask = target_ids != -100 if mask is None else mask.bool()
    if cu_seqlens is None:
        spans: list[Any] = list(range(target_ids.shape[0]))  # x[i] is sequence i of a padded batch
    else:
        spans = [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]
    lengths = [int(mask[span].sum()) for span in spans]
    kl_aggregation = objective.kl_aggregation or objective.aggregation
    normalizer = default_normalizer(objective.aggregation, lengths) if normalizer is None else normalizer
    if kl_normalizer is None:
        same = kl_aggregation == objective.aggregation
        kl_normalizer = normalizer if same else default_normalizer(kl_aggregation, lengths)
    per_token_advantages = advantages.shape == target_ids.shape and advantages.ndim == mask.ndim
    per_token_advantages &= not (cu_seqlens is not None and len(spans) == target_ids.shape[0])

    kept = None if kept_sets is None else mask_of_sets(kept_sets, weight.shape[0]).view(*mask.shape, -1)
    loss = hidden.new_zeros(())
    log_probs, entropies = hidden.new_zeros(target_ids.shape), hidden.new_zeros(target_ids.shape)
    log_ratios = []
    for i, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        keep = mask[span]

        def pick(x: Tensor | None, span: Any = span, keep: Tensor = keep) -> Any:
            return None if x is None else torch.broadcast_to(x, mask.shape)[span][keep]

        temperatures = temperature[span][keep] if isinstance(temperature, Tensor) and temperature.ndim else temperature
        head = (bias, logit_scale, logit_softcap, temperatures, vocab_size, None if kept is None else kept[span][keep])
        lp, entropy = token_log_probs(hidden[span][keep], weight, target_ids[span][keep], *head)
        old, ref, weights = pick(old_log_probs), pick(ref_log_probs), pick(token_weights)
        advantage = pick(advantages) if per_token_advantages else advantages.flatten()[i].expand(length)

        # 1. The log-ratio: per token, or the mean over the sequence.
        token_log_ratio, u, log_ratio = log_ratios_of_sequence(lp, old, advantage, objective)

        # 2. The policy term, weighted per token, the entropy bonus, and the KL term.
        if weights is not None:
            # Weighting the advantage is the same as weighting the surrogate, because weights are >= 0. It also avoids
            # 0 * inf, because the surrogate is exactly 0 if the advantage is 0.
            advantage = advantage * weights
        if objective.surrogate in ("cispo", "reinforce", "vespo", "topr"):
            per_token = score(log_ratio, advantage, lp, objective)
        elif objective.surrogate in ("dppo_tv", "dppo_kl"):
            per_token = dppo(log_ratio, advantage, lp, objective)
        else:
            per_token = surrogate(log_ratio, advantage, objective)
        if length:
            c = aggregation_weight(objective.aggregation, length, objective.length_norm) / normalizer
            loss = loss + c * (per_token - objective.entropy_coef * entropy).sum()
            if objective.kl_coef > 0:
                kl = kl_to_reference(lp, ref, token_log_ratio, objective.kl_estimator)
                if objective.kl_ratio_factor:
                    kl = kl * log_ratio.exp()
                c = aggregation_weight(kl_aggregation, length, objective.length_norm) / kl_normalizer
                loss = loss + objective.kl_coef * c * kl.sum()

        log_probs, entropies = _put(log_probs, span, keep, lp), _put(entropies, span, keep, entropy)
        log_ratios.append(token_log_ratio if objective.ratio == "token" else u)

    if objective.ratio == "token":
        log_ratio = log_probs - (log_probs.detach() if old_log_probs is None else torch.where(mask, old_log_probs, 0))
    else:
        log_ratio = torch.stack(log_ratios) if log_ratios else hidden.new_zeros(0)
    return ReferenceOutput(loss, log_probs, entropies, log_ratio)


def mask_of_sets(kept_sets: Any, vocab: int) -> Tensor:
    """Turn a `KeptSets` of N tokens into a mask [N, vocab]. An empty set stands for the full vocabulary."""
    sizes = kept_sets.offsets[1:] - kept_sets.offsets[:-1]
    kept = torch.zeros(len(sizes), vocab, dtype=torch.bool)
    tokens = torch.repeat_interleave(torch.arange(len(sizes)), sizes.long())
    kept[tokens, kept_sets.ids.long() % vocab] = True  # masked tokens may have any id
    return kept | (sizes == 0)[:, None]


def _put(x: Tensor, span: Any, keep: Tensor, values: Tensor) -> Tensor:
    """Return a copy of `x` with `values` at the unmasked tokens of one sequence."""
    places = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    places[span] = keep
    return x.masked_scatter(places, values)
