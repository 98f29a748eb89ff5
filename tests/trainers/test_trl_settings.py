"""Updates per rollout with `GSPOConfig`, and warnings about settings that never clip."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import datasets
import torch
import transformers
import trl
from helpers.trl_trainer import SEQUENCE, checkpoint, make_trainer
from tolerance import LOG_PROB_STD
from trl import GRPOConfig, GRPOTrainer

import gspo_kernels.integrations.trl
from gspo_kernels import Objective, validation
from gspo_kernels.integrations.huggingface import LogProbsByPrecision, clip_noise
from gspo_kernels.integrations.trl import ClipNoiseCallback, GSPOConfig, GSPOTrainer, accelerate_trainer
from gspo_kernels.integrations.trl.config import LOSS_TYPES

ON_A_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": []}


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_warned", set())


def config(**options: Any) -> GSPOConfig:
    return GSPOConfig("unused", **ON_A_CPU, **options)


def named_settings(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return the first setting that each of our warnings names."""
    texts = [str(w.message) for w in caught if str(w.message).startswith("gspo_kernels")]
    return [next(iter(re.findall(r"steps_per_generation|epsilon|train_dataset", text)), text) for text in texts]


def test_an_old_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.14.2")
    with pytest.raises(ImportError, match=r"needs TRL 1\.15 or later, .* got TRL 1\.14\.2: pip install 'trl>=1\.15'$"):
        importlib.reload(gspo_kernels.integrations.trl)


# A class of configurations, settings that are made after it was checked, and the message.
REFUSED_EARLY: dict[str, tuple[type, dict[str, Any], str]] = {
    "another class": (transformers.TrainingArguments, {}, "args must be a GSPOConfig or GRPOConfig, got a TrainingArg"),
    "a missing folder": (GSPOConfig, {}, "model must be a folder that exists, a hub id or a model, got '/.*/no model'"),
    "no precision of a head": (
        GSPOConfig,
        {"head_precision": "bf16"},
        "head_precision must be one of 'fp32', 'bf16x3', got 'bf16'",
    ),
    "Liger's kernels on a CPU": (
        GSPOConfig,
        {"use_liger_kernel": True},
        "use_liger_kernel must be False on a CPU",
    ),
    "a level that the loss does not know": (
        GRPOConfig,
        {"importance_sampling_level": "sequence_token"},
        "importance_sampling_level must be one of 'token', 'sequence', got 'sequence_token'",
    ),
    "a budget set later": (GSPOConfig, {"gradient_budget": 2.0}, "gradient_budget must be a number from 0 .* got 2.0"),
    "a budget with an entropy bonus": (
        GSPOConfig,
        {"gradient_budget": 1e-3, "entropy_coef": 0.1},
        "gradient_budget must be 0 with an entropy bonus",
    ),
}


@pytest.mark.parametrize("name", REFUSED_EARLY)
def test_gspo_trainer_refuses_arguments_before_it_loads_the_model(name: str, tmp_path: Path) -> None:
    kind, settings, message = REFUSED_EARLY[name]
    args = kind(str(tmp_path), **ON_A_CPU)
    vars(args).update(settings)
    with pytest.raises((ValueError, TypeError), match=f"^GSPOTrainer: {message}"):
        GSPOTrainer(str(tmp_path / "no model"), None, args)


def test_every_loss_type_of_the_installed_trl_is_accepted() -> None:
    """The loss types are those that the trainer's method compares with."""
    code = inspect.getsource(GRPOTrainer._compute_loss)
    names = set(re.findall(r'loss_type == "(\w+)"', code))
    names |= {x for group in re.findall(r"loss_type in \[(.*?)\]", code) for x in re.findall(r'"(\w+)"', group)}
    assert names <= set(LOSS_TYPES)
    for name in names:
        assert config(loss_type=name, epsilon=0.2, epsilon_high=1.5).loss_type == name


# Options, and the resulting steps_per_generation and generation_batch_size. TRL's defaults are 8 completions per device
# and 8 generations per prompt.
ARITHMETIC: list[tuple[dict[str, Any], int, int]] = [
    ({}, 4, 32),
    ({"num_iterations": 3, "gradient_accumulation_steps": 2}, 8, 64),
    ({"steps_per_generation": 6, "gradient_accumulation_steps": 2}, 6, 48),
    ({"generation_batch_size": 64}, 8, 64),
    ({"steps_per_generation": 2, "generation_batch_size": 16}, 2, 16),
]


