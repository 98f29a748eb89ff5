"""`gspo export`: merged adapters, copied models, model cards, refused arguments, interrupted exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import chat_model
from helpers.reference_runs import SMALL, rows_of, write_jsonl
from safetensors.torch import load_file
from tolerance import MERGED_WEIGHT_ABSOLUTE
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import export, exporting, train, train_config
from gspo_kernels.tools.cli import app

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bf16 checkpoint and two runs on it: "full" and "lora", which has seeds 0 and 1."""
    folder = tmp_path_factory.mktemp("runs")
    model = AutoModelForCausalLM.from_pretrained(chat_model.save(folder / "base"), dtype=torch.bfloat16)
    model.generation_config.update(do_sample=True, top_k=7, eos_token_id=[0])
    model.save_pretrained(folder / "base")
    lines = [{"prompt": f"{a}{b}?", "answer": a} for a in "abcd" for b in "efg"]
    (folder / "rewards.py").write_text("def brief(completion):\n    return 1 / (1 + len(completion))\n")
    options: dict[str, Any] = {
        **SMALL,
        "data": write_jsonl(folder / "data.jsonl", *lines),
        "output": folder,
        "steps": 2,
    }
    options |= {"reward": f"0.5*{folder}/rewards.py:brief", "model": folder / "base", "max_new_tokens": 4}
    train(train_config(name="full", learning_rate=1e-2, **options))
    train(train_config(name="lora", learning_rate=1e-1, lora_rank=4, lora_head=True, seeds=[0, 1], **options))
    return folder


@pytest.mark.parametrize(("name", "seed"), [("full", 0), ("lora", 0), ("lora", 1)])
def test_an_export_is_the_trained_model(runs: Path, tmp_path: Path, name: str, seed: int) -> None:
    out = tmp_path / "new" / "out"
    result = CliRunner().invoke(app, ["export", str(runs / name), str(out), *(["--seed", "1"] if seed else [])])
    assert result.exit_code == 0, result.output
    dtype = torch.bfloat16 if name == "lora" else torch.float32  # of the base, or of the trained weights
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == dtype and {path.suffix for path in out.iterdir()} >= {
        ".safetensors",
        ".json",
        ".md",
        ".jinja",
    }
    trained, weights = runs / name / f"model-seed{seed}", model.state_dict()
    base = AutoModelForCausalLM.from_pretrained(runs / "base", dtype=torch.float32).state_dict()
    if name == "lora":
        settings = json.loads((trained / "adapter_config.json").read_text())
        adapter = {key: x.double() for key, x in load_file(trained / "adapter_model.safetensors").items()}
        expected = {key: x.double() for key, x in base.items()}
        for key in adapter:
            if (module := key.removesuffix(".lora_A.weight")) != key:
                change = adapter[f"{module}.lora_B.weight"] @ adapter[key] * settings["lora_alpha"] / settings["r"]
                assert change.norm() > 0
                expected[f"{module.removeprefix('base_model.model.')}.weight"] += change
        rounding, limit = torch.finfo(dtype).eps / 2, MERGED_WEIGHT_ABSOLUTE
    else:
        expected, rounding, limit = AutoModelForCausalLM.from_pretrained(trained).state_dict(), 0.0, 0.0
        assert not torch.equal(weights["lm_head.weight"], base["lm_head.weight"])
    assert weights.keys() == expected.keys()
    for key, x in weights.items():
        error = (x.double() - expected[key]).abs() - rounding * expected[key].abs()
        assert error.max() <= limit, key
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == chat_model.TEMPLATE
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.do_sample, generation.top_k) == (True, 7)  # from the checkpoint, not from the run
    assert generation.eos_token_id == sorted({0, tokenizer.eos_token_id}) and generation.pad_token_id is not None


