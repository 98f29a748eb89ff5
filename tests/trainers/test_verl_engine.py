"""Our engine in verl's TrainingWorker on CPUs: fp16, how verl finds it, what it refuses or leaves to verl.

Training and metrics: test_verl_array.py. Part of `make test-trainers`, in verl's environment.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from helpers import ranks
from helpers.verl_worker import BASE, ENVIRONMENT, batch, make_worker, run_ranks, step
from tolerance import (
    FP16_LOG_PROB_ABSOLUTE,
    FP16_NORM_RELATIVE,
    TRAINER_ABSOLUTE,
)

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its variables
    pytest.skip("verl is not installed", allow_module_level=True)


def half_main(rank: int, folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    results = {}
    for dtype in ("float32", "float16"):
        worker = make_worker(folder / f"{dtype}-{rank}", True, BASE | {"dtype": dtype})
        results[dtype] = step(worker, rank, BASE, 2)
        assert (worker.engine.scaler is not None) == (dtype == "float16")
    torch.save(results, folder / f"results-{rank}.pt")


def test_fp16_training_is_close_to_fp32_training(tmp_path: Path) -> None:
    run_ranks(half_main, 2, tmp_path)
    for rank in range(2):
        single, half = torch.load(tmp_path / f"results-{rank}.pt", weights_only=False).values()
        assert 0 < (half["old"] - single["old"]).abs().max() < FP16_LOG_PROB_ABSOLUTE
        assert half["metrics"]["grad_norm"] == pytest.approx(single["metrics"]["grad_norm"], rel=FP16_NORM_RELATIVE)
        assert any(not torch.equal(half["parameters"][key], p) for key, p in single["parameters"].items())


def registration_main(rank: int, folder: Path, external: str) -> None:
    os.environ.update(ENVIRONMENT, VERL_ENGINE_VENDOR="gspo")
    if external:
        os.environ["VERL_USE_EXTERNAL_MODULES"] += "," + external
        os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    import verl  # noqa: F401
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.engine import EngineRegistry

    for strategy in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", strategy).__name__ == "GSPOEngine"
    assert get_policy_loss_fn("gspo_kernels").__name__ == "gspo_policy_loss"


@pytest.mark.parametrize("external", ["", "gspo_kernels.integrations.verl"], ids=["entry point", "environment"])
def test_verl_finds_the_engine(external: str, tmp_path: Path) -> None:
    ranks.run_ranks(registration_main, 1, tmp_path, external)  # spawned, because it sets what verl reads on import


def refused_main(rank: int, folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    with pytest.raises(ValueError, match=r"model.use_fused_kernels must be False .* got True"):
        make_worker(folder / "fused", True, BASE, use_fused_kernels=True)
    # Batches whose loss needs logits, such as distillation, run through verl's code in both engines.
    from verl.utils import tensordict_utils as tu

    data = batch(0, BASE)
    sums, log_probs = [], []
    for ours in (False, True):
        worker = make_worker(folder / f"sum-{ours}", ours, BASE)
        copied = data.copy()
        tu.assign_non_tensor(copied, compute_loss=False, calculate_sum_pi_squared=True)
        sums.append(worker.infer_batch(copied)["sum_pi_squared"].values())
        # The log-probs of prompts, too.
        tu.assign_non_tensor(data, compute_loss=False, return_model_output=True)
        log_probs.append(worker.infer_batch(data.copy())["log_probs"].values())
    assert torch.equal(*sums)
    torch.testing.assert_close(*log_probs, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)


def test_unsupported_settings_raise_or_use_verls_code(tmp_path: Path) -> None:
    run_ranks(refused_main, 1, tmp_path)
