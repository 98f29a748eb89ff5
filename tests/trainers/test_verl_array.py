"""verl's TrainingWorker on CPUs for every pair of settings: with our engine, training equals that with verl's own.

Log-probs, entropies, losses, metrics and trained parameters must be equal. Part of `make test-trainers`, in verl's
environment.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pair_cover import Ban, pair_cover, value_cover
from helpers.verl_worker import BASE, ENVIRONMENT, make_worker, run_ranks, step
from tolerance import LOSS_PER_ADVANTAGE, TRAINER_ABSOLUTE, TRAINER_GRADIENT_RELATIVE

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its variables
    pytest.skip("verl is not installed", allow_module_level=True)

# A setting -> its values, each with what differs from BASE.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "rows": {"packed": {}, "padded": {"packed": False}},
    "head": {"untied": {}, "tied": {"tied": True}, "soft-cap": {"softcap": True, "tied": True}},
    "temperature": {"1": {}, "0.7": {"temperature": 0.7}},
    "trained": {"all": {}, "LoRA": {"lora": 4}},
    "micro": {"4": {}, "2": {"micro": 2}, "1": {"micro": 1}, "by tokens": {"micro": 0}},
    "loss": {x: {"loss_mode": x} for x in ("gspo", "gspo_kernels", "vanilla", "sapo", "gpg", "cispo", "geo_mean")},
    "aggregation": {
        x: {"aggregation": x}
        for x in (
            "seq-mean-token-mean", "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
        )
    },
    "term": {
        "none": {"calculate_entropy": False},
        "entropies": {},
        "KL": {"kl": 0.1, "calculate_entropy": False},
        "entropy bonus": {"entropy": 0.01},
    },
    "weights": {"none": {}, "weights": {"weights": True}},
    "teacher": {
        "none": {},
        "teacher": {"teacher": {"log_prob_min_clamp": -4.0}},
        "alone": {"teacher": {"use_task_rewards": False, "log_prob_min_clamp": None}},
    },
    "advantages": {
        "all live": {},
        "half dead": {"advantages": [[1.0, 0.0, 0.0, -1.5]] * 2},
        "one rank dead": {"advantages": [[1.0, 0.0, 0.0, -1.5], [0.0] * 4]},
        "all dead": {"advantages": [[0.0] * 4] * 2},
    },
    "options": {
        "default": {},
        "not skipped": {"options": {"skip_zero_advantage": False}},
        "budget": {"options": {"gradient_budget": 1e-9, "cache_mib": 1}},  # drops what rounding would hide
    },
}  # fmt: skip  # a table
FACTORS = {name: list(values) for name, values in SETTINGS.items()}
BANS = [
    Ban(("options", "term"), lambda x, term: (x, term) == ("budget", "entropy bonus"), "refused", "must be 0"),
    Ban(
        ("teacher", "loss"), lambda x, loss: x != "none" and loss not in ("gspo", "gspo_kernels"), "to have fewer rows"
    ),
]
ROWS = pair_cover(FACTORS, bans=BANS)
# Only a few of the rows above skip answers, because every setting has to allow it. These rows always do. Their head is
# tied because verl's FSDP1 does not initialize an untied head on all ranks.
FIRST = {name: values[0] for name, values in FACTORS.items()} | {"head": "tied"}
SKIPPING = [
    FIRST | {"advantages": "half dead", "micro": "by tokens", "aggregation": "token-mean"},
    FIRST | {"advantages": "one rank dead", "micro": "2"},
    FIRST | {"advantages": "all dead", "micro": "1"},
]
ADDED = {"gspo/passes", "gspo/dropped_gradient_mass", "gspo/live_row_share", "gspo/rows_differentiated"}
OVERLAP = {"distillation/overlap_ratio", "distillation/overlap_token_advantage"}  # need the student's own top k


def case_of(row: dict[str, str]) -> dict[str, Any]:
    case = BASE | {"options": {}}
    for name, value in row.items():
        case |= SETTINGS[name][value]
    return case


def rows_run(row: dict[str, str], case: dict[str, Any], ranks: int) -> int | None:
    """Return the number of answers that a rank runs in an update, None if all of them run."""
    exact = row["term"] == row["teacher"] == "none" and row["loss"] not in ("cispo", "geo_mean")
    if not exact or row["options"] == "not skipped":
        return None
    advantages = torch.tensor(case["advantages"] or [[1.0] * 4] * 2)[:ranks]
    if case["weights"] and case["advantages"]:
        advantages[:, 0] = 0
    size = case["micro"] or 1
    return -(-max(1, int((advantages != 0).sum(1).max())) // size) * size


def compare(row: dict[str, str], stock: dict[str, Any], ours: dict[str, Any], ranks: int) -> None:
    case, metrics = case_of(row), stock["metrics"]
    for name in ("old", "entropy"):
        torch.testing.assert_close(ours[name], stock[name], rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    run = rows_run(row, case, ranks)
    assert ours["metrics"].keys() - metrics.keys() == ADDED | ({"gspo/rows_run"} if run is not None else set())
    assert metrics.keys() - ours["metrics"].keys() == (OVERLAP if case["teacher"] is not None else set())
    assert ours["metrics"].get("gspo/rows_run") == (None if run is None else [run / 4] * 3 * ranks)
    for name in ADDED:  # over the tokens of all ranks
        values = sorted(ours["metrics"][name])
        assert values[::ranks] == values[ranks - 1 :: ranks], name
    left_out = OVERLAP
    if run is not None and run < 4:
        left_out = left_out | {"actor/ppo_kl"}  # a mean over the answers that run
        # verl averages clip fractions over micro-batches, and counts answers whose weight is 0.
        left_out = left_out | ({"actor/pg_clipfrac"} if case["micro"] in (1, 2) or case["weights"] else set())
    for key, value in metrics.items():
        if key in left_out or key.startswith("perf/") or key == "mfu":
            continue
        relative, absolute = TRAINER_ABSOLUTE, TRAINER_ABSOLUTE
        if key in ("loss", "actor/pg_loss"):
            relative = absolute = LOSS_PER_ADVANTAGE
        elif key == "grad_norm":  # later updates start from weights that differ by rounding
            relative, absolute = 0.0, TRAINER_ABSOLUTE * max(value) + LOSS_PER_ADVANTAGE
            first = pytest.approx(value[0], rel=TRAINER_GRADIENT_RELATIVE, abs=LOSS_PER_ADVANTAGE)
            assert ours["metrics"][key][0] == first
        assert ours["metrics"][key] == pytest.approx(value, rel=relative, abs=absolute), key
    assert stock["parameters"].keys() == ours["parameters"].keys()
    for key, p in stock["parameters"].items():
        torch.testing.assert_close(ours["parameters"][key], p, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    if row["loss"] in ("gspo", "gspo_kernels") and row["advantages"] == "all live" and row["teacher"] != "alone":
        assert max(metrics["grad_norm"]) > 1e-3
        shares = ours["metrics"]["gspo/rows_differentiated"]  # the first update clips nothing
        clips = row["term"] in ("none", "entropies") and row["teacher"] == "none"
        assert shares[0] == 1 and (min(shares) < 1) == clips


def rank_main(rank: int, folder: Path, rows: list[dict[str, str]], ranks: int) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    for i, row in enumerate(rows):
        case, results = case_of(row), []
        if ranks > 1 and row["trained"] == "all" and i % 2:
            case["strategy"] = "fsdp"
        try:
            for name in ("stock", "ours"):
                options = {"fused_kernel_options": case["options"]} if name == "ours" else {}
                worker = make_worker(folder / f"{i}-{name}-{rank}", name == "ours", case, **options)
                assert (type(worker.engine).__name__ == "GSPOEngine") == (name == "ours")
                results.append(step(worker, rank, case, ranks))
            compare(row, results[0], results[1], ranks)
        except Exception as error:
            raise AssertionError(row) from error


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_that_with_verls_engine(ranks: int, tmp_path: Path) -> None:
    """Two ranks run rows with every value. All rows run in one start of the processes."""
    rows = ROWS if ranks == 1 else value_cover(ROWS)
    run_ranks(rank_main, ranks, tmp_path, rows + SKIPPING, ranks, deadline=900.0)
