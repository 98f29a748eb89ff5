"""The likeliest ids of each row and their log-probs, slab by slab. For both backends, without a gradient."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ranks.collectives import gather
from ...ranks.shards import shard_of
from ..precision import exact_products
from ..rows import HeadRows
from .tiles import Tiles


def largest_log_probs(head: HeadRows, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest log-probs of each row over the vocabulary of all ranks.

    Returns:
        Ids [N, k] int64, and log-probs [N, k]; -1 and -inf at masked rows, and for ids whose logit is -inf. Equal
        log-probs are in the order of ids.
    """
    tiles = Tiles(head, head.mask.nonzero()[:, 0])
    ids = torch.full((tiles.padded, k), -1, dtype=torch.int64, device=tiles.device)
    logits = torch.full((tiles.padded, k), -math.inf, dtype=tiles.dtype, device=tiles.device)
    others = torch.full((tiles.padded,), -math.inf, dtype=tiles.dtype, device=tiles.device)
    with exact_products(tiles.device):
        for low, high in tiles.slabs:
            weight = tiles.weight_slab(low, high)
            for rows in tiles.chunks():
                z = tiles.logits(rows, weight, low, high)
                values, columns = _largest(z, min(k, high - low))
                rest = z.scatter_(1, columns[:, :1], -math.inf).logsumexp(1)
                parts = [(logits[rows], ids[rows], others[rows]), (values, columns + low, rest)]
                logits[rows], ids[rows], others[rows] = _merged(parts, k)
    if head.shard:
        logits, ids, others = _of_all_ranks(head, logits, ids, others)
    # As in forward.py: the log-prob of the first id keeps the digits of 1 - p if p is near 1.
    log_top = -F.softplus(others - logits[:, :1].squeeze(1))
    log_probs = logits - logits[:, :1] + log_top[:, None]
    ids = torch.where(log_probs == -math.inf, -1, ids)
    out = torch.full((head.hidden.shape[0], k), -math.inf, dtype=tiles.dtype, device=tiles.device)
    return (
        torch.full_like(out, -1, dtype=torch.int64).index_copy_(0, tiles.index, ids[: tiles.count]),
        out.index_copy_(0, tiles.index, log_probs[: tiles.count]),
    )


def _largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their columns. Equal values are in the order of columns, unlike in topk."""
    values, columns = z.topk(k)
    least = values[:, -1:]
    cut = ((z == least).sum(1) > (values == least).sum(1)).nonzero()[:, 0]  # topk took any of several equal values
    if len(cut):
        ordered = z[cut].sort(dim=1, descending=True, stable=True)
        values[cut], columns[cut] = ordered.values[:, :k], ordered.indices[:, :k]
    columns, order = columns.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _merged(parts: list[tuple[Tensor, Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the largest logits of disjoint columns, in the order of columns.

    Each part has the largest logits of its columns [n, any], their ids, and the log-sum-exp of all its logits without
    the first, [n].
    """
    logits, ids, others = zip(*parts, strict=True)
    tops = torch.stack([x[:, 0] for x in logits])  # [parts, n]
    is_first = F.one_hot(tops.argmax(0), len(parts)).t().bool()
    rest = torch.cat([torch.where(is_first, -math.inf, tops), torch.stack(others)]).logsumexp(0)
    values, order = torch.cat(logits, 1).sort(dim=1, descending=True, stable=True)
    return values[:, :k], torch.cat(ids, 1).gather(1, order[:, :k]), rest


def _of_all_ranks(head: HeadRows, logits: Tensor, ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the results of all ranks with one all-gather. The returned ids are ids of the full vocabulary."""
    shard, k = shard_of(head.shard), logits.shape[1]
    if not shard.columns():  # this rank computed a column of padding
        logits, others = torch.full_like(logits, -math.inf), torch.full_like(others, -math.inf)
    width = min(k, shard.columns(0))  # no rank has more columns
    own = torch.cat([logits[:, :width].double(), (ids[:, :width] + shard.first).double(), others[:, None].double()], 1)
    every = gather(own, shard.group)
    values = every.to(logits.dtype)
    parts = [(v[:, :width], x[:, width:-1].long(), v[:, -1]) for v, x in zip(values, every, strict=True)]
    return _merged(parts, k)
