"""Compare heads of a model's size with float64: log-probs, gradients, clip decisions, offsets past 2^31, equal bits.

On a CPU the heads are small and the kernels are interpreted. Such a run only checks the tests themselves.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.device import DEVICE
from helpers.features import DTYPES
from helpers.random_heads import (
    OPTIONS,
    ROWS_AT_ONCE,
    SIZES,
    Tensors,
    assert_law,
    assert_near,
    assert_same_bits,
    by_kernels,
    by_torch,
    random_head,
    random_upstream,
    relative_rms,
    take_rows,
)
from tolerance import ACCUMULATED_IN_FP32, RELATIVE_RMS, decision_band
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.backends import live_tiles
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.precision import add_product
from gspo_kernels.backends.rows import HeadRows, NeedsGradient
from gspo_kernels.benchmarks import peaked
from gspo_kernels.layout import segment_sum
from gspo_kernels.ops.adapter import adapter_product
from gspo_kernels.ops.head import linear_log_probs_op

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device", "cached_memory_is_returned")]

TRAINED = ("bf16", "fp16", "fp32") if DEVICE.type == "cuda" else ("bf16",)
MODEL = (SIZES.rows, SIZES.width, SIZES.vocab)
WIDE = (SIZES.rows, SIZES.wide, SIZES.vocab)
HEADS = [
    *((MODEL, dtype, options) for dtype in TRAINED for options in OPTIONS),
    *((s, dtype, o) for s in (WIDE, *SIZES.ragged) for dtype in TRAINED for o in ("plain", "everything")),
    *((SIZES.ragged[-1], "fp64", options) for options in ("plain", "everything")),
]
CELLS = [
    (shape, dtype, options)
    for shape in (MODEL, *SIZES.ragged)
    if shape[0] > 1
    for dtype in TRAINED
    for options in ("plain", "softcap-scale", "temperature-per-token", "padded-vocab")
]


def name_of(case: object) -> str:
    return "x".join(map(str, case)) if isinstance(case, tuple) else str(case)


# -- log-probs and gradients


@pytest.mark.parametrize(("shape", "dtype", "options"), HEADS, ids=name_of)
def test_log_probs_and_gradients_equal_float64(shape: tuple[int, int, int], dtype: str, options: str) -> None:
    head = random_head(*shape, DTYPES[dtype], **OPTIONS[options])
    upstream = random_upstream(head)
    ours = by_kernels(head, upstream)
    truth = by_torch(head, upstream, torch.float64)
    assert_near(head, ours["log_probs"][head.mask], truth["log_probs"][head.mask])
    assert_law(head, ours, by_torch(head, upstream, DTYPES[dtype]), truth)


@pytest.mark.parametrize(("shape", "dtype", "options"), CELLS, ids=name_of)
def test_gradients_of_a_list_of_all_cells_equal_float64(shape: tuple[int, int, int], dtype: str, options: str) -> None:
    """Run the sparse backward, which computes a list of cells, with a list of all cells."""
    head = random_head(*shape, DTYPES[dtype], **OPTIONS[options])
    upstream = random_upstream(head)
    result, cached = triton_backend.forward_and_cache(head, tile_mass=True)
    cell = triton_backend.cell_shape(head)
    assert cell is not None
    live, _ = live_tiles.choose(head, result, upstream.d_log_probs, cached, cell, budget=0.0)
    blocks = -(-live.counts[:1] // cell[0])
    cells = (torch.arange(live.cells.shape[0], device=blocks.device) < blocks)[:, None].expand_as(live.cells)
    every_cell = live._replace(cells=cells, counts=torch.stack([live.counts[0], torch.ones_like(live.counts[0])]))
    needs = NeedsGradient(True, True, False, False, False)
    gradients = triton_backend.head_backward(head, result, upstream.d_log_probs, None, needs, every_cell)
    truth, same_dtype = (by_torch(head, upstream, to) for to in (torch.float64, DTYPES[dtype]))
    names = ("d_hidden", "d_weight")
    ours = {name: x for name, x in zip(names, gradients, strict=False) if x is not None}
    assert_law(head, ours, {n: same_dtype[n] for n in names}, {n: truth[n] for n in names})


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("width", [SIZES.width, SIZES.wide])
def test_log_probs_of_sampled_tokens_are_near_float64(width: int, dtype: str) -> None:
    """Logits reach about 30, as in trained models."""
    head, truth = sampled(SIZES.batch // 4, width, dtype)
    assert_near(head, linear_log_probs(head.hidden, head.weight, head.target_ids, backend="triton").log_probs, truth)


def sampled(rows: int, width: int, dtype: str) -> tuple[HeadRows, Tensor]:
    """Return a head whose target ids are sampled from its softmax, and their log-probs in float64."""
    head = random_head(rows, width, dtype=DTYPES[dtype], masked=False, std=5.0)
    rng = torch.Generator(head.hidden.device).manual_seed(2)
    weight = head.weight.double()
    ids = []
    log_probs = []
    for hidden in head.hidden.split(ROWS_AT_ONCE):
        logits = hidden.double() @ weight.T
        uniform = torch.rand(logits.shape, generator=rng, dtype=torch.float64, device=logits.device)
        ids.append((logits - uniform.log_().neg_().log_()).argmax(1))
        log_probs.append(torch.log_softmax(logits, 1).gather(1, ids[-1][:, None])[:, 0])
    return head._replace(target_ids=torch.cat(ids)), torch.cat(log_probs)


# -- decisions


@pytest.mark.parametrize("dtype", TRAINED)
def test_clip_decisions_equal_those_of_float64(dtype: str) -> None:
    """Log-ratios spread about as far as GSPO's clip window. A sequence counts as clipped if it has no gradient."""
    lengths = torch.tensor([length for length, n in SIZES.lengths.items() for _ in range(n)])
    head, truth = sampled(int(lengths.sum()), SIZES.width, dtype)
    hidden, weight, ids = head.hidden, head.weight, head.target_ids
    band = torch.tensor([decision_band(n) for n in lengths.tolist()]).to(truth)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(truth.device)
    lengths = lengths.to(truth.device)
    objective = Objective()
    bounds = truth.new_tensor([math.log1p(-objective.clip_low), math.log1p(objective.clip_high)])
    log_probs = linear_log_probs(hidden, weight, ids, backend="triton").log_probs.requires_grad_()
    rng = torch.Generator(truth.device).manual_seed(3)
    shares = []

    def randn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=rng, dtype=torch.float64, device=like.device)

    def mean(x: Tensor) -> Tensor:
        return segment_sum(x, offsets) / lengths

    for turn in range(SIZES.rounds):
        noise = 0.03 * randn(truth)
        level = objective.clip_low * randn(band) - mean(noise)
        old = (truth - level.repeat_interleave(lengths) - noise).float()
        u = mean(truth - old.double())
        advantages = randn(band)
        options: dict[str, Any] = dict(cu_seqlens=offsets, old_log_probs=old, objective=objective, backend="triton")
        if turn == 0:  # the first turn starts from hidden states, later turns from log-probs
            leaf = hidden.detach().requires_grad_()
            out = gspo_fused_loss(leaf, weight, ids, advantages.float(), **options)
            has_gradient = torch.autograd.grad(out.loss * len(lengths), leaf)[0].any(1)
        else:
            out = policy_loss(log_probs, advantages.float(), **options)
            has_gradient = torch.autograd.grad(out.loss, log_probs)[0] != 0
        ours = segment_sum(has_gradient.double(), offsets) == 0  # a clipped sequence has a gradient of exactly 0
        clipped = torch.where(advantages > 0, u > bounds[1], u < bounds[0])
        clear = (u[:, None] - bounds).abs().amin(1) > band
        assert not (clear & (ours != clipped)).any(), f"{int((clear & (ours != clipped)).sum())} decisions differ"
        assert ((out.log_ratio.double() - u).abs() <= band).all()
        shares.append(torch.stack([clear.double().mean(), clipped.double().mean()]))
    clear_share, clipped_share = torch.stack(shares).mean(0).tolist()
    assert clear_share > 0.7 and 0.02 < clipped_share < 0.5  # the test covers decisions of both kinds


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("budget", [1e-3, 0.5])
def test_a_gradient_budget_is_respected_and_reproducible(budget: float, dtype: str, device: torch.device) -> None:
    """The policy is peaked, and a quarter of the sequences have advantage zero."""
    policy = peaked.make(SIZES.rows // 4 * 4, SIZES.width, max(SIZES.vocab, 2000))
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.5], device=device)
    runs = []
    for _ in range(2):
        hidden, weight = (x.to(device, DTYPES[dtype]).requires_grad_() for x in policy[:2])
        out = gspo_fused_loss(
            hidden.view(4, -1, SIZES.width),
            weight,
            policy.target_ids.view(4, -1).to(device),
            advantages,
            gradient_budget=budget,
            backend="triton",
        )
        runs.append(torch.autograd.grad(out.loss, (hidden, weight)))
        dropped = out.metrics["dropped_gradient_mass"].item()
        assert dropped <= budget and (dropped > 0 or budget < 0.5)
    first, second = runs
    assert_same_bits(first, second)


