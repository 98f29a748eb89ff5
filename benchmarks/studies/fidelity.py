"""How wrong token log-probs are, and how many of GSPO's clip decisions that turns over, by implementation and length.

    python -m gspo_kernels.benchmarks fidelity          about 4 minutes on two cores

Hidden states and head are rounded to bf16 first; the truth is float64 of exactly these values. The policy is updated
(its hidden states move, and are rounded again), and every implementation computes the log-probs before and after.

A sequence is L of the measured tokens, drawn with replacement; of each the error of its log-ratio counts. The mean of
the true log-ratios is set, to N(0, 3.4e-4), so that at every length the same share of sequences, about 15 %, is beyond
the window of 3e-4 / 4e-4. A decision is wrong if it is not the one that float64 takes. The mean error of the tokens is
taken out, because that of a few thousand tokens is mostly chance and would be a bias of every long sequence; decisions
with it left in are reported too ("wrong with the bias").

Two intervals: "95 %" covers the drawing of sequences from these tokens, "95 %, tokens drawn anew" the choice of the
tokens besides (a bootstrap; of a trained policy's, whole answers are drawn). Neither covers another policy, nor errors
that are correlated within a sequence, which draws undo. How much they are is told of a trained policy's answers: the
standard deviation of their mean errors, times sqrt(L), over that of tokens is 1 where errors are independent.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs

from .. import candidates, measure, peaked
from ..candidates import LogProbs
from ..measure import Record
from ..suites.bench import device_of
from ..suites.step import at_least, told
from ..workloads import MODELS, Head
from .decisions import SPREAD, about_errors, decisions, spread_of_means

HEAD = MODELS["qwen2.5-0.5b"]
LENGTHS = tuple(2**k for k in range(6, 15))
UPDATE = 0.03  # nats that an update moves a logit
ROWS = 512  # of a call, of every implementation, before and after the update
POLICY = Path("runs/policy")  # where `gspo_kernels.benchmarks.studies.policy` leaves a trained policy
OURS, NAIVE = "ours", "naive GSPO"
OTHER_ENGINE = "old by bf16 logits, new by ours"


class Tokens(NamedTuple):
    old_hidden: Tensor  # [N, H] bf16
    new_hidden: Tensor  # [N, H] bf16
    weight: Tensor  # [V, H] bf16
    target_ids: Tensor  # [N], sampled before the update
    sequence: Tensor  # [N] on the CPU: whose they are, in order; each its own where tokens are independent


class Measured(NamedTuple):
    """Of every implementation, in float64 on the CPU."""

    log_ratio: Tensor  # [N] the truth
    old: dict[str, Tensor]  # name -> error of the log-prob before the update [N]
    new: dict[str, Tensor]  # and after
    dtypes: dict[str, str]  # that it returns

    def ratio_errors(self) -> dict[str, Tensor]:
        """Errors of the log-ratios [N]; the last is of old log-probs from another engine, as a sampler's are."""
        log_ratios = {name: self.new[name] - self.old[name] for name in self.old}
        if {OURS, NAIVE} <= log_ratios.keys():
            log_ratios[OTHER_ENGINE] = self.new[OURS] - self.old[NAIVE]
        return log_ratios


# Who is compared


def implementations(head: Head, device: torch.device) -> tuple[dict[str, LogProbs], dict[str, str]]:
    """Those that run here, and why the others do not. What shares its log-probs with an earlier one is left out."""
    runs: dict[str, LogProbs] = {}
    absent: dict[str, str] = {}
    seen = set()
    for name, candidate in candidates.ALL.items():
        if candidate.log_probs in seen:
            continue
        seen.add(candidate.log_probs)
        why = candidate.absent(head, torch.bfloat16, device)
        if why is None:
            runs[name] = candidate.log_probs
        else:
            absent[name] = why
    return {**runs, "fp16 logits": half_logits, "fp32 logits": full_precision_logits}, absent


