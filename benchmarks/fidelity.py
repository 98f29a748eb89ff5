"""How wrong token log-probs are, and how many of GSPO's clip decisions that turns over, by implementation and length.

    python -m benchmarks.fidelity          about 4 minutes on two cores

Hidden states and head are rounded to bf16 first; the truth is float64 of exactly these values. The policy is updated
(its hidden states move, and are rounded again), and every implementation computes the log-probs before and after.

A sequence is L of the measured tokens, drawn with replacement; of each the error of its log-ratio counts. The mean of
the true log-ratios is set, to N(0, 3.4e-4), so that at every length the same share of sequences, about 15 %, is beyond
the window of 3e-4 / 4e-4. A decision is wrong if it is not the one that float64 takes. The mean error of the tokens is
taken out, because that of a few thousand tokens is mostly chance and would be a bias of every long sequence; what the
decisions are with it left in is reported too. In a real sequence errors may be correlated, which draws do not show; the
correlation of neighbouring tokens' errors stands beside them, and says something for the tokens of a trained policy.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs

from . import candidates, measure, peaked
from .workloads import MODELS, Head

HEAD = MODELS["qwen2.5-0.5b"]
LENGTHS = tuple(2**k for k in range(6, 15))
SPREAD = 3.4e-4  # of the true log-ratios of sequences
UPDATE = 0.03  # nats that an update moves a logit
ROWS = 512  # of a call, of every implementation, before and after the update
POLICY = Path("runs/policy")  # where `benchmarks.policy` leaves a trained policy
OURS, ROUNDED = "ours", "naive GSPO"
OTHER_ENGINE = "old by bf16 logits, new by ours"
LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, H], weight [V, H], ids [N] -> [N]


class Tokens(NamedTuple):
    old_hidden: Tensor  # [N, H] bf16
    new_hidden: Tensor  # [N, H] bf16
    weight: Tensor  # [V, H] bf16
    target_ids: Tensor  # [N], sampled before the update


class Measured(NamedTuple):
    """Of every implementation, in float64 on the CPU."""

    log_ratio: Tensor  # [N] the truth
    old: dict[str, Tensor]  # name -> error of the log-prob before the update [N]
    new: dict[str, Tensor]  # and after
    dtypes: dict[str, str]  # that it returns

    def ratio_errors(self) -> dict[str, Tensor]:
        """Errors of the log-ratios [N]; the last is of old log-probs from another engine, as a sampler's are."""
        found = {name: self.new[name] - self.old[name] for name in self.old}
        if {OURS, ROUNDED} <= found.keys():
            found[OTHER_ENGINE] = self.new[OURS] - self.old[ROUNDED]
        return found


# Who is compared


def implementations(device: torch.device) -> tuple[dict[str, LogProbs], dict[str, str]]:
    """Those that run here, and why the others do not. What shares its log-probs with an earlier one is left out."""
    found: dict[str, LogProbs] = {}
    absent: dict[str, str] = {}
    seen = set()
    for name, one in candidates.ALL.items():
        if one.log_probs in seen:
            continue
        seen.add(one.log_probs)
        why = one.absent(None, device)
        if why is None:
            found[name] = _plain(one.log_probs)
        else:
            absent[name] = why
    return {**found, "fp16 logits": half_logits, "fp32 logits": full_precision_logits}, absent


def _plain(log_probs: candidates.LogProbs) -> LogProbs:
    return lambda hidden, weight, ids: log_probs(hidden, weight, ids, None)


