"""LoRA's h A^T as an operator, for both backends.

It is part of the logits, so it keeps their promises: never rounded, independent of masked rows, and the same bits in
any batch. A plain F.linear keeps none of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .precision import exact_products, whole_columns
from .torch.tiles import tile_shape


def _adapter_op(x: Tensor, lora_a: Tensor, mask: Tensor) -> Tensor:
    index, tile_rows = mask.nonzero()[:, 0], tile_shape(x.device, x.dtype)[0]
    out = x.new_zeros(x.shape[0], lora_a.shape[0])
    tile = x.new_zeros(tile_rows, x.shape[1])
    right = whole_columns(lora_a).t()
    with exact_products(x.device):
        for rows in index.split(tile_rows):
            tile[: len(rows)], tile[len(rows) :] = x[rows], 0
            out[rows] = torch.mm(tile, right)[: len(rows), : lora_a.shape[0]]
    return out


def _adapter_backward_op(x: Tensor, lora_a: Tensor, mask: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    index = (mask & (d_out != 0).any(1)).nonzero()[:, 0]
    d_x, d_rows = torch.zeros_like(x), d_out[index]
    with exact_products(x.device):
        d_x[index] = torch.mm(d_rows, lora_a)
        return d_x, torch.mm(d_rows.t(), x[index])


adapter_product: Any = torch.library.custom_op("gspo_kernels::adapter", _adapter_op, mutates_args=())
_adapter_backward: Any = torch.library.custom_op(
    "gspo_kernels::adapter_backward", _adapter_backward_op, mutates_args=()
)
adapter_product.register_fake(lambda x, lora_a, mask: x.new_empty(x.shape[0], lora_a.shape[0]))
_adapter_backward.register_fake(lambda x, lora_a, mask, d_out: (torch.empty_like(x), torch.empty_like(lora_a)))
adapter_product.register_autograd(
    lambda ctx, d_out: (*_adapter_backward(*ctx.saved_tensors, d_out), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
