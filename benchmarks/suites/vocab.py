"""Time and memory of loss and gradients against the size of the vocabulary: small ones are where we lose.

python -m gspo_kernels.benchmarks vocab
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..measure import destination, save
from ..workloads import Head, Spec
from .step import arguments, chosen_by, sweep


class Sizes(NamedTuple):
    width: int
    tokens: int
    vocabs: tuple[int, ...]
    rounds: int


ON_CPU = Sizes(896, 512, (2048, 8192, 32_768, 131_072), rounds=5)
ON_GPU = Sizes(4096, 16_384, (2048, 8192, 32_768, 131_072, 262_144), rounds=15)
TINY = Sizes(64, 128, (1000, 2000), rounds=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks vocab", description=(__doc__ or "").split("\n\n")[0]
    )
    arguments(parser)
    asked = parser.parse_args()
    chosen, device = chosen_by(parser, asked.against), asked.device
    on_gpu = device.type == "cuda"
    sizes = TINY if asked.tiny else ON_GPU if on_gpu else ON_CPU
    dtype = asked.dtype or ("bfloat16" if on_gpu else "float32")
    specs = [Spec(Head(sizes.width, vocab), sizes.tokens, "rl-like", dtype, str(device)) for vocab in sizes.vocabs]
    output = destination("vocab", device, asked.output, asked.tiny)
    runs = sweep(specs, chosen, asked.rounds or sizes.rounds)
    print(save("vocab", device, {"runs": runs}, output))
