"""verl 0.9.1's `main_ppo` from end to end on a CPU: Ray, agent loop, reward, FSDP2 actor, weight sync.

The script in examples/ trains with our engine and loss, and verl's own `gspo` trains on the same rollouts. Metrics must
agree. `make test-trainers` runs this in verl's environment. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import chat_model, pages
from helpers.ray_run import run_with_ray
from helpers.readme import EXAMPLES, WITH_VERL
from tolerance import SHARE_ABSOLUTE

pytest.importorskip("verl")

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    # Answers to a prompt differ. If all were equal, advantages would be rounding, and so would their clip decisions.
    return sum(map(str.__eq__, solution_str, ground_truth)) / len(ground_truth) + sum(map(ord, solution_str)) % 97 / 97
"""
STOCK = ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"]
WINDOW = [
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    "actor_rollout_ref.actor.clip_ratio_low=3e-4",
    "actor_rollout_ref.actor.clip_ratio_high=4e-4",
]
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def settings(folder: Path) -> list[str]:
    """Settings of both runs: 2 steps of 4 updates, on one CPU worker."""
    fp32 = [f"+{ACTOR}.fsdp_config.mixed_precision.{name}_dtype=fp32" for name in ("param", "reduce", "buffer")]
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/toy/train.parquet",
        f"data.val_files={folder}/toy/test.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=12",  # as many as the sampler's LONGEST
        "data.dataloader_num_workers=0",
        "data.seed=1",
        "data.shuffle=false",
        f"{MODEL}.path={folder}/model",
        f"{MODEL}.use_remove_padding=false",
        f"{MODEL}.enable_gradient_checkpointing=false",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        f"{ACTOR}.strategy=fsdp2",
        # The whole rollout of 16 prompts and 64 answers, because Ray delivers its rows in any order.
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=64",
        f"{ACTOR}.ppo_epochs=4",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.calculate_entropy=true",
        f"{ACTOR}.optim.optimizer=SGD",  # AdamW would turn rounding in small gradients into whole steps
        f"{ACTOR}.optim.lr=1e-2",
        f"{ACTOR}.use_torch_compile=false",
        f"{ACTOR}.fsdp_config.model_dtype=fp32",
        f"{ACTOR}.fsdp_config.use_torch_compile=false",
        *fp32,
        f"{ROLLOUT}.name=cpu",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.free_cache_engine=false",
        f"{ROLLOUT}.load_format=auto",
        f"reward.custom_reward_function.path={folder}/score.py",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.total_training_steps=2",
        "trainer.total_epochs=1",
        "trainer.device=cpu",
        "trainer.resume_mode=disable",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
    ]


def metrics_of(command: list[str], folder: Path, variables: dict[str, str]) -> list[dict[str, float]]:
    """Run a command that starts `main_ppo` on a CPU, and return the metrics that it logged in each step."""
    on_cpu = {
        "VERL_USE_EXTERNAL_MODULES": "helpers.verl_rollout",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # under which verl registers its engines
    }
    done = run_with_ray(command, folder, on_cpu | variables, timeout=900)
    output = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert done.returncode == 0, (output[-2000:], done.stderr[-3000:])
    logged = re.findall(r"step:\d+ - (.*)", output)
    numbers = [re.findall(r"([\w/@-]+):(?:np\.float64\()?(-?[\d.]+(?:e-?\d+)?)", line) for line in logged]
    return [{name: float(x) for name, x in pairs} for pairs in numbers]


def save_inputs(folder: Path, score: str) -> None:
    """Save a model, a toy data set and a reward function to `folder`."""
    chat_model.save(folder / "model")
    (folder / "score.py").write_text(score)
    data = [sys.executable, str(EXAMPLES / "verl_data.py"), "--output", str(folder / "toy"), "--toy"]
    subprocess.run(data, check=True, env=os.environ | {"HF_HOME": str(folder / "cache")})


def test_main_ppo_trains_by_the_example_as_with_verls_gspo(tmp_path: Path) -> None:
    """The example is written for GPUs and GSM8K. Variables and arguments replace its model, its data and the GPUs."""
    example = EXAMPLES / "verl_gspo.sh"
    for lines in (WITH_VERL, pages.VERL_LINES):
        assert set(lines.split()) - {"\\"} <= set(example.read_text().split())  # the documented settings are in force
    save_inputs(tmp_path, SCORE)
    variables = {
        "MODEL": str(tmp_path / "model"),
        "DATA": str(tmp_path / "toy"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    # The example's own model, data and loss stay in force.
    mine = ("data.train_files", "data.val_files", f"{MODEL}.path", "algorithm.adv_estimator")
    for_cpu = [line for line in settings(tmp_path) if line.partition("=")[0] not in mine]
    for_cpu += [f"{ROLLOUT}.log_prob_use_dynamic_bsz=false", "data.filter_overlong_prompts=false"]
    commands = [
        [str(example), *for_cpu],
        [sys.executable, "-m", "verl.trainer.main_ppo", *STOCK, *WINDOW, *settings(tmp_path)],
    ]
    with ThreadPoolExecutor(2) as pool:  # most of a run is spent in Ray's processes, which import verl one by one
        ours, stock = pool.map(metrics_of, commands, [tmp_path] * 2, [variables, {"VERL_ENGINE_VENDOR": ""}])
    assert len(ours) == len(stock) == 2
    for step in range(2):
        a, b = ours[step], stock[step]
        for name in ("actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/entropy_loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-6), name
        for name in ("actor/pg_clipfrac", "actor/ppo_kl", "critic/rewards/mean", "response_length/mean"):
            assert a[name] == pytest.approx(b[name], abs=SHARE_ABSOLUTE), name
        assert a["actor/pg_clipfrac"] > 0.1 and a["actor/gspo/passes"] > 1
        assert a["critic/rewards/mean"] > 0 and a["actor/grad_norm"] > 0
        assert a["training/global_step"] == step + 1
