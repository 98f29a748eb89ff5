"""Run a row of `helpers.features` on several ranks that share its vocabulary, its sequences or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from helpers.array import Results, Tensors, cache_mib, run
from helpers.features import Case
from torch import Tensor

from gspo_kernels import KeptSets, metrics


@dataclass(frozen=True)
class Groups:
    """The process groups of a rank; None where nothing is sharded."""

    tp: Any = None
    cp: Any = None


def rank_in(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Any) -> int:
    return 1 if group is None else group.size()


def shard_rows(x: Tensor, group: Any) -> Tensor:
    """Return this rank's rows of `x` [V, ...]."""
    rows = x.shape[0] // size_of(group)
    assert rows * size_of(group) == x.shape[0]
    return x[rank_in(group) * rows : (rank_in(group) + 1) * rows]


def of_every_rank(x: Any, group: Any) -> list[Any]:
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, x, group=group)
    return out


def contiguous(shape: Sequence[int], ranks: int) -> Tensor:
    """Return the rank of each token [B, T]: consecutive tokens on the same rank."""
    batch, length = shape
    return (torch.arange(length) * ranks // max(length, 1)).expand(batch, length)


def zigzag(shape: Sequence[int], ranks: int) -> Tensor:
    """Return the rank of each token [B, T]: of 2 R chunks, rank r holds chunks r and 2 R - 1 - r."""
    chunk = contiguous(shape, 2 * ranks)
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def owners(case: Case, ranks: int, seed: int) -> Tensor:
    """Return the rank of each token [B, T]."""
    kind, shape = case.row["owner"], case.mask.shape
    owner = zigzag(shape, ranks) if kind == "zigzag" else contiguous(shape, ranks)
    if kind == "random":
        owner = torch.randint(ranks, shape, generator=torch.Generator().manual_seed(seed))
    if kind == "empty rank":
        owner = torch.where(owner == ranks // 2, 0, owner)
    if case.row["layout"] == "padded":
        return owner
    # If a rank has as many tokens as sequences, per-token values would be read as per-sequence values, so move tokens
    # to other ranks. With a single token, both readings agree.
    owner, inside = owner.clone(), case.tokens["inside"]
    while ranks > 1 and inside.sum() > 1 and (full := owner[inside].bincount() == len(inside)).any():
        of_rank = inside & (owner == full.nonzero()[0])
        owner[tuple(of_rank.nonzero()[0])] += 1
        owner %= ranks
    return owner


@dataclass
class Part:
    """The results of one rank, and the places of its rows in the flattened batch."""

    results: Results
    places: Tensor


def run_rank(case: Case, groups: Groups, owner: Tensor) -> Part:
    """Compute the results of this rank."""
    mine = owner == rank_in(groups.cp)
    places = torch.arange(mine.numel()).view(mine.shape)
    tokens = case.tokens | {"places": places}
    if case.row["layout"] == "packed":
        tokens["inside"] = tokens["inside"] & mine
    else:
        columns = mine.all(0)
        assert (mine == columns).all()
        for name, x in tokens.items():
            if isinstance(x, KeptSets):
                tokens[name] = x.select(places[:, columns])
            elif x.shape[:2] == mine.shape:
                tokens[name] = x[:, columns]
    leaves = {name: x if name[0] == "A" else shard_rows(x, groups.tp) for name, x in case.leaves.items()}
    local = replace(case, tokens=tokens, leaves=leaves)
    options = {"tp_group": groups.tp, "cp_group": groups.cp, "reduce_hidden": case.row["reduce_hidden"]}
    cache = (
        cache_mib(case)
        if case.row["cache_mib"] == "all rows"
        else cache_mib(case) / size_of(groups.tp) / size_of(groups.cp)
    )
    return Part(run(local, **options, cache_mib=cache), local.lay_out("places").reshape(-1))


def put_together(case: Case, parts: list[list[Part]]) -> Results:
    """Return the results of all ranks as one process would return them. `parts[i][j]`: rank i in CP, j in TP."""
    of_sequences = [row[0] for row in parts]
    first = of_sequences[0].results
    inside = case.tokens["inside"]

    def equal(values: list[Tensor]) -> Tensor:
        assert all(torch.equal(x, values[0]) for x in values), "ranks differ"
        return values[0]

    def rows(values: list[Tensor], of_row: int) -> Tensor:
        """Put rows of the sequences' ranks at their places. Rows have `of_row` dimensions."""
        rest = values[0].shape[values[0].ndim - of_row :]
        out = values[0].new_zeros(inside.numel(), *rest)
        for part, x in zip(of_sequences, values, strict=True):
            out[part.places] = x.reshape(-1, *rest)
        out = out.view(*inside.shape, *rest)
        return out[inside] if case.row["layout"] == "packed" else out

    outputs: Tensors = {}
    for name in first.outputs:
        values = [equal([part.results.outputs[name] for part in row]) for row in parts]
        if name == "loss" or (name == "log_ratio" and case.objective.ratio != "token"):
            outputs[name] = equal(values)
        else:
            outputs[name] = rows(values, 1 if name.startswith(("extra", "top")) else 0)

    gradients: Tensors = {}
    for name, x in first.gradients.items():
        grid = [[part.results.gradients[name] for part in row] for row in parts]
        if name == "hidden":
            partial = case.row["reduce_hidden"] == "none"
            values = [torch.stack(row).double().sum(0).to(x.dtype) if partial else equal(row) for row in grid]
            gradients[name] = rows(values, 1)
        else:
            values = [equal(row) if name[0] == "A" else torch.cat(row) for row in grid]
            gradients[name] = torch.stack(values).double().sum(0).to(x.dtype)

    found = {name: x for name, x in first.metrics.items() if not name.startswith("backward ")}
    for part in (part for row in parts for part in row):
        assert all(torch.equal(part.results.metrics[name], x) for name, x in found.items()), "metrics differ"
    works = [
        {name.removeprefix("backward "): x for name, x in part.results.metrics.items() if name not in found}
        for part in of_sequences
    ]
    if all(works):
        found |= {f"backward {name}": x for name, x in metrics.combine(works).items()}
    dropped = None
    if first.dropped is not None:
        cells = [torch.cat([part.results.dropped for part in row], 1) for row in parts]  # pyright: ignore
        dropped = rows(cells, 1).flatten(0, -2)
    return Results(outputs, gradients, found, dropped)
