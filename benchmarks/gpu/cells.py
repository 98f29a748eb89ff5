"""The backward of a list of cells: with all of them it is the dense one, with a budget it stays within it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gspo_kernels import Objective, gspo_fused_loss
from gspo_kernels.backends import live_tiles
from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.rows import HeadRows, NeedsGradient

from .. import peaked
from .checks import TRAINED, Check, Setting
from .heads import DTYPES, FLAGS, Found, by_torch, compare, differing, random_head, random_upstream, together

SOME = ("plain", "soft-cap, scale", "temperature per token", "padded vocabulary")
BUDGETS = (1e-3, 0.5)  # of the second something must go, whatever the sizes


def heads(setting: Setting) -> Iterator[tuple[str, Callable[..., HeadRows]]]:
    """(name, how to make it on a device) of every head whose cells are computed."""
    sizes = setting.sizes
    for n, h, v in ((sizes.rows, sizes.width, sizes.vocab), *(shape for shape in sizes.ragged if shape[0] > 1)):
        for dtype in TRAINED:
            for flag in SOME:
                make = partial(random_head, n, h, v, DTYPES[dtype], **FLAGS[flag])
                yield f"cells {n}x{h}x{v} {dtype} {flag}", make


def checks(setting: Setting) -> Iterator[tuple[str, Check]]:
    for name, make in heads(setting):
        yield name, partial(all_cells_equal_float64, make, setting.device)
    for dtype in TRAINED:
        for budget in BUDGETS:
            yield f"budget {budget:g} {dtype}", partial(stays_within_the_budget, setting, dtype, budget)


def all_cells_equal_float64(make: Callable[..., HeadRows], device: torch.device) -> Found:
    head = make(device=device)
    upstream, dtype = random_upstream(head), head.hidden.dtype
    result, tiles = kernels.forward_with_shares(head, wanted=True)
    assert tiles is not None
    live, _ = live_tiles.choose(head, result, upstream.d_log_probs, tiles, budget=0.0)
    blocks = -(-live.counts[:1] // tiles.block_rows)
    cells = (torch.arange(live.cells.shape[0], device=device) < blocks)[:, None].expand_as(live.cells)
    everything = live._replace(cells=cells, counts=torch.stack([live.counts[0], torch.ones_like(live.counts[0])]))
    needs = NeedsGradient(True, True, False, False, False)
    found = kernels.head_backward(head, result, upstream.d_log_probs, None, needs, everything)
    truth, same = by_torch(head, upstream, torch.float64), by_torch(head, upstream, dtype)
    names = ("d_hidden", "d_weight")
    return together(
        compare(n, g, same[n], truth[n], dtype) for n, g in zip(names, found, strict=False) if g is not None
    )


def stays_within_the_budget(setting: Setting, dtype: str, most: float) -> Found:
    """A peaked policy, a third of the sequences of zero advantage: what is dropped, and what it costs and saves."""
    sizes, device = setting.sizes, setting.device
    policy = peaked.make(sizes.rows // 4 * 4, sizes.width, max(sizes.vocab, 2000))
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.5], device=device)
    ids = policy.target_ids.view(4, -1).to(device)

    def run(budget: float) -> tuple[dict[str, Any], list[torch.Tensor]]:
        hidden, weight = (x.to(device, DTYPES[dtype]).requires_grad_() for x in policy[:2])
        out = gspo_fused_loss(
            hidden.view(4, -1, sizes.width), weight, ids, advantages, objective=Objective(), gradient_budget=budget,
            backend="triton",
        )  # fmt: skip
        metrics = {k: v.item() for k, v in out.metrics.items()}
        return metrics, list(torch.autograd.grad(out.loss, (hidden, weight)))

    (_, exact), (metrics, first), (_, second) = run(0.0), run(most), run(most)
    errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(first, exact, strict=True)]
    bits = {f"{n} bits": differing(a, b) for n, a, b in zip(("d_hidden", "d_weight"), first, second, strict=True)}
    names = ("dropped_gradient_mass", "live_tile_share", "passes")
    measured = {k: metrics[k] for k in names} | {"d_hidden error": errors[0], "d_weight error": errors[1]} | bits
    nothing = ["nothing was dropped"] if most == max(BUDGETS) and metrics["dropped_gradient_mass"] == 0 else []
    return Found(measured, {"dropped_gradient_mass": most} | dict.fromkeys(bits, 0), nothing)
