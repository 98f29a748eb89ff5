"""Faults in code for heads and sequences that are sharded over ranks."""

from __future__ import annotations

from helpers.faults.table import Fault

FAULTS: dict[str, Fault] = {
    "tiles of the ranks in the wrong order": (
        "parallel",
        "for rank, count in enumerate(tiles)]))",
        "for rank, count in reversed(list(enumerate(tiles)))]))",
        "distributed/sharded::test_case[bits tp 2 torch]",
    ),
    "no logit of a target in the columns of another rank": (
        "parallel",
        "torch.where(is_nan, -torch.inf, logits).amax(0)",
        "logits[0]",
        "distributed/sharded::test_case[tp 2 torch plain]",
    ),
    "d_hidden not summed over ranks": (
        "parallel",
        "dist.all_reduce(d_x, group=ctx.group)",
        "pass",
        "distributed/sharded::test_case[tp 2 torch plain]",
    ),
    "padding of the vocabulary counted as columns": (
        "parallel",
        "max(min(self.vocab_size - rank * self.rows, self.rows), 0)",
        "self.rows",
        "distributed/sharded::test_case[tp 2 torch padded-vocab]",
    ),
    "cells of the first rank computed on every rank": (
        "parallel",
        "first = sum(tiles[: self.rank])",
        "first = 0",
        "distributed/sharded::test_case[tp 2 torch gradient_budget]",
    ),
    "sums over the tokens of the first rank only": (
        "backends/torch/sharded_sequence",
        "total = total + term",
        "pass",
        "distributed/sharded::test_case[cp 2 torch gspo]",
    ),
    "sums over the tokens of ranks in fp32": (
        "backends/torch/sharded_sequence",
        'return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0)',
        "x = x if x.is_floating_point() else x.double()\n"
        '    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0).double()',
        "distributed/sharded::test_case[cp 2 equal tokens]",
    ),
    "lengths and normalizer of this rank's tokens": (
        "backends/torch/sequence",
        "share = _share_of_token(mask, sequence, lengths,",
        "share = _share_of_token(mask, sequence, segment_sum(mask.to(lp.dtype), offsets),",
        "distributed/sharded::test_case[cp 2 torch gspo]",
    ),
    "ranks whose options differ are not refused": (
        "agreement",
        "if any(answer.get(key) != answers[0][key] for answer in answers)",
        "if False",
        "distributed/sharded::test_case[errors on every rank]",
    ),
}
