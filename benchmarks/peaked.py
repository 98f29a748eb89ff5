"""A synthetic policy as peaked as RL leaves one: half of all tokens under 0.01 nats, a fifth above 0.67.

Every row has a few candidates, whose ids are log-uniform (Zipf-like: frequent tokens have small ids, as a BPE gives
them), and its hidden state is the sum of their rows of the head, weighted so that the candidates get the logits wanted.
All other ids get what a random head gives them: together the probability `tail`. Targets are sampled from the policy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

CANDIDATES = 16
DECAY = 0.8  # nats from one candidate to the next, after the second


class Policy(NamedTuple):
    hidden: Tensor  # [N, H] fp32
    weight: Tensor  # [V, H] fp32, rows of norm 1 on average
    target_ids: Tensor  # [N]
    entropy: Tensor  # [N] nats


def make(rows: int, width: int, vocab: int, tail: float = 1e-5, seed: int = 0, peaked: bool = True) -> Policy:
    """`peaked=False`: the other extreme, a random head and random hidden states of unit logits."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=rng) / width**0.5
    if not peaked:
        return _sampled(torch.randn(rows, width, generator=rng), weight, rng)
    # The first candidate's logit `top` gives others N(0, top^2 / width): vocab exp(top^2 / 2 width - top) = tail.
    top = width - math.sqrt(width * (width - 2 * math.log(vocab / tail)))
    kind = torch.rand(rows, generator=rng)
    gap = torch.rand(rows, generator=rng)
    gap = torch.where(kind < 0.5, 8 + 4 * gap, torch.where(kind < 0.8, 2.5 + 5.5 * gap, 1.2 * gap))
    places = torch.arange(CANDIDATES).clamp(min=1) - 1
    below = (gap[:, None] + DECAY * places).where(torch.arange(CANDIDATES) > 0, 0.0)
    start = 20  # ids from here on are log-uniform
    spread = torch.rand(rows, CANDIDATES, generator=rng) * math.log((vocab + start) / start)
    ids = (start * spread.exp() - start).long().clamp(0, vocab - 1)
    chosen = weight[ids]  # [N, CANDIDATES, H]
    gram = chosen @ chosen.mT + 1e-3 * torch.eye(CANDIDATES)  # the same id twice makes it singular
    mix = torch.linalg.solve(gram, (top - below)[..., None])
    return _sampled((chosen * mix).sum(1), weight, rng)


def _sampled(hidden: Tensor, weight: Tensor, rng: torch.Generator) -> Policy:
    ids, entropies = [], []
    for some in hidden.split(64):
        log_p = (some @ weight.t()).log_softmax(-1)
        p = log_p.exp()
        ids.append(p.multinomial(1, generator=rng)[:, 0])
        entropies.append(-(p * log_p).sum(-1))
    return Policy(hidden, weight, torch.cat(ids), torch.cat(entropies))


def about(policy: Policy) -> dict[str, Any]:
    """What the text promises, measured."""
    shares = {f"share under {x} nats": (policy.entropy < x).double().mean().item() for x in (0.01, 0.1)}
    above = (policy.entropy > 0.67).double().mean().item()
    return {"mean entropy": policy.entropy.mean().item(), **shares, "share above 0.67 nats": above}
