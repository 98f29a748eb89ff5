"""Batches for measurements: heads of real models, and advantages and ratios as in training with GSPO.

All sequences of a batch have the same length and no token is masked, so no candidate pays for padding. Each candidate
gets old log-probs from its own forward, as in a trainer. Log-ratios are well inside or well outside the clip window, so
all candidates should make the same clip decisions. `precision` measures which decisions rounding changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import Objective

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
    """The shares of sequences without a gradient, and options of the loss and the batch."""

    what: str
    zero: float = 0.0  # share of sequences with advantage 0, because all answers of their group got the same reward
    clipped: float = 0.0  # share of the remaining sequences that are clipped
    kl: bool = False
    on_policy: bool = False  # no old log-probs: the ratio is exactly 1
    long: bool = False  # the batch has only two sequences, however many tokens it has


SCENARIOS = {
    "dense": Scenario("every token has a gradient: our worst case"),
    "rl-like": Scenario("some sequences have advantage 0, some are clipped", zero=0.3, clipped=0.15),
    "on-policy": Scenario("no old log-probs, so no clipping; some advantages are 0", zero=0.3, on_policy=True),
    "kl": Scenario("rl-like, plus 0.04 times k3 KL, so every token has a gradient", zero=0.3, clipped=0.15, kl=True),
    "long": Scenario("only two long sequences; every token has a gradient", long=True),
}
LENGTH = 1024  # tokens per sequence
FEWEST = 8  # sequences; small batches have shorter ones
INSIDE, OUTSIDE = 1e-4, 1e-2  # log-ratios inside and outside the clip window
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4
KL_COEF = 0.04
DRIFT = -0.2  # least reference minus current log-prob; it is uniform up to 0, so that no log-prob is above 0


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
    log_ratio: Tensor | None  # [S] fp32, current minus old log-prob of every token; None: on-policy
    kl_drift: Tensor | None  # [S, L] fp32, reference minus current log-prob; None: no KL
    softcap: float | None
    entropy: Tensor  # [S, L] nats, of the policy before it was rounded to the dtype

    @property
    def objective(self) -> Objective:
        return Objective(kl_coef=KL_COEF) if self.kl_drift is not None else Objective()

    @property
    def rows(self) -> int:
        return self.target_ids.numel()

    @property
    def products(self) -> float:
        """Operations of one matrix pass, 2 N H V."""
        return 2.0 * self.rows * self.weight.numel()


class Old(NamedTuple):
    """Log-probs from before the update."""

    log_probs: Tensor | None  # [S, L]; None: on-policy
    ref_log_probs: Tensor | None  # [S, L]; None: no KL


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
    scenario = SCENARIOS[spec.scenario]
    count, zero, clipped = counts(spec.tokens, spec.scenario)
    length = spec.tokens // count
    head = spec.head
    device = torch.device(spec.device)
    source = peaked.make(count * length, head.width, head.vocab, softcap=head.softcap, device=device, **policy)
    w = batch(source, count, zero, clipped, scenario.kl, getattr(torch, spec.dtype))._replace(softcap=head.softcap)
    return w._replace(log_ratio=None) if scenario.on_policy else w


def batch(
    policy: peaked.Policy, count: int, zero: int, clipped: int, kl: bool = False, dtype: torch.dtype = torch.float32
) -> Workload:
    """Make `count` sequences of equal length with the advantages and log-ratios of `roles`."""
    advantages, log_ratio = roles(count, zero, clipped)
    device = policy.hidden.device
    rng = torch.Generator().manual_seed(1)
    return Workload(
        hidden=policy.hidden.to(dtype).view(count, -1, policy.hidden.shape[-1]),
        weight=policy.weight.to(dtype),
        target_ids=policy.target_ids.view(count, -1),
        advantages=advantages.to(device),
        log_ratio=log_ratio.to(device),
        kl_drift=DRIFT * torch.rand(count, len(policy.hidden) // count, generator=rng).to(device) if kl else None,
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
