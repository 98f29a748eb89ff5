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
from helpers import chat_model

EXAMPLES = Path(__file__).parents[2] / "examples"
needs_trl = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("trl", "datasets", "peft")), reason="needs the extra trl"
)
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
needs_notebooks = pytest.mark.skipif(find_spec("nbclient") is None, reason="needs the extra dev")


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


def rise(output: str, name: str = "mean reward", place: str = " .* updates") -> float:
    """Return by how much the last printed mean of a reward exceeds the first."""
    ((first, last),) = re.findall(rf"{name}: (\d\.\d+){place}, (\d\.\d+) ", output)
    return float(last) - float(first)


@needs_trl
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_accelerate_launches_the_trl_example_on_two_processes(config: str, tmp_path: Path) -> None:
    path = EXAMPLES / "accelerate" / f"{config}.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path]
    output = output_of(tmp_path, [*launch, EXAMPLES / "trl_gspo.py", "--steps", 60])
    assert rise(output) > 0.05  # rank 0 prints it once
    state = json.loads((tmp_path / "runs/trl_gspo/checkpoint-60/trainer_state.json").read_text())
    # Each process trains on 32 of 64 completions per step: 216 prompts last 216 * 8 / 64 = 27 steps.
    assert state["train_batch_size"] == 32 and state["epoch"] > 2
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
@pytest.mark.parametrize(
    ("head", "trained"),
    [("frozen", 32_768), ("lora", 32_768 + 16 * (64 + 15)), ("full", 32_768 + 15 * 64)],
)
def test_lora(head: str, trained: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    output = run(tmp_path, "trl_gspo_lora.py", "--head", head, "--steps", 40, "--output", "adapter")
    assert f"{trained:,} trained parameters" in output
    assert rise(output) > 0
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    changed = [name for name, x in weights.items() if "lora_B" in name and x.any()]  # LoRA's B begins with zeros
    assert any("q_proj" in name for name in changed)
    assert any("lm_head" in name for name in changed) == (head == "lora")
    assert any(name.endswith("lm_head.weight") for name in weights) == (head == "full")


@needs_trl
def test_gsm8k_toy(tmp_path: Path) -> None:
    output = run(tmp_path, "trl_gsm8k.py", "--toy", "--steps", 100, "--output", "out")
    assert rise(output, place=" at first") > 0.05
    assert int(re.findall(r"clipped answers: (\d+)%", output)[0]) > 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@needs_trl
def test_gsm8k_by_name(tmp_path: Path) -> None:
    """A folder openai/gsm8k, laid out as on the hub, stands in for the download."""
    from datasets import Dataset

    model = chat_model.save(tmp_path / "model")
    rows = [{"question": f"{a}+{a}?", "answer": f"{a} + {a} = {2 * a}\n#### {2 * a}"} for a in range(32)]
    data = tmp_path / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(data / "main" / "train-00000-of-00001.parquet")
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    )
    run(tmp_path, "trl_gsm8k.py", "--model", model, "--steps", 4, "--length", 8, "--output", "out")
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    # Four updates of 8 * 4 completions train on one rollout of 16 prompts, half of the problems.
    assert state["global_step"] == 4 and state["epoch"] == 0.5


@needs_trl
def test_the_reward_of_gsm8k() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import trl_gsm8k
    finally:
        sys.path.remove(str(EXAMPLES))
    solution = "Natalia sold 1,000 + 200 = 1200 clips.\n#### 1,200"
    answers = {
        "So she sold 1000 + 200.\n#### 1200": 1.0,
        "#### 1,200.": 1.0,
        "#### $1200": 0.5,  # the marker is not followed by the number
        "The answer is 1200.00": 0.5,
        "#### 1200 and then 7": 0.0,
        "#### -1200": 0.0,
        "": 0.0,
    }
    assert {text: trl_gsm8k.score(text, solution) for text in answers} == answers


@needs_trl
def test_custom_reward_in_trl(tmp_path: Path) -> None:
    output = run(tmp_path, "custom_reward.py", "--steps", 60)
    assert rise(output, "right") > 0.05 and "brief: " in output


def test_custom_reward_in_gspo_train(tmp_path: Path) -> None:
    file = EXAMPLES / "custom_reward.py"
    reward = f"reward={file}:right, 0.2*{file}:brief"
    command = [Path(sys.executable).parent / "gspo", "train", "seeds=0", "steps=3", reward]
    output_of(tmp_path, command)
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if "reward/right" in row)
    assert 0 < step["reward/right"] < 1 and 0 < step["reward/brief"] <= 1


def test_plain_loop(tmp_path: Path) -> None:
    output = run(tmp_path, "plain_loop.py", "--steps", 31)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    clipped = re.findall(r"each update ([\d., ]+), gradient", output)
    for line in clipped:
        first, *others = map(float, line.split(", "))
        assert first == 0 and max(others) > 0.05  # before the first update, every ratio is exactly 1


def test_fsdp2_and_its_checkpoint(tmp_path: Path) -> None:
    output = run(tmp_path, "fsdp2.py", "--steps", 31, "--output", "sharded", processes=2)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    assert max(numbers("clipped", output)) > 0.05
    (continued,) = numbers("reward", run(tmp_path, "plain_loop.py", "--model", "sharded", "--steps", 1))
    assert continued > rewards[0] + 0.1


@needs_megatron
def test_megatron_tp(tmp_path: Path) -> None:
    output = run(tmp_path, "megatron_tp.py", "--steps", 21, processes=2)
    rewards = numbers("reward", output)
    assert rewards[-1] > rewards[0] + 0.1
    assert max(numbers(r"update 0\.00,", output)) > 0.05
    assert all(f"rank {rank}: head 7x64 of 13x64" in output for rank in range(2))


@needs_notebooks
def test_the_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    path = EXAMPLES / "gspo_idea.ipynb"
    assert path.stat().st_size < 300_000
    committed = nbformat.read(path, 4)
    notebook = nbformat.read(path, 4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    for text in (printed(committed), printed(notebook)):
        wrong = {name: int(flips) for name, flips in re.findall(r"(\w[\w ]*): (\d+) of 64 decisions", text)}
        assert wrong["bf16 logits"] > 6 and wrong["gspo_kernels"] == 0
        memory = re.findall(r"151,936: +(\d+) MiB with logits, +(\d+) MiB fused", text)
        assert int(memory[0][0]) > 4 * int(memory[0][1])
        passes = float(re.findall(r"([\d.]+) passes", text)[0])
        assert 1 < passes < 4
    figures = [x for cell in committed.cells for x in cell.get("outputs", []) if "image/png" in x.get("data", {})]
    assert len(figures) == 2
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text())


def printed(notebook: Any) -> str:
    """Return what the cells printed."""
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", [])]
    return "".join(x["text"] for x in outputs if x["output_type"] == "stream")


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = [x.relative_to(EXAMPLES).as_posix() for x in EXAMPLES.rglob("*.*") if x.name != "README.md"]
    files = [name for name in files if "__pycache__" not in name]
    assert sorted(re.findall(r"^\| \[`([\w./]+)`\]\(\1\) \|", page, re.MULTILINE)) == sorted(files)
