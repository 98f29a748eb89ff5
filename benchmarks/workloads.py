"""Batches for measurements: heads of real models, and advantages and ratios as in training with GSPO.

All sequences of a batch have the same length and no token is masked, so no candidate pays for padding. Each candidate
gets old log-probs from its own forward, as in a trainer. Log-ratios are well inside or well outside the clip window, so
all candidates should make the same clip decisions. `precision` measures which decisions rounding changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import peaked


class Head(NamedTuple):
    width: int  # H
    vocab: int  # V
    softcap: float | None = None


MODELS = {
    "qwen3-8b": Head(4096, 151_936),
    "qwen2.5-0.5b": Head(896, 151_936),
    "gemma-2-2b": Head(2304, 256_000, softcap=30.0),
    "llama-3-8b": Head(4096, 128_256),
}


class Scenario(NamedTuple):
    """The shares of sequences without a gradient."""

    what: str
    zero: float = 0.0  # share of sequences with advantage 0, because all answers of their group got the same reward
    clipped: float = 0.0  # share of the remaining sequences that are clipped
    long: bool = False  # the batch has only two sequences, however many tokens it has


SCENARIOS = {
    "dense": Scenario("every token has a gradient: our worst case"),
    "rl-like": Scenario("some sequences have advantage 0, some are clipped", zero=0.3, clipped=0.15),
    "long": Scenario("only two long sequences; every token has a gradient", long=True),
}
LENGTH = 1024  # tokens per sequence
FEWEST = 8  # sequences; small batches have shorter ones
INSIDE, OUTSIDE = 1e-4, 1e-2  # log-ratios inside and outside the clip window
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4


class Spec(NamedTuple):
    """The parameters from which `make` builds a workload. Unlike a workload, they can be sent to a process as JSON."""

    head: Head
    tokens: int
    scenario: str
    dtype: str = "float32"
    device: str = "cpu"


class Workload(NamedTuple):
    hidden: Tensor  # [S, L, H]
    weight: Tensor  # [V, H]
    target_ids: Tensor  # [S, L]
    advantages: Tensor  # [S] fp32
    log_ratio: Tensor  # [S] fp32, current minus old log-prob of every token
    softcap: float | None
    entropy: Tensor  # [S, L] nats, of the policy before it was rounded to the dtype

    @property
    def rows(self) -> int:
        return self.target_ids.numel()

    @property
    def products(self) -> float:
        """Operations of one matrix pass, 2 N H V."""
        return 2.0 * self.rows * self.weight.numel()


class Counts(NamedTuple):
    sequences: int
    zero: int  # sequences of advantage 0
    clipped: int  # sequences that are clipped; their advantage is not 0


def counts(tokens: int, scenario: str) -> Counts:
    """Count the sequences of a batch, those with advantage 0, and those that are clipped."""
    shares = SCENARIOS[scenario]
    if shares.long:
        return Counts(2, 0, 0)
    sequences = max(FEWEST, tokens // LENGTH)
    zero = round(shares.zero * sequences)
    return Counts(sequences, zero, round(shares.clipped * (sequences - zero)))


def make(spec: Spec, **policy: Any) -> Workload:
    """Make the batch of a spec, the same on all devices of a kind. `policy` holds arguments of `peaked.make`."""
    count, zero, clipped = counts(spec.tokens, spec.scenario)
    length = spec.tokens // count
    head = spec.head
    device = torch.device(spec.device)
    source = peaked.make(count * length, head.width, head.vocab, softcap=head.softcap, device=device, **policy)
    return batch(source, count, zero, clipped, getattr(torch, spec.dtype))._replace(softcap=head.softcap)


def batch(policy: peaked.Policy, count: int, zero: int, clipped: int, dtype: torch.dtype = torch.float32) -> Workload:
    """Make `count` sequences of equal length with the advantages and log-ratios of `roles`."""
    advantages, log_ratio = roles(count, zero, clipped)
    device = policy.hidden.device
    return Workload(
        hidden=policy.hidden.to(dtype).view(count, -1, policy.hidden.shape[-1]),
        weight=policy.weight.to(dtype),
        target_ids=policy.target_ids.view(count, -1),
        advantages=advantages.to(device),
        log_ratio=log_ratio.to(device),
        softcap=None,
        entropy=policy.entropy.view(count, -1),
    )


def roles(count: int, zero: int, clipped: int) -> tuple[Tensor, Tensor]:
    """Make advantages [S] and log-ratios [S]: `zero` sequences with advantage 0, then `clipped` clipped ones.

    Advantages other than 0 alternate in sign, and their absolute values are from 0.5 to 1.5.
    """
    sign = torch.tensor([1.0, -1.0]).repeat(count)[:count]
    advantages = sign * torch.linspace(0.5, 1.5, count)
    advantages[:zero] = 0
    log_ratio = INSIDE * torch.linspace(-1, 1, count)
    log_ratio[zero : zero + clipped] = OUTSIDE * sign[zero : zero + clipped]
    return advantages, log_ratio
