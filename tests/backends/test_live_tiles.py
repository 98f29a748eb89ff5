"""The gradient budget: the dropped mass is reported correctly, stays within the budget, and saves products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.counters import product_flops
from helpers.device import DEVICE, gspo_fused_loss, on_device, policy_loss, to_device
from helpers.head_rows import NEEDS
from helpers.marks import by_dtype, slow
from helpers.oracle import DTYPES
from helpers.samples import Sample, make_sample, run_fused
from helpers.tile_choices import Chosen, assert_dropped_mass_is_reported, choices, d_logits, kept, small_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import KEPT_GRADIENT_RELATIVE
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels.backends import dispatch, live_tiles
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.live_tiles import break_even
from gspo_kernels.backends.rows import HeadRows, NeedsGradient
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.ops.head import all_columns
from gspo_kernels.outputs import work_metrics

SHAPES = st.fixed_dictionaries(
    {
        "logit_std": st.sampled_from([0.3, 3.0, 9.0]),  # flat, medium, peaked
        "vocab": st.integers(7, 60),
        "hidden_size": st.integers(1, 24),
        "holes": st.booleans(),
        "per_token_advantages": st.booleans(),
        "objective": st.sampled_from(
            [
                Objective(),
                Objective(ratio="sequence-token"),
                Objective.preset("grpo"),
                Objective(kl_coef=0.1),
                Objective(kl_coef=0.1, kl_ratio_factor=True, clip_low=0.2, clip_high=0.2),
            ]
        ),
    },
    optional={
        "logit_softcap": st.sampled_from([2.0, 10.0]),
        "logit_scale": st.sampled_from([0.5, 2.0]),
        "temperature": st.sampled_from([0.6, "per-token"]),
        "padded_vocab": st.integers(1, 5),
    },
)
BUDGETS = st.sampled_from([1e-6, 1e-3, 1e-2, 0.1, 0.5, 0.99])


@on_device
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7).map(tuple), SHAPES, BUDGETS, st.integers(0, 10_000))
def test_torch_reports_the_dropped_mass_and_stays_within_the_budget(
    lengths: tuple[int, ...], shape: dict[str, Any], budget: float, seed: int
) -> None:
    with small_tiles():
        assert_dropped_mass_is_reported(make_sample(seed, lengths=lengths, **shape), budget, "torch")


@on_device
@pytest.mark.slow
@settings(max_examples=12)
@given(SHAPES, BUDGETS, st.integers(0, 10_000))
def test_triton_reports_the_dropped_mass_and_stays_within_the_budget(
    shape: dict[str, Any], budget: float, seed: int
) -> None:
    sample = make_sample(seed, lengths=(40, 31, 25, 52, 17, 29), **{**shape, "vocab": 601, "hidden_size": 24})
    assert_dropped_mass_is_reported(sample, budget, "triton")


@on_device
@by_dtype
@pytest.mark.parametrize("head", ["plain", "tail", "padded"])
@pytest.mark.parametrize("parts", [slow("one part"), "many parts"])
def test_gradients_of_every_dtype_equal_those_of_the_kept_entries(
    parts: str, head: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parts are several chunks of rows and slabs of columns, with ragged ends."""
    from gspo_kernels.inputs import head as inputs

    if parts == "many parts":
        monkeypatch.setattr(inputs, "workspace_bytes", lambda: 2**17)
    heads: dict[str, Any] = {"tail": {"logit_softcap": 8.0, "temperature": "per-token"}, "padded": {"padded_vocab": 70}}
    sample = make_sample(
        3,
        lengths=(40, 31, 85, 52, 17, 59, 60),
        dtype=DTYPES[dtype],
        vocab=1201,
        hidden_size=72,
        logit_std=6.0,
        **heads.get(head, {}),
    )
    with launches() as seen:
        assert_dropped_mass_is_reported(sample, 0.05, backend)
    if backend == "triton":
        first_cells = {x.arguments["first_cell"] for x in seen if x.kernel.__name__ == "gradient_tile"}
        assert len(first_cells) == 1 if parts == "one part" else len(first_cells) >= 3
        assert {x.kernel.__name__ for x in seen} >= {"hidden_product", "weight_product"}


