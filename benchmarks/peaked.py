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


def make(
    rows: int,
    width: int,
    vocab: int,
    tail: float = 1e-5,
    seed: int = 0,
    peaked: bool = True,
    sure: float = 0.5,
    softcap: float | None = None,
    device: torch.device | str = "cpu",
) -> Policy:
    """`sure`: the share of tokens under 0.01 nats; of the others two in five are above 0.67.

    `peaked=False`: the other extreme, a random head and random hidden states of unit logits.

    A soft-cap is undone before the hidden states are made, so that the capped logits are those wanted; it must be
    above the largest of them, about log(vocab / tail).
    """
    rng = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        return _make(rows, width, vocab, tail, peaked, sure, softcap, rng)


def _make(
    rows: int,
    width: int,
    vocab: int,
    tail: float,
    peaked: bool,
    sure: float,
    softcap: float | None,
    rng: torch.Generator,
) -> Policy:
    weight = torch.randn(vocab, width, generator=rng) / width**0.5
    if not peaked:
        return _sampled(torch.randn(rows, width, generator=rng), weight, softcap, rng)
    # The first candidate's logit `top` gives others N(0, top^2 / width): vocab exp(top^2 / 2 width - top) = tail.
    top = width - math.sqrt(width * (width - 2 * math.log(vocab / tail)))
    kind = torch.rand(rows, generator=rng)
    gap = torch.rand(rows, generator=rng)
    middle = sure + 0.6 * (1 - sure)
    gap = torch.where(kind < sure, 8 + 4 * gap, torch.where(kind < middle, 2.5 + 5.5 * gap, 1.2 * gap))
    places = torch.arange(CANDIDATES).clamp(min=1) - 1
    below = (gap[:, None] + DECAY * places).where(torch.arange(CANDIDATES) > 0, 0.0)
    start = 20  # ids from here on are log-uniform
    spread = torch.rand(rows, CANDIDATES, generator=rng) * math.log((vocab + start) / start)
    ids = (start * spread.exp() - start).long().clamp(0, vocab - 1)
    wanted = top - below
    if softcap is not None:
        wanted = softcap * torch.atanh(wanted / softcap)
    # In parts: the candidates' rows of the head are 16 times the hidden states.
    parts = [_mixed(weight[part], w) for part, w in zip(ids.split(4096), wanted.split(4096), strict=True)]
    return _sampled(torch.cat(parts), weight, softcap, rng)


def _mixed(chosen: Tensor, wanted: Tensor) -> Tensor:
    """[n, CANDIDATES, H] and logits [n, CANDIDATES] -> the sums of rows that have these logits [n, H]."""
    gram = chosen @ chosen.mT + 1e-3 * torch.eye(CANDIDATES)  # the same id twice makes it singular
    return (chosen * torch.linalg.solve(gram, wanted[..., None])).sum(1)


def _sampled(hidden: Tensor, weight: Tensor, softcap: float | None, rng: torch.Generator) -> Policy:
    ids, entropies = [], []
    for states in hidden.split(64):
        logits = states @ weight.t()
        log_p = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
        p = log_p.exp()
        ids.append(p.multinomial(1, generator=rng)[:, 0])
        entropies.append(-(p * log_p).sum(-1))
    return Policy(hidden, weight, torch.cat(ids), torch.cat(entropies))


def about(policy: Policy) -> dict[str, Any]:
    """What the text promises, measured."""
    return entropy_quantiles(policy.entropy)


def entropy_quantiles(entropy: Tensor) -> dict[str, Any]:
    """Of entropies in nats, one per token."""
    shares = {f"share under {x} nats": (entropy < x).double().mean().item() for x in (0.01, 0.1)}
    above = (entropy > 0.67).double().mean().item()
    at = (0.1, 0.25, 0.5, 0.75, 0.9)
    quantiles = entropy.double().quantile(torch.tensor(at, dtype=torch.float64, device=entropy.device)).tolist()
    return {
        "mean entropy": entropy.double().mean().item(),
        **shares,
        "share above 0.67 nats": above,
        "quantiles": dict(zip(map(str, at), quantiles, strict=True)),
    }