@pytest.mark.parametrize(("options", "steps", "batch"), ARITHMETIC, ids=[str(options) for options, *_ in ARITHMETIC])
def test_a_rollout_gets_four_updates_unless_the_user_sets_their_number(
    options: dict[str, Any], steps: int, batch: int
) -> None:
    """A config that is saved and loaded, or changed by `replace`, keeps their number."""
    original = config(**options)
    assert (original.steps_per_generation, original.generation_batch_size) == (steps, batch)
    values = original.to_dict()
    assert GSPOConfig(**values).to_dict() == values
    assert dataclasses.replace(original, learning_rate=1e-4).to_dict() == {**values, "learning_rate": 1e-4}


def test_the_size_of_a_rollout_counts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GSPOConfig, "world_size", 2)
    assert (config().steps_per_generation, config().generation_batch_size) == (4, 64)
    assert config(generation_batch_size=64).steps_per_generation == 4


def test_contradictory_rollout_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"generation_batch_size must be None or 32 .*= 8 \* 1 \* 4\), got 64"):
        config(steps_per_generation=4, generation_batch_size=64)
    with pytest.raises(ValueError, match="generation_batch_size must be None or 16"):
        dataclasses.replace(config(), per_device_train_batch_size=4)


OF_GSPO_CONFIG: dict[str, Any] = {"config": GSPOConfig, "steps_per_generation": None, "num_generations": 8}


def test_default_args_do_not_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gspo_kernels.integrations.trl.trainer.GSPOConfig",
        lambda output_dir: GSPOConfig(str(tmp_path / output_dir), **ON_A_CPU),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = GSPOTrainer(
            checkpoint(tmp_path / "model"),
            lambda completions, **_: [0.0] * len(completions),
            train_dataset=datasets.Dataset.from_list([{"prompt": "ab"}] * 8),
        )
    settings: Any = trainer.args
    assert not named_settings(caught) and settings.steps_per_generation == 4
    assert (settings.importance_sampling_level, settings.loss_type, settings.beta) == ("sequence", "grpo", 0.0)
    assert (settings.epsilon, settings.epsilon_high) == (3e-4, 4e-4)


# gradient_accumulation_steps, steps_per_generation, num_iterations, and whether the ratio can differ from 1.
RUNS = [(4, 2, 2, False), (2, 1, 4, True), (3, 2, 1, True)]


@pytest.mark.parametrize(("accumulation", "steps", "iterations", "can_differ"), RUNS)
def test_settings_whose_ratio_is_always_1_are_warned_of(
    accumulation: int, steps: int, iterations: int, can_differ: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**SEQUENCE, "gradient_accumulation_steps": accumulation}
    options |= {"steps_per_generation": steps, "num_iterations": iterations}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, **options)
        accelerate_trainer(trainer)
    assert named_settings(caught) == ([] if can_differ else ["steps_per_generation"])
    trainer.train()
    logs = [log["clip_ratio/region_mean"] for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4 and (max(logs) > 0) == can_differ, logs


def test_warnings_name_the_settings_and_the_callers_line(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), **ON_A_CPU, importance_sampling_level="sequence")
    arguments: dict[str, Any] = {
        "model": checkpoint(tmp_path / "model"),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "args": args,
        "train_dataset": datasets.Dataset.from_list([{"prompt": "ab"}] * 8),
    }
    for kind in (GRPOTrainer, GSPOTrainer):
        validation._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            line = sys._getframe().f_lineno + 1
            accelerate_trainer(kind(**arguments))
        our_warnings = [w for w in caught if str(w.message).startswith("gspo_kernels")]
        assert named_settings(our_warnings) == ["steps_per_generation", "epsilon"]
        assert all((w.filename, w.lineno) == (__file__, line) for w in our_warnings)
        updates, window = (str(w.message) for w in our_warnings)
        assert "steps_per_generation=1, num_iterations=1" in updates and updates.endswith("steps_per_generation=4")
        assert "epsilon=0.2, epsilon_high=0.2" in window and "epsilon=3e-4 and epsilon_high=4e-4" in window