@on_device
@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradients_that_are_not_needed_are_not_computed(needs: tuple[bool, bool], backend: str) -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=601).with_options(gradient_budget=0.1)
    hidden, weight = (x.detach().requires_grad_(n) for x, n in zip(sample.leaves.values(), needs, strict=True))
    with choices(), launches() as seen:
        out = gspo_fused_loss(hidden, weight, sample.target_ids, sample.advantages, backend=backend, **sample.options)
        out.loss.backward()
        all_gradients = run_fused(sample, backend)[1]
    gradients = {"hidden": hidden.grad, "weight": weight.grad}
    for (name, grad), need in zip(gradients.items(), needs, strict=True):
        assert torch.equal(grad, all_gradients[name]) if need else grad is None  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(out.metrics["passes"], 1 + 2 * out.metrics["live_tile_share"])
    assert backend == "torch" or seen


@on_device
def test_budget_zero_has_the_bits_of_the_dense_backward_of_live_rows(backend: str) -> None:
    sample = make_sample(5, vocab=601)
    out, grads = run_fused(sample.with_options(gradient_budget=0.0), backend)
    live = grads["hidden"].flatten(0, 1).any(1)
    assert 0 < live.sum() < sample.options["mask"].sum()
    implementation = dispatch.implementation(backend)
    hidden, weight = (x.detach() for x in sample.leaves.values())
    head = HeadRows(
        hidden.flatten(0, 1)[live],
        weight,
        None,
        None,
        None,
        sample.target_ids.flatten()[live],
        torch.ones(int(live.sum()), dtype=torch.bool),
        None,
        1.0,
        None,
        601,
        False,
    )
    coefficient = torch.autograd.grad(*coefficients(sample, backend))[0].flatten()
    head, coefficient = to_device((head, coefficient))
    dense = implementation.head_backward(
        head, implementation.head_forward(head), coefficient[live.to(DEVICE)], None, NEEDS
    )
    dense = to_device(dense, "cpu")
    assert dense.hidden is not None and dense.weight is not None
    assert torch.equal(grads["hidden"].flatten(0, 1)[live], dense.hidden) and torch.equal(grads["weight"], dense.weight)
    assert out.metrics["dropped_gradient_mass"] == 0


def coefficients(sample: Sample, backend: str) -> tuple[Tensor, Tensor]:
    """Return a loss and the log-probs [B, T] that it is computed from. Its gradients are the tokens' coefficients."""
    log_probs = run_fused(sample, backend)[0].log_probs.detach().requires_grad_()
    options = {k: v for k, v in sample.options.items() if k in ("mask", "old_log_probs", "ref_log_probs")}
    return policy_loss(log_probs, sample.advantages, backend=backend, **options).loss, log_probs


@pytest.mark.parametrize("budget", [0.0, 1e-3, 0.3])
def test_reported_passes_equal_the_counted_products(budget: float) -> None:
    """Products are counted at PyTorch's dispatcher. All tiles are full, so the count includes no padding."""
    n, width, vocab = 64, 24, 48
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=rng)
    weight = 2 * torch.randn(vocab, width, generator=rng)
    ids = torch.randint(0, vocab, (n,), generator=rng)
    mask = torch.ones(n, dtype=torch.bool)
    head = HeadRows(hidden, weight, None, None, None, ids, mask, None, 1.0, None, vocab, False)
    coefficient = torch.tensor([1.0, 0.0, -1.0, 0.0, 0.5, 0.0, 0.0, 2.0]).repeat_interleave(8)
    works: list[live_tiles.Work] = []

    def both_passes() -> None:
        result, kept = torch_backend.forward_and_keep(head, shares=budget > 0)
        live = all_columns(ids.device)
        if budget:
            cell = torch_backend.cell_shape(head)
            live, work = live_tiles.choose(head, result, coefficient, kept, cell, budget)
            works.append(work)
        torch_backend.head_backward(head, result, coefficient, None, NEEDS, live)

    with choices(), small_tiles(8, 24):
        flops = product_flops(both_passes)
    work = torch.stack(works[0]) if works else torch.empty(0)
    metrics = work_metrics(work, torch.tensor(0.5), d_hidden=True, d_weight=True, has_backward=True)
    passes = metrics["passes"].item()
    assert passes == pytest.approx(flops / (2 * n * width * vocab), rel=1e-6)
    assert (passes < 2.5) == (budget > 0.01) and metrics["live_row_share"] == 0.5


