"""What crosses the boundary to a backend: flat rows in, flat results out.

N rows (tokens), H hidden size, V vocabulary, R rank of an adapter, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadRows(NamedTuple):
    """What makes log-probs: z = softcap(logit_scale * (h W^T + a B^T + bias)) / temperature."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None  # [N, R]: LoRA's scaled h A^T, any float dtype
    adapter_weight: Tensor | None  # [V, R]: LoRA's B
    target_ids: Tensor  # [N] int64, anything where masked
    mask: Tensor  # [N] bool
    temperature: Tensor | None  # [] or [N]; None is 1
    logit_scale: float
    logit_softcap: float | None
    vocab_size: int  # columns from here on are padding
    entropy: bool


class HeadResult(NamedTuple):
    """Per row, in fp32 (fp64 for fp64 inputs); 0 at masked rows."""

    log_probs: Tensor  # [N]
    entropy: Tensor  # [N] nats, or [0] if not asked for
    shift: Tensor  # [N] the largest logit
    # Log-sum-exp of the logits, less shift: apart they keep the bits that their sum would round off.
    log_total: Tensor  # [N]


class NeedsGradient(NamedTuple):
    """Which operands of a head need a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    adapter_hidden: bool
    adapter_weight: bool


class HeadGradients(NamedTuple):
    """Gradients of a head's operands, in the operands' dtypes; None where none is needed."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None  # [N, R]
    adapter_weight: Tensor | None  # [V, R]


class PolicyRows(NamedTuple):
    """What a backend needs beside log-probs to form the loss."""

    offsets: Tensor  # [S + 1] int64
    advantages: Tensor  # [N]
    old_log_probs: Tensor | None  # [N]; None: the log-probs themselves, detached
    ref_log_probs: Tensor | None  # [N]
    token_weights: Tensor | None  # [N]
    normalizer: Tensor | None  # []
    kl_normalizer: Tensor | None  # []


class PolicyResult(NamedTuple):
    loss: Tensor  # []
    log_ratio: Tensor  # [S], or [N] for ratio="token"
    coefficient: Tensor  # [N] d(loss)/d(log_prob)
    entropy_coefficient: Tensor  # [N] d(loss)/d(entropy), or [0] where entropy_coef is 0
    metrics: Tensor  # in the order of metrics.NAMES


class TileShares(NamedTuple):
    """What the forward knows: the probability of every tile of columns, the target's column left out."""

    share: Tensor  # [tiles, n]
    place: Tensor  # [N] int64: at which of the n columns a row of the batch stands; anything for a masked row
    block_rows: int  # of a cell
    columns: int  # of a tile


class LiveTiles(NamedTuple):
    """What the backward computes. Tensors of no size: every row with a gradient, and all of its columns."""

    order: Tensor  # [N] int64: rows of the batch, those with a gradient first, the heaviest foremost
    cells: Tensor  # [row blocks of `order`, tiles] bool
    counts: Tensor  # [2] int64: rows with a gradient; 1 if only the cells are to be computed, 0 if all columns are
