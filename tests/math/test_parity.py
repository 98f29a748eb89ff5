"""Compare values and gradients of the fused loss with the float64 oracle, within tolerance.py, for every option."""

from __future__ import annotations

import pytest
import torch
from helpers.device import linear_log_probs, policy_loss
from helpers.oracle import DTYPES, HEADS, OBJECTIVES, assert_equals_oracle
from helpers.samples import make_sample, new_leaves, run_fused, run_oracle
from tolerance import check

from gspo_kernels import Objective
from gspo_kernels.backends.torch import tiles as torch_tiles

pytestmark = pytest.mark.usefixtures("device")


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
