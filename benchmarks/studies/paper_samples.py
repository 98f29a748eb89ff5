"""Log-ratios of tokens, by several laws and with measured noise, and what this library makes of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, policy_loss
from gspo_kernels.reference import gspo_reference_loss

from ..measure import Record
from ..workloads import Head
from . import decisions, fidelity

GSPO = Objective.preset("gspo")  # 3e-4 and 4e-4, as in the paper
GRPO = Objective.preset("grpo", clip_low=0.2, clip_high=0.27)
BF16 = "bf16 logits"  # what naive GSPO is, as a kind of noise
OBJECTIVES = {"gspo": GSPO, "grpo": GRPO}
NORMALISED, PRODUCT = "normalised, 1 % to 99 %", "product, 1 % to 99 %"
AT_ONCE = 2**22  # tokens


class Law(NamedTuple):
    """Of log-ratios of tokens. But for `drift`, standard deviations are fitted: GRPO then clips as the paper says."""

    what: str
    std: float
    unit: Callable[[tuple[int, int], torch.Generator], Tensor]  # samples of standard deviation 1
    drift: float = 0.0  # of every token, to the side that its sequence's advantage pushes to


def _gauss(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng)


def _laplace(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    size = torch.empty(shape).exponential_(generator=rng) * 0.5**0.5
    return torch.where(torch.rand(shape, generator=rng) < 0.5, -size, size)


def _some(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.where(torch.rand(shape, generator=rng) < 0.2, torch.randn(shape, generator=rng) * 5**0.5, 0.0)


def _student(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    square = torch.randn((3, *shape), generator=rng).square().sum(0)
    return torch.randn(shape, generator=rng) / square.sqrt()  # t of 3 degrees, whose variance is 3, over sqrt(3)


LAWS = {
    "Gauss": Law("normal", 0.076, _gauss),
    "Laplace": Law("Laplace", 0.055, _laplace),
    "one in five": Law("20 % of the tokens move, normal; the others do not", 0.042, _some),
    "Student t3": Law("Student's t of 3 degrees of freedom", 0.043, _student),
    "drift": Law("normal, and 3e-4 towards the advantage", 0.02, _gauss, drift=3e-4),
}


def signs(sequences: int) -> Tensor:
    """Advantages: half of them 1, half -1."""
    return torch.tensor([1.0, -1.0]).repeat((sequences + 1) // 2)[:sequences]


def draw(law: Law, advantages: Tensor, length: int, rng: torch.Generator) -> Tensor:
    """Log-ratios [S, length]."""
    noise = law.unit((advantages.shape[0], length), rng)
    return law.std * noise + law.drift * advantages.sign()[:, None]


def judged(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> dict[str, Tensor]:
    """The library's metrics and log-ratios. Only differences enter a loss, so old log-probs are 0."""
    out = policy_loss(log_ratio, advantages, old_log_probs=torch.zeros_like(log_ratio), objective=objective)
    return {**out.metrics, "log_ratio": out.log_ratio}


def coefficients(log_ratio: Tensor, advantages: Tensor, objective: Objective, **more: Any) -> Tensor:
    """What the gradient of each token's log-prob is multiplied by: d loss / d log-probs, times -(tokens of a sequence).

    The sum over sequences is not divided by anything, so this is ratio x advantage where the clip does not bind.
    """
    leaf = log_ratio.detach().requires_grad_()
    old = torch.zeros_like(leaf)
    loss = policy_loss(leaf, advantages, old_log_probs=old, objective=objective, normalizer=1.0, **more).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return -gradient * log_ratio.shape[1]