def half_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Accumulated in fp32 and rounded to fp16 before the softmax, as some GPU kernels do."""
    logits = (hidden.float() @ weight.float().t()).half().float()
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def full_precision_logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return candidates.full_log_probs(hidden.float(), weight.float(), ids, None)


# What is measured


def updated(hidden: Tensor, weight: Tensor, ids: Tensor, seed: int) -> Tokens:
    """An update that moves every logit by about `UPDATE`, each on its own."""
    rng = torch.Generator(hidden.device).manual_seed(seed)
    noise = torch.randn(hidden.shape, generator=rng, device=hidden.device)
    scale = UPDATE / weight.float().square().sum(1).mean().sqrt()
    return Tokens(hidden.bfloat16(), (hidden.float() + scale * noise).bfloat16(), weight.bfloat16(), ids)


def synthetic(count: int, head: Head, device: torch.device, seed: int = 0) -> tuple[Tokens, dict[str, Any]]:
    made = peaked.make(count, head.width, head.vocab, seed=seed, device=device)
    return updated(made.hidden, made.weight, made.target_ids, seed + 1), peaked.about(made)


def trained(folder: Path, count: int, device: torch.device) -> tuple[Tokens, dict[str, Any]] | str:
    """Of a policy that was trained; or why there is none."""
    from . import policy  # needs transformers, which nothing else here does

    try:
        states = policy.load(folder)
    except FileNotFoundError as missing:
        return str(missing)
    hidden, ids = (x[:count].to(device) for x in states.rows())
    tokens = updated(hidden, states.weight.to(device), ids, seed=1)
    found = linear_log_probs(tokens.old_hidden[None], tokens.weight, ids[None], entropy=True).entropy
    assert found is not None
    return tokens, peaked.entropy_quantiles(found[0])


@torch.no_grad()
def log_probs(run: LogProbs, hidden: Tensor, weight: Tensor, ids: Tensor, rows: int = ROWS) -> Tensor:
    """On the CPU, in the dtype that they come in."""
    parts = [run(h, weight, i) for h, i in zip(hidden.split(rows), ids.split(rows), strict=True)]
    return torch.cat(parts).cpu()


def truth(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """`weight` is float64 already: of a large head that is a gigabyte."""

    def run(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return candidates.full_log_probs(hidden.double(), weight, ids, None, torch.float64)

    return log_probs(run, hidden, weight, ids, rows=64)


def measured(tokens: Tokens, runs: dict[str, LogProbs]) -> Measured:
    print(f"  float64, {tokens.target_ids.numel()} tokens", flush=True)
    wide, ids = tokens.weight.double(), tokens.target_ids
    true_old, true_new = truth(tokens.old_hidden, wide, ids), truth(tokens.new_hidden, wide, ids)
    del wide
    old, new, dtypes = {}, {}, {}
    for name, run in runs.items():
        start = time.perf_counter()
        before, after = (log_probs(run, h, tokens.weight, ids) for h in (tokens.old_hidden, tokens.new_hidden))
        old[name], new[name] = before.double() - true_old, after.double() - true_new
        dtypes[name] = str(after.dtype).removeprefix("torch.")
        seconds = time.perf_counter() - start
        print(f"  {name}: error {new[name].std().item():.2g} nats a token ({seconds:.0f} s)", flush=True)
    return Measured(true_new - true_old, old, new, dtypes)


# What is made of it


def about_errors(errors: Tensor) -> dict[str, float]:
    """Of token errors [N], nats."""
    sizes = errors.abs()
    return {
        "std": errors.std().item(), "bias": errors.mean().item(),
        "standard error of the bias": errors.std().item() / math.sqrt(errors.numel()),
        "99th percentile": sizes.quantile(0.99).item(), "largest": sizes.max().item(),
        "correlation of neighbours": torch.stack([errors[:-1], errors[1:]]).corrcoef()[0, 1].item(),
    }  # fmt: skip


def passes_clip(u: Tensor, positive: Tensor) -> Tensor:
    """Whether a sequence of log-ratio u keeps its gradient, by the sign of its advantage."""
    low, high = Objective().log_window
    return torch.where(positive, u <= high, u >= low)


def interval(hits: int, count: int) -> tuple[float, float]:
    """95 % of a share, by Wilson's score."""
    z = 1.959964
    share, scale = hits / count, 1 + z * z / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / scale if hits else 0.0, (middle + half) / scale


