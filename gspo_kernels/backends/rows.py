"""Arguments and results of the backends: tuples of tensors over rows.

N rows (tokens), H hidden size, V vocabulary, R rank of an adapter, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .workspace import DEFAULT_WORKSPACE

# Factor of cached exponentials in fp16, which cannot represent values below 2^-24.
CACHED_FACTOR = 2.0**15


class HeadRows(NamedTuple):
    """A head and its inputs. Its logits are z = softcap(logit_scale * (h W^T + a B^T + bias)) / temperature."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None  # [N, R]: a = LoRA's scaled h A^T, any float dtype
    adapter_weight: Tensor | None  # [V, R]: LoRA's B
    target_ids: Tensor  # [N] int64, any value where masked
    mask: Tensor  # [N] bool, True at unmasked rows
    temperature: Tensor | None  # [] or [N]; None is 1
    logit_scale: float
    logit_softcap: float | None
    vocab_size: int  # number of columns that are not padding
    entropy: bool  # compute entropies
    # `ranks.shards.Shard.text` if the vocabulary is sharded over ranks, else "". In a shard, weight, bias and
    # adapter_weight are this rank's rows, vocab_size counts its columns (at least 1), and target_ids are relative to
    # its first column.
    shard: str = ""
    workspace: int = DEFAULT_WORKSPACE  # limit for temporary tensors, in bytes
    # Triton only: fp32 operands that are split into two bf16 numbers each (`triton/split.py`): "", "weight" if hidden
    # states are bf16 numbers, or "both".
    split: str = ""

    @property
    def kernel_dtype(self) -> torch.dtype:
        """The dtype in which the Triton kernels multiply operands and keep exponentials."""
        return torch.bfloat16 if self.split else self.hidden.dtype


class HeadResult(NamedTuple):
    """Per-row results of the forward, in fp32 (fp64 for fp64 inputs); 0 at masked rows.

    The log-sum-exp of a row's logits is shift + log_total, kept apart because the sum would be rounded.
    """

    log_probs: Tensor  # [N]
    entropy: Tensor  # [N] nats, or [0] if not requested
    shift: Tensor  # [N]: the largest logit
    log_total: Tensor  # [N]: log-sum-exp of the logits minus shift


class NeedsGradient(NamedTuple):
    """Whether each operand of a head needs a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    adapter_hidden: bool
    adapter_weight: bool


class HeadGradients(NamedTuple):
    """Gradients of a head's operands, in their dtypes; None if not needed."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None  # [N, R]
    adapter_weight: Tensor | None  # [V, R]


class PolicyRows(NamedTuple):
    """Inputs of the loss besides log-probs, entropies and mask."""

    offsets: Tensor  # [S + 1] int64: sequence i is rows offsets[i] to offsets[i + 1] - 1
    advantages: Tensor  # [N]
    old_log_probs: Tensor | None  # [N]; None: the detached log-probs
    ref_log_probs: Tensor | None  # [N]
    token_weights: Tensor | None  # [N]
    normalizer: Tensor | None  # []
    kl_normalizer: Tensor | None  # []
    invalid: Tensor  # [] int64: number of invalid values; if it is not 0, the loss and its gradient are NaN
    group: str = ""  # name of the process group that shares the tokens of each sequence, if there is one


class PolicyResult(NamedTuple):
    """The loss and its derivatives in the dtype of the log-probs, and the metrics in fp64."""

    loss: Tensor  # []
    log_ratio: Tensor  # [S], or [N] for ratio="token"
    coefficient: Tensor  # [N]: d(loss)/d(log_prob)
    entropy_coefficient: Tensor  # [N]: d(loss)/d(entropy), or [0] if entropy_coef is 0
    metrics: Tensor  # in the order of metrics.NAMES


class Cache(NamedTuple):
    """Which exponentials of logits the forward may cache, so that the backward does not recompute these logits."""

    rows: int  # maximum number of rows to cache, a multiple of the backend's row block or all N
    may_have_gradient: Tensor  # [N] bool: only these rows are cached


class Cached(NamedTuple):
    """What the forward caches for the backward besides `HeadResult`. Tensors that were not requested are empty.

    The forward gathers n unmasked rows; rows that may have a gradient come first. With Triton, "tile" means a tile of
    the forward. With torch, `tile_mass` is per cell, `top` is per slab, and n and N are padded to full row blocks. In
    fp16, exponentials are multiplied by CACHED_FACTOR.
    """

    place: Tensor  # [N] int64: index of each row of the batch among the n rows; arbitrary for masked rows
    tile_mass: Tensor  # [tiles of all ranks, n]: probability of each tile, without the target's column
    exponentials: Tensor  # [C, columns], in the dtype of the operands: E = exp(logit - top), 0 in the target's column
    top: Tensor  # [tiles, n]: largest logit of each tile, without the target's column
    n_cached: Tensor  # [1] or [0] int64: number of rows in `exponentials`; their places are 0 to n_cached - 1


class LiveTiles(NamedTuple):
    """The cells that the backward computes. Empty tensors: all columns of every row with a gradient."""

    order: Tensor  # [N] int64: rows by decreasing L1 mass of d_logits, those with cached exponentials first
    cells: Tensor  # [row blocks of `order`, column ranges] bool: True for cells to compute
    counts: Tensor  # [2] int64: number of rows with a gradient; then 1 to compute only `cells`, 0 to compute all


class Pairs(NamedTuple):
    """K pairs of a row and an id whose logits are computed, sorted by row."""

    offsets: Tensor  # [N + 1] int64: the pairs of row i are offsets[i] to offsets[i + 1] - 1
    rows: Tensor  # [K] int64: row of each pair
    ids: Tensor  # [K] int64, relative to this rank's first column; any value if not live
    live: Tensor  # [K] bool: False for pairs that are skipped, such as pairs in masked rows


class KeptRows(NamedTuple):
    """The kept sets of a batch as pairs, and what becomes of each row."""

    pairs: Pairs
    is_target: Tensor  # [K] bool: the pair has the row's target id
    computed: Tensor  # [N] bool: unmasked rows with at least two ids
    is_single: Tensor  # [N] bool: unmasked rows with one id
    full: Tensor | None  # [N] bool: unmasked rows whose log-prob is over the full vocabulary
    invalid: Tensor  # [N] bool: rows whose log-prob is NaN, because an id is wrong or the target is not in the set


class ExtraRows(NamedTuple):
    """`extra_ids` of a batch, as (row, id) pairs."""

    pairs: Pairs  # of each row, its target and then its k extra ids
    invalid: Tensor  # [N, k] bool: ids whose log-prob is NaN, because they are out of range


class Groups(NamedTuple):
    """Pairs grouped by row or by id. Group g holds the pairs order[begin[g]] to order[begin[g + 1] - 1]."""

    order: Tensor | None  # [K] int64: a permutation of the pairs; None: their own order
    begin: Tensor  # [groups + 1] int64
    to: Tensor | None  # [groups] int64: row or id of each group, arbitrary for an empty one; None: the group's number
