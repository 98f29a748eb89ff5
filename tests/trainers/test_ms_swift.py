"""ms-swift 4.6.0 trains with the documented plugin. Each micro-batch is compared with ms-swift's own loss.

`make test-trainers` runs these tests in an environment with ms-swift. Elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import chat_model, pages
from tolerance import SHARE_ABSOLUTE, TRAINER_GRADIENT_RELATIVE

from gspo_kernels import Objective, policy_loss
from gspo_kernels.sampler_mismatch import RolloutCorrection

if importlib.util.find_spec("swift") is None:
    pytest.skip("needs ms-swift, which is installed in another environment", allow_module_level=True)

REWARD = """
from swift.rewards import ORM, orms


class Letters(ORM):
    def __call__(self, completions, solution, **options):
        return [sum(map(str.__eq__, x, y)) / len(y) + len(x) % 7 * 0.05 for x, y in zip(completions, solution)]


orms["letters"] = Letters
"""


def run(folder: Path) -> list[list[dict[str, Any]]]:
    """Train on two processes for 8 steps of 2 micro-batches. Return the records of each process."""
    (plugin,) = pages.code_blocks(pages.INTEGRATIONS, "python", "gspo_plugin.py")
    (lines,) = pages.code_blocks(pages.INTEGRATIONS, "bash", "swift rlhf")
    (folder / "gspo_plugin.py").write_text(plugin)
    (folder / "reward.py").write_text(REWARD)
    words = ["".join(random.Random(i).sample("abcdefgh", 4)) for i in range(64)]
    rows = [{"messages": [{"role": "user", "content": f"sort {w}:"}], "solution": "".join(sorted(w))} for w in words]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plugins = [folder / "gspo_plugin.py", folder / "reward.py", Path(__file__).parents[1] / "helpers" / "swift_pair.py"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = {
        "model": chat_model.save(folder / "model"),
        "model_type": "qwen2",
        "tuner_type": "full",
        "template": "chatml",
        "torch_dtype": "float32",
        "dataset": folder / "data.jsonl",
        "reward_funcs": "letters",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 8,
        "max_completion_length": 12,
        "overlong_filter": "true",
        "max_length": 128,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "output_dir": folder / "out",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
        "gradient_checkpointing": "false",
        "split_dataset_ratio": 0,
    }
    command += ["-m", "swift.cli.rlhf", "--rlhf_type", "grpo", "--external_plugins", *map(str, plugins)]
    command += lines.partition("gspo_plugin.py")[2].replace("\\", "").split()
    command += [x for name, value in options.items() for x in (f"--{name}", str(value))]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables |= {"PAIR_OUTPUT": str(folder / "pairs"), "MODELSCOPE_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    files = [folder / f"pairs-{rank}" for rank in range(2)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_every_micro_batch_has_ms_swifts_loss_and_gradient(tmp_path: Path) -> None:
    for records in run(tmp_path):
        assert len(records) == 16  # 8 steps of 2 micro-batches
        for record in records:
            ours, theirs = record["ours"], record["theirs"]
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
            norm, difference = record["gradient"]
            assert difference <= TRAINER_GRADIENT_RELATIVE * norm
            assert ours["clipping"] == pytest.approx(theirs["clipping"], abs=SHARE_ABSOLUTE)
        assert sum(record["gradient"][0] > 0 for record in records) > 8
        assert max(record["ours"]["clipping"]["region_clip_mean"] for record in records) > 0


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_equal_those_of_every_rollout_importance_sampling_mode(mode: str) -> None:
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    threshold = 1.05
    corrections = {
        "token_truncate": RolloutCorrection("token", "truncate", high=threshold),
        "token_mask": RolloutCorrection("token", "mask", high=threshold),
        "sequence_truncate": RolloutCorrection("geometric", "truncate", high=threshold),
        "sequence_mask": (
            RolloutCorrection("geometric", "gate", high=threshold),
            RolloutCorrection("token", high=math.inf),
        ),
    }
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 9, generator=rng) > 0.2
    old = -1 - torch.rand(6, 9, generator=rng, dtype=torch.float64)
    rollout = old - 0.3 * torch.randn(6, 9, generator=rng, dtype=torch.float64)
    trainer: Any = SimpleNamespace(
        rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=threshold
    )
    trainer._compute_sequence_level_ratios = partial(GRPOTrainer._compute_sequence_level_ratios, trainer)
    weights = GRPOTrainer._apply_rollout_importance_sampling(trainer, old - rollout, mask)
    lp = old.clone().requires_grad_()
    objective = Objective(ratio="token", rollout_correction=corrections[mode])
    options = {"mask": mask, "old_log_probs": old, "rollout_log_probs": rollout, "objective": objective}
    out = policy_loss(lp, torch.ones(6, dtype=torch.float64), **options)
    (gradient,) = torch.autograd.grad(out.loss, lp)
    # At a ratio of 1, the gradient of a token is minus its weight, over the tokens of its answer and the 6 answers.
    computed = -gradient * mask.sum(1, keepdim=True) * 6
    torch.testing.assert_close(computed, weights * mask)
    assert 0 < out.metrics["rollout_bound_share"] < 1