# Options of the trainer, and whether a warning about the clip window is expected.
WINDOWS: dict[str, tuple[dict[str, Any], bool]] = {
    "one wide bound": ({**SEQUENCE, "epsilon_high": 0.28}, True),
    "epsilon_high not set": ({**SEQUENCE, "epsilon": 0.2, "epsilon_high": None}, True),
    "luspo's window": ({**SEQUENCE, "loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3}, False),
    "token ratios": ({}, False),
    "cispo": ({**SEQUENCE, "loss_type": "cispo", "epsilon_high": 5.0}, False),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_for_tokens_on_a_sequence_ratio_is_warned_of(name: str, tmp_path: Path) -> None:
    options, warned = WINDOWS[name]
    trainer = make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerate_trainer(trainer)
        accelerate_trainer(trainer)
    assert named_settings(caught) == ["epsilon"] * warned


@pytest.mark.parametrize(("prompts", "warned"), [(3, True), (4, False)])
def test_a_dataset_smaller_than_a_rollout_is_warned_of(prompts: int, warned: bool, tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1, **OF_GSPO_CONFIG}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, prompts=prompts, **options)
        trainer.train()
    assert named_settings(caught) == ["train_dataset"] * warned
    assert trainer.state.global_step == (0 if warned else 1)


@pytest.mark.parametrize(
    ("level", "method", "paper"), [("sequence", "GSPO", "2507.18071"), ("token", "GRPO", "2402.03300")]
)
def test_the_model_card_names_the_method_and_its_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, method: str, paper: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = checkpoint(tmp_path / "model")
    warned = pytest.warns(UserWarning, match="importance_sampling_level='token' is not GSPO")
    with warned if level == "token" else nullcontext():
        trainer = make_trainer(GSPOTrainer, path, tmp_path, importance_sampling_level=level, steps_per_generation=4)
    trainer.create_model_card(model_name="sorter")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"trained with {method}, a method introduced in" in card
    assert f"https://huggingface.co/papers/{paper}" in card and f"arXiv:{paper}" in card
    assert f"\n- {method.lower()}\n" in card  # a tag
    assert trainer.model.model_tags == ["trl", method.lower()]


class Snapshots(transformers.TrainerCallback):
    """Keeps the weights before each update, and the last mini-batch of the rollout."""

    def __init__(self, trainer: Any, taken: list[Any]) -> None:
        self.trainer, self.taken = trainer, taken

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = {name: x.double() for name, x in self.trainer.model.state_dict().items()}
        self.taken.append((weights, dict(self.trainer._buffered_inputs[-1])))


def check_with_float64(model: Any, compared: list[Any], taken: list[Any]) -> None:
    """Check the arguments of `clip_noise` in a training with rollouts of four updates."""
    for (before, after, advantages, mask, objective), update in zip(compared, (0, 4), strict=True):
        assert objective == Objective(clip_low=3e-4, clip_high=4e-4, delta=1.5)
        batch = taken[update][1]
        rows = batch["advantages"].nonzero()[:2, 0]
        assert torch.equal(advantages, batch["advantages"][rows])
        ids, attended = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1)[rows] for x in ("ids", "mask"))
        for scored, (weights, _) in ((before, taken[update]), (after, taken[update + 3])):
            model.load_state_dict(weights)
            cut = [
                (x[int(m.argmax()) :], m[int(m.argmax()) :]) for x, m in zip(ids, attended, strict=True)
            ]  # no left padding
            logits = torch.cat([model(x[None], m[None]).logits[:, -1 - mask.shape[1] : -1] for x, m in cut]) / 0.7
            expected = logits.log_softmax(-1).gather(-1, ids[:, -mask.shape[1] :, None])[..., 0]
            assert (scored.fp32 - expected)[mask.bool()].std() < LOG_PROB_STD


