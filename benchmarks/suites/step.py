"""Time and memory of loss and gradients against the number of tokens, for everyone installed.

    python -m gspo_kernels.benchmarks step --time        (80 minutes on two cores)
    python -m gspo_kernels.benchmarks step --memory      of more tokens, until it runs out (an hour on two cores)
    python -m gspo_kernels.benchmarks step --model qwen3-8b --tokens 4096 16384 65536

Timed at every number of tokens as in training (`rl-like`); at the largest also where every token has a gradient
(`dense`), the worst case for us, with few long sequences (`long`), because Liger's cost is per sequence, and on a CPU
in bf16 too. With neither option both parts are measured; each keeps what the file has of the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..candidates import Candidate
from ..measure import OUTPUT, Record, destination, results_in, save_part
from ..workloads import MODELS, Spec, counts, length_of
from . import bench

ON_CPU: dict[str, Any] = dict(model="qwen2.5-0.5b", tokens=[256, 512, 1024], memory_tokens=[4096, 16_384], rounds=5)
ON_GPU: dict[str, Any] = dict(model="qwen3-8b", tokens=[4096, 16_384, 65_536], memory_tokens=[131_072], rounds=15)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every suite of comparisons has."""
    parser.add_argument("--against", help="as of `gspo bench` (default: what is installed)")
    device = str(bench.device_of(None))
    parser.add_argument("--device", type=told(bench.device_of), default=device, help=f"default {device}")
    parser.add_argument("--dtype", choices=bench.DTYPES, help="default float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--rounds", type=positive, help="timed runs of each, in turns")
    parser.add_argument("--tiny", action="store_true", help="a trial with small shapes")
    parser.add_argument("--output", type=Path, help=OUTPUT)


def told(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which keeps what an ArgumentTypeError says and drops the text of any other."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: a whole number that is not less."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise ValueError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return told(parse)


positive = at_least(1)


def chosen_by(parser: argparse.ArgumentParser, against: str | None) -> list[Candidate]:
    """Who was asked for; stops with a line if that is nobody."""
    try:
        return bench.candidates(against)
    except ValueError as error:
        parser.error(str(error))


def say(what: str) -> None:
    print(f"  {what}", flush=True)


def sweep(specs: list[Spec], chosen: list[Candidate], rounds: int) -> list[Record]:
    """One comparison after the other, each told on its own line."""
    points = []
    for spec in specs:
        print(
            f"{spec.scenario}, {spec.dtype}, {spec.tokens} tokens, H = {spec.head.width}, V = {spec.head.vocab}",
            flush=True,
        )
        points.append(bench.compare(spec, chosen, rounds, say))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks step", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--time", action="store_true", help="time, memory and passes at --tokens")
    parser.add_argument("--memory", action="store_true", help="peak memory at --memory-tokens")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--tokens", type=told(bench.tokens_of), nargs="+", help="timed")
    parser.add_argument("--memory-tokens", type=told(bench.tokens_of), nargs="+", help="measured for memory alone")
    arguments(parser)
    options = parser.parse_args()
    chosen, device = chosen_by(parser, options.against), options.device
    on_gpu = device.type == "cuda"
    default = ON_GPU if on_gpu else ON_CPU
    model, tokens, memory_tokens, rounds = (getattr(options, name) or default[name] for name in default)
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    head = MODELS[model]
    if options.tiny:
        model, head, tokens, memory_tokens, rounds = "tiny", head._replace(width=64, vocab=2000), [128, 256], [512], 2
    both, output = not (options.time or options.memory), destination("step", device, options.output, options.tiny)
    kept = {
        part: measured["model"] for part, measured in results_in(output).items() if not (both or getattr(options, part))
    }
    if other := {part: of for part, of in kept.items() if of != model}:
        parser.error(f"--output: {output} would keep {other} beside {model}: expected a file of its own")
    if options.time or both:
        specs = [Spec(head, count, "rl-like", dtype, str(device)) for count in tokens]
        specs += [Spec(head, max(tokens), scenario, dtype, str(device)) for scenario in ("dense", "long")]
        if not on_gpu and dtype == "float32":
            specs.append(Spec(head, max(tokens), "rl-like", "bfloat16", str(device)))
        runs = sweep(specs, chosen, rounds)
        print(save_part("step", device, "time", {"model": model, "runs": runs}, output))
    if options.memory or both:
        points = []
        for count in memory_tokens:
            try:
                points.append(memory(Spec(head, count, "rl-like", dtype, str(device)), chosen))
            except MemoryError as error:  # of the batch itself, or of ours
                print(f"  the end: {error}", flush=True)
                break
        print(save_part("step", device, "memory", {"model": model, "points": points}, output))


def memory(spec: Spec, chosen: list[Candidate]) -> Record:
    """Of everyone at one number of tokens."""
    tokens = counts(spec.tokens, spec.scenario).sequences * length_of(spec.tokens, spec.scenario)
    print(f"memory alone, {tokens} tokens", flush=True)
    return {"tokens": tokens, "candidates": bench.costs(spec, chosen, say, passes=False)}
