"""Measure errors of token log-probs, and the clip decisions that they change, by implementation and sequence length.

    python -m gspo_kernels.benchmarks fidelity          about 4 minutes on two cores

Hidden states and head are rounded to bf16, and the reference is float64 of exactly these values. A synthetic update
moves the hidden states, which are rounded again. Every implementation computes log-probs before and after the update.

The error of a sequence is the mean error of L measured tokens, drawn with replacement. It is added to a true log-ratio
that is drawn independently of the tokens, from a normal distribution with standard deviation 3.4e-4. So at every length
about 31 % of the sequences are outside the clip window of 3e-4 / 4e-4. About 15 % are clipped, because an advantage is
clipped on one side only. A decision is wrong if float64 decides otherwise. Before decisions are made, the mean error of
all measured tokens is subtracted from each error: it would shift every long sequence, and a few thousand tokens are too
few to estimate it. "wrong with the mean error" counts decisions without this subtraction.

The 95 % intervals include two errors: of drawing sequences (Wilson's interval), and of choosing tokens (a bootstrap,
which redraws entire answers if the tokens come from answers). They do not cover other policies, or a correlation of
errors within a sequence, because drawing single tokens removes it. For a trained policy "correlation" measures it:
sqrt(length of an answer) * std(mean errors of answers) / std(errors of tokens), which is 1 for independent errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels import Objective

from .. import candidates, measure, peaked
from ..candidates import LogProbs
from ..measure import Record
from ..suites.options import device_of, parser_of
from ..workloads import MODELS, Head

FULL = 3072, 100_000, MODELS["qwen2.5-0.5b"]  # tokens that are measured, sequences drawn from them per length, and head
TINY = 256, 2000, Head(128, 4096)
LENGTHS = tuple(2**k for k in range(6, 15))
UPDATE = 0.03  # standard deviation, in nats, of the change of a logit by the update
ROWS = 512  # rows per call of an implementation
SPREAD = 3.4e-4  # standard deviation of the true log-ratios of sequences
CHUNK = 2000  # number of sequences drawn at once
Z, T = 1.959964, 2.022691  # 97.5 % quantiles: normal, and Student's t with REDRAWS - 1 degrees of freedom
REDRAWS, FRACTION = 40, 10  # bootstrap samples of the tokens; each uses one in FRACTION of the sequences
OURS, NAIVE = "ours", "naive GSPO"
OTHER_ENGINE = "old by bf16 logits, new by ours"


class Tokens(NamedTuple):
    old_hidden: Tensor  # [N, H] bf16
    new_hidden: Tensor  # [N, H] bf16
    weight: Tensor  # [V, H] bf16
    target_ids: Tensor  # [N], sampled before the update
    sequence: Tensor  # [N] on the CPU: index of each token's answer; a different one for every independent token


def implementations(head: Head, device: torch.device) -> tuple[dict[str, LogProbs], dict[str, str]]:
    """The implementations that can run here, and why others cannot. Implementations with equal log-probs count once."""
    runs: dict[str, LogProbs] = {}
    absent: dict[str, str] = {}
    for name, candidate in candidates.ALL.items():
        if why := candidate.absent(head, torch.bfloat16, device):
            absent[name] = why
        elif candidate.log_probs not in runs.values():
            runs[name] = candidate.log_probs
    fp32: LogProbs = lambda h, w, *rest: candidates.full_log_probs(h.float(), w.float(), *rest)  # noqa: E731
    return {**runs, "fp16 logits": fp16_logits, "fp32 logits": fp32}, absent


def fp16_logits(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    """Compute log-probs [N] from logits that are summed in fp32 and rounded to fp16, as in some GPU kernels."""
    assert softcap is None
    logits = (hidden.float() @ weight.float().t()).half().float()
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def updated(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tokens:
    """Round the tokens to bf16, and add new hidden states after a random update of size `UPDATE`."""
    rng = torch.Generator(hidden.device).manual_seed(1)
    noise = torch.randn(hidden.shape, generator=rng, device=hidden.device)
    scale = UPDATE / weight.float().square().sum(1).mean().sqrt()
    moved = (hidden.float() + scale * noise).bfloat16()
    return Tokens(hidden.bfloat16(), moved, weight.bfloat16(), ids, torch.arange(ids.numel()))


def trained(folder: Path, count: int, device: torch.device) -> Tokens:
    """Load the answers of a trained policy. If there is none, the FileNotFoundError names the command to run."""
    from . import policy  # needs transformers

    states = policy.load(folder)
    hidden, ids = (x[:count].to(device) for x in states.rows())
    lengths = states.mask.sum(1).cpu()
    sequence = torch.arange(lengths.numel()).repeat_interleave(lengths)[:count]
    return updated(hidden, states.weight.to(device), ids)._replace(sequence=sequence)


@torch.no_grad()
def log_probs(run: LogProbs, hidden: Tensor, weight: Tensor, ids: Tensor, rows: int = ROWS) -> Tensor:
    """Run an implementation on `rows` rows at a time. Return log-probs [N] on the CPU, in its dtype."""
    parts = [run(h, weight, i, None) for h, i in zip(hidden.split(rows), ids.split(rows), strict=True)]
    return torch.cat(parts).cpu()


def measured(tokens: Tokens, runs: dict[str, LogProbs]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """For each implementation: errors of old and new log-probs, [2, N] on the CPU, and the dtype that it returns."""
    weight = tokens.weight
    ids = tokens.target_ids
    states = (tokens.old_hidden, tokens.new_hidden)
    exact = weight.double()  # cast once, to 1 GB for `FULL`
    full = partial(candidates.full_log_probs, accumulator=torch.float64)
    true = torch.stack([log_probs(full, h.double(), exact, ids, rows=64) for h in states])
    errors, dtypes = {}, {}
    for name, run in runs.items():
        result = torch.stack([log_probs(run, h, weight, ids) for h in states])
        errors[name] = result.double() - true
        dtypes[name] = str(result.dtype).removeprefix("torch.")
        print(f"  {name}: error {errors[name][1].std().item():.2g} nats per token", flush=True)
    return errors, dtypes


def of_log_ratios(errors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Errors of the log-ratios, [N], by implementation. `OTHER_ENGINE` combines two implementations."""
    ratios = {name: new - old for name, (old, new) in errors.items()}
    if {OURS, NAIVE} <= errors.keys():
        ratios[OTHER_ENGINE] = errors[OURS][1] - errors[NAIVE][0]
    return ratios