@pytest.mark.parametrize("lora", [False, True], ids=["bf16", "dropout"])
def test_clip_noise_is_logged_and_training_does_not_change(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward without dropout in fp32 has no noise. With bf16, what is compared is checked against float64."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": 8, "temperature": 0.7, "delta": 1.5}
    options |= {"learning_rate": 0.1} if lora else {"bf16": True, "learning_rate": 1e-3}
    if lora:
        options |= {"steps_per_generation": 2, "num_iterations": 2}
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    compared: list[Any] = []
    taken: list[Any] = []
    monkeypatch.setattr(
        "gspo_kernels.integrations.trl.clip_noise.clip_noise",
        lambda *arguments: (compared.append(arguments), clip_noise(*arguments))[1],
    )
    rare_steps: list[int] = []
    model, runs = checkpoint(tmp_path / "model"), []
    for measures in (False, True):
        trainer = make_trainer(GSPOTrainer, model, tmp_path, **{**SEQUENCE, **options})
        prompts = [x["prompt"] + "cd"[: 2 * (i % 2)] for i, x in enumerate(trainer.train_dataset)]
        trainer.train_dataset = datasets.Dataset.from_list([{"prompt": x} for x in prompts])  # so some are padded
        if measures:
            trainer.add_callback(Snapshots(trainer, taken))
            trainer.add_callback(ClipNoiseCallback(trainer, every=1, answers=2))
            rare = ClipNoiseCallback(trainer, every=5)
            trainer.add_callback(rare)
            monkeypatch.setattr(rare, "_log", lambda *_, trainer=trainer: rare_steps.append(trainer.state.global_step))
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        runs.append((trainer.model.state_dict(), [{k: x for k, x in log.items() if k != "step_time"} for log in logs]))
    assert all(map(torch.equal, *(weights.values() for weights, _ in runs)))
    (_, plain), (_, measured) = runs
    assert plain == [{k: x for k, x in log.items() if "clip_noise" not in k} for log in measured]
    logged = {log["step"]: log for log in measured if "gspo/clip_noise" in log}
    assert logged.keys() == {4, 8}  # the last update of each rollout
    assert rare_steps == [3]  # the second rollout starts at step 4, so it is not measured
    for log in logged.values():
        assert log["gspo/clip_noise"] in (0, 0.5, 1) and (log["gspo/clip_noise_log_ratio"] > 1e-5) != lora
        assert log["gspo/clip_noise"] <= log["gspo/clip_noise_body"] + log["gspo/clip_noise_head"]

    if not lora:
        exact = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        check_with_float64(exact, compared, taken)

    callback = ClipNoiseCallback(trainer, answers=2)
    assert callback._objective().ratio == "sequence"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "importance_sampling_level", "token")
        assert callback._objective().ratio == "token"
    mask = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]])  # the first answer is truncated, so it is masked
    answers = {f"{of}_{what}": 0 * mask + 1 for of in ("prompt", "completion") for what in ("ids", "mask")}
    tools = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]])
    answers |= {"completion_mask": mask, "tool_mask": tools, "advantages": torch.tensor([1.0, -1.0, 1.0, 1.0])}
    callback._batch = callback._answers(answers)
    assert torch.equal(callback._batch["completion_mask"], mask[1:3])
    compared.clear()
    zeros = LogProbsByPrecision(*[torch.zeros(2, 3)] * 3)
    reductions: list[str] = []
    with monkeypatch.context() as patch:  # decisions are counted over all ranks
        patch.setattr(trainer.accelerator, "reduce", lambda x, reduction: reductions.append(reduction) or x)
        callback._log(zeros, zeros)
    assert reductions == ["sum"]
    assert torch.equal(compared[0][3].bool(), (mask * tools)[1:3].bool())

    with pytest.raises(ValueError, match="every must be a whole number >= 1, got 0"):
        ClipNoiseCallback(trainer, every=0)
    with pytest.raises(ValueError, match="trainer must be a training without images, got pixel_values"):
        callback._answers({**answers, "pixel_values": mask})
    trainer.loss_type = "sapo"
    with pytest.raises(ValueError, match=r"trainer.loss_type must be one of .*, got 'sapo'"):
        ClipNoiseCallback(trainer)
    trainer.loss_type = "grpo"
    one_update = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, steps_per_generation=2)
    with pytest.raises(ValueError, match=r"several updates per rollout .* got one update"):
        ClipNoiseCallback(one_update)
    trainer.args.delta = 1.0003
    with pytest.raises(ValueError, match=r"delta must be a number > 1 \+ clip_high = 1\.0004, .*got 1\.0003"):
        ClipNoiseCallback(trainer)
