"""Log-probs and entropies: one kernel reduces each tile of logits to two numbers per row, another combines the tiles.

For each row, a tile writes its largest logit and its mass relative to that logit, both without the target's column.
Combining the two into a log-sum-exp would round. With entropies, a tile also writes the entropy of the softmax over its
columns. The tile that contains the target writes the target's logit. There are no atomics and no locks, and additions
have a fixed order, so a row has the same bits in any batch.

Must match the torch backend's `forward.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...layout import accumulator
from ...ranks.collectives import gather_tiles
from ...ranks.shards import shard_of, widest_shard
from ..rows import Cache, Cached, HeadResult, HeadRows
from .elementary import LOG_OF_NOTHING, fast_exp, finite, lift
from .launch import launch
from .logit_tile import (
    HeadPointers,
    HeadStrides,
    gather_rows,
    grouped,
    in_tile,
    logit_tile,
    straighten,
    target_column,
    tile_arguments,
    triton_type,
)
from .reduce_rows import reduce_rows
from .slabs import slabs_of_forward
from .split import slab_of, split_rows
from .tuning import REDUCE_ROWS, REDUCE_TILES, tile_config


@triton.jit(do_not_specialize=["n_rows", "row_blocks", "column_blocks", "stride_temperature", "vocab_size"])
def forward_tile(
    hidden,  # [N, H]: gathered by `order`; this and the next five are fields of `HeadPointers`
    weight,
    bias,
    adapter_hidden,
    adapter_weight,
    temperature,
    target_ids,  # [N] int64
    order,  # [N] int64: a permutation of the rows, unmasked rows first
    n_unmasked,  # [1] int64
    tile_top,  # out [column_blocks, N], columns in the order of `order`; only the first `n_unmasked` are written
    tile_mass,  # out, as tile_top
    tile_entropy,  # out, as tile_top; or None
    exponentials,  # out [C, column_blocks * BLOCK_V] in the order of `order`: exp(logit - tile_top); or None
    n_cached,  # [1] int64: number of rows whose exponentials are written, rounded up to row blocks; or None
    target_logit,  # out [N] in the order of `order`; not written for a target outside the vocabulary
    n_rows: tl.int64,
    row_blocks: tl.int32,
    column_blocks: tl.int32,
    stride_hidden_row: tl.int64,
    stride_weight_row: tl.int64,
    stride_weight_column,  # strides that are mostly 1 have no type: Triton makes 1 a constant only if untyped
    stride_bias,
    stride_adapter_hidden_row: tl.int64,
    stride_adapter_hidden_column,
    stride_adapter_weight_row: tl.int64,
    stride_adapter_weight_column,
    stride_temperature: tl.int64,
    stride_exponentials: tl.int64,
    hidden_size: tl.int32,
    vocab_size: tl.int32,
    logit_scale: tl.float64,
    logit_softcap: tl.float64,
    HEAD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Reduce each tile of logits to its largest logit and its mass per row, without the target's column.

    Cost: 2 N H V operations, N H + V H operand elements read, 8 N column_blocks bytes written.
    """
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    row_block, tile = grouped(tl.program_id(0), row_blocks, column_blocks, GROUP=CONFIG.group)
    unmasked = tl.load(n_unmasked)
    n = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if row_block.to(tl.int64) * BLOCK_N < unmasked:
        rows = tl.load(order + tl.minimum(n, n_rows - 1))
        head = HeadPointers(
            hidden=hidden,
            weight=weight,
            bias=bias,
            adapter_hidden=adapter_hidden,
            adapter_weight=adapter_weight,
            temperature=temperature,
            strides=HeadStrides(
                hidden_row=stride_hidden_row,
                weight_row=stride_weight_row,
                weight_column=stride_weight_column,
                bias=stride_bias,
                adapter_hidden_row=stride_adapter_hidden_row,
                adapter_hidden_column=stride_adapter_hidden_column,
                adapter_weight_row=stride_adapter_weight_row,
                adapter_weight_column=stride_adapter_weight_column,
                temperature=stride_temperature,
            ),
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
        )
        first_column = tile * BLOCK_V
        # Load before the product, which hides the latency.
        target = target_column(target=tl.load(target_ids + rows), vocab_size=vocab_size)
        tile_has_target = in_tile(target, first_column, BLOCK_V=BLOCK_V)[1]
        z = logit_tile(
            head,
            rows,
            first_row=row_block * BLOCK_N,
            first_column=first_column,
            n_rows=n_rows,
            HEAD=HEAD,
            CONFIG=CONFIG,
        )
        valid = n < unmasked
        beyond = vocab_size - first_column  # columns of the tile from here on are padding
        # One branch for both rare cases: with two, the tile takes more registers.
        if tile_has_target | (beyond < BLOCK_V):
            # Load the ids again. Keeping them during the product would cost registers in every tile.
            reloaded = target_column(target=tl.load(target_ids + rows), vocab_size=vocab_size)
            has_target = in_tile(reloaded, first_column, BLOCK_V=BLOCK_V)[0]
            columns = tl.arange(0, BLOCK_V)[None, :]
            is_target = columns == (reloaded - first_column)[:, None]
            tl.store(target_logit + n, tl.sum(tl.where(is_target, z, 0.0), 1), mask=valid & has_target)
            z = tl.where(is_target | (columns >= beyond), float("-inf"), z)
        top = finite(tl.max(z, 1))
        # Store before the exponentials: Triton 3.8 spills registers if this store follows them.
        at = tile.to(tl.int64) * n_rows + n
        tl.store(tile_top + at, top, mask=valid)
        z -= top[:, None]
        weights = fast_exp(z)
        mass = tl.sum(weights, 1)
        tl.store(tile_mass + at, mass, mask=valid)
        if tile_entropy is not None:
            mean = tl.sum(weights * tl.maximum(z, LOG_OF_NOTHING), 1)  # weights hold the NaN of z, if any
            tl.store(tile_entropy + at, tl.where(mass > 0, tl.log(mass) - mean / mass, mass), mask=valid)
        if exponentials is not None:
            if row_block.to(tl.int64) * BLOCK_N < tl.load(n_cached):
                if CONFIG.descriptors:
                    exponentials.store([row_block * BLOCK_N, first_column], lift(weights, exponentials.dtype))
                else:
                    columns = first_column + tl.arange(0, BLOCK_V)[None, :]
                    to = exponentials + n[:, None] * stride_exponentials + columns
                    tl.store(to, lift(weights, exponentials.dtype.element_ty))


