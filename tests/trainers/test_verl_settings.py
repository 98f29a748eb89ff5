"""Warnings about settings that never clip, in verl's TrainingWorker. Part of `make test-trainers`."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.verl_worker import BASE, ENVIRONMENT, batch, make_worker, run_ranks

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its environment variables
    pytest.skip("verl is not installed", allow_module_level=True)

UPDATES, WINDOW = "ppo_epochs", "actor.clip_ratio_low"  # the first setting that each warning names
# For each case, the differences from one update of four answers by verl's gspo with a window of 3e-4, and the warnings
# that are expected.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two epochs": ({"epochs": 2}, []),
    "two mini-batches": ({"mini_batch_size": 2}, []),
    "another loss with a ratio": ({"loss_mode": "vanilla", "clip": 0.2}, [UPDATES]),
    "a loss without a ratio": ({"loss_mode": "gpg"}, []),
    "old log-probs of the sampler": ({"sampler_offset": 0.0}, []),
    "another sampler": ({"sampler_offset": 0.1}, [UPDATES]),
    "verl's window, our loss": ({"clip": 0.2, "epochs": 2, "loss_mode": "gspo_kernels"}, [WINDOW]),
    "verl's window for tokens": ({"clip": 0.2, "epochs": 2, "loss_mode": "vanilla"}, []),
    "both": ({"clip": 0.2}, [UPDATES, WINDOW]),
    "one wide bound": ({"clip_high": 0.28, "epochs": 2}, [WINDOW]),
}
# With verl's engine, only the policy loss can be our code, and only our code warns.
STOCK_CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "our loss": ({"clip": 0.2, "loss_mode": "gspo_kernels"}, [WINDOW]),
    "verl's loss": ({"clip": 0.2}, []),
}


def train_twice(
    worker: Any,
    loss_mode: str = "gspo",
    clip: float = 3e-4,
    clip_high: float | None = None,
    sampler_offset: float | None = None,
    epochs: int = 1,
    mini_batch_size: int = 4,
) -> tuple[list[str], list[float]]:
    """Train on two rollouts. Return the settings that our warnings name, and verl's clip fractions."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    from gspo_kernels import validation

    validation._warned.clear()
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=2,
        clip_ratio_low=clip,
        clip_ratio_high=clip if clip_high is None else clip_high,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss={"loss_mode": loss_mode},
    )
    worker.set_loss_fn(functools.partial(ppo_loss, config=config))
    clipped = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            data = batch(0, BASE)
            tu.assign_non_tensor(data, compute_loss=False, global_batch_size=4)
            data["old_log_probs"] = no_padding_2_padding(worker.infer_batch(data.copy())["log_probs"], data)
            if sampler_offset is not None:
                data["rollout_log_probs"] = data["old_log_probs"] + sampler_offset
            tu.assign_non_tensor(data, compute_loss=True, mini_batch_size=mini_batch_size, epochs=epochs, seed=1)
            clipped.append(tu.get(worker.train_mini_batch(data), "metrics").get("actor/pg_clipfrac"))
    texts = [str(w.message) for w in caught]
    texts = [text for text in texts if "gspo_kernels" in text or "a window for ratios of tokens" in text]
    return [text.removeprefix("gspo_kernels: ").split("=")[0] for text in texts], clipped


def rank_main(rank: int, folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    for name, cases in (("ours", CASES), ("stock", STOCK_CASES)):
        worker = make_worker(folder / name, name == "ours", {**BASE, "micro": 2})
        for case, (options, expected) in cases.items():
            named, clipped = train_twice(worker, **options)
            assert named == expected, (name, case, named)
            if name == "ours" and options.get("loss_mode") != "gpg" and options.get("clip", 0) < 0.2:
                highest = torch.tensor(clipped, dtype=torch.float64).max()
                assert (highest > 0) == bool({"epochs", "mini_batch_size"} & set(options)), (case, clipped)


def test_settings_that_never_clip_are_warned_of_once(tmp_path: Path) -> None:
    run_ranks(rank_main, 1, tmp_path)
