"""Make the tables of docs/scale.md: memory, bytes and operations of the head step on each rank. Nothing is measured.

They replace the text between `<!-- counted: NAME -->` and `<!-- end -->`. All numbers follow from
`gspo_kernels.memory`, whose formulas tests compare with counted bytes. The last table also uses published
rates of a GPU and of its links.
"""

from __future__ import annotations

import re

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_kernels import memory
from gspo_kernels.backends.triton.tuning import assume
from gspo_kernels.memory import MIB, Batch

from ..measure import ROOT
from .tables import percent, table

PAGE = ROOT / "docs" / "scale.md"

MODELS = {
    "Llama-3 8B": (4096, 128_256),
    "Llama-3 70B": (8192, 128_256),
    "Qwen3-235B-A22B": (4096, 151_936),
}  # H, V
TOKENS = 32_768
TP = (1, 2, 4, 8, 16)
CP = (1, 2, 4, 8)
ARCHITECTURE = "sm_90"
PASSES = 4  # of a step in which every token has a gradient, without a cache
# H200 SXM datasheet: 1,979 TFLOP/s in bf16 with sparsity, 4.8 TB/s.
PEAK = 989.5e12  # operations per second, dense
BANDWIDTH = 4.8e12  # bytes per second
# GB/s that a GPU receives. H200 datasheet: NVLink 900 GB/s, both directions together. InfiniBand NDR: 400 Gb/s a port.
LINKS = {"NVLink": 450.0, "400 Gb/s": 50.0}
BLOCK = re.compile(r"(<!-- counted: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page() -> str:
    """The text of docs/scale.md with new tables."""
    with FakeTensorMode(), assume(ARCHITECTURE):
        tables = {"parts": parts(), "totals": totals(), "limits": limits()}
    return BLOCK.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", PAGE.read_text())


def parts() -> str:
    """Memory and collectives by TP, without CP. Only the column of the cache's size assumes a cache."""
    header = ["model", "TP", "rows", "head", "hidden", "gradients", "copies", "table", "at most", "full cache"]
    header += ["all-gather", "with entropies", "all-reduce", "same bits"]
    rows = []
    for name, (width, vocab) in MODELS.items():
        for tp in TP:
            batch = Batch(TOKENS, width, vocab, tp)
            head, with_entropies = (batch.head(torch.bfloat16, entropy=entropy) for entropy in (False, True))
            bound = memory.bound(head, "triton", 0)
            sent = [[x.size for x in memory.collectives(y, "triton")] or [0, 0] for y in (head, with_entropies)]
            sizes = (head.weight.nbytes, head.hidden.nbytes, bound.gradients, bound.hidden_copies, bound.tile_table)
            cache = memory.full_cache_mib(head, "triton") * MIB
            numbers = (*sizes, bound.total, cache, sent[0][0], sent[1][0], sent[0][1])
            aligned = "yes" if memory.shards_are_aligned(head, "triton") else "no"
            rows.append((name, str(tp), f"{len(head.weight):,}", *(f"{x / MIB:,.0f}" for x in numbers), aligned))
    return table(header, rows)


def totals() -> str:
    """The memory bound by TP and CP."""
    rows = []
    for name, (width, vocab) in MODELS.items():
        for tp in TP:
            heads = [Batch(TOKENS, width, vocab, tp, cp).head(torch.bfloat16) for cp in CP]
            bounds = [memory.bound(head, "triton", 0).total + head.hidden.nbytes for head in heads]
            weight = heads[0].weight.nbytes
            rows.append((name, str(tp), *(f"{(size + weight) / MIB:,.0f}" for size in bounds)))
    return table(("model", "TP", *(f"CP {cp}" for cp in CP)), rows)


def limits() -> str:
    """Split the time into what shrinks with TP and what does not. Add the TP at which both take equally long."""
    header = ["model", "TP", "TFLOP", "received", "traffic", "operations per byte"]
    header += [f"share, {link}" for link in LINKS]
    rows = []
    for name, (width, vocab) in MODELS.items():
        for tp in TP[1:]:
            head = Batch(TOKENS, width, vocab, tp).head(torch.bfloat16)
            received = sum(x.received for x in memory.collectives(head, "triton"))
            traffic = sum(memory.unsharded_traffic(head, "triton").values())
            operations = PASSES * 2.0 * TOKENS * width * head.vocab_size
            shares = [share(operations, received, traffic, rate) for rate in LINKS.values()]
            numbers = (f"{operations / 1e12:,.1f}", f"{received / MIB:,.0f}", f"{traffic / MIB:,.0f}")
            rows.append((name, str(tp), *numbers, f"{operations / received:,.0f}", *map(percent, shares)))
        crossings = [str(crossing(width, vocab, rate)) for rate in LINKS.values()]
        rows.append((name, "**half**", "", "", "", "", *(f"**at TP {x}**" for x in crossings)))
    return table(header, rows)


def share(operations: float, received: float, traffic: float, link: float) -> float:
    """Share of a step's time that does not shrink with TP, at the published rates and without overlap."""
    products = operations / PEAK
    others = received / (link * 1e9) + traffic / BANDWIDTH
    return others / (products + others)


def crossing(width: int, vocab: int, link: float) -> int:
    """The TP at which the part that does not shrink takes as long as the products. V is not padded."""
    head = Batch(TOKENS, width, vocab, TP[-1]).head(torch.bfloat16)
    traffic = memory.unsharded_traffic(head, "triton")
    # With many ranks, each receives the results of all tiles, a quarter of the table's traffic, and twice its d_hidden.
    others = (traffic["table"] / 4 + 2 * head.hidden.nbytes) / (link * 1e9)
    others += sum(traffic.values()) / BANDWIDTH
    return round(PASSES * 2.0 * TOKENS * width * vocab / PEAK / others)