def head_forward(head: HeadRows) -> HeadResult:
    """Compute log-probs (and entropies) of the target ids. The host reads no values."""
    return forward_and_cache(head)[0]


def forward_and_cache(head: HeadRows, tile_mass: bool = False, cache: Cache | None = None) -> tuple[HeadResult, Cached]:
    """Compute log-probs and entropies. Cache tile probabilities if `tile_mass`, and exponentials if `cache`."""
    n = head.hidden.shape[0]
    dtype = accumulator(head.hidden.dtype)
    device = head.hidden.device
    log_probs, shift, log_total = (torch.empty(n, dtype=dtype, device=device) for _ in range(3))
    entropy = torch.empty(n if head.entropy else 0, dtype=dtype, device=device)
    result = HeadResult(log_probs, entropy, shift, log_total)
    cached = empty_cached(head, tile_mass, 0 if cache is None else cache.rows)
    tile_mass = cached.tile_mass.numel() > 0
    config = tile_config(head, "forward")
    tiles, row_blocks = -(-head.vocab_size // config.block_v), -(-n // config.block_n)
    if n == 0:
        return result, cached
    head = straighten(head, config)
    order, count = _order(head.mask, cache, cached.n_cached)
    tile_results: dict[str, Any] = dict(
        order=order,
        n_unmasked=count,
        tile_top=cached.top if cache else torch.empty(tiles, n, dtype=dtype, device=device),
        tile_mass=cached.tile_mass
        if tile_mass and not head.shard
        else torch.empty(tiles, n, dtype=dtype, device=device),
        tile_entropy=torch.empty(tiles, n, dtype=dtype, device=device) if head.entropy else None,
        target_logit=torch.full((n,), math.nan, dtype=dtype, device=device),
    )
    hidden = split_rows(gather_rows(head.hidden, order), head.split)
    for low, high in slabs_of_forward(head, config):
        slab = slab_of(head, low, high)
        first, column_blocks = low // config.block_v, -(-(high - low) // config.block_v)
        of_tiles = {name: x[first:] for name, x in tile_results.items() if x is not None and x.ndim == 2}
        exponentials: Any = cached.exponentials[:, low:] if cache else None
        if cache and config.descriptors:
            exponentials = TensorDescriptor.from_tensor(exponentials, [config.block_n, config.block_v])
        launch(
            forward_tile,
            row_blocks * column_blocks,
            config,
            **tile_arguments(slab, hidden, config),
            **tile_results | of_tiles,
            exponentials=exponentials,
            n_cached=cached.n_cached if cache else None,
            stride_exponentials=cached.exponentials.stride(0),
            target_ids=slab.target_ids,
            row_blocks=row_blocks,
            column_blocks=column_blocks,
        )
        del slab  # frees a split weight before the next one is made
    if head.shard:
        tiles = _add_other_ranks(head.shard, tile_results, config.block_v, cached.tile_mass if tile_mass else None)
    launch(
        reduce_rows,
        -(-n // REDUCE_ROWS.block_n),
        REDUCE_ROWS,
        **tile_results,
        log_probs=log_probs,
        entropy=entropy if head.entropy else None,
        shift=shift,
        log_total=log_total,
        place=cached.place if cached.place.numel() else None,
        n_rows=n,
        n_tiles=tiles,
        HAS_TILE_MASS=tile_mass,
        ACC=triton_type(dtype),
        BLOCK_N=REDUCE_ROWS.block_n,
        BLOCK_T=REDUCE_TILES,
    )
    return result, cached


def _add_other_ranks(shard: str, tile_results: dict[str, Any], block_v: int, tile_mass: Tensor | None) -> int:
    """Replace this rank's tile results in `tile_results` with the results of all ranks. Return the number of tiles.

    If `tile_mass` is not None, the masses are stored in it.
    """
    names = [name for name in ("tile_top", "tile_mass", "tile_entropy") if tile_results[name] is not None]
    tables = [(tile_results[name], block_v) for name in names]
    gathered = gather_tiles(shard_of(shard), tables, tile_results["target_logit"])
    tile_results.update(zip([*names, "target_logit"], gathered, strict=True))
    if tile_mass is not None:
        tile_results["tile_mass"] = tile_mass.copy_(tile_results["tile_mass"])
    return tile_results["tile_top"].shape[0]


def tiles_of_all_ranks(head: HeadRows, width: int) -> int:
    """Count the vocabulary tiles of `width` columns on all ranks."""
    return sum(shard_of(head.shard).tiles(width)) if head.shard else -(-head.vocab_size // width)


def _order(mask: Tensor, cache: Cache | None, n_cached: Tensor) -> tuple[Tensor, Tensor]:
    """Order the rows for gathering, unmasked rows first, [N], and count the unmasked rows, [1].

    With a cache, rows that may have a gradient come first. `n_cached` gets their number, limited by the cache.
    """
    rank = mask.view(torch.uint8)
    if cache is not None:
        cacheable = mask & cache.may_have_gradient
        torch.clamp(cacheable.sum().reshape(1), max=cache.rows, out=n_cached)
        rank = rank + cacheable.view(torch.uint8)
    return rank.sort(stable=True, descending=True).indices, mask.sum().reshape(1)


def cache_rows(head: HeadRows, cache_bytes: int) -> int:
    """Number of rows whose exponentials fit into `cache_bytes`, a multiple of the forward's row block."""
    config = tile_config(head, "forward")
    columns = -(-widest_shard(head) // config.block_v) * config.block_v
    fit = cache_bytes // (config.block_n * columns * head.kernel_dtype.itemsize)
    # Under torch.compile, `min` would compile two graphs: for batches that fit and for batches that do not.
    blocks: Any = torch.sym_min(fit, -(-head.hidden.shape[0] // config.block_n))
    return blocks * config.block_n


def empty_cached(head: HeadRows, tile_mass: bool, cache_rows: int) -> Cached:
    """Allocate what the forward keeps, uninitialized. Tensors that are not requested are empty."""
    config = tile_config(head, "forward")
    n = head.hidden.shape[0]
    tiles = -(-head.vocab_size // config.block_v)
    make = partial(torch.empty, device=head.hidden.device)
    tile_mass = tile_mass and cell_shape(head) is not None
    dtype = accumulator(head.hidden.dtype)
    return Cached(
        place=make(n if tile_mass or cache_rows else 0, dtype=torch.int64),
        tile_mass=make((tiles_of_all_ranks(head, config.block_v), n) if tile_mass else (0, 0), dtype=dtype),
        exponentials=make((cache_rows, tiles * config.block_v) if cache_rows else (0, 0), dtype=head.kernel_dtype),
        top=make((tiles, n) if cache_rows else (0, 0), dtype=dtype),
        n_cached=make(1 if cache_rows else 0, dtype=torch.int64),
    )


def cell_shape(head: HeadRows) -> tuple[int, int] | None:
    """Shape (rows, columns) of a cell, the unit that a backward may leave out.

    Rows are a row block of the backward, columns a tile of the forward. None for a head with a bias or an adapter,
    whose gradients have no block-sparse kernels.
    """
    if head.bias is not None or head.adapter_weight is not None:
        return None
    return tile_config(head, "gradient").block_n, tile_config(head, "forward").block_v