def half_logits(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Accumulated in fp32 and rounded to fp16 before the softmax, as some GPU kernels do."""
    assert softcap is None
    logits = (hidden.float() @ weight.float().t()).half().float()
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def full_precision_logits(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    return candidates.full_log_probs(hidden.float(), weight.float(), ids, softcap)


# What is measured


def updated(hidden: Tensor, weight: Tensor, ids: Tensor, seed: int) -> Tokens:
    """An update that moves every logit by about `UPDATE`, each on its own."""
    rng = torch.Generator(hidden.device).manual_seed(seed)
    noise = torch.randn(hidden.shape, generator=rng, device=hidden.device)
    scale = UPDATE / weight.float().square().sum(1).mean().sqrt()
    moved, alone = (hidden.float() + scale * noise).bfloat16(), torch.arange(ids.numel())
    return Tokens(hidden.bfloat16(), moved, weight.bfloat16(), ids, alone)


def synthetic(count: int, head: Head, device: torch.device, seed: int = 0) -> tuple[Tokens, Record]:
    policy = peaked.make(count, head.width, head.vocab, seed=seed, device=device)
    return updated(policy.hidden, policy.weight, policy.target_ids, seed + 1), peaked.about(policy)


def trained(folder: Path, count: int, device: torch.device) -> tuple[Tokens, Record] | str:
    """Of a policy that was trained; or why there is none."""
    from . import policy  # needs transformers, which nothing else here does

    try:
        states = policy.load(folder)
    except FileNotFoundError as missing:
        return str(missing)
    hidden, ids = (x[:count].to(device) for x in states.rows())
    lengths = states.mask.sum(1).cpu()
    whose = torch.arange(lengths.numel()).repeat_interleave(lengths)[:count]
    tokens = updated(hidden, states.weight.to(device), ids, seed=1)._replace(sequence=whose)
    entropy = linear_log_probs(tokens.old_hidden[None], tokens.weight, ids[None], entropy=True).entropy
    assert entropy is not None
    return tokens, peaked.entropy_quantiles(entropy[0])


@torch.no_grad()
def log_probs(run: LogProbs, hidden: Tensor, weight: Tensor, ids: Tensor, rows: int = ROWS) -> Tensor:
    """On the CPU, in the dtype that they come in."""
    parts = [run(h, weight, i, None) for h, i in zip(hidden.split(rows), ids.split(rows), strict=True)]
    return torch.cat(parts).cpu()


def truth(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """`weight` is float64 already: of a large head that is a gigabyte."""

    def run(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
        return candidates.full_log_probs(hidden.double(), weight, ids, softcap, torch.float64)

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


def suite(tokens: Tokens, about: Record, sequences: int) -> Record:
    """All that is known of one set of tokens."""
    vocab, width = tokens.weight.shape
    runs, absent = implementations(Head(width, vocab), tokens.weight.device)
    for name, why in absent.items():
        print(f"  not measured: {name}, {why}", flush=True)
    results = measured(tokens, runs)
    ratio_errors, twice = results.ratio_errors(), tokens.sequence.repeat(2)
    both = {name: torch.cat([results.old[name], results.new[name]]) for name in runs}
    return {
        "tokens": tokens.target_ids.numel(),
        "sequences": tokens.sequence.unique().numel(),
        "width": width,
        "vocab": vocab,
        "not measured": absent,
        "entropy": about,
        "std of the true log-ratio": results.log_ratio.std().item(),
        "log-probs": {name: {"dtype": results.dtypes[name], **about_errors(both[name], twice)} for name in runs},
        "log-ratios": {
            name: about_errors(errors, tokens.sequence) | spread_of_means(errors, tokens.sequence)
            for name, errors in ratio_errors.items()
        },
        "decisions": decisions(ratio_errors, LENGTHS, sequences, tokens.sequence),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks fidelity", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tokens", type=at_least(64), default=3072, help="measured, of each set (default 3072)")
    parser.add_argument("--sequences", type=at_least(1000), default=100_000, help="per length (default 100000)")
    parser.add_argument("--policy", type=Path, default=POLICY, help="a trained policy (default runs/policy)")
    parser.add_argument("--device", type=told(device_of), default="cpu", help="default cpu")
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds: a head of 128 x 4096")
    parser.add_argument("--output", type=Path, help=measure.OUTPUT)
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.tokens, arguments.sequences = 256, 2000
    device, head = arguments.device, Head(128, 4096) if arguments.tiny else HEAD
    output = measure.destination("fidelity", device, arguments.output, arguments.tiny)
    sets: Record = {}
    print("a synthetic policy", flush=True)
    sets["synthetic"] = suite(*synthetic(arguments.tokens, head, device), arguments.sequences)
    absent = dict(sets["synthetic"]["not measured"])
    states = trained(arguments.policy, arguments.tokens, device)
    if isinstance(states, str):
        absent["trained policy"] = states
        print(f"not measured: {states}", flush=True)
    else:
        print("a trained policy", flush=True)
        sets["trained"] = suite(*states, arguments.sequences)
        absent |= sets["trained"]["not measured"]
    objective = Objective()
    results = {
        "dtype": "bfloat16",
        "spread of log-ratios": SPREAD,
        "update": UPDATE,
        "rows of a call": ROWS,
        "clip": [objective.clip_low, objective.clip_high],
        "seed": 0,
        "not measured": absent,
        "sets": sets,
    }
    print(f"wrote {measure.save('fidelity', device, results, output)}")