def correlation(errors: Tensor, sequence: Tensor) -> float | None:
    """The "correlation" that the module's docstring defines; None if the tokens do not come from answers."""
    if sequence.unique().numel() == sequence.numel():
        return None
    centred = errors - errors.mean()
    return (torch.bincount(sequence, centred).norm() / centred.norm()).item()


def passes_clip(u: Tensor, positive: Tensor) -> Tensor:
    """True where a sequence with log-ratio u is not clipped. `positive`: whether its advantage is positive."""
    low, high = Objective().log_window
    return torch.where(positive, u <= high, u >= low)


def decisions(
    errors_of: dict[str, Tensor], lengths: tuple[int, ...], sequences: int, sequence: Tensor
) -> dict[str, Record]:
    """Shares of wrong decisions by implementation and length. All implementations get the same sequences."""
    rng = torch.Generator().manual_seed(0)
    errors = torch.stack(list(errors_of.values()), 1)  # [N, K implementations]
    deviation = _bootstrap(errors, sequence, lengths, sequences // FRACTION, rng)
    mean_error = errors.mean(0)
    wrong, biased = torch.zeros(2, errors.shape[1], len(lengths), dtype=torch.int64)
    for chunk in torch.arange(sequences).split(CHUNK):
        u = SPREAD * torch.randn(len(chunk), 1, generator=rng, dtype=torch.float64)
        positive = torch.rand(len(chunk), 1, generator=rng) < 0.5
        right = passes_clip(u, positive)
        for at, mean in enumerate(_means(errors - mean_error, len(chunk), lengths, rng)):
            wrong[:, at] += (passes_clip(u + mean, positive) != right).sum(0)
            biased[:, at] += (passes_clip(u + mean + mean_error, positive) != right).sum(0)
    return {
        name: {
            "wrong": (wrong[k].double() / sequences).tolist(),
            "95 %": [interval(int(x), sequences, d) for x, d in zip(wrong[k], deviation[k].tolist(), strict=True)],
            "wrong with the mean error": (biased[k].double() / sequences).tolist(),
        }
        for k, name in enumerate(errors_of)
    }


def interval(hits: int, count: int, deviation: float = 0.0) -> tuple[float, float]:
    """Wilson's 95 % interval of hits / count, widened for a second error of standard deviation `deviation`."""
    share = hits / count
    scale = 1 + Z * Z / count
    middle = (share + Z * Z / (2 * count)) / scale
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count)) / scale
    down, up = (share - middle + half if hits else 0.0), middle + half - share
    widened = math.hypot(down, T * deviation), math.hypot(up, T * deviation)
    return max(0.0, share - widened[0]), min(1.0, share + widened[1])


