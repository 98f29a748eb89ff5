"""Time and memory of loss and gradients against the size of the vocabulary: small ones are where we lose.

python -m gspo_kernels.benchmarks vocab
"""

from __future__ import annotations

import argparse

from ..measure import destination, save
from ..workloads import Head, Spec
from .step import arguments, chosen_by, sweep

ON_CPU = dict(width=896, tokens=512, vocabs=(2048, 8192, 32_768, 131_072), rounds=5)
ON_GPU = dict(width=4096, tokens=16_384, vocabs=(2048, 8192, 32_768, 131_072, 262_144), rounds=15)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks vocab", description=(__doc__ or "").split("\n\n")[0]
    )
    arguments(parser)
    given = parser.parse_args()
    chosen, device = chosen_by(parser, given.against), given.device
    on_gpu = device.type == "cuda"
    default = ON_GPU if on_gpu else ON_CPU
    width, tokens, vocabs, rounds = (default[name] for name in ("width", "tokens", "vocabs", "rounds"))
    if given.tiny:
        width, tokens, vocabs, rounds = 64, 128, (1000, 2000), 2
    dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    specs = [Spec(Head(width, vocab), tokens, "rl-like", dtype, str(device)) for vocab in vocabs]
    output = destination("vocab", device, given.output, given.tiny)
    runs = sweep(specs, chosen, given.rounds or rounds)
    print(save("vocab", device, {"runs": runs}, output))