def test_the_card_has_data_rewards_result_settings_and_versions(runs: Path, tmp_path: Path) -> None:
    export(runs / "lora", tmp_path / "out", seed=1)
    text = (tmp_path / "out" / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    assert yaml.safe_load(metadata)["library_name"] == "transformers" and "base_model" not in metadata
    last = [row for row in rows_of(runs / "lora") if row["seed"] == 1][-1]
    for expected in (
        "`base`, trained with reinforcement learning by `gspo train`: 2 of 2 rollouts, seed 1.",
        "| reward | before training | after 2 rollouts | change, prompt by prompt | prompts | verdict |\n",
        " | 2 | not decided |\n",
        f"| {last['eval_reward']:.3f} [{last['eval_reward_low']:.3f}, {last['eval_reward_high']:.3f}] | ",
        "Not decided: the held-out reward went from",
        "Held out: 2 of 12 prompts, by random.Random(0).sample.",
        "Prompts: `data.jsonl` (digest",
        "Rewards, from `rewards.py:brief`:\n\n- `brief`, weight 0.5\n",
        "learning_rate: 0.1\n",
        "lora_rank: 4\n",
        f"torch {torch.__version__}, ",
    ):
        assert expected in body, expected
    assert str(runs) not in text


def test_the_card_of_an_interrupted_run_is_about_the_saved_step(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "full", tmp_path / "run")
    (tmp_path / "run" / "model-seed0" / "trainer_state.json").write_text(json.dumps({"seed": 0, "step": 1}))
    export(tmp_path / "run", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "1 of 2 rollouts, seed 0" in text and "| before training | after 0 rollouts |" in text
    assert "Not decided: the model was saved before the second evaluation." in text
    assert not (tmp_path / "out" / "trainer_state.json").exists()


def test_a_base_that_has_moved_is_named_and_can_be_given(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "lora", tmp_path / "lora")
    settings = tmp_path / "lora" / "model-seed0" / "adapter_config.json"
    written = json.loads(settings.read_text())
    assert written["base_model_name_or_path"] == str(runs / "base")
    settings.write_text(json.dumps({**written, "base_model_name_or_path": str(tmp_path / "gone")}))
    out = tmp_path / "out"
    arguments = ["export", str(tmp_path / "lora"), str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "error: " in result.stderr
    assert (
        f"expected the adapter's base model at '{tmp_path}/gone'" in result.stderr and "--base FOLDER" in result.stderr
    )
    assert not out.exists()
    assert CliRunner().invoke(app, [*arguments, "--base", str(runs / "base")]).exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(out)
    other = chat_model.save(tmp_path / "other", vocab_size=300)
    wrong = CliRunner().invoke(app, ["export", str(runs / "lora"), str(tmp_path / "wrong"), "--base", other])
    assert wrong.exit_code == 1 and f"the adapter does not fit the base '{other}'" in wrong.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("wrong")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{runs}/none {out}", "RUN: expected the folder of a run, with a metrics.jsonl, got {runs}/none"),
        (
            "{runs}/full/model-seed0 {out}",
            "RUN: expected the folder of a run, with a metrics.jsonl, got {runs}/full/model",
        ),
        ("{runs}/full {out} --seed 3", "seed: expected one of {runs}/full's seeds [0], got 3"),
        (
            "{runs}/full {out} --base {runs}/base",
            "--base: expected none, because {runs}/full/model-seed0 is not an adap",
        ),
        ("{runs}/full {runs}/full/model-seed0/new", "OUT: expected a folder outside {runs}/full/model-seed0, got"),
        ("{runs}/full {runs}/base", "OUT: expected a folder that does not exist or is empty, got {runs}/base"),
        (
            "{runs}/full {runs}/rewards.py",
            "OUT: expected a folder that does not exist or is empty, got {runs}/rewards.py",
        ),
        ("{runs}/full {left}", "OUT: expected no {left}.partial, which an interrupted export may have left: remove it"),
    ],
)
def test_wrong_arguments_change_nothing(runs: Path, tmp_path: Path, arguments: str, message: str) -> None:
    names = {"runs": runs, "out": tmp_path / "out", "left": tmp_path / "left"}
    (tmp_path / "left.partial").mkdir()
    files = {path: path.stat().st_mtime_ns for folder in (runs, tmp_path) for path in folder.rglob("*")}
    result = CliRunner().invoke(app, ["export", *arguments.format(**names).split()])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {message.format(**names)}")
    assert {path: path.stat().st_mtime_ns for folder in (runs, tmp_path) for path in folder.rglob("*")} == files


def test_an_interrupted_export_leaves_nothing(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "card", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(runs / "full", tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not any((tmp_path / "empty").iterdir())
    export(runs / "full", tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