def decisions(
    ratio_errors: dict[str, Tensor], lengths: tuple[int, ...], sequences: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Wrong ones by implementation and length. A sequence of 2 L tokens is one of L and L more; all share the draws."""
    rng = torch.Generator().manual_seed(seed)
    names, errors = list(ratio_errors), torch.stack(list(ratio_errors.values()), 1)
    bias = errors.mean(0)
    centred = (errors - bias).float()
    wrong = torch.zeros(2, len(lengths), len(names), dtype=torch.int64)
    clipped = 0
    for some in torch.arange(sequences).split(10_000):
        u = SPREAD * torch.randn(len(some), 1, generator=rng, dtype=torch.float64)
        positive = torch.rand(len(some), 1, generator=rng) < 0.5
        right = passes_clip(u, positive)
        clipped += int((~right).sum())
        total, before = torch.zeros(len(some), len(names), dtype=torch.float64), 0
        for at, length in enumerate(lengths):
            drawn = torch.randint(errors.shape[0], (len(some), length - before), generator=rng)
            total += torch.nn.functional.embedding_bag(drawn, centred, mode="sum").double()
            before = length
            for kind, more in enumerate((0.0, bias)):
                wrong[kind, at] += (passes_clip(u + total / length + more, positive) != right).sum(0)
    return [
        {
            "implementation": name, "length": length, "sequences": sequences, "clipped": clipped / sequences,
            **_share("wrong", int(wrong[0, at, k]), sequences),
            **_share("wrong with the bias", int(wrong[1, at, k]), sequences),
        }
        for k, name in enumerate(names)
        for at, length in enumerate(lengths)
    ]  # fmt: skip


def _share(name: str, hits: int, count: int) -> dict[str, Any]:
    return {name: hits / count, f"{name}, 95 %": interval(hits, count)}


def suite(tokens: Tokens, about: dict[str, Any], runs: dict[str, LogProbs], sequences: int) -> dict[str, Any]:
    """All that is known of one set of tokens."""
    found = measured(tokens, runs)
    ratio_errors = found.ratio_errors()
    return {
        "tokens": tokens.target_ids.numel(), "width": tokens.weight.shape[1], "vocab": tokens.weight.shape[0],
        "entropy": about, "std of the true log-ratio": found.log_ratio.std().item(),
        "log-probs": {
            name: {"dtype": found.dtypes[name], **about_errors(torch.cat([found.old[name], found.new[name]]))}
            for name in runs
        },
        "log-ratios": {name: about_errors(errors) for name, errors in ratio_errors.items()},
        "decisions": decisions(ratio_errors, LENGTHS, sequences),
    }  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=3072, help="measured, of each set (default 3072)")
    parser.add_argument("--sequences", type=int, default=100_000, help="per length (default 100000)")
    parser.add_argument("--policy", type=Path, default=POLICY, help="a trained policy (default runs/policy)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds: a head of 128 x 4096")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/fidelity-<cpu or GPU>.json")
    arguments = parser.parse_args(given)
    if arguments.tiny:
        arguments.tokens, arguments.sequences = 256, 2000
    device, head = torch.device(arguments.device), Head(128, 4096) if arguments.tiny else HEAD
    runs, absent = implementations(device)
    for name, why in absent.items():
        print(f"not measured: {name}, {why}", flush=True)
    sets: dict[str, Any] = {}
    print("a synthetic policy", flush=True)
    sets["synthetic"] = suite(*synthetic(arguments.tokens, head, device), runs, arguments.sequences)
    states = trained(arguments.policy, arguments.tokens, device)
    if isinstance(states, str):
        absent["trained policy"] = states
        print(f"not measured: {states}", flush=True)
    else:
        print("a trained policy", flush=True)
        sets["trained"] = suite(*states, runs, arguments.sequences)
    objective = Objective()
    results = {
        "dtype": "bfloat16", "spread of log-ratios": SPREAD, "update": UPDATE, "rows of a call": ROWS,
        "clip": [objective.clip_low, objective.clip_high], "seed": 0, "not measured": absent, "sets": sets,
    }  # fmt: skip
    print(f"wrote {measure.save('fidelity', device, results, arguments.output)}")


if __name__ == "__main__":
    main()
