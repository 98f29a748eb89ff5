"""What is measured on: heads of real models, and batches as GSPO meets them.

All sequences of a batch are equally long and no token is masked, so that nobody is charged for padding. Log-ratios are
set, not left to chance: well inside the clip window or well outside it, so that every implementation should decide
alike; each gets old log-probs from its own forward, as in a trainer. Which decisions rounding flips is another
question, with a suite of its own (`fidelity`).
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
    """Shares of the sequences, and what else the loss has."""

    what: str
    zero: float = 0.0  # of advantage 0: every answer of the group got the same reward
    clipped: float = 0.0  # beyond the clip, of those with an advantage
    kl: bool = False
    on_policy: bool = False  # no old log-probs: the ratio is exactly 1
    long: bool = False  # two sequences, however many tokens


SCENARIOS = {  # shares are met as nearly as the number of sequences allows: see `counts`
    "dense": Scenario("every token has a gradient: the worst case for us"),
    "rl-like": Scenario("some sequences of zero advantage, some clipped", zero=0.3, clipped=0.15),
    "on-policy": Scenario("no old log-probs, so nothing clipped; some of zero advantage", zero=0.3, on_policy=True),
    "kl": Scenario("as rl-like with a k3 KL of 0.04, which keeps every row alive", zero=0.3, clipped=0.15, kl=True),
    "long": Scenario("two sequences that share all tokens, both with a gradient", long=True),
}
LENGTH = 1024  # tokens of a sequence, where there are enough for eight
FEWEST = 8  # sequences
INSIDE, OUTSIDE = 1e-4, 1e-2  # log-ratios; the window ends at 3e-4 and 4e-4
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4
KL_COEF = 0.04
BUDGETS = (0.0, 1e-4, 1e-3, 4e-3, 1e-2)  # gradient budgets that are tried


class Spec(NamedTuple):
    """A workload in words, which travel to other processes."""

    head: Head
    tokens: int
    scenario: str
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0


class Workload(NamedTuple):
    hidden: Tensor  # [S, L, H]
    weight: Tensor  # [V, H]
    target_ids: Tensor  # [S, L]
    advantages: Tensor  # [S] fp32
    log_ratio: Tensor | None  # [S] fp32, of every sequence, what an update did; None: on-policy
    kl_drift: Tensor | None  # [S, L] fp32: ref log-probs are a candidate's own plus this
    softcap: float | None
    entropy: Tensor  # [S, L] nats, before rounding to the dtype

    @property
    def objective(self) -> Objective:
        return Objective(kl_coef=KL_COEF) if self.kl_drift is not None else Objective()

    @property
    def rows(self) -> int:
        return self.target_ids.numel()

    @property
    def products(self) -> float:
        """Operations of one pass: 2 N H V."""
        return 2.0 * self.rows * self.weight.numel()


class Old(NamedTuple):
    """What a trainer keeps from before the update."""

    log_probs: Tensor | None  # [S, L]; None: on-policy
    ref_log_probs: Tensor | None  # [S, L]; None: no KL


class Counts(NamedTuple):
    sequences: int
    zero: int  # of advantage 0
    clipped: int  # of the others


def counts(tokens: int, scenario: str) -> Counts:
    """How many sequences share the tokens, and what they are."""
    named = SCENARIOS[scenario]
    if named.long:
        return Counts(2, 0, 0)
    sequences = max(FEWEST, tokens // LENGTH)
    zero = round(named.zero * sequences)
    return Counts(sequences, zero, round(named.clipped * (sequences - zero)))


def length_of(tokens: int, scenario: str) -> int:
    """Of each of the `counts` sequences; tokens are rounded down to so many."""
    count = counts(tokens, scenario).sequences
    if tokens < count:
        raise ValueError(f"tokens: expected at least {count} for {scenario!r}, got {tokens}")
    return tokens // count


def make(spec: Spec, **policy: Any) -> Workload:
    """The batch of a spec; the same one wherever it is made on the same kind of device.

    Tokens are rounded down to equal sequences. `policy`: further arguments of `peaked.make`.
    """
    scenario, (count, zero, clipped) = SCENARIOS[spec.scenario], counts(spec.tokens, spec.scenario)
    length = length_of(spec.tokens, spec.scenario)
    head, device = spec.head, torch.device(spec.device)
    peaked_policy = peaked.make(
        count * length, head.width, head.vocab, seed=spec.seed, softcap=head.softcap, device=device, **policy
    )
    drift = None
    if scenario.kl:
        rng = torch.Generator().manual_seed(spec.seed + 1)
        drift = 0.1 * torch.randn(count, length, generator=rng).to(device)
    w = batch(peaked_policy, count, zero, clipped, getattr(torch, spec.dtype))._replace(
        kl_drift=drift, softcap=head.softcap
    )
    return w._replace(log_ratio=None) if scenario.on_policy else w


def batch(policy: peaked.Policy, count: int, zero: int, clipped: int, dtype: torch.dtype = torch.float32) -> Workload:
    """`count` sequences of equal length, with the parts of `roles`."""
    advantages, log_ratio = roles(count, zero, clipped)
    device = policy.hidden.device
    return Workload(
        hidden=policy.hidden.to(dtype).view(count, -1, policy.hidden.shape[-1]),
        weight=policy.weight.to(dtype),
        target_ids=policy.target_ids.view(count, -1),
        advantages=advantages.to(device),
        log_ratio=log_ratio.to(device),
        kl_drift=None,
        softcap=None,
        entropy=policy.entropy.view(count, -1),
    )


def roles(count: int, zero: int, clipped: int) -> tuple[Tensor, Tensor]:
    """Advantages [S] and log-ratios [S]: the first `zero` have advantage 0, the next `clipped` lie beyond the clip.

    Advantages change signs from one to the next, and lie between 0.5 and 1.5 in size.
    """
    sign = torch.tensor([1.0, -1.0]).repeat(count)[:count]
    advantages = sign * torch.linspace(0.5, 1.5, count)
    advantages[:zero] = 0
    log_ratio = INSIDE * torch.linspace(-1, 1, count)
    log_ratio[zero : zero + clipped] = OUTSIDE * sign[zero : zero + clipped]
    return advantages, log_ratio


def spec_from(fields: list[Any]) -> Spec:
    """Back from JSON, which knows no named tuples."""
    return Spec(Head(*fields[0]), *fields[1:])
