"""Measure time and memory of loss and gradients for every installed candidate.

    python -m gspo_kernels.benchmarks step --time      for several numbers of tokens (100 minutes on two cores)
    python -m gspo_kernels.benchmarks step --memory    peak memory only, for more tokens (an hour on two cores)
    python -m gspo_kernels.benchmarks step --vocab     for several vocabularies (half an hour)

Without these options, --time and --memory are measured. Both are parts of one JSON file; with one option, only that
part is replaced. --time measures `rl-like` batches, as in training, for every number of tokens. For the largest number
it also measures `dense` batches (our worst case), `long` batches (because Liger's loss has a cost per sequence) and, on
a CPU, bf16 batches. `gspo bench` measures a single batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from .. import bench_table
from ..candidates import Candidate
from ..measure import Record, destination, save, save_part
from ..workloads import MODELS, SCENARIOS, Head, Spec, counts
from . import bench
from .options import device_of, parser_of, say


class Sizes(NamedTuple):
    head: Head
    tokens: list[int]
    memory_tokens: list[int]
    rounds: int
    vocab_tokens: int  # number of tokens for --vocab
    vocabs: tuple[int, ...]  # sizes of the vocabulary for --vocab


VOCABS = (2048, 8192, 32_768, 131_072)
ON_CPU = Sizes(MODELS["qwen2.5-0.5b"], [256, 512, 1024], [4096, 16_384], 5, 512, VOCABS)
ON_GPU = Sizes(MODELS["qwen3-8b"], [4096, 16_384, 65_536], [131_072], 15, 16_384, (*VOCABS, 262_144))
TINY = Sizes(Head(64, 2000), [128], [512], 2, 128, (1000, 2000))


def sweep(specs: list[Spec], chosen: list[Candidate], rounds: int) -> list[Record]:
    """Compare the candidates on each spec in turn. Print each table as soon as it is measured."""
    runs = []
    for spec in specs:
        head = f"{spec.scenario}, {spec.dtype}, {spec.tokens} tokens, H = {spec.head.width}, V = {spec.head.vocab}"
        print(f"{head}: about {bench.minutes(chosen, spec, rounds):.1f} minutes", flush=True)
        runs.append(bench.compare(spec, chosen, rounds, say))
        bench_table.show(runs[-1], Console(width=bench_table.WIDE), SCENARIOS[spec.scenario].what)
    return runs


def timed_specs(sizes: Sizes, device: torch.device, dtype: str) -> list[Spec]:
    """The batches of --time."""
    most = max(sizes.tokens)
    points = [("rl-like", count, dtype) for count in sizes.tokens]
    points += [(scenario, most, dtype) for scenario in ("dense", "long")]
    if device.type == "cpu":
        points.append(("rl-like", most, "bfloat16"))
    return [Spec(sizes.head, count, scenario, dtype, str(device)) for scenario, count, dtype in points]


def memory_points(specs: list[Spec], chosen: list[Candidate]) -> list[Record]:
    """Measure peak memory at every number of tokens. Stop at the first batch that does not fit."""
    points = []
    for spec in specs:
        tokens = spec.tokens - spec.tokens % counts(spec.tokens, spec.scenario).sequences
        print(f"memory only, {tokens} tokens", flush=True)
        try:
            points.append({"tokens": tokens, "candidates": bench.costs(spec, chosen, say, passes=False)})
        except MemoryError as error:
            say(f"stopped: {error}")
            break
    return points


def parsed() -> tuple[argparse.Namespace, dict[str, Path]]:
    """Parse the command line: options, and the file of each suite. For a bad option, exit with a message."""
    parser = parser_of("step", __doc__)
    parser.add_argument("--time", action="store_true", help="time, memory and passes for several numbers of tokens")
    parser.add_argument("--memory", action="store_true", help="peak memory for more tokens")
    parser.add_argument("--vocab", action="store_true", help="time, memory and passes for several vocabularies")
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    if not (options.time or options.memory or options.vocab):
        options.time = options.memory = True
    suites = ["step"] * (options.time or options.memory) + ["vocab"] * options.vocab
    if len(suites) > 1 and options.output:
        parser.error("--output: --vocab writes another file than --time and --memory: expected --vocab without them")
    return options, {suite: destination(suite, options.device, options.output, options.tiny) for suite in suites}


def main() -> None:
    options, paths = parsed()
    device = options.device
    on_gpu = device.type == "cuda"
    sizes = TINY if options.tiny else ON_GPU if on_gpu else ON_CPU
    chosen = bench.candidates("torch" if options.tiny else None)
    dtype = "bfloat16" if on_gpu else "float32"
    if options.time:
        runs = sweep(timed_specs(sizes, device, dtype), chosen, sizes.rounds)
        print(save_part("step", device, "time", {"runs": runs}, paths["step"]))
    if options.memory:
        specs = [Spec(sizes.head, count, "rl-like", dtype, str(device)) for count in sizes.memory_tokens]
        print(save_part("step", device, "memory", {"points": memory_points(specs, chosen)}, paths["step"]))
    if options.vocab:
        heads = [Head(sizes.head.width, vocab) for vocab in sizes.vocabs]
        specs = [Spec(head, sizes.vocab_tokens, "rl-like", dtype, str(device)) for head in heads]
        print(save("vocab", device, {"runs": sweep(specs, chosen, sizes.rounds)}, paths["vocab"]))
