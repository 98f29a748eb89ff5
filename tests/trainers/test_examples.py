"""Every script in examples/ runs as a user would start it, at a size that suits a CPU.

The test of verl_gspo.sh is in test_verl_main_ppo.py. `make test-trainers` runs megatron_tp.py in an environment with
Megatron Core.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.readme import EXAMPLES

needs_trl = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("trl", "datasets")), reason="needs the extra trl"
)
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")


def run(folder: Path, *command: object, processes: int = 1) -> str:
    """Run an example in a folder and return its output. `command`: the file in examples/ and its arguments."""
    file, *arguments = command
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    started = [*(launcher if processes > 1 else [sys.executable]), EXAMPLES / str(file), *arguments]
    return output_of(folder, started)


def output_of(folder: Path, command: list[Any]) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables |= {"HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [str(x) for x in command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def numbers(pattern: str, output: str) -> list[float]:
    """Return the number that follows each match of a pattern."""
    return [float(x) for x in re.findall(rf"{pattern} (-?\d+\.\d+)", output)]


@needs_trl
def test_accelerate_launches_the_trl_example_on_two_processes(tmp_path: Path) -> None:
    """Accelerate does not shard on CPUs, so with fsdp2.yaml this would run the same. See test_trl_zero_advantage.py."""
    path = EXAMPLES / "accelerate" / "ddp.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path]
    output = output_of(tmp_path, [*launch, EXAMPLES / "trl_gspo.py", "--steps", 8])
    assert output.count("mean reward: ") == 1  # rank 0 prints it
    state = json.loads((tmp_path / "runs/trl_gspo/checkpoint-8/trainer_state.json").read_text())
    # Each process trains on 32 of 64 completions per step: 216 prompts last 216 * 8 / 64 = 27 steps.
    assert state["train_batch_size"] == 32 and 8 / 27 < state["epoch"] < 10 / 27
    assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in state["log_history"])


@needs_trl
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero3"])
def test_accelerate_knows_every_key_of_the_configurations(config: str) -> None:
    """accelerate accepts unknown keys inside fsdp_config and deepspeed_config, and ignores them."""
    launch: Any = pytest.importorskip("accelerate.commands.launch")
    loaded = launch.load_config_from_file(str(EXAMPLES / "accelerate" / f"{config}.yaml"))
    expected = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
    assert loaded.distributed_type == expected[config] and loaded.num_processes == 2
    options = {action.dest for action in launch.launch_command_parser()._actions}
    assert {*loaded.fsdp_config, *loaded.deepspeed_config} <= options


@needs_trl
def test_tools_in_trl(tmp_path: Path) -> None:
    assert max(numbers("mean tools/call_frequency:", run(tmp_path, "trl_tools.py", "--steps", 4))) > 0


def test_plain_loop(tmp_path: Path) -> None:
    for line in re.findall(r"each update ([\d., ]+), gradient", run(tmp_path, "plain_loop.py", "--steps", 2)):
        first, *others = map(float, line.split(", "))
        assert first == 0 and max(others) > 0.05  # before the first update, every ratio is exactly 1


def test_fsdp2_and_its_checkpoint(tmp_path: Path) -> None:
    output = run(tmp_path, "fsdp2.py", "--steps", 2, "--output", "sharded", processes=2)
    assert min(numbers("clipped", output)) > 0.05
    run(tmp_path, "plain_loop.py", "--model", "sharded", "--steps", 1)


@needs_megatron
def test_megatron_tp(tmp_path: Path) -> None:
    output = run(tmp_path, "megatron_tp.py", "--steps", 2, processes=2)
    assert max(numbers(r"update 0\.00,", output)) > 0.05
    assert all(f"rank {rank}: head 7x64 of 13x64" in output for rank in range(2))


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = [x.relative_to(EXAMPLES).as_posix() for x in EXAMPLES.rglob("*.*") if x.name != "README.md"]
    files = [name for name in files if "__pycache__" not in name]
    assert sorted(re.findall(r"^\| \[`([\w./]+)`\]\(\1\) \|", page, re.MULTILINE)) == sorted(files)
