"""Time and memory of loss and gradients against the number of tokens, for everyone installed.

    python -m benchmarks.step                            this machine's device (on two cores 80 minutes of timing)
    python -m benchmarks.step --model qwen3-8b --tokens 4096 16384 65536

Timed at every number of tokens as in training (`rl-like`); at the largest also where every token has a gradient
(`dense`), the worst case for us, with few long sequences (`long`), because Liger's cost is per sequence, and on a CPU
in bf16 too. `--memory-tokens` are measured for memory alone, until it runs out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from . import bench
from .candidates import Candidate
from .measure import Record, save
from .workloads import MODELS, Spec

ON_CPU: dict[str, Any] = dict(model="qwen2.5-0.5b", tokens=[256, 512, 1024], memory_tokens=[4096, 12_288], rounds=5)
ON_GPU: dict[str, Any] = dict(model="qwen3-8b", tokens=[4096, 16_384, 65_536], memory_tokens=[131_072], rounds=15)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every suite of comparisons has."""
    parser.add_argument("--against", help="as of `gspo bench` (default: what is installed)")
    parser.add_argument("--device", type=lambda name: str(bench.device_of(name)), default=str(bench.device_of(None)))
    parser.add_argument("--dtype", choices=bench.DTYPES, help="default float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--rounds", type=positive, help="timed runs of each, in turns")
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/<suite>-<device>.json")


def positive(text: str) -> int:
    """For argparse, which says so where it is not."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


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
    found = []
    for spec in specs:
        print(
            f"{spec.scenario}, {spec.dtype}, {spec.tokens} tokens, H = {spec.head.width}, V = {spec.head.vocab}",
            flush=True,
        )
        found.append(bench.compare(spec, chosen, rounds, say))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--tokens", type=bench.tokens_of, nargs="+", help="timed")
    parser.add_argument("--memory-tokens", type=bench.tokens_of, nargs="*", help="measured for memory alone")
    arguments(parser)
    given = parser.parse_args()
    chosen = chosen_by(parser, given.against)
    on_gpu = not given.device.startswith("cpu")
    default = ON_GPU if on_gpu else ON_CPU
    model, tokens, rounds = (getattr(given, name) or default[name] for name in ("model", "tokens", "rounds"))
    memory_tokens = default["memory_tokens"] if given.memory_tokens is None else given.memory_tokens
    dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    head = MODELS[model]
    if given.tiny:
        head, tokens, memory_tokens, rounds = head._replace(width=64, vocab=2000), [128, 256], [512], 2
    specs = [Spec(head, count, "rl-like", dtype, given.device) for count in tokens]
    specs += [Spec(head, max(tokens), scenario, dtype, given.device) for scenario in ("dense", "long")]
    if not on_gpu and dtype == "float32":
        specs.append(Spec(head, max(tokens), "rl-like", "bfloat16", given.device))
    runs, memory = sweep(specs, chosen, rounds), []
    for count in memory_tokens:
        print(f"memory alone, {count} tokens", flush=True)
        spec = Spec(head, count, "rl-like", dtype, given.device)
        memory.append({"tokens": count, "candidates": bench.costs(spec, chosen, say, passes=False)})
    results = {"model": "tiny" if given.tiny else model, "runs": runs, "memory": memory}
    print(save("step", torch.device(given.device), results, given.output))


if __name__ == "__main__":
    main()
