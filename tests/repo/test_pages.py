"""Every code block in docs/ is run by a test: here, or by the test that `BLOCKS` names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import DOCS, INTEGRATIONS, blocks_in_order
from typer.testing import CliRunner

from gspo_kernels.benchmarks.__main__ import COMMANDS
from gspo_kernels.benchmarks.suites.bench import candidates
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.tools.cli import app

ROOT = DOCS.parent
# What happens to each block, in the order of the page. "run" and "gspo" run it here, "install" looks for its extras in
# pyproject.toml, "example" for the files that it names, which have tests of their own, and "copy" for the block in a
# trainer's page. "benchmark" checks the names in commands that take long. Everything else is the test that
# runs the block.
BLOCKS = {
    "api/gspo_train.md": ["run"],
    "api/losses.md": ["run"],
    "api/metrics.md": ["run"],
    "api/rewards.md": ["run"],
    "benchmarks.md": ["benchmark"],
    "concepts/backward.md": ["run", "gspo"],
    "concepts/gspo.md": ["run"],
    "concepts/log_probs.md": ["run"],
    "concepts/sharding.md": ["example", *["distributed/test_sharded.py"] * 2],
    "guides/long_runs.md": ["gspo"],
    "guides/precision.md": ["integrations/test_clip_noise.py"],
    "guides/teachers.md": ["run"],
    "guides/truncated_sampling.md": ["run"],
    "how_it_works.md": ["math/test_recipes.py::test_the_idea_in_plain_pytorch"],
    "index.md": ["install", "copy", "run"],
    "tasks.md": ["repo/test_pages.py::test_the_trainers_manual_runs", "run", "run"],
    "trainer.md": [
        "repo/test_pages.py::test_the_trainers_manual_runs",
        "repo/test_pages.py::test_the_manuals_run_is_evaluated_and_exported",
        "example",
    ],
    "trainers/megatron.md": ["trainers/test_megatron.py", "install", "example", "example"],
    "trainers/others.md": [
        "integrations/test_seams.py",
        *["trainers/test_openrlhf.py"] * 2,
        *["trainers/test_ms_swift.py"] * 2,
        *["integrations/test_seams.py"] * 2,
        "trainers/test_skyrl.py",
    ],
    "trainers/own_loop.md": ["integrations/test_huggingface.py", "install", "example", "example", "run"],
    "trainers/trl.md": [*["trainers/test_trl.py"] * 2, "install", "example", "example"],
    "trainers/verl.md": [
        "trainers/test_verl_main_ppo.py",
        *["install", "example", "example"],
        "trainers/test_verl_budget.py",
        "trainers/test_verl_megatron.py",
    ],
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
        names: dict[str, Any] = {"__name__": "block"}
        exec(code, names)
        if "torch.randn(" in code:  # again with hidden states that make the policy certain
            randn = torch.randn
            monkeypatch.setattr(torch, "randn", lambda *sizes, **options: peaked(randn(*sizes, **options)))
            exec(code, names)
        tensors = [x for x in names.values() if isinstance(x, torch.Tensor)]
        assert all(x.isfinite().all() for x in (*tensors, *(x.grad for x in tensors if x.grad is not None)))
    elif runner == "gspo":
        for command in code.splitlines():
            result = CliRunner().invoke(app, command.split()[1:])
            assert result.exit_code == 0, result.output
    elif runner == "install":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        (wanted,) = re.findall(r"^pip install -e '?\.(?:\[([\w,]+)\])?'?$", code, re.MULTILINE)
        assert set(filter(None, wanted.split(","))) <= set(extras)
    elif runner == "benchmark":
        for command in code.splitlines():
            words = shlex.split(command, comments=True)
            if words[0] == "gspo":
                assert not CliRunner().invoke(app, [*words[1:], "--help"]).exit_code
                assert "--against" not in words or candidates(words[words.index("--against") + 1])
            else:
                assert words[:3] == ["python", "-m", "gspo_kernels.benchmarks"] and words[3] in COMMANDS
    elif runner == "example":
        files = re.findall(r"(?:examples|integrations)/[\w/]+\.\w+", code)
        assert files and all((ROOT / file).exists() for file in files)
        assert re.fullmatch(rf'--8<-- "{files[0]}(:\w+)?"\n', code) or language == "bash"
    else:
        assert runner == "copy" and f"```{language}\n{code}```" in INTEGRATIONS


def peaked(x: torch.Tensor) -> torch.Tensor:
    x.data *= 8
    return x


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder with the files that the manual's commands name."""
    monkeypatch.chdir(tmp_path)
    (_, prompts), (_, rewards), _ = PAGES["tasks.md"]
    assert all({"prompt", "answer"} <= json.loads(line).keys() for line in prompts.splitlines())
    lines = "".join(f'{{"prompt": "How many legs do {n} spiders have?", "answer": {8 * n}}}\n' for n in range(1, 99))
    Path("FILE").write_text(lines)
    Path("rewards.py").write_text(rewards)
    Path("run.yaml").write_text("model: FOLDER\ndata: FILE\n")
    demo_policy(" ?Hadeghilmnopsvwy0123456789").save(Path("FOLDER"))


@pytest.mark.usefixtures("user")
def test_the_trainers_manual_runs() -> None:
    """The commands load their model, prompts and rewards, and would train."""
    commands = [line.partition("#")[0].split() for line in PAGES["trainer.md"][0][1].splitlines()]
    started: list[Any] = [command for command in commands if command[0] == "gspo" and "--resume" not in command]
    assert len(started) == 4  # the other tests of the trainer resume runs and start torchrun
    for command in started:
        result = CliRunner().invoke(app, [*command[1:], "--dry-run"])
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.usefixtures("user")
def test_the_manuals_run_is_evaluated_and_exported() -> None:
    sizes = dict(steps=1, prompts_per_step=2, group_size=2, updates_per_rollout=2, eval_prompts=2, max_new_tokens=3)
    options = [f"{name}={x}" for name, x in sizes.items()]
    options += [
        "model=FOLDER",
        "data=FILE",
        "name=mine",
        "reward=rewards.py:boxed,0.1*rewards.py:short,rewards.py:digits",
    ]
    commands = [line.partition("#")[0].split() for line in PAGES["trainer.md"][1][1].splitlines()]
    assert [command[1] for command in commands] == ["eval", "eval", "eval", "export"]
    for command in (["gspo", "train", *options], *commands):
        assert command[0] == "gspo"
        few = ["eval_prompts=2", "max_new_tokens=3"] if command[1] == "eval" else []
        result = CliRunner().invoke(app, [*command[1:], *few])
        assert result.exit_code == 0, (command, result.output)
    assert Path("boxed-model", "config.json").exists() and len(Path("answers.jsonl").read_text().splitlines()) == 2 * 5
