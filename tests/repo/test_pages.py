"""Every code block in docs/ is run by a test: here, or by the test that `BLOCKS` names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import DOCS, INTEGRATIONS, ONE_GPU_LINES, SCALE, blocks_in_order
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.tools.cli import app

ROOT = DOCS.parent
# What happens to each block, in the order of the page. "run" and "gspo" run it here, "install" looks for its extras in
# pyproject.toml, "example" for its script in examples/, which has tests of its own, and "copy" for the block in
# integrations.md or scale.md. Everything else is the test that runs the block.
BLOCKS = {
    "api/advantages.md": ["run"],
    "api/objective.md": ["run"],
    "api/reference_trainer.md": ["run"],
    "concepts/backward.md": ["run"],
    "concepts/cache.md": ["gspo"],
    "concepts/gradient_budget.md": ["run"],
    "concepts/gspo.md": ["run"],
    "concepts/log_probs.md": ["run"],
    "get_started/megatron.md": ["install", "copy"],
    "get_started/own_loop.md": ["install", "copy", "run"],
    "get_started/trl.md": ["install", "example", "example"],
    "get_started/verl.md": ["install", "copy"],
    "guides/long_runs.md": ["gspo"],
    "guides/several_gpus.md": [
        *["repo/test_pages.py::test_accelerate_reads_the_files"] * 3,
        "example",
        *["repo/test_pages.py::test_the_torchrun_script_runs"] * 2,
        "integrations/test_trainer_ranks.py",
    ],
    "index.md": ["install", "copy", "run"],
    "integrations.md": [
        "trainers/test_trl.py",
        "trainers/test_verl_engine.py",
        "trainers/test_verl_budget.py",
        "integrations/test_huggingface.py",
        "trainers/test_megatron.py",
        "trainers/test_verl_megatron.py",
        *["integrations/test_seams.py"] * 3,
        *["trainers/test_ms_swift.py"] * 2,
        *["integrations/test_seams.py"] * 2,
    ],
    "scale.md": [
        "distributed/test_sharded.py",
        "repo/test_docs.py",
        *["distributed/test_sharded.py"] * 3,
        *["repo/test_docs.py"] * 3,
    ],
    "tasks.md": ["repo/test_pages.py::test_the_trainers_manual_runs", "run", "run"],
    "trainer.md": ["repo/test_pages.py::test_the_trainers_manual_runs"],
}
PAGES = {path.relative_to(DOCS).as_posix(): blocks_in_order(path.read_text()) for path in DOCS.rglob("*.md")}
RUNNERS = [(page, i) for page, runners in BLOCKS.items() for i, runner in enumerate(runners) if "/" not in runner]


def test_every_code_block_is_run() -> None:
    found = {page: len(blocks) for page, blocks in PAGES.items() if blocks}
    assert found == {page: len(runners) for page, runners in BLOCKS.items()}
    for runner in {runner for runners in BLOCKS.values() for runner in runners if "/" in runner}:
        file, _, test = runner.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text(), runner


@pytest.mark.parametrize(("page", "at"), RUNNERS)
def test_a_code_block_works(page: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language, code = PAGES[page][at]
    monkeypatch.chdir(tmp_path)
    runner = BLOCKS[page][at]
    if runner == "run":
        assert language == "python"
        exec(code, {"__name__": "block"})
    elif runner == "gspo":
        for command in code.splitlines():
            result = CliRunner().invoke(app, command.split()[1:])
            assert result.exit_code == 0, result.output
    elif runner == "install":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        (wanted,) = re.findall(r"^pip install '?\.(?:\[([\w,]+)\])?'?$", code, re.MULTILINE)
        assert set(filter(None, wanted.split(","))) <= set(extras)
    elif runner == "example":
        (script,) = re.findall(r"examples/\w+\.py", code)
        assert (ROOT / script).exists() and (language == "bash" or code == f'--8<-- "{script}"\n')
    else:
        assert runner == "copy" and f"```{language}\n{code}```" in INTEGRATIONS + SCALE


def test_accelerate_reads_the_files(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    kinds = []
    for language, code in PAGES["guides/several_gpus.md"]:
        if language == "yaml":
            (tmp_path / "accelerate.yaml").write_text(code)
            kinds.append(config_args.load_config_from_file(str(tmp_path / "accelerate.yaml")).distributed_type)
    assert kinds == ["MULTI_GPU", "FSDP", "DEEPSPEED"]


@pytest.mark.slow
def test_the_torchrun_script_runs(tmp_path: Path) -> None:
    (script,) = (code for language, code in PAGES["guides/several_gpus.md"] if language == "python")
    helpers = """
import torch
from gspo_kernels.integrations.reference_trainer.policy import demo_policy

def make_model():
    torch.manual_seed(0)
    return demo_policy().model

def batches_of_this_rank():
    ids = torch.randint(3, 15, (4, 9))
    ones = torch.ones(4, 8)
    yield {"ids": ids, "mask": ones.bool(), "old_log_probs": -2 * ones, "advantages": torch.randn(4)}
"""
    one_gpu = ONE_GPU_LINES.partition("fuse_head(model)\n")[0]
    check = "\nassert all(p.grad is not None for p in model.parameters())\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(helpers + one_gpu + script + check)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_trainers_manual_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands load their model, prompts and rewards, and would train."""
    monkeypatch.chdir(tmp_path)
    (_, prompts), (_, rewards), _ = PAGES["tasks.md"]
    assert all({"prompt", "answer"} == json.loads(line).keys() for line in prompts.splitlines())
    lines = "".join(f'{{"prompt": "How many legs do {n} spiders have?", "answer": {8 * n}}}\n' for n in range(1, 99))
    Path("FILE").write_text(lines)
    Path("rewards.py").write_text(rewards)
    Path("run.yaml").write_text("model: FOLDER\ndata: FILE\n")
    demo_policy(" ?Hadeghilmnopsvwy0123456789").save(Path("FOLDER"))
    commands = [line.partition("#")[0].split() for line in PAGES["trainer.md"][0][1].splitlines()]
    started: list[Any] = [command for command in commands if command[0] == "gspo" and "--resume" not in command]
    assert len(started) == 4  # the other tests of the trainer resume runs and start torchrun
    for command in started:
        result = CliRunner().invoke(app, [*command[1:], "--dry-run"])
        assert result.exit_code == 0, (command, result.output)