# -- the same bits


@pytest.mark.parametrize("dtype", TRAINED)
def test_log_probs_have_the_same_bits_in_every_batch_and_memory_layout(dtype: str) -> None:
    """Rows are computed alone, in other batches, with other options and with other memory layouts."""
    head = random_head(SIZES.batch, dtype=DTYPES[dtype], masked=False)
    expected = log_probs_of(head)
    rows = torch.randperm(SIZES.batch)[:300].to(head.mask.device)
    mask = torch.zeros_like(head.mask)
    mask[rows] = True
    apart = head._replace(hidden=misaligned(head.hidden), weight=misaligned(head.weight))
    transposed = head._replace(weight=head.weight.T.contiguous().T)
    fused = gspo_fused_loss(
        head.hidden[None], head.weight, head.target_ids[None], torch.ones_like(expected[:1]), backend="triton"
    )
    with torch.no_grad():
        unrecorded = log_probs_of(head)
    for case, ours, expected_rows in (
        ("alone", log_probs_of(take_rows(head, rows[:1])), expected[rows[:1]]),
        ("with 299 others", log_probs_of(take_rows(head, rows)), expected[rows]),
        ("others masked", log_probs_of(head._replace(mask=mask))[rows], expected[rows]),
        ("with entropy", log_probs_of(head._replace(entropy=True)), expected),
        ("without autograd", unrecorded, expected),
        ("in the fused loss", fused.log_probs[0], expected),
        ("misaligned", log_probs_of(apart), expected),
        ("transposed head", log_probs_of(transposed), expected),
        ("every other row", log_probs_of(take_rows(head, slice(None, None, 2))), expected[::2]),
    ):
        assert_same_bits([ours], [expected_rows], case)