def _means(errors: Tensor, count: int, lengths: tuple[int, ...], rng: torch.Generator) -> Iterator[Tensor]:
    """Draw `count` sequences that grow from length to length. At each length, yield their mean errors [count, K]."""
    table = errors.float()
    total = torch.zeros(count, errors.shape[1], dtype=torch.float64)
    before = 0
    for length in lengths:
        drawn = torch.randint(len(errors), (count, length - before), generator=rng)
        total += torch.nn.functional.embedding_bag(drawn, table, mode="sum").double()
        before = length
        yield total / length


def _bootstrap(
    errors: Tensor, sequence: Tensor, lengths: tuple[int, ...], sequences: int, rng: torch.Generator
) -> Tensor:
    """Standard deviation of the share of wrong decisions over redrawn sets of tokens, [K, lengths].

    `flip_chance` averages over the true log-ratios, so few sequences suffice. Drawing them adds noise to the result.
    """
    sizes = sequence.unique_consecutive(return_counts=True)[1]
    tables = []
    for _ in range(REDRAWS):
        chunk = torch.randint(len(sizes), (4 * len(sizes),), generator=rng)  # more than needed, because lengths differ
        shift = (sizes.cumsum(0)[chunk] - sizes[chunk].cumsum(0)).repeat_interleave(sizes[chunk])
        tables.append(errors[(shift + torch.arange(len(shift)))[: errors.shape[0]]])
    every = torch.cat(tables, 1)  # [N, REDRAWS * K]
    share = torch.zeros(every.shape[1], len(lengths), dtype=torch.float64)
    for chunk in torch.arange(sequences).split(CHUNK):
        for at, mean in enumerate(_means(every - every.mean(0), len(chunk), lengths, rng)):
            share[:, at] += flip_chance(mean).sum(0) / sequences
    return share.unflatten(0, (REDRAWS, -1)).std(0)


def flip_chance(error: Tensor) -> Tensor:
    """Probability that an error makes a decision wrong, for a random true log-ratio and sign of the advantage."""
    cdf = torch.special.ndtr
    sides = [cdf((end - error) / SPREAD) - cdf(error.new_tensor(end / SPREAD)) for end in Objective().log_window]
    return 0.5 * (sides[0].abs() + sides[1].abs())


def study(tokens: Tokens, sequences: int) -> tuple[Record, dict[str, str]]:
    """Measure one set of tokens. Return the results, and why implementations were not measured, by name."""
    vocab, width = tokens.weight.shape
    runs, absent = implementations(Head(width, vocab), tokens.weight.device)
    errors, dtypes = measured(tokens, runs)
    ratios = of_log_ratios(errors)
    wrong = decisions(ratios, LENGTHS, sequences, tokens.sequence)
    records = []
    for name, ratio in ratios.items():
        record: Record = {"name": name, "dtype": dtypes.get(name), "log-ratio": {"std": ratio.std().item()}}
        if name in runs:
            record["log-prob"] = {"std": errors[name].std().item()}
        records.append(record | {"correlation": correlation(ratio, tokens.sequence), **wrong[name]})
    sizes = {"tokens": len(tokens.target_ids), "width": width, "vocab": vocab, "lengths": LENGTHS}
    return {**sizes, "implementations": records}, absent


def main() -> None:
    parser = parser_of("fidelity", __doc__)
    parser.add_argument("--policy", type=Path, default=Path("runs/policy"), help="trained policy (default runs/policy)")
    parser.add_argument("--device", type=device_of, default="cpu", help="where to compute (default cpu)")
    options = parser.parse_args()
    count, sequences, head = TINY if options.tiny else FULL
    output = measure.destination("fidelity", options.device, options.output, options.tiny)
    sets: dict[str, Record] = {}
    policy = peaked.make(count, head.width, head.vocab, device=options.device)
    sets["synthetic"], absent = study(updated(policy.hidden, policy.weight, policy.target_ids), sequences)
    try:
        sets["trained"] = study(trained(options.policy, count, options.device), sequences)[0]
    except FileNotFoundError as missing:
        absent["trained policy"] = str(missing)
    results = {"sequences": sequences, "spread of log-ratios": SPREAD, "not measured": absent, "sets": sets}
    print(f"not measured: {absent}")
    print(measure.save("fidelity", options.device, results, output))