def in_parts(sequences: int, length: int) -> list[int]:
    """Numbers of sequences that together make `AT_ONCE` tokens at most, or one each."""
    each = max(1, AT_ONCE // length)
    return [min(each, sequences - start) for start in range(0, sequences, each)]


# Noise


class Noise(NamedTuple):
    """Measured per token, on the same tokens."""

    log_ratio: Tensor  # [N] float64: what the update did
    errors: dict[str, Tensor]  # implementation -> errors of it [N], without their mean


def measured_noise(tokens: int, head: Head) -> Noise:
    """What rounding in the head alone does to log-ratios, and to those whose old log-probs come from another engine."""
    device = torch.device("cpu")
    runs, _ = fidelity.implementations(head, device)
    wanted = (fidelity.NAIVE, "fp16 logits", "fp32 logits", fidelity.OURS)
    policy, _ = fidelity.synthetic(tokens, head, device)
    results = fidelity.measured(policy, {name: runs[name] for name in wanted})
    named = {BF16 if name == fidelity.NAIVE else name: errors for name, errors in results.ratio_errors().items()}
    return Noise(results.log_ratio, {name: errors - errors.mean() for name, errors in named.items()})


def disturbed(noise: Noise, length: int, sequences: int, rng: torch.Generator) -> list[Record]:
    """Coefficients from disturbed log-ratios beside those of float64, of GSPO and GRPO."""
    totals = {(name, kind): torch.zeros(6, dtype=torch.float64) for name in noise.errors for kind in OBJECTIVES}
    for chunk in in_parts(sequences, length):
        advantages = signs(chunk)
        drawn = torch.randint(noise.log_ratio.shape[0], (chunk, length), generator=rng)
        log_ratio = noise.log_ratio[drawn]
        u = decisions.SPREAD * torch.randn(chunk, 1, generator=rng, dtype=torch.float64)
        log_ratio += u - log_ratio.mean(1, keepdim=True)
        for kind, objective in OBJECTIVES.items():
            right = coefficients(log_ratio, advantages, objective)
            for name, errors in noise.errors.items():
                noisy = coefficients((log_ratio + errors[drawn]).float(), advantages, objective).double()
                totals[name, kind] += _compared(noisy, right)
    return [
        {
            "noise": name,
            "objective": kind,
            "length": length,
            "sequences": sequences,
            "wrong of these": (wrong / (sequences * length)).item(),
            "cosine": (dot / (square * true).sqrt()).item(),
            "relative error": (apart / true).sqrt().item(),
            "relative error where decisions agree": (apart_alike / true).sqrt().item(),
        }
        for (name, kind), (wrong, dot, square, true, apart, apart_alike) in totals.items()
    ]


def _compared(values: Tensor, right: Tensor) -> Tensor:
    other = (values == 0) != (right == 0)  # all tokens of a sequence alike for GSPO, so that this counts sequences
    square = (values - right).square()
    alike = square.masked_fill(other, 0)
    sums = (other, values * right, values.square(), right.square(), square, alike)
    return torch.stack([x.sum(dtype=torch.float64) for x in sums])


# Coefficients


def weights(law: Law, sequences: int, length: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """What a token's gradient is multiplied by besides its advantage, 0 where clipped: by objective, [S, L] float64.

    Exact if `length` is a power of 2. The second tensor has the signs of the advantages [S].
    """
    rng = torch.Generator().manual_seed(seed)
    advantages = signs(sequences)
    log_ratio = draw(law, advantages, length, rng).double()
    shares = {kind: coefficients(log_ratio, advantages, o) / advantages[:, None] for kind, o in OBJECTIVES.items()}
    return shares, advantages


def at_the_bounds(objective: Objective) -> dict[str, bool]:
    """Of sequences of one token exactly on a bound and one float64 beyond: whether it keeps its gradient."""
    cases = {}
    for side, bound, advantage in zip(("lower", "upper"), objective.log_window, (-1.0, 1.0), strict=True):
        on = torch.tensor(bound, dtype=torch.float64)
        beyond = torch.nextafter(on, -advantage * torch.tensor(-math.inf, dtype=torch.float64))
        kept = coefficients(torch.stack([on, beyond])[:, None], torch.full((2,), advantage), objective) != 0
        cases |= {f"{side}, on it": bool(kept[0]), f"{side}, beyond it": bool(kept[1])}
    return cases


def range_within(weight: Tensor) -> float:
    """Of the weights of a sequence, largest less least of those kept."""
    most = weight.amax(1) - weight.masked_fill(weight == 0, math.inf).amin(1)
    return most[most > -math.inf].max().item()


# GSPO and GSPO-token


def presets_apart(weighted: bool, dtype: torch.dtype) -> dict[str, float]:
    """Of the gradients of the hidden states, largest difference over largest entry: ours and the reference's."""
    rng = torch.Generator().manual_seed(0)
    sequences, length, width, vocab = 24, 40, 32, 96
    hidden = torch.randn(sequences, length, width, generator=rng, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=rng, dtype=torch.float64) / width**0.5
    ids = torch.randint(vocab, (sequences, length), generator=rng)
    lengths = torch.randint(length // 4, length + 1, (sequences, 1), generator=rng)
    options: dict[str, Any] = {"mask": torch.arange(length) < lengths}
    exact = (hidden @ weight.t()).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    moved = 0.01 * torch.randn(exact.shape, generator=rng, dtype=torch.float64)
    kept = torch.where(options["mask"], moved, 0)
    u = 3.4e-4 * torch.randn(sequences, 1, generator=rng, dtype=torch.float64)
    options["old_log_probs"] = (exact - moved + kept.sum(1, keepdim=True) / lengths - u).to(dtype)
    weights = 0.5 + torch.rand(exact.shape, generator=rng, dtype=torch.float64)
    options["token_weights"] = weights.to(dtype) if weighted else None

    def gradient(loss: Callable[..., Any], preset: str) -> Tensor:
        leaf = hidden.to(dtype).requires_grad_()
        out = loss(
            leaf, weight.to(dtype), ids, signs(sequences).to(dtype), objective=Objective.preset(preset), **options
        )
        return torch.autograd.grad(out.loss, leaf)[0]

    differences = {}
    for name, loss in (("ours", gspo_fused_loss), ("reference", gspo_reference_loss)):
        sequence, token = gradient(loss, "gspo"), gradient(loss, "gspo-token")
        differences[name] = ((sequence - token).abs().max() / sequence.abs().max()).item()
    return differences


# What a length changes


def crossing(points: list[Record], share: float, end: int | None = None) -> float | None:
    """The length where the clip fraction falls through `share`, on a logarithmic axis; None if it does not.

    `end`: 0 or 1, of the fraction's interval instead.
    """
    values = [p["gspo"] if end is None else p["gspo, 95 %"][end] for p in points]
    for a, b in itertools.pairwise(range(len(points))):
        if values[a] >= share > values[b]:
            part = (values[a] - share) / (values[a] - values[b])
            return points[a]["length"] * (points[b]["length"] / points[a]["length"]) ** part
    return None


def means(law: Law, length: int, sequences: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """The library's log-ratios of sequences [S] float64, and their advantages."""
    parts = [signs(chunk) for chunk in in_parts(sequences, length)]
    log_ratios = [judged(draw(law, chunk, length, rng), chunk, GSPO)["log_ratio"].double() for chunk in parts]
    return torch.cat(log_ratios), torch.cat(parts)


def ranges(u: Tensor, length: int) -> Record:
    """Of the ratios of sequences whose mean log-ratios are `u` [S]."""
    at = u.new_tensor([0.01, 0.99])
    return {
        "length": length,
        "sequences": u.shape[0],
        PRODUCT: (length * u).quantile(at).exp().tolist(),
        NORMALISED: u.quantile(at).exp().tolist(),
        "std of u": u.std().item(),
    }


def slope(points: list[Record], name: str) -> float:
    """Of the logarithm of the range's width (as log-ratios) against that of the length, by least squares."""
    lengths = [math.log(p["length"]) for p in points]
    return statistics.linear_regression(lengths, [math.log(math.log(p[name][1] / p[name][0])) for p in points]).slope


def log_edges(marks: list[float]) -> Tensor:
    """Of about 60 bins in the logarithm, none of which lies on both sides of a mark."""
    logs = torch.tensor(marks, dtype=torch.float64).log()
    parts = zip(logs[:-1], logs[1:], (60 * logs.diff() / (logs[-1] - logs[0])).ceil().int().tolist(), strict=True)
    return torch.cat([*(torch.linspace(a, b, n + 1, dtype=logs.dtype)[:-1] for a, b, n in parts), logs[-1:]])
