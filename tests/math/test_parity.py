"""Compare values and gradients of the fused loss with the float64 oracle, within tolerance.py, for every option."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.device import linear_log_probs, policy_loss
from helpers.marks import slow
from helpers.oracle import DTYPES, HEADS, LAYOUTS, OBJECTIVES, assert_equals_oracle
from helpers.samples import make_sample, new_leaves, run_fused, run_oracle
from tolerance import check

from gspo_kernels import Objective
from gspo_kernels.backends.torch import tiles as torch_tiles

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("layout", ["padded", slow("packed-per-token-weights")])
def test_every_objective_equals_the_oracle_in_float64(name: str, layout: str, backend: str) -> None:
    sample = make_sample(3, dtype=torch.float64, objective=Objective(**OBJECTIVES[name]), **LAYOUTS[layout])
    assert_equals_oracle(sample, torch.float64, backend)


@pytest.mark.parametrize("dtype", [slow("fp32"), "bf16", slow("fp16")])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_the_oracle_in_training_dtypes(name: str, dtype: str, backend: str) -> None:
    sample = make_sample(11, dtype=DTYPES[dtype], objective=Objective(**OBJECTIVES[name]))
    assert_equals_oracle(sample, DTYPES[dtype], backend)


# float64 runs every pair of head and layout. Other dtypes differ only in rounding, so they run every layout with two
# heads, and every head with one layout. `make test` runs only this smaller set, in float64 and bf16.
PAIRS = [
    (head, layout, dtype) if few and dtype in ("fp64", "bf16") else slow(head, layout, dtype)
    for head in HEADS
    for layout in LAYOUTS
    for few in [head in ("plain", "all") or layout == "padded"]
    for dtype in (DTYPES if few else ["fp64"])
]


@pytest.mark.parametrize(("head", "layout", "dtype"), PAIRS)
def test_every_head_and_layout_equals_the_oracle(head: str, layout: str, dtype: str, backend: str) -> None:
    sample = make_sample(5, dtype=DTYPES[dtype], **HEADS[head], **LAYOUTS[layout])
    assert_equals_oracle(sample, DTYPES[dtype], backend)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_normalizers_from_the_host_trainer(aggregation: str, as_tensor: bool, backend: str) -> None:
    objective = Objective(aggregation=aggregation, kl_coef=0.1, kl_aggregation="token-mean")
    sample = make_sample(6, dtype=torch.float64, objective=objective)
    sample = sample.with_options(normalizer=17.0, kl_normalizer=31.0)
    truth, true_grads = run_oracle(sample)
    if as_tensor:
        sample = sample.with_options(normalizer=torch.tensor(17), kl_normalizer=torch.tensor(31.0))
    out, grads = run_fused(sample, backend)
    check("loss", out.loss, truth.loss, truth.loss, torch.float64)
    check("d_weight", grads["weight"], true_grads["weight"], true_grads["weight"], torch.float64)


@pytest.mark.parametrize("name", ["gspo", "everything"])
@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_and_policy_loss_chained_equal_the_fused_loss_bitwise(name: str, packed: bool, backend: str) -> None:
    objective = Objective(**OBJECTIVES[name])
    sample = make_sample(7, objective=objective, packed=packed, token_weights=True)
    fused, fused_grads = run_fused(sample, backend, entropy=True)
    leaves = new_leaves(sample)
    mask = sample.options["mask"]
    lp = linear_log_probs(
        leaves["hidden"], leaves["weight"], sample.target_ids, mask=mask, entropy=True, backend=backend
    )
    out = policy_loss(
        lp.log_probs, sample.advantages, entropy=lp.entropy, objective=objective, backend=backend, **sample.options
    )
    out.loss.backward()
    for name in ("loss", "log_ratio", "log_probs"):
        assert torch.equal(getattr(out, name), getattr(fused, name)), name
    assert fused.metrics.keys() - out.metrics.keys() == {
        "dropped_gradient_mass",
        "gradient_mass",
        "live_row_share",
        "live_tile_share",
        "passes",
    }
    for key, value in out.metrics.items():
        assert torch.equal(fused.metrics[key], value), key
    for key, value in fused_grads.items():
        assert torch.equal(leaves[key].grad, value), key  # pyright: ignore[reportArgumentType]


def test_several_tiles_of_rows_and_columns(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The batch and the vocabulary have several tiles, of which the last is ragged. Every slab has targets."""
    monkeypatch.setattr(torch_tiles, "tile_shape", lambda *_: (8, 7))
    for head, dtype in itertools.product(["plain", "all"], ["fp64", "fp32", "bf16"]):
        sample = make_sample(8, dtype=DTYPES[dtype], vocab=38, **HEADS[head])
        assert {int(t) // 7 for t in sample.target_ids[sample.options["mask"]]} == set(range(6))
        assert_equals_oracle(sample, DTYPES[dtype], backend)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate tensor cores on a CPU: operands stay in half precision, products are fp32."""
    monkeypatch.setattr(torch_tiles, "operand_dtype", lambda device, dtype, sum_dtype: dtype)
    monkeypatch.setattr(torch_tiles, "_product", lambda a, b: a.float() @ b.float())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_operands_with_fp32_results(dtype: str, tensor_cores: None) -> None:
    assert_equals_oracle(make_sample(12, dtype=DTYPES[dtype], **HEADS["all"]), DTYPES[dtype], "torch")


def test_small_fp16_gradients_survive_the_product(tensor_cores: None) -> None:
    """Here d_logits underflows in fp16 unless it is multiplied by a power of two, but d_hidden does not underflow."""
    sample = make_sample(12, dtype=torch.float16).with_options(normalizer=200.0, logit_scale=1 / 64)
    sample.leaves["weight"].data *= 64
    d_hidden, truth = (run(sample)[1]["hidden"].flatten(0, 1) for run in (run_fused, run_oracle))
    same_dtype = truth.to(torch.float16)
    check("d_hidden", d_hidden, same_dtype, truth, torch.float16)
