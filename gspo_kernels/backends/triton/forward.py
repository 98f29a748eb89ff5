"""Log-probs and entropies: each tile of logits leaves a log-sum-exp per row, and a second kernel adds those up.

What a tile writes is the largest of its logits except the target's and the mass relative to it (and the entropy of
their softmax, if asked for): apart they keep the bits that a log-sum-exp in one number would round off. The tile that
holds the target writes the target's logit. No atomics, no locks, a fixed order: a row has the same bits alone and in
any batch.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# Triton types its kernels' arguments in a language of its own.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...layout import accumulator
from ..rows import HeadResult, HeadRows, TileShares
from .elementary import LOG_OF_NOTHING, at_least, difference, finite, log1p, softplus
from .launch import launch
from .logit_tile import gather_rows, grouped, logit_tile, straighten, target_column, tile_arguments, triton_type
from .tuning import REDUCE_ROWS, REDUCE_TILES, tile_config


@triton.jit(do_not_specialize=["n_rows", "row_blocks", "column_blocks", "stride_temperature"])
def forward_tile(
    hidden,  # [N, H] in the order of `order`
    weight,
    bias,
    adapter_hidden,
    adapter_weight,
    temperature,
    target_ids,  # [N] int64
    order,  # [N] int64: a permutation of the rows, those that count first
    count,  # [1] int64: how many count
    tile_top,  # out [column_blocks, N], of each row of it the first `count` are written
    tile_mass,  # out [column_blocks, N], as is tile_entropy
    tile_entropy,  # or None
    target_logit,  # out [N], left alone where no tile finds the target
    n_rows: tl.int64,
    row_blocks: tl.int32,
    column_blocks: tl.int32,
    stride_hidden_row: tl.int64,
    stride_weight_row: tl.int64,
    stride_weight,  # untyped, as are the other strides that are mostly 1: a typed 1 would not become a constant
    stride_bias,
    stride_adapter_hidden_row: tl.int64,
    stride_adapter_hidden,
    stride_adapter_weight_row: tl.int64,
    stride_adapter_weight,
    stride_temperature: tl.int64,
    logit_scale: tl.float64,
    logit_softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Two numbers: 2 N H V operations; N H + V H operand elements read and 8 N column_blocks bytes written."""
    row_block, tile = grouped(tl.program_id(0), row_blocks, column_blocks, GROUP)
    kept = tl.load(count)
    n = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if row_block.to(tl.int64) * BLOCK_N < kept:
        rows = tl.load(order + tl.minimum(n, n_rows - 1))
        z = logit_tile(
            hidden, weight, bias, adapter_hidden, adapter_weight, temperature,
            row_block * BLOCK_N, tile * BLOCK_V, n_rows, rows,
            stride_hidden_row, stride_weight_row, stride_weight, stride_bias,
            stride_adapter_hidden_row, stride_adapter_hidden, stride_adapter_weight_row, stride_adapter_weight,
            stride_temperature, logit_scale, logit_softcap,
            HAS_SOFTCAP, H, R, V, ACC, BLOCK_N, BLOCK_V, BLOCK_H, BLOCK_R, CHAIN, DESCRIPTORS, UPCAST,
        )  # fmt: skip
        v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        target = target_column(tl.load(target_ids + rows), V)
        at_target = v[None, :] == target[:, None]
        own = tl.sum(tl.where(at_target, z, 0.0), 1)
        z = tl.where(at_target | (v[None, :] >= V), float("-inf"), z)
        shift = finite(tl.max(z, 1))
        z -= shift[:, None]
        weights = tl.exp(z)
        mass = tl.sum(weights, 1)
        store = n < kept
        at = tile.to(tl.int64) * n_rows + n
        tl.store(tile_top + at, shift, mask=store)
        tl.store(tile_mass + at, mass, mask=store)
        if tile_entropy is not None:
            mean = tl.sum(weights * at_least(z, LOG_OF_NOTHING), 1)
            tl.store(tile_entropy + at, tl.where(mass > 0, tl.log(mass) - mean / mass, mass), mask=store)
        here = (target >= tile * BLOCK_V) & (target < tile * BLOCK_V + BLOCK_V)
        tl.store(target_logit + n, own, mask=store & here)


