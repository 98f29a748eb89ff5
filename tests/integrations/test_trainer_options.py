"""Options of the reference trainer: files, presets, LoRA, precision, schedules, advantages, trackers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.reference_runs import SMALL, rows_of, small, write_jsonl
from tolerance import MERGED_LOGIT_ABSOLUTE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from typer.testing import CliRunner

from gspo_kernels import Objective
from gspo_kernels.advantages import RunningMoments, whiten
from gspo_kernels.integrations.reference_trainer import (
    InputError,
    TrainConfig,
    held_out,
    loading,
    policy,
    read_config,
    train,
    train_config,
    update,
)
from gspo_kernels.integrations.reference_trainer import optimizer as optimizer_module
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.advantages import advantages_of
from gspo_kernels.integrations.reference_trainer.config import Step
from gspo_kernels.integrations.reference_trainer.config_file import PRESETS
from gspo_kernels.integrations.reference_trainer.optimizer import Optimizer
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, answers_to
from gspo_kernels.integrations.reference_trainer.trackers import Trackers
from gspo_kernels.integrations.tasks import RewardBatch
from gspo_kernels.tools.cli import app

# Files, presets and the dry run


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "preset: moe\nclip_high: 5e-4\nseeds: [3, 4]\nadvantages: [{group_advantages: {scale: none}}, whiten]\n"
        "x-anchors: {a: 1}\n"
    )
    config = read_config(file, ["clip_low=1e-4", "objective=gspo-token", "steps=1e2"])
    of = config.objective
    assert (of.ratio, of.clip_low, of.clip_high) == ("sequence-token", 1e-4, 5e-4)
    assert (config.group_size, config.learning_rate, config.lora_rank, config.steps) == (6, 3e-6, 32, 100)
    assert train_config(objective="dapo", kl_coef=0.1).objective == Objective.preset("dapo", kl_coef=0.1)
    mine = train_config(objective=Objective(clip_low=1e-4), clip_high=5e-4).objective
    assert mine == Objective(clip_low=1e-4, clip_high=5e-4)
    assert config.seeds == (3, 4)
    with pytest.raises(InputError, match="--resume: expected no --config"):
        read_config(file, resume=tmp_path)
    assert config.advantages == (Step("group_advantages", {"scale": "none"}), Step("whiten", {}))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_can_be_written_and_read(tmp_path: Path, preset: str) -> None:
    config = read_config(None, [f"preset={preset}", "objective=luspo", "cache_mib=3", "clip_high=inf", "kl_coef=0.1"])
    config = replace(config, chat_template_kwargs={"enable_thinking": False, "tools": ["a"]})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert read_config(tmp_path / "config.json") == replace(config, overwrite=False)


def test_a_dry_run_prints_options_prompts_and_rewards(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--dry-run", f"output={tmp_path}", "threads=1"])
    assert result.exit_code == 0, result.output
    assert "clip_low: 0.0003\n" in result.output and 'schedule: "constant"\n' in result.output
    assert "# 520 prompts for training, 128 for evaluation; rewards: letters_in_place\n" in result.output
    assert not list(tmp_path.iterdir())


OF_PRESETS: dict[str, tuple[float, float, float, int, int, int, bool]] = {
    "under-1b": (3e-4, 4e-4, 1e-5, 4, 8, 32, False),
    "1b-10b": (2e-4, 3e-4, 5e-6, 4, 16, 32, True),
    "moe": (2e-4, 3e-4, 3e-6, 6, 32, 32, True),
}


@pytest.mark.parametrize("preset", OF_PRESETS)
def test_settings_of_presets(preset: str) -> None:
    config = train_config(preset=preset, model="x")
    of = config.objective
    lora = config.lora_rank, config.lora_alpha
    settings = of.clip_low, of.clip_high, config.learning_rate, config.group_size, *lora, config.gradient_checkpointing
    assert settings == OF_PRESETS[preset]


def test_defaults_of_a_checkpoint() -> None:
    config = train_config(model="x")
    assert (config.prompts_per_step, config.max_new_tokens, config.seeds) == (16, 512, (0,))


@pytest.mark.parametrize("head", [False, True])
def test_lora_adapts_every_linear_layer(head: bool, tmp_path: Path) -> None:
    policy.demo_policy().save(tmp_path / "base")
    config = train_config(model=tmp_path / "base", lora_rank=2, lora_head=head)
    adapted = loading.initial_policy(config).model
    linear = {name.split(".")[-1] for name, x in policy.demo_policy().model.named_modules() if isinstance(x, nn.Linear)}
    assert "lm_head" in linear and len(linear) > 4
    names = {name.split(".lora_A")[0].split(".")[-1] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert names == (linear if head else linear - {"lm_head"})


def test_lora_on_a_checkpoint_has_a_learning_rate_of_its_own() -> None:
    assert train_config(model="x").learning_rate == 1e-6
    assert train_config(model="x", lora_rank=8).learning_rate == 1e-5
    assert train_config(model="x", lora_rank=8, learning_rate=3e-6).learning_rate == 3e-6
    assert train_config(model="x", preset="1b-10b").learning_rate == 5e-6
    assert train_config(lora_rank=8).learning_rate == train_config().learning_rate == 5e-4


def test_variables_of_the_chat_template_reach_every_rendering(tmp_path: Path) -> None:
    """Without its variable, this template fails. The message names the prompt."""
    demo = policy.demo_policy()
    demo.tokenizer.chat_template = "{{ messages[0].content if short is defined else raise_exception('no\n short') }}"
    demo.save(tmp_path / "tiny")
    data = write_jsonl(tmp_path / "data.jsonl", *({"prompt": f"sort {x}:", "answer": x} for x in "abcd"))
    start = ["train", f"model={tmp_path}/tiny", f"data={data}", f"output={tmp_path}/runs", "name=one", "steps=1"]
    start += ["max_new_tokens=2", "prompts_per_step=4", "group_size=2"]
    given = "chat_template_kwargs={short: true}"
    for arguments, options in (
        (start, [given]),
        (["eval", str(tmp_path / "runs/one"), "n=0"], []),  # has the run's variables
    ):
        result = CliRunner().invoke(app, [*arguments, *options[:-1], "chat_template_kwargs={}"])
        expected = r"error: prompt 'sort [abcd]:': the chat template fails: no short\n"
        assert result.exit_code == 1 and re.fullmatch(expected, result.stderr), result.stderr
        assert not CliRunner().invoke(app, [*arguments, *options]).exit_code


# Schedules


def test_schedules() -> None:
    config = TrainConfig(
        steps=5, epochs=2, updates_per_rollout=2, warmup_updates=4, schedule="cosine", learning_rate=1.0
    )
    rates = [config.learning_rate_at(update) for update in range(21)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[12] == pytest.approx(0.5) and rates[20] == pytest.approx(0) and sorted(rates[4:])[::-1] == rates[4:]
    assert replace(config, schedule="linear").learning_rate_at(16) == pytest.approx(0.25)
    assert replace(config, warmup_updates=20).learning_rate_at(9) == 0.5  # in all 20 updates


# LoRA, precision


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("autocast", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp16-autocast", torch.float16),
    ],
)
def test_layers_compute_in_the_dtype_of_the_precision(
    precision: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_updates: set[torch.dtype] = set()
    in_sampling: set[torch.dtype] = set()

    def of_update(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear) and isinstance(output, Tensor) and torch.is_grad_enabled():
            in_updates.add(output.dtype)

    def of_sampling(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear) and isinstance(output, Tensor):
            in_sampling.add(output.dtype)

    def sampled(*arguments: Any, **options: Any) -> Any:
        with nn.modules.module.register_module_forward_hook(of_sampling):
            return answers_to(*arguments, **options)

    monkeypatch.setattr(held_out, "answers_to", sampled)
    with nn.modules.module.register_module_forward_hook(of_update):
        train(small(tmp_path, steps=1, precision=precision))
    assert in_updates == in_sampling == {dtype}


def test_an_adapter_names_its_base_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA is refused where an adapter could not name its base: on random weights, and on another adapter."""
    monkeypatch.chdir(tmp_path)
    policy.demo_policy().save(Path("base"))
    options: dict[str, Any] = {**SMALL, "task": "sorting", "output": "runs", "lora_rank": 2, "steps": 1, "seeds": 0}
    options |= {"max_new_tokens": 7}
    train(train_config(model="base", name="first", **options))
    settings = json.loads((tmp_path / "runs/first/model-seed0/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    for model, message in ((None, "expected 0 without model"), ("runs/first/model-seed0", "is an adapter")):
        with pytest.raises(InputError, match=f"lora_rank: .*{message}"):
            train(train_config(model=model, name="second", **options))


TUNERS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "lora": lambda sides: {"target_modules": ["q_proj", *sides]},
    "modules_to_save": lambda sides: {"target_modules": ["q_proj"], "modules_to_save": sides},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:You have requested `ensure_weight")
@pytest.mark.parametrize("sides", [[], ["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=", ".join)
@pytest.mark.parametrize("tuner", TUNERS)
def test_merging_adapters_of_tied_embeddings_keeps_the_logits(tmp_path: Path, tuner: str, sides: list[str]) -> None:
    import peft

    config = policy.demo_policy().model.config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(Qwen3ForCausalLM(config), peft.LoraConfig(r=4, **TUNERS[tuner](sides))).eval()
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    ids = torch.arange(8)[None]
    expected = adapted(ids).logits
    model = policy.merged(adapted)
    model.save_pretrained(tmp_path)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    for merged in (model, saved):
        torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=MERGED_LOGIT_ABSOLUTE)
        is_tied = merged.lm_head.weight is merged.get_input_embeddings().weight
        assert is_tied == merged.config.tie_word_embeddings == (not sides)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Attempting to merge")
def test_an_adapter_that_is_merged_in_part_is_refused() -> None:
    """PEFT ties the trained tokens of the embeddings to the head, whose LoRA it then does not merge."""
    import peft

    config = policy.demo_policy().model.config
    config.tie_word_embeddings = True
    sides = {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [3, 5]}}
    adapted: Any = peft.get_peft_model(Qwen3ForCausalLM(config), peft.LoraConfig(r=4, **sides))
    with pytest.raises(InputError, match="PEFT cannot merge the adapter: it leaves a part of it in lm_head"):
        policy.merged(adapted)


def test_the_loss_scale_grows_and_is_halved_down_to_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "UPDATES_TO_RAISE", 2)
    config = small(tmp_path, precision="fp16")
    optimizer = Optimizer(loading.initial_policy(config), config)
    factors = []
    for i in range(8):
        if i == 5:
            assert optimizer.lower_loss_scale()  # the count of updates starts again
        factors.append(optimizer.loss_scale / optimizer_module.FIRST_LOSS_SCALE)
        optimizer.step()
    assert factors == [1, 1, 2, 2, 4, 2, 2, 4]
    another = Optimizer(loading.initial_policy(config), config)
    another.load(optimizer.state())
    assert another.state()["loss_scale"] == 4 * optimizer_module.FIRST_LOSS_SCALE
    another = Optimizer(loading.initial_policy(config), config)
    another.load(Optimizer(loading.initial_policy(config), small(tmp_path)).state())  # of a run in fp32
    assert another.loss_scale == optimizer_module.FIRST_LOSS_SCALE
    optimizer.loss_scale = 1.0
    assert not optimizer.lower_loss_scale()


# Updates


def test_every_seed_step_and_epoch_has_mini_batches_of_its_own() -> None:
    config = TrainConfig(epochs=2, updates_per_rollout=2, prompts_per_step=2)
    drawn = [
        torch.cat(epoch) for seed in (0, 1) for step in (1, 2) for epoch in update.mini_batches(config, seed, step)
    ]
    assert all(torch.equal(rows.sort().values, torch.arange(16)) for rows in drawn)
    assert len({tuple(rows.tolist()) for rows in drawn}) == len(drawn)


# Advantages


def test_advantages_are_computed_by_the_named_functions() -> None:
    mask = torch.ones(4, 6, dtype=torch.bool)
    batch = update.Batch(SimpleNamespace(answer_mask=mask), torch.zeros(4, 6), None)  # type: ignore[arg-type]
    steps = (Step("group_advantages", {"scale": "none"}), Step("whiten", {}), Step("clamp", {"max": 0.5}))
    rewards = RewardBatch([0.0, 1.0, 5.0, 5.5], {}, [])
    computed = advantages_of(TrainConfig(group_size=2, advantages=steps), batch, rewards, RunningMoments())
    torch.testing.assert_close(computed, whiten(torch.tensor([-0.5, 0.5, -0.25, 0.25]), mask).clamp(max=0.5))


def test_answers_without_a_reward_have_no_advantage_and_do_not_count() -> None:
    """As in TRL, mean and standard deviation are those of the other answers."""
    totals, none = [1.0, 2.0, 0.0, 0.5, 3.0, 4.0], [2, 4, 5]
    components = {"one": [None if i in none else total for i, total in enumerate(totals)]}
    rewards = RewardBatch([0.0 if i in none else total for i, total in enumerate(totals)], components, [])
    zeros = torch.zeros(6, 2)
    rollout: Any = Rollout(zeros, zeros, 1, [""] * 6, zeros == 0, zeros[:, 0] > 0, zeros)  # type: ignore[arg-type]
    batch = update.Batch(rollout, torch.zeros(6, 2), None)
    running = RunningMoments()

    def computed(*steps: Step) -> list[float]:
        return advantages_of(TrainConfig(group_size=3, advantages=steps), batch, rewards, running).tolist()

    half = 0.5 / 0.5**0.5  # the standard deviation of 1 and 2 is the root of 0.5
    assert computed(Step("group_advantages", {"eps": 0.0})) == pytest.approx([-half, half, 0, 0, 0, 0])
    assert computed(Step("group_advantages", {"scale": "none"})) == pytest.approx([-0.5, 0.5, 0, 0, 0, 0])
    by_group = computed(Step("normalize_rewards", {"by": "group", "scale": False}))
    assert by_group == pytest.approx([-0.5, 0.5, 0, 0, 0, 0])
    one_group = computed(Step("group_advantages", {"group_size": 6, "scale": "none"}))
    assert one_group == pytest.approx([1 - 3.5 / 3, 2 - 3.5 / 3, 0, 0.5 - 3.5 / 3, 0, 0])
    assert computed(Step("normalize_rewards", {"by": "running", "scale": False})) == pytest.approx(
        [1 - 3.5 / 3, 2 - 3.5 / 3, 0, 0.5 - 3.5 / 3, 0, 0]
    )
    by_batch = computed(Step("normalize_rewards", {"by": "batch", "scale": False}))
    assert by_batch == pytest.approx([1 - 3.5 / 3, 2 - 3.5 / 3, 0, 0.5 - 3.5 / 3, 0, 0])
    assert running.count == 3
    nothing = RewardBatch([0.0] * 6, {"one": [None] * 6}, [])
    assert advantages_of(TrainConfig(group_size=3), batch, nothing, running).tolist() == [0] * 6


def test_running_moments_are_those_of_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[float], Tensor]] = []

    def recorded(config: Any, batch: Any, rewards: RewardBatch, running: RunningMoments) -> Tensor:
        seen.append((rewards.total, advantages_of(config, batch, rewards, running)))
        return seen[-1][1]

    monkeypatch.setattr(loop, "advantages_of", recorded)
    train(small(tmp_path, advantages=[{"normalize_rewards": {"by": "running", "scale": False}}]))
    assert len(seen) == 3
    for i, (rewards, advantages) in enumerate(seen):
        so_far = torch.tensor([x for totals, _ in seen[: i + 1] for x in totals], dtype=torch.float64)
        torch.testing.assert_close(advantages.double(), (torch.tensor(rewards) - so_far.mean()).double())


KL_OF_TOKEN = {"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": 0.5 - 1 + 2.718281828459045**-0.5}


@pytest.mark.parametrize("estimator", KL_OF_TOKEN)
def test_the_kl_in_advantages_is_that_of_unmasked_tokens(estimator: str) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rollout: Any = SimpleNamespace(answer_mask=mask)
    batch = update.Batch(rollout, torch.zeros(2, 3), torch.full((2, 3), -0.5))
    rewards = RewardBatch([1.0, 2.0], {}, [])
    kl = KL_OF_TOKEN[estimator]

    def advantages(step: Step) -> Tensor:
        return advantages_of(TrainConfig(group_size=2, advantages=(step,)), batch, rewards, RunningMoments())

    of_answers = advantages(Step("subtract_kl", {"kl_coef": 0.1, "kl_estimator": estimator}))
    torch.testing.assert_close(of_answers, torch.tensor([1 - 0.2 * kl, 2 - 0.1 * kl]))
    of_tokens = advantages(Step("token_returns", {"kl_coef": 0.1, "kl": f"{estimator}, per token"}))
    expected = torch.tensor([[1 - 0.2 * kl, 1 - 0.1 * kl, 0], [2 - 0.1 * kl, 0, 0]])
    torch.testing.assert_close(of_tokens, expected)
    for call, expected in (("subtract_kl", rewards.total), ("token_returns", [[1, 1, 0], [2, 0, 0]])):
        none = {"kl_coef": 0, "kl_estimator" if call == "subtract_kl" else "kl": estimator}
        assert advantages(Step(call, none)).tolist() == expected
    default = Step("token_returns", {"kl_coef": 0.1})
    assert TrainConfig(advantages=(default,)).needs_reference
    assert torch.equal(advantages(default), of_tokens) == (kl == KL_OF_TOKEN["k1"])


# Rewards and trackers


def test_metrics_reach_tensorboard(tmp_path: Path) -> None:
    events: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options: dict[str, Any] = {"steps": 1, "seeds": (0, 1), "report_to": ("tensorboard",)}
    train(small(tmp_path, **options))
    folder = train(small(tmp_path, overwrite=True, **options)).folder
    (file,) = folder.rglob("events.out.*")  # none of the run that it replaced
    written = events.EventAccumulator(str(file.parent)).Reload().Scalars("seed1/reward")
    assert [(event.step, event.value) for event in written] == [(1, pytest.approx(rows_of(folder)[3]["reward"]))]


def test_each_seed_is_a_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Run:
        def __init__(self, name: str) -> None:
            self.name = name
            seen.append(name)

        def log(self, numbers: dict[str, Any], step: int) -> None:
            seen.append((self.name[-1], step))

        def finish(self) -> None:
            seen.append("finish")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda name, **_: Run(name)))
    trackers = Trackers(small(tmp_path, name="mine", report_to=("wandb",)))
    for seed, step in ((0, 1), (0, 2), (1, 1)):
        trackers.write(seed, {"step": step, "reward": 1.0})
    trackers.close()
    assert seen == ["mine-seed0", ("0", 1), ("0", 2), "finish", "mine-seed1", ("1", 1), "finish"]


def test_wandb_writes_runs_offline_where_its_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    of_variables = {"WANDB_PROJECT": "project-v", "WANDB_ENTITY": "entity-v", "WANDB_TAGS": "tag-v"}
    folders = {f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
    offline = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    for name, value in {**of_variables, **folders, **offline}.items():
        monkeypatch.setenv(name, value)
    texts = ["report_to=wandb", f"output={tmp_path}", "name=my-run", "learning_rate=0.0123456"]
    config = read_config(texts=texts)
    config.folder.mkdir()
    trackers = Trackers(config)
    for step, reward in ((0, None), (1, 0.1234567), (2, 0.7654321)):
        trackers.write(5, {"step": step, "reward": reward})
    trackers.close()
    wandb.teardown()  # wait until W&B's process has written the file
    (log,) = config.folder.glob("wandb/offline-run-*/run-*.wandb")
    text = log.read_bytes().decode(errors="replace")
    for word in ("my-run-seed5", "learning_rate", "0.0123456", "0.1234567", "0.7654321", *of_variables.values()):
        assert word in text, word