@on_device
def test_triton_launches_one_program_per_counted_cell() -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=1201, logit_std=6.0).with_options(gradient_budget=0.1)
    with choices() as decisions, launches() as seen:
        run_fused(sample, "triton")
    # On a GPU, the first step also loads the kernel of the dense backward, by one program without a list of cells.
    of_cells = [x for x in seen if x.kernel.__name__ == "gradient_tile" and x.arguments["by_tile"] is not None]
    tiles = sum(x.programs for x in of_cells)
    assert 0 < tiles == int(decisions[0].live.cells.sum()) < decisions[0].live.cells.numel()


@on_device
def test_nothing_is_dropped_if_the_sparse_backward_is_not_cheaper(backend: str) -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=601, logit_std=6.0)
    exact, grads = run_fused(sample, backend)
    with choices(pays=False):
        out, with_budget = run_fused(sample.with_options(gradient_budget=0.3), backend)
    assert out.metrics["dropped_gradient_mass"] == 0
    for key in ("live_tile_share", "passes", "live_row_share"):
        torch.testing.assert_close(out.metrics[key], exact.metrics[key])
    assert all(torch.equal(with_budget[k], grads[k]) for k in grads)


@on_device
def test_strided_ids_and_masks_choose_the_cells_of_contiguous_ones(backend: str) -> None:
    sample = make_sample(3, lengths=(40, 31, 85), vocab=601, holes=True, logit_std=6.0).with_options(
        gradient_budget=0.1
    )

    def strided(x: Tensor) -> Tensor:
        return torch.stack([x, torch.ones_like(x)], -1)[..., 0]

    mask = sample.options["mask"]
    apart = replace(sample, target_ids=strided(sample.target_ids)).with_options(mask=strided(mask))
    assert not apart.target_ids.reshape(-1).is_contiguous()
    with choices() as decisions:
        results = [run_fused(x, backend) for x in (sample, apart)]
    assert torch.equal(*(x.live.cells for x in decisions)) and not decisions[0].live.cells.all()
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name])


@on_device
def test_nothing_is_dropped_if_the_total_mass_is_infinite(backend: str) -> None:
    """The ratio of the first sequence overflows at a negative advantage, so its coefficients are infinite."""
    sample = make_sample(3, lengths=(140, 140), vocab=601, logit_std=6.0)
    old = sample.options["old_log_probs"].clone()
    old[0] -= 200
    sample = replace(sample, advantages=torch.tensor([-1.0, 1.0])).with_options(old_log_probs=old, gradient_budget=1e-3)
    with choices():
        out, _ = run_fused(sample, backend)
    assert out.metrics["live_tile_share"] == 1 and out.metrics["dropped_gradient_mass"] == 0


