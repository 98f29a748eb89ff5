"""`gspo export`: merged adapters, models, refused arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import chat_model
from helpers.reference_runs import SMALL, write_jsonl
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import (
    InputError,
    evaluate,
    evaluation,
    export,
    loading,
    read_evaluation,
    train,
    train_config,
)
from gspo_kernels.integrations.reference_trainer.policy import ROUNDED, Policy
from gspo_kernels.tools.cli import app

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bf16 checkpoint and two runs that train it: "full" with seed 0, "lora" with seeds 1 and 0."""
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
    options |= {"lora_rank": 4, "lora_alpha": 7, "lora_head": True, "seeds": [1, 0]}
    train(train_config(name="lora", learning_rate=1e-1, **options))
    return folder


@pytest.mark.parametrize(
    ("name", "seed", "options"),
    [
        ("full", 0, ""),
        ("full", 0, "--dtype bfloat16"),
        ("lora", 1, ""),
        ("lora", 0, "--seed 0 --dtype bfloat16"),
    ],
)
def test_an_export_is_the_trained_model(runs: Path, tmp_path: Path, name: str, seed: int, options: str) -> None:
    out = tmp_path / "new" / "out"
    result = CliRunner().invoke(app, ["export", str(runs / name), str(out), *options.split()])
    assert result.exit_code == 0, result.output
    dtype = torch.bfloat16 if options else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == dtype and result.output.startswith(f"model: {out}, ")
    assert f" GB, {str(dtype).removeprefix('torch.')}\n" in result.output
    trained, weights = runs / name / f"model-seed{seed}", model.state_dict()
    base = AutoModelForCausalLM.from_pretrained(runs / "base", dtype=torch.float32).state_dict()
    if name == "lora":
        settings = json.loads((trained / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (4, 7)
        adapter = {key: x.double() for key, x in load_file(trained / "adapter_model.safetensors").items()}
        expected, limits = {key: x.double() for key, x in base.items()}, {}
        for key in adapter:
            if (module := key.removesuffix(".lora_A.weight")) != key:
                a, b = adapter[key], adapter[f"{module}.lora_B.weight"] * settings["lora_alpha"] / settings["r"]
                assert b.norm() > 0
                weight = f"{module.removeprefix('base_model.model.')}.weight"
                expected[weight] += b @ a
                # The fp32 product over the rank, its scale and the sum, and then the rounding to `dtype`.
                in_fp32 = (settings["r"] + 2) * (b.abs() @ a.abs()) + expected[weight].abs()
                limits[weight] = (
                    torch.finfo(torch.float32).eps * in_fp32 + torch.finfo(dtype).eps * expected[weight].abs()
                ) / 2
        assert "lm_head.weight" in limits
    else:
        expected, limits = AutoModelForCausalLM.from_pretrained(trained, dtype=dtype).state_dict(), {}
        assert not torch.equal(weights["lm_head.weight"], base["lm_head.weight"])
    assert weights.keys() == expected.keys()
    for key, x in weights.items():
        assert ((x.double() - expected[key]).abs() <= limits.get(key, 0.0)).all(), key
    for key, x in loading.load_policy(str(trained)).model.named_parameters():
        assert x.requires_grad and torch.equal(x.to(dtype), weights[key]), key
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == chat_model.TEMPLATE
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.do_sample, generation.top_k) == (True, 7)  # from the checkpoint, not from the run
    assert generation.eos_token_id == sorted({0, tokenizer.eos_token_id}) and generation.pad_token_id is not None


def test_a_change_smaller_than_the_rounding_of_bf16_is_kept(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The adapter changes weights near 0.3 by 1e-4, less than the 2e-3 between bf16 numbers of that size.

    The base is stored in fp32, and training rounds it to bf16.
    """
    base = AutoModelForCausalLM.from_pretrained(runs / "base", dtype=torch.float32)
    with torch.no_grad():
        for weight in base.parameters():
            weight *= 1.001
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(runs / "base").save_pretrained(tmp_path / "base")
    seen: list[Policy] = []
    save, load = Policy.save, loading.load_policy

    def saved(self: Policy, *args: Any) -> None:
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=1e-4)
        seen.append(self)
        save(self, *args)

    monkeypatch.setattr(Policy, "save", saved)
    monkeypatch.setattr(
        evaluation, "load_policy", lambda *args, **options: seen.append(load(*args, **options)) or seen[-1]
    )
    options: dict[str, Any] = {**SMALL, "output": tmp_path, "steps": 1, "precision": "bf16", "lora_rank": 4}
    options |= {"task": "sorting", "max_new_tokens": 7}
    train(train_config(name="half", model=tmp_path / "base", seeds=0, save=True, **options))
    of_run = read_evaluation(str(tmp_path / "half"), ["n=0", "eval_prompts=1"])
    assert of_run.config.precision == "bf16"
    evaluate(of_run)
    export(tmp_path / "half", tmp_path / "out")
    model = seen[0].model.float()
    ids = IDS % seen[0].inner.config.vocab_size
    with torch.no_grad():
        trained = model(ids).logits.log_softmax(-1)
        with model.disable_adapter():
            change = (model(ids).logits.log_softmax(-1) - trained).norm()
        for policy in (seen[1].model, AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
            assert (policy.float()(ids).logits.log_softmax(-1) - trained).norm() < 0.01 * change
    for name in ("float32", "bfloat16"):
        export(tmp_path / "half", tmp_path / name, dtype=name)
        assert (ROUNDED in capsys.readouterr().out) == (name == "bfloat16")


def test_a_model_keeps_its_dtype(runs: Path, tmp_path: Path) -> None:
    model = shutil.copytree(runs / "full", tmp_path / "run") / "model-seed0"
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    out = export(tmp_path / "run", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_an_adapter_is_exported_in_the_format_of_peft(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is a bf16 checkpoint, which was loaded in fp32 for training."""
    monkeypatch.chdir(runs)
    out = tmp_path / "mine"
    arguments = ["export", "lora", str(out), "--adapter", "--base", "base"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and result.stdout.startswith(f"adapter: {out}, ")
    assert result.stdout.endswith(f" GB, load its base {runs}/base in float32, as in training\n")
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    trained = loading.load_policy(str(runs / "lora" / "model-seed1"), merge=False).model
    assert torch.equal(loaded(IDS).logits, trained(IDS).logits)
    names = {path.name for path in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} < names
    assert not names & {"config.json", "generation_config.json"}
    config = json.loads((shutil.copytree("lora", tmp_path / "lora") / "config.json").read_text())
    for parallel, dtype in (("ddp", "bfloat16"), ("fsdp2", "float32")):  # FSDP2 keeps fp32 weights
        changed = {**config, "precision": "bf16", "parallel": parallel}
        (tmp_path / "lora" / "config.json").write_text(json.dumps(changed))
        said: list[str] = []
        export(tmp_path / "lora", tmp_path / parallel, adapter=True, say=said.append)
        assert f" in {dtype}, as in training" in said[0]


def test_a_base_that_has_moved_is_named_and_can_be_given(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "lora", tmp_path / "lora")
    settings = tmp_path / "lora" / "model-seed1" / "adapter_config.json"
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{runs}/none {out}", "{runs}/none: expected the folder of a run, with a config.json"),
        ("{runs}/full {out} --seed 3", "seed: expected one of {runs}/full's seeds [0], got 3"),
        (
            "{runs}/full {out} --base {runs}/base",
            "--base: expected none, because {runs}/full/model-seed0 is not an adap",
        ),
        (
            "{runs}/full {out} --adapter",
            "--adapter: expected the run of an adapter, got {runs}/full/model-seed0, which",
        ),
        ("{runs}/lora {out} --adapter --dtype float16", "--dtype: expected none with --adapter, which copies the adap"),
        ("{runs}/full {out} --dtype int8", "--dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        ("{runs}/full {runs}/base", "OUT: expected a folder that does not exist or is empty, got {runs}/base"),
    ],
)
def test_wrong_arguments_change_nothing(runs: Path, tmp_path: Path, arguments: str, message: str) -> None:
    names = {"runs": runs, "out": tmp_path / "out"}
    files = {path: path.stat().st_mtime_ns for folder in (runs, tmp_path) for path in folder.rglob("*")}
    result = CliRunner().invoke(app, ["export", *arguments.format(**names).split()])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {message.format(**names)}")
    assert {path: path.stat().st_mtime_ns for folder in (runs, tmp_path) for path in folder.rglob("*")} == files


@pytest.mark.parametrize(("name", "value"), [("run", None), ("out", 1), ("seed", [0]), ("adapter", "yes")])
def test_an_argument_of_another_type_is_named(runs: Path, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name}: expected .*, got "):
        export(**{"run": runs / "full", "out": tmp_path / "out", name: value})
    assert not any(tmp_path.iterdir())
