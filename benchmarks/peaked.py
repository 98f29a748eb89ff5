"""Make a synthetic policy as peaked as after RL: half of the entropies are below 0.01 nats, a fifth above 0.67 nats.

Every row has 16 candidate ids. They are log-uniform, because a BPE gives frequent tokens small ids. The row's hidden
state is a weighted sum of the candidates' vectors in the head, with weights that give each candidate a chosen logit.
All other ids get random logits, with a total probability of `TAIL`. Target ids are sampled from the policy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

CANDIDATES = 16
TAIL = 1e-5
DECAY = 0.8  # nats from each candidate's logit to the next, from the second candidate on
FIRST_ID = 20  # id + FIRST_ID has a log-uniform distribution


class Policy(NamedTuple):
    hidden: Tensor  # [N, H] fp32
    weight: Tensor  # [V, H] fp32, rows of norm about 1
    target_ids: Tensor  # [N]
    entropy: Tensor  # [N] nats


def make(
    rows: int, width: int, vocab: int, peaked: bool = True, softcap: float | None = None,
    device: torch.device | str = "cpu",
) -> Policy:  # fmt: skip  # related arguments share a line
    """Make a policy. With `peaked=False`, head and hidden states are random and logits have standard deviation 1.

    The chosen logits are logits after the soft-cap. So the soft-cap must exceed the largest, about log(vocab / TAIL).
    """
    rng = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        weight = torch.randn(vocab, width, generator=rng) / width**0.5
        if peaked:
            hidden = _peaked_states(rows, weight, softcap, rng)
        else:
            hidden = torch.randn(rows, width, generator=rng)
        return _sampled(hidden, weight, softcap, rng)


def _peaked_states(rows: int, weight: Tensor, softcap: float | None, rng: torch.Generator) -> Tensor:
    """Make the hidden states of a peaked policy, [rows, H]."""
    vocab, width = weight.shape
    # If the first candidate has the logit `top`, the logits of other ids are distributed as N(0, top^2 / width). Their
    # probability relative to this candidate's is vocab * exp(top^2 / (2 width) - top), which has to be `TAIL`.
    top = width - math.sqrt(width * (width - 2 * math.log(vocab / TAIL)))
    kind, uniform = torch.rand(rows, generator=rng), torch.rand(rows, generator=rng)
    gap = torch.where(kind < 0.5, 8 + 4 * uniform, torch.where(kind < 0.8, 2.5 + 5.5 * uniform, 1.2 * uniform))
    places = torch.arange(CANDIDATES).clamp(min=1) - 1
    below = (gap[:, None] + DECAY * places).where(torch.arange(CANDIDATES) > 0, 0.0)  # [rows, CANDIDATES]
    spread = torch.rand(rows, CANDIDATES, generator=rng) * math.log((vocab + FIRST_ID) / FIRST_ID)
    ids = (FIRST_ID * spread.exp() - FIRST_ID).long().clamp(0, vocab - 1)
    logits = top - below
    if softcap is not None:
        logits = softcap * torch.atanh(logits / softcap)
    # Chunks of rows, because the candidates' vectors take 16 times the memory of the hidden states.
    pairs = zip(ids.split(4096), logits.split(4096), strict=True)
    return torch.cat([_states_with_logits(weight[chunk], wanted) for chunk, wanted in pairs])


def _states_with_logits(candidates: Tensor, logits: Tensor) -> Tensor:
    """Solve for hidden states [n, H] that give the vectors [n, CANDIDATES, H] the logits [n, CANDIDATES]."""
    gram = candidates @ candidates.mT + 1e-3 * torch.eye(CANDIDATES)  # not singular if a row has an id twice
    return (candidates * torch.linalg.solve(gram, logits[..., None])).sum(1)


def _sampled(hidden: Tensor, weight: Tensor, softcap: float | None, rng: torch.Generator) -> Policy:
    ids, entropies = [], []
    for states in hidden.split(64):
        logits = states @ weight.t()
        log_p = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).log_softmax(-1)
        p = log_p.exp()
        ids.append(p.multinomial(1, generator=rng)[:, 0])
        entropies.append(-(p * log_p).sum(-1))
    return Policy(hidden, weight, torch.cat(ids), torch.cat(entropies))


def entropy_quantiles(entropy: Tensor) -> dict[str, Any]:
    """Describe the tokens' entropies: mean and quantiles in nats, and shares below and above limits."""
    exact = entropy.double()
    at = (0.1, 0.25, 0.5, 0.75, 0.9)
    quantiles = exact.quantile(torch.tensor(at, dtype=torch.float64, device=entropy.device)).tolist()
    return {
        "mean entropy": exact.mean().item(),
        **{f"share under {x} nats": (entropy < x).double().mean().item() for x in (0.01, 0.1)},
        "share above 0.67 nats": (entropy > 0.67).double().mean().item(),
        "quantiles": dict(zip(map(str, at), quantiles, strict=True)),
    }
