"""Train with verl's TrainingWorker on CPUs, with verl's FSDP engines and with ours.

Log-probs, losses, metrics and trained parameters must be equal. Part of `make test-trainers`, in verl's environment.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ranks
from helpers.verl_worker import BASE, ENVIRONMENT, batch, make_worker, run_ranks
from tolerance import (
    FP16_LOG_PROB_ABSOLUTE,
    FP16_NORM_RELATIVE,
    LOSS_PER_ADVANTAGE,
    TRAINER_ABSOLUTE,
    TRAINER_GRADIENT_RELATIVE,
)
from torch.distributed.fsdp import FullyShardedDataParallel

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its variables
    pytest.skip("verl is not installed", allow_module_level=True)

ON_ONE_RANK: dict[str, dict[str, Any]] = {
    "packed, tied, micro-batches of 2": {"tied": True, "micro": 2},
    "padded, micro-batches of 1": {"packed": False, "micro": 1},
    "soft-cap, temperature, weights": {"softcap": True, "tied": True, "temperature": 0.7, "weights": True},
    "kl, entropy, our policy loss": {"kl": 0.1, "entropy": 0.01, "loss_mode": "gspo_kernels", "micro": 2},
    "our policy loss, weights": {"weights": True, "loss_mode": "gspo_kernels", "packed": False},
    "token-mean": {"aggregation": "token-mean"},
    "teacher, our policy loss, padded, temperature": {
        "teacher": {"log_prob_min_clamp": -4.0},
        "loss_mode": "gspo_kernels",
        "packed": False,
        "temperature": 0.7,
    },
    "only the teacher": {"teacher": {"use_task_rewards": False}, "epochs": 1, "micro": 2},
}
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "packed, untied": {},
    "padded, tied": {"packed": False, "tied": True},
    "LoRA": {"lora": 4, "tied": True},
    "LoRA, untied, padded": {"lora": 4, "packed": False},
    "FSDP1": {"strategy": "fsdp", "tied": True, "micro": 2},
    "teacher": {"teacher": {}, "micro": 2},
}
OVERLAP = {"distillation/overlap_ratio", "distillation/overlap_token_advantage"}  # need the student's own top k


def step(worker: Any, rank: int, case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Compute old and reference log-probs with the worker, then train on one batch."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data = batch(rank, case)
    tu.assign_non_tensor(data, compute_loss=False, global_batch_size=4 * ranks)
    out = worker.infer_batch(data.copy())
    old = no_padding_2_padding(out["log_probs"], data)
    entropy = no_padding_2_padding(out["entropy"], data)
    data["old_log_probs"] = old
    data["ref_log_prob"] = old - 0.1
    teacher = case["teacher"]
    if teacher is not None:  # without entropies, nothing but the teacher forbids skipping
        only = not teacher.get("use_task_rewards", True)
        tu.assign_non_tensor(data, distillation_use_topk=True, distillation_only=only, calculate_entropy=False)
    tu.assign_non_tensor(data, compute_loss=True, mini_batch_size=4 * ranks, epochs=case["epochs"], seed=1)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    module = worker.engine.module
    fsdp1 = isinstance(module, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(module) if fsdp1 else nullcontext():
        parameters = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in module.named_parameters()
            if p.requires_grad
        }
    return {"old": old, "entropy": entropy, "metrics": metrics, "parameters": parameters}


def rank_main(rank: int, folder: Path, case: dict[str, Any], ranks: int) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    results = {}
    for name in ("stock", "ours"):
        worker = make_worker(folder / f"{name}-{rank}", name == "ours", case)
        assert (type(worker.engine).__name__ == "GSPOEngine") == (name == "ours")
        results[name] = step(worker, rank, case, ranks)
    torch.save(results, folder / f"results-{rank}.pt")


def compare(folder: Path, case: dict[str, Any], ranks: int) -> None:
    run_ranks(rank_main, ranks, folder, case, ranks)
    for rank in range(ranks):
        results = torch.load(folder / f"results-{rank}.pt", weights_only=False)
        stock, ours = results["stock"], results["ours"]
        for name in ("old", "entropy"):
            torch.testing.assert_close(ours[name], stock[name], rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
        added = {"gspo/passes", "gspo/dropped_gradient_mass", "gspo/live_row_share", "gspo/rows_differentiated"}
        assert ours["metrics"].keys() - stock["metrics"].keys() == added
        left_out = OVERLAP if case["teacher"] is not None else set()
        assert stock["metrics"].keys() - ours["metrics"].keys() == left_out
        for key, value in stock["metrics"].items():
            if key in OVERLAP or key.startswith("perf/") or key == "mfu":
                continue
            relative, absolute = TRAINER_ABSOLUTE, TRAINER_ABSOLUTE
            if key in ("loss", "actor/pg_loss"):
                relative = 0.0
                absolute = LOSS_PER_ADVANTAGE
            elif key == "grad_norm":
                relative = 0.0
                absolute = TRAINER_GRADIENT_RELATIVE * max(value)
            assert ours["metrics"][key] == pytest.approx(value, rel=relative, abs=absolute), key
        assert max(stock["metrics"]["grad_norm"]) > 1e-3
        shares = ours["metrics"]["gspo/rows_differentiated"]  # the first update clips nothing
        assert shares[0] == 1 and (min(shares) < 1) == (case["kl"] == case["entropy"] == 0 and case["teacher"] is None)
        assert stock["parameters"].keys() == ours["parameters"].keys()
        for key, p in stock["parameters"].items():
            torch.testing.assert_close(ours["parameters"][key], p, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_training_on_one_rank_equals_training_with_verls_engine(name: str, tmp_path: Path) -> None:
    compare(tmp_path, BASE | ON_ONE_RANK[name], 1)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_training_on_two_ranks_equals_training_with_verls_engine(name: str, tmp_path: Path) -> None:
    compare(tmp_path, BASE | ON_TWO_RANKS[name], 2)


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
