"""LoRA's h A^T as an operator, for both backends.

As in the logits, and unlike in F.linear, the product is not rounded to half precision, masked rows do not affect it,
and a row has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.precision import exact_products, pad_columns
from ..backends.torch.tiles import tile_shape
from ..backends.workspace import DEFAULT_WORKSPACE
from ..validation import refuse_second_derivative, refuse_torch_func
from .tuples import NAMESPACE


def _adapter_op(x: Tensor, lora_a: Tensor, mask: Tensor) -> Tensor:
    """Multiply x [N, H] by A^T, for A [R, H]; the result [N, R] is 0 at masked rows."""
    index = mask.nonzero()[:, 0]
    tile_rows = tile_shape(x.device, x.dtype, DEFAULT_WORKSPACE)[0]
    out = x.new_zeros(x.shape[0], lora_a.shape[0])  # [N, R]
    # Every product has the same number of rows, because a different shape may round differently.
    tile = x.new_zeros(tile_rows, x.shape[1])
    right = pad_columns(lora_a).t()  # [H, R padded]
    with exact_products(x.device):
        for rows in index.split(tile_rows):
            tile[: len(rows)] = x[rows]
            tile[len(rows) :] = 0
            out[rows] = torch.mm(tile, right)[: len(rows), : lora_a.shape[0]]
    return out


def _adapter_backward_op(x: Tensor, lora_a: Tensor, mask: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x [N, H] and A [R, H] from d_out [N, R]."""
    index = (mask & (d_out != 0).any(1)).nonzero()[:, 0]
    d_x = torch.zeros_like(x)  # [N, H]
    d_rows = d_out[index]  # [n, R]
    with exact_products(x.device):
        d_x[index] = torch.mm(d_rows, lora_a)
        return d_x, torch.mm(d_rows.t(), x[index])


_adapter: Any = torch.library.custom_op(f"{NAMESPACE}::adapter", _adapter_op, mutates_args=())
_adapter_backward: Any = torch.library.custom_op(
    f"{NAMESPACE}::adapter_backward", _adapter_backward_op, mutates_args=()
)
_adapter.register_fake(lambda x, lora_a, mask: x.new_empty(x.shape[0], lora_a.shape[0]))
_adapter_backward.register_fake(lambda x, lora_a, mask, d_out: (torch.empty_like(x), torch.empty_like(lora_a)))
_adapter.register_autograd(
    lambda ctx, d_out: (*_adapter_backward(*ctx.saved_tensors, d_out), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
_adapter_backward.register_autograd(lambda ctx, *upstream: refuse_second_derivative("linear_log_probs"))


def adapter_product(x: Tensor, lora_a: Tensor, mask: Tensor) -> Tensor:
    """Multiply x [N, H] by A^T, for A [R, H]. The result [N, R] is differentiable, and 0 at masked rows."""
    refuse_torch_func("linear_log_probs", (x, lora_a))
    return _adapter(x, lora_a, mask)