def test_an_adapter_product_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    """LoRA's h A^T is the vendor's product, so its bits depend on the vendor's choice of an algorithm."""
    rng = torch.Generator(device).manual_seed(0)
    x = torch.randn(SIZES.batch, SIZES.width, generator=rng, device=device)
    lora_a = torch.randn(16, SIZES.width, generator=rng, device=device)
    mask = torch.ones_like(x[:, 0], dtype=torch.bool)
    expected = adapter_product(x, lora_a, mask)
    rows = torch.randperm(SIZES.batch, generator=rng, device=device)
    for part in (rows, rows[: SIZES.batch // 3], rows[:1]):
        unmasked = torch.zeros_like(mask).index_fill_(0, part, True)
        assert_same_bits([adapter_product(x[part], lora_a, mask[part])], [expected[part]], f"{len(part)} rows")
        assert_same_bits([adapter_product(x, lora_a, unmasked)[part]], [expected[part]], f"{len(part)} unmasked rows")


def log_probs_of(head: HeadRows) -> Tensor:
    hidden = head.hidden.detach().requires_grad_()
    return linear_log_probs_op(head._replace(hidden=hidden), 0.0, 0, "triton").head.log_probs.detach()


def misaligned(x: Tensor) -> Tensor:
    """Return the same numbers at an address and with a row stride that are no multiples of 16 bytes."""
    return x.new_empty(x.shape[0], x.shape[1] + 3)[:, 1:-2].copy_(x)


# -- offsets past 2^31


def test_gradients_of_more_than_two_to_the_31_logits_equal_float64() -> None:
    head = random_head(SIZES.many_rows, masked=False)
    upstream = random_upstream(head)
    same_dtype, truth = (by_torch(head, upstream, to) for to in (torch.bfloat16, torch.float64))
    assert_law(head, by_kernels(head, upstream), same_dtype, truth)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_head_with_offsets_past_two_to_the_31_has_the_same_results(dtype: str) -> None:
    head = random_head(SIZES.rows, dtype=DTYPES[dtype])
    room = head.weight.new_empty(SIZES.vocab, SIZES.stride)
    apart = head._replace(weight=room[:, : SIZES.width].copy_(head.weight))
    upstream = random_upstream(head)
    near, far = by_kernels(head, upstream), by_kernels(apart, upstream)
    assert_same_bits([far["log_probs"]], [near["log_probs"]])
    for name in ("d_hidden", "d_weight"):  # in another layout, the vendor's product may sum in another order
        assert relative_rms(far[name], near[name]) <= RELATIVE_RMS[DTYPES[dtype]]


def test_gradients_of_more_than_two_to_the_31_hidden_elements_equal_float64() -> None:
    """d_hidden is compared in the first rows, the last rows, and the rows around offset 2^31."""
    rows, width, vocab = SIZES.tall
    head = random_head(rows, width, vocab, masked=False)
    upstream = random_upstream(head)
    boundary = min(2**31 // width, rows - 50)
    compared = torch.tensor([*range(100), *range(boundary - 50, boundary + 50), *range(rows - 100, rows)])

    def cut(x: Tensors) -> Tensors:
        return x | {"d_hidden": x["d_hidden"][compared.to(head.mask.device)]}

    ours = cut(by_kernels(head, upstream))
    same_dtype, truth = (cut(by_torch(head, upstream, to)) for to in (torch.bfloat16, torch.float64))
    assert_law(head, ours, same_dtype, truth)


# -- the vendor's products


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [SIZES.batch, 1])
def test_products_of_the_backward_are_accumulated_in_fp32(rows: int, dtype: str, device: torch.device) -> None:
    """Products of half-precision operands are accumulated in fp32, without rounding partial sums."""
    vocab = SIZES.batch // 2
    width = SIZES.width
    rng = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device)

    d_logits = randn(rows, vocab + 8).to(DTYPES[dtype])[:, :vocab]  # padded rows, as in the backward
    hidden, weight = randn(rows, width).to(DTYPES[dtype]), randn(vocab, width).to(DTYPES[dtype])
    for a, b in ((d_logits, weight), (d_logits.T, hidden)):
        total = 10 * randn(a.shape[0], width)  # not 0, so that the test detects an overwritten sum
        truth = total.double() + a.double() @ b.double()
        add_product(total, a, b)
        assert relative_rms(total, truth) <= ACCUMULATED_IN_FP32
