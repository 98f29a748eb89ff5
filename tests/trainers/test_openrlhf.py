"""OpenRLHF 0.11.2 trains with the documented module and flags, and with its own GSPO. Logs and weights must agree.

`make test-trainers` runs these tests in an environment with OpenRLHF. Elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import chat_model, pages
from helpers.ray_run import run_with_ray
from safetensors.torch import load_file
from tolerance import SHARE_ABSOLUTE, TRAINER_LAST_GRADIENT_RELATIVE, TRAINER_UPDATES_RELATIVE

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("needs OpenRLHF, which is installed in another environment", allow_module_level=True)

(OURS,) = pages.code_blocks(pages.INTEGRATIONS, "python", "gspo_openrlhf.py")
(COMMAND,) = pages.code_blocks(pages.INTEGRATIONS, "bash", "gspo_openrlhf.py")
FLAGS = COMMAND.partition("gspo_openrlhf.py")[2].split()
STOCK = 'import runpy; runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)'


def train(folder: Path, name: str, script: str, level: str) -> list[dict[str, Any]]:
    """Train for two rollouts of four updates, with two micro-batches each. Return a record per rollout."""
    (folder / f"{name}.py").write_text(script)
    options = {
        "actor.model_name_or_path": folder / "model",
        "actor.num_gpus_per_node": 1,
        "actor.adam.lr": 1e-2,
        "actor.adam.eps": 1,  # far above the gradients, so that no update depends on the sign of a tiny gradient
        "actor.lr_scheduler": "constant",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "ckpt.output_dir": folder / name,
        "ckpt.path": folder / f"{name}-checkpoints",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "ds.attn_implementation": "eager",
        "logger.tensorboard_dir": folder / f"{name}.jsonl",
        "reward.remote_url": "unused",
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 8,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
    }
    command = [sys.executable, "-c", "from helpers import openrlhf_cpu; openrlhf_cpu.main()", f"{name}.py"]
    command += [x for option, value in options.items() for x in (f"--{option}", str(value))]
    command += [*FLAGS, "--algo.advantage.is_correction_level", level]
    variables = {
        "CUDA_VISIBLE_DEVICES": "0",  # Ray refuses to start with a GPU that is not visible
        "RAY_prestart_worker_first_driver": "0",
    }
    done = run_with_ray(command, folder, variables, timeout=600)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-3000:])
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openrlhf")
    chat_model.save(folder / "model")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"prompt {i}"}) for i in range(16)))
    return folder


@pytest.mark.parametrize("level", ["off", "seq"])
def test_train_ppo_ray_with_our_module_trains_as_with_openrlhfs_gspo(level: str, folder: Path) -> None:
    names = (f"ours_{level}", f"stock_{level}")
    with ThreadPoolExecutor(2) as pool:
        ours, stock = pool.map(lambda name, script: train(folder, name, script, level), names, (OURS, STOCK))
    assert len(ours) == len(stock) == 2
    for a, b in zip(ours, stock, strict=True):
        assert a["environment"] == b["environment"] and b["environment"]["NCCL_DEBUG"] == "WARN"
        a, b = a["numbers"], b["numbers"]
        assert a.keys() == b.keys()
        assert a["policy_loss"] == pytest.approx(b["policy_loss"], abs=1e-6)
        assert a["actor_grad_norm"] == pytest.approx(b["actor_grad_norm"], rel=TRAINER_LAST_GRADIENT_RELATIVE)
        assert a["ppo_kl"] == pytest.approx(b["ppo_kl"], abs=SHARE_ABSOLUTE)
        assert a["ppo_clip_ratio"] == pytest.approx(b["ppo_clip_ratio"], abs=SHARE_ABSOLUTE)
        assert 0.1 < a["ppo_clip_ratio"] < 0.9 and a["actor_grad_norm"] > 0.1
    initial, *trained = (load_file(folder / name / "model.safetensors") for name in ("model", *names))
    for name, before in initial.items():
        x, y = (weights[name] - before for weights in trained)
        assert y.norm() > 0 and (x - y).norm() <= TRAINER_UPDATES_RELATIVE * y.norm(), name