@on_device
@pytest.mark.parametrize("budget", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_batch_without_unmasked_tokens_has_no_work(
    tokens: int, budget: float, backend: str, request: pytest.FixtureRequest
) -> None:
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    ids = torch.full((tokens,), -100)
    offsets = torch.tensor([0, tokens])
    out = gspo_fused_loss(
        hidden, weight, ids, torch.ones(1), cu_seqlens=offsets, gradient_budget=budget, backend=backend
    )
    assert out.metrics["live_row_share"] == out.metrics["live_tile_share"] == out.metrics["dropped_gradient_mass"] == 0
    assert out.metrics["passes"] == 1


def test_the_cost_model_depends_on_width_and_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("hpu")  # any other type of device
    assert 0.8 < break_even(4096, cpu) < 0.85 and 0.4 < break_even(4096, gpu) < 0.5
    assert break_even(8, cpu) < 0.2 < break_even(896, cpu) < break_even(4096, cpu)


@on_device
@pytest.mark.parametrize("budget", [0.0, 0.1])
def test_gradients_are_zero_if_no_token_has_one(budget: float, backend: str) -> None:
    sample = make_sample(3)
    zero = Sample(sample.leaves, sample.target_ids, torch.zeros_like(sample.advantages), Objective(), sample.options)
    with choices():
        out, grads = run_fused(zero.with_options(gradient_budget=budget), backend)
    assert out.loss == 0 and not any(g.any() for g in grads.values())
    assert out.metrics["live_row_share"] == out.metrics["live_tile_share"] == 0 and out.metrics["passes"] == 1


@on_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinite_gradients_are_not_dropped(bad: float, backend: str) -> None:
    sample = make_sample(3, vocab=601)
    sample.options["old_log_probs"][1, 0] = -bad
    assert sample.advantages[1] < 0  # with a negative advantage, an infinite ratio is not clipped
    with choices() as decisions:
        grads = run_fused(sample.with_options(gradient_budget=0.5), backend)[1]
    assert not decisions[0].coefficient.isfinite().all()
    rows = decisions[0].live.counts[0]
    assert decisions[0].live.cells[: -(-int(rows) // decisions[0].cell[0])].all()
    assert grads["hidden"].isnan().any()


@on_device
def test_two_runs_drop_the_same_cells_and_have_the_same_bits(backend: str) -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=601, logit_std=6.0).with_options(gradient_budget=0.1)
    with choices() as decisions:
        (a, first), (b, second) = run_fused(sample, backend), run_fused(sample, backend)
    assert torch.equal(decisions[0].live.cells, decisions[1].live.cells) and torch.equal(
        decisions[0].live.order, decisions[1].live.order
    )
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert torch.equal(a.metrics["dropped_gradient_mass"], b.metrics["dropped_gradient_mass"])


@on_device
def test_the_forward_has_the_same_bits_with_a_budget(backend: str) -> None:
    sample = make_sample(3, vocab=601)
    with choices():
        a, b = (run_fused(sample.with_options(gradient_budget=x), backend, entropy=True)[0] for x in (0.0, 0.3))
    assert torch.equal(a.log_probs, b.log_probs) and torch.equal(a.loss, b.loss) and torch.equal(a.entropy, b.entropy)  # pyright: ignore


def test_triton_reads_once_on_the_host_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=601, logit_std=6.0)
    head = HeadRows(
        sample.leaves["hidden"].detach().flatten(0, 1),
        sample.leaves["weight"].detach(),
        None,
        None,
        None,
        sample.target_ids.flatten(),
        sample.options["mask"].flatten(),
        None,
        1.0,
        None,
        601,
        False,
    )
    reads: list[str] = []
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        real = getattr(Tensor, name)

        def recorded(x: Tensor, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            reads.append(name)
            return real(x, *args, **options)

        monkeypatch.setattr(Tensor, name, recorded)
    monkeypatch.setattr("gspo_kernels.backends.triton.launch.launch", lambda *args, **options: None)
    for module in ("forward", "gradient_rows", "cells.products", "cells.lists"):
        monkeypatch.setattr(f"gspo_kernels.backends.triton.{module}.launch", lambda *args, **options: None)
    with choices():
        result, tiles = triton_backend.forward_and_keep(head, shares=True)
        cell = triton_backend.cell_shape(head)
        assert cell is not None
        tiles.share.fill_(1e-3)  # in place of the kernel's output, as are the next two
        tiles.place.copy_(torch.arange(len(tiles.place)))
        result.log_probs.fill_(-1.0)
        live, _ = triton_backend.choose(head, result, head.mask.float(), tiles, cell, 0.1)
        assert reads == []
        triton_backend.head_backward(head, result, head.mask.float(), None, NEEDS, live)
    assert reads == ["tolist"]


@on_device
def test_triton_drops_nothing_for_a_head_with_a_bias() -> None:
    sample = make_sample(3, vocab=601, bias=True)
    with choices():
        out, grads = run_fused(sample.with_options(gradient_budget=0.3), "triton")
        dense, expected = run_fused(sample, "triton")
    assert out.metrics["dropped_gradient_mass"] == 0 and torch.equal(out.metrics["passes"], dense.metrics["passes"])
    assert all(torch.equal(grads[k], expected[k]) for k in grads)


@on_device
def test_the_torch_backend_drops_cells_of_a_head_with_a_bias() -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=601, bias=True, logit_std=6.0)
    with choices() as decisions:
        out, grads = run_fused(sample.with_options(gradient_budget=0.1), "torch")
    assert 0 < out.metrics["dropped_gradient_mass"] <= 0.1
    truth = torch.where(kept(decisions[0]), d_logits(decisions[0])[0], 0).sum(0)
    assert (grads["bias"].double() - truth).norm() <= KEPT_GRADIENT_RELATIVE[torch.float32] * truth.norm()


@on_device
@pytest.mark.parametrize("lengths", [(), (0, 0), (1,), (3, 0, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_budget_is_respected_in_small_empty_and_fully_masked_batches(
    lengths: tuple[int, ...], masked: bool, backend: str
) -> None:
    sample = make_sample(3, lengths=lengths, vocab=300)
    if masked:
        sample = sample.with_options(mask=torch.zeros_like(sample.options["mask"]))
    with choices():
        out, grads = run_fused(sample.with_options(gradient_budget=0.5), backend)
    assert out.loss.isfinite() and all(g.isfinite().all() for g in grads.values())
    assert out.metrics["dropped_gradient_mass"] <= 0.5 and 1 <= out.metrics["passes"] <= 4
    if masked or not sum(lengths):
        assert out.metrics["passes"] == 1 and not any(g.any() for g in grads.values())


@on_device
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_forward_without_autograd_reports_one_pass_and_chooses_no_cells(budget: float) -> None:
    sample = make_sample(3).with_options(gradient_budget=budget)
    with torch.no_grad(), choices() as decisions:
        out = gspo_fused_loss(
            sample.leaves["hidden"], sample.leaves["weight"], sample.target_ids, sample.advantages, **sample.options
        )
    assert out.metrics["passes"] == 1 and out.metrics["live_row_share"] > 0
    assert out.metrics["dropped_gradient_mass"] == 0 and not decisions


@on_device
def test_the_mass_of_a_last_tile_with_only_the_target_is_correct(backend: str) -> None:
    """For row 7, the last tile holds only the target, so the tile's mass is 0 and its maximum is arbitrary.

    Logits are so low that rescaling this tile by exp(maximum - log-sum-exp) would overflow without a clamp.
    """
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=rng)
    weight = torch.randn(513, 64, generator=rng) / 8
    hidden[:, 0], weight[:, 0] = 1, -20
    ids = torch.randint(0, 512, (300,), generator=rng)
    ids[7] = 512
    cu_seqlens = torch.tensor([0, 100, 150, 300])
    leaves = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_()}
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "temperature": 0.1, "mask": torch.ones_like(ids).bool()}
    sample = Sample(leaves, ids, torch.tensor([1.0, -1.0, 0.5]), Objective(), options)
    for budget in (1e-3, 0.3):
        assert_dropped_mass_is_reported(sample, budget, backend)


def test_the_torch_backend_drops_cells_of_a_head_with_lora() -> None:
    """A run of consecutive cells ends at the end of the vocabulary, and 1,000 is not a multiple of COLUMN_MULTIPLE."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(140, 16, generator=rng)
    weight = 2 * torch.randn(1000, 16, generator=rng)
    weight[-100:] *= 1.5
    left = torch.randn(140, 4, generator=rng)
    right = torch.randn(1000, 4, generator=rng) / 8
    ids = torch.randint(0, 1000, (140,), generator=rng)
    mask = torch.ones(140, dtype=torch.bool)
    head = HeadRows(hidden, weight, None, left, right, ids, mask, None, 1.0, None, 1000, False)
    merged = head._replace(
        hidden=torch.cat([hidden, left], 1),
        weight=torch.cat([weight, right], 1),
        adapter_hidden=None,
        adapter_weight=None,
    )
    coefficient = torch.randn(140, generator=rng)
    needs = NeedsGradient(True, True, False, True, True)
    with choices():
        result, tiles = torch_backend.forward_and_keep(head, shares=True)
        cell = torch_backend.cell_shape(head)
        live, work = live_tiles.choose(head, result, coefficient, tiles, cell, 0.3)
    assert 0 < work.dropped <= 0.3 and live.cells[:, -1].any()
    chosen = Chosen(merged, result, coefficient, live, cell, tiles.share)
    d = torch.where(kept(chosen), d_logits(chosen)[0], 0)
    gradients = torch_backend.head_backward(head, result, coefficient, None, needs, live)
    truth = (d @ weight.double(), d.t() @ hidden.double(), None, d @ right.double(), d.t() @ left.double())
    for ours, x in zip(gradients, truth, strict=True):
        if x is not None:
            assert ours is not None
            assert (ours.double() - x).norm() <= KEPT_GRADIENT_RELATIVE[torch.float32] * x.norm()


def test_cells_heavier_than_the_total_and_overflowing_sums_are_not_dropped() -> None:
    """With a soft-cap, masses are upper bounds and the total is a lower bound, so a cell may exceed the total."""
    total = torch.tensor(1e-3, dtype=torch.float64)
    dropped = live_tiles._lightest(torch.ones(512, 1024, dtype=torch.float64), total, 0.1)
    assert not dropped.any()
    mass = torch.ones(512, 1024, dtype=torch.float64)
    mass[3, 5], mass[0, 0] = 5e-5, torch.nan
    dropped = live_tiles._lightest(mass, total, 0.1)
    assert dropped.sum() == 1 and dropped[3, 5]