@triton.jit(do_not_specialize=["n_rows"])
def reduce_rows(
    tile_top,
    tile_mass,
    tile_entropy,  # or None
    target_logit,
    order,
    count,
    log_probs,  # out [N], as are the next three; rows that do not count are left alone
    entropy,  # or None
    shift,
    log_total,
    n_rows: tl.int64,
    TILES: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """log_prob = -softplus(lse_others - z_target): the difference to a whole lse would lose 1 - p on peaked rows."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = tl.load(count)
    ok = n < kept
    largest = tl.full([BLOCK_N], float("-inf"), ACC)
    mass = tl.zeros([BLOCK_N], ACC)  # of all logits but the target's, relative to exp(largest)
    for start in range(0, TILES, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = (t[:, None] < TILES) & ok[None, :]
        at = t[:, None] * n_rows + n[None, :]
        top = tl.load(tile_top + at, mask=inside, other=float("-inf"))
        part = tl.load(tile_mass + at, mask=inside, other=0.0)
        grown = tl.maximum(largest, tl.max(tl.where(part > 0, top, float("-inf")), 0))
        mass *= tl.exp(largest - finite(grown))
        mass += tl.sum(tl.where(part == 0, 0.0, part * tl.exp(top - finite(grown)[None, :])), 0)
        largest = grown
    top_of_all = finite(largest)
    others = tl.log(mass)
    own = tl.load(target_logit + n, mask=ok, other=0.0)
    over, lost = difference(own, top_of_all)
    margin, lost_too = difference(tl.where(own == float("inf"), float("nan"), over), others)
    log_rest = -softplus(margin)
    # log p = log sigmoid(margin), rounded once: two more roundings would show in the mean of a short sequence.
    lost = (lost + lost_too) * tl.exp(log_rest)
    log_p = tl.minimum(margin, 0.0) + (lost - log1p(tl.exp(-tl.abs(margin))))
    rows = tl.load(order + n, mask=ok, other=0)
    tl.store(log_probs + rows, log_p, mask=ok)
    # The log-sum-exp of all, in two numbers: kept apart they have the bits that their sum would round off.
    whole = tl.where(own > top_of_all, own, top_of_all)
    tl.store(shift + rows, whole, mask=ok)
    high = tl.where(margin > 0, own - whole, others + (top_of_all - whole))
    tl.store(log_total + rows, high + log1p(tl.exp(-tl.abs(margin))), mask=ok)
    if tile_entropy is not None:
        # By the chain rule (is it the target? which tile? which column?): positive terms, nothing cancels.
        of_others = tl.zeros([BLOCK_N], ACC)
        for start in range(0, TILES, BLOCK_T):
            t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
            inside = (t[:, None] < TILES) & ok[None, :]
            at = t[:, None] * n_rows + n[None, :]
            top = tl.load(tile_top + at, mask=inside, other=float("-inf"))
            part = tl.load(tile_mass + at, mask=inside, other=0.0)
            log_share = (top - top_of_all[None, :]) + (tl.log(part) - others[None, :])
            log_share = tl.where(log_share > LOG_OF_NOTHING, log_share, LOG_OF_NOTHING)  # also if there are no others
            within = tl.load(tile_entropy + at, mask=inside, other=0.0)
            of_others += tl.sum(tl.exp(log_share) * (within - log_share), 0)
        log_rest = at_least(log_rest, LOG_OF_NOTHING)
        own_part = tl.exp(log_p) * at_least(log_p, LOG_OF_NOTHING)
        tl.store(entropy + rows, tl.exp(log_rest) * (of_others - log_rest) - own_part, mask=ok)


def head_forward(head: HeadRows) -> HeadResult:
    """Log-probs (and entropies) of the target ids; nothing is read on the host."""
    return forward_with_shares(head)[0]


def forward_with_shares(head: HeadRows, wanted: bool = False) -> tuple[HeadResult, TileShares | None]:
    """The same, and if wanted the probabilities of tiles of columns."""
    n, dtype, device = head.hidden.shape[0], accumulator(head.hidden.dtype), head.hidden.device
    log_probs, shift, log_total = (torch.zeros(n, dtype=dtype, device=device) for _ in range(3))
    entropy = torch.zeros(n if head.entropy else 0, dtype=dtype, device=device)
    result = HeadResult(log_probs, entropy, shift, log_total)
    cell = cell_shape(head) if wanted else None
    config = tile_config(head, "forward")
    tiles, row_blocks = -(-head.vocab_size // config.block_v), -(-n // config.block_n)
    tile_top, tile_mass = (torch.empty(tiles, n, dtype=dtype, device=device) for _ in range(2))
    if n == 0:
        return result, TileShares(tile_mass, torch.empty_like(head.target_ids), *cell) if cell else None
    head = straighten(head, config)
    order = (~head.mask).to(torch.uint8).sort(stable=True).indices
    count = head.mask.sum().reshape(1)
    tile_entropy = torch.empty_like(tile_mass) if head.entropy else None
    target_logit = torch.full((n,), math.nan, dtype=dtype, device=device)
    launch(
        forward_tile,
        row_blocks * tiles,
        config,
        **tile_arguments(head, gather_rows(head.hidden, order), config),
        target_ids=head.target_ids,
        order=order,
        count=count,
        tile_top=tile_top,
        tile_mass=tile_mass,
        tile_entropy=tile_entropy,
        target_logit=target_logit,
        row_blocks=row_blocks,
        column_blocks=tiles,
    )
    launch(
        reduce_rows,
        -(-n // REDUCE_ROWS.block_n),
        REDUCE_ROWS,
        ACC=triton_type(dtype),
        tile_top=tile_top,
        tile_mass=tile_mass,
        tile_entropy=tile_entropy,
        target_logit=target_logit,
        order=order,
        count=count,
        log_probs=log_probs,
        entropy=entropy if head.entropy else None,
        shift=shift,
        log_total=log_total,
        n_rows=n,
        TILES=tiles,
        BLOCK_N=REDUCE_ROWS.block_n,
        BLOCK_T=REDUCE_TILES,
    )
    if cell is None:
        return result, None
    # No tile exceeds the whole; one that has the target's column only has no mass, and a shift that says nothing.
    tile_mass.mul_(tile_top.sub_(shift[order]).sub_(log_total[order]).clamp_(max=0).exp_())
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(n, device=device))
    return result, TileShares(tile_mass, place, *cell)


def cell_shape(head: HeadRows) -> tuple[int, int] | None:
    """(rows, columns) of the cells that a backward may leave out: columns are those of the forward's tiles.

    None: it leaves nothing out. There are no block-sparse sums for the gradients of a bias and an adapter.
    """
    if head.bias is not None or head.adapter_weight is not None:
        return None
    return tile_config(head, "gradient").block_n, tile_config(head, "forward").block_v
