"""Test curves, budget, head, sampling and rewards of the reference trainer, and that it refuses bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.reference_runs import hidden_states, rows_of, small, write_jsonl
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import (
    InputError,
    loading,
    policy,
    train,
    train_config,
    update,
)
from gspo_kernels.integrations.reference_trainer.chat import encode
from gspo_kernels.integrations.reference_trainer.curves import plot_curves
from gspo_kernels.integrations.reference_trainer.data import jsonl_task
from gspo_kernels.integrations.reference_trainer.loading import load_policy
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.reference_trainer.sampling import left_padded, sample
from gspo_kernels.integrations.tasks import Example, answer_found, batches, letters_in_place
from gspo_kernels.tools.cli import app


def test_without_matplotlib_there_are_no_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("gspo_kernels.integrations.reference_trainer.report.plot_curves", missing)
    with RunFolder(small(tmp_path)) as folder:
        curves, reason = folder.plot()
    assert curves is None and "pip install 'gspo-kernels[train]'" in reason


def test_curves_are_moving_averages_and_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [float(step**2) for step in range(1, 13)]
    rows: list[dict] = [{"step": i, "reward": x, "clip_fraction": 0, "entropy": 0} for i, x in enumerate(rewards, 1)]
    rows.insert(0, {"step": 0})
    for step, (mean, low, high) in {0: (2.0, 1.0, 5.0), 12: (7.0, 4.0, 9.0)}.items():
        estimate = {"eval_reward": mean, "eval_reward_low": low, "eval_reward_high": high, "eval_reward_prompts": 1}
        rows[step] |= {**estimate, "eval_rewards": {"total": [mean]}}
        rows[step] |= {f"{name}/right": x / 2 for name, x in estimate.items()}
    rows = [{"seed": 0, "reward/right": 0.5, **row} for row in rows]
    rows += [{**row, "seed": 1, "reward": 0.0} for row in rows]
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot_curves(rows, tmp_path / "curves.png")
    each, means, evaluated, *_ = figures[0].axes[0].get_lines()
    assert figures[0].axes[1].get_lines()[2].get_ydata().tolist() == [1.0, 3.5]
    assert each.get_ydata().tolist() == rewards
    expected = [sum(rewards[:i]) / i for i in range(1, 11)] + [sum(rewards[i : i + 10]) / 10 for i in (1, 2)]
    assert means.get_ydata().tolist() == pytest.approx(expected) and means.get_xdata().tolist() == [*range(1, 13)]
    assert (evaluated.get_xdata().tolist(), evaluated.get_ydata().tolist()) == ([0, 12], [2.0, 7.0])
    (bars,) = figures[0].axes[0].containers[0][2]
    assert [x.tolist() for x in bars.get_segments()] == [[[0, 1], [0, 5]], [[12, 4], [12, 9]]]


# The loop


def test_a_gradient_budget_and_a_cache_save_passes(tmp_path: Path) -> None:
    def first_step(**options: float) -> dict:
        # The update has several row blocks. Blocks of little mass can be dropped, although the vocabulary is one tile.
        sizes = {"steps": 1, "group_size": 16, "updates_per_rollout": 1, "prompts_per_step": 8, "overwrite": True}
        return rows_of(train(small(tmp_path, **sizes, **options)).folder)[1]

    exact, with_budget, cached = first_step(), first_step(gradient_budget=0.9), first_step(cache_mib=16)
    assert exact["dropped_gradient_mass"] == 0 < with_budget["dropped_gradient_mass"] <= 0.9
    assert 1 <= with_budget["passes"] < exact["passes"] <= 4
    assert with_budget["reward"] == exact["reward"] and with_budget["entropy"] == exact["entropy"]
    assert cached["passes"] - 1 == pytest.approx(2 / 3 * (exact["passes"] - 1))
    assert cached["loss"] == pytest.approx(exact["loss"], abs=1e-6)


def test_the_head_is_fp32_in_updates_old_log_probs_and_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []

    def recording(name: str, function: Any, *args: object, **options: object) -> object:
        seen.append((name, options["head_precision"]))
        return function(*args, **options)

    functions = ("gspo_fused_loss", "linear_log_probs", "linear_top_k")
    for name in functions:
        monkeypatch.setattr(update, name, partial(recording, name, getattr(update, name)))
    policy.demo_policy().save(tmp_path / "teacher")
    for teacher in (None, str(tmp_path / "teacher")):
        options = {"precision": "autocast", "head_precision": "fp32", "teacher": teacher, "distillation_k": 3}
        train(small(tmp_path / str(bool(teacher)), steps=1, **options))
    assert set(seen) == {(name, "fp32") for name in functions}


# Sampling


@pytest.mark.parametrize("letters", ["", "c"])
def test_the_mask_ends_at_the_first_end_token_of_the_tokenizer_or_the_checkpoint(letters: str) -> None:
    torch.manual_seed(1)
    demo = policy.demo_policy()
    ends = {demo.tokenizer.eos_token_id, *demo.tokenizer.convert_tokens_to_ids([*letters])}
    demo.inner.generation_config.eos_token_id = sorted(ends)
    examples = [Example("sort abc:", ""), Example("sort fedcb:", "")]
    rollout = sample(demo, examples, group_size=32, max_new_tokens=7, temperature=1.0)
    assert rollout.input_ids.shape[0] == len(rollout.texts) == 32 * len(examples)
    lengths = set()
    for ids, mask, text in zip(rollout.answer_ids.tolist(), rollout.answer_mask.tolist(), rollout.texts, strict=True):
        length = min((ids.index(end) + 1 for end in ends & {*ids}), default=len(ids))
        assert mask == [True] * length + [False] * (len(ids) - length)
        assert text == demo.tokenizer.decode([token for token in ids[:length] if token not in ends])
        lengths.add(length)
    assert len(lengths) > 2
    assert rollout.truncated.tolist() == [not ends & {*ids} for ids in rollout.answer_ids.tolist()]
    assert rollout.attention_mask[:32, : rollout.prompt_width].sum(1).eq(9).all()  # "sort abc:", padded by two
    assert rollout.attention_mask[0, :2].eq(0).all()


def test_a_tokenizer_without_a_padding_token_pads_with_the_end_token() -> None:
    demo = policy.demo_policy()
    demo.tokenizer.pad_token = None
    padding = policy.make_policy(demo.model, demo.tokenizer)
    examples = [Example("sort abc:", ""), Example("sort fedcb:", "")]
    rollout = sample(padding, examples, max_new_tokens=2, temperature=1.0)
    assert rollout.input_ids[0, :2].tolist() == [demo.tokenizer.eos_token_id] * 2
    assert rollout.attention_mask[0, :3].tolist() == [0, 0, 1]


def test_a_chat_without_a_template_is_joined_by_newlines() -> None:
    demo = policy.demo_policy("ab \n")
    messages = [{"role": role, "content": text} for role, text in (("system", "a"), ("user", "b"))]
    assert encode(demo, [messages]) == encode(demo, ["a\nb"]) != encode(demo, ["a b"])


def test_sampling_ignores_the_checkpoints_sampling_defaults(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = policy.demo_policy()
    saved.checkpoint_generation_config.update(do_sample=True, top_k=1, repetition_penalty=3.0)
    with torch.no_grad():
        saved.head.get_parameter("weight").mul_(4)  # make logits large enough for a penalty to have an effect
    saved.save(tmp_path)
    loaded = load_policy(str(tmp_path))
    assert loaded.checkpoint_generation_config.top_k == 1
    rollout = sample(loaded, [Example("sort abc:", "abc")], group_size=512, max_new_tokens=1, temperature=0.5)
    ids, mask = left_padded(loaded, encode(loaded, ["sort abc:"]))
    with torch.no_grad():
        expected = loaded.model(input_ids=ids, attention_mask=mask).logits[0, -1].div(0.5).softmax(-1)
    share = torch.bincount(rollout.answer_ids[:, 0], minlength=len(expected)) / 512
    assert (share - expected).abs().max() < 0.1


def test_left_padding_does_not_change_the_hidden_states() -> None:
    # A shift of positions would change the hidden states of GPT-2, which has learned position embeddings.
    config = GPT2Config(vocab_size=15, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    gpt2 = policy.make_policy(GPT2LMHeadModel(config), policy.demo_policy().tokenizer)
    ids, mask = left_padded(gpt2, encode(gpt2, ["sort abc:", "sort fedcb:"]))
    alone, ones = left_padded(gpt2, encode(gpt2, ["sort abc:"]))
    with torch.no_grad():
        padded, single = (
            hidden_states(gpt2, SimpleNamespace(input_ids=x, attention_mask=m, prompt_width=x.shape[1] - 3))[0]
            for x, m in ((ids, mask), (alone, ones))
        )
    torch.testing.assert_close(padded, single)


# Tasks and rewards


def test_batches_contain_every_example_once_per_pass() -> None:
    examples = [Example(str(number), "") for number in range(10)]
    stream = batches(examples, 4, seed=0)
    drawn = [example for _ in range(5) for example in next(stream)]
    assert set(drawn[:10]) == set(drawn[10:]) == set(examples)
    assert drawn[:10] != drawn[10:]


def test_rewards_of_completions() -> None:
    assert letters_in_place("abc", "abc") == 1
    assert letters_in_place("abcc", "abc") == 3 / 4
    assert letters_in_place("ba", "abc") == 0 == letters_in_place("", "abc")
    assert letters_in_place("ab<pad>", "ab") == 2 / 7
    for completion, answer, reward in [
        (" 42\n", "42", 1),
        ("6 times 7 is 42.", "42", 1),
        ("so it costs 1,200.00 dollars", "1200", 1),
        ("42 or 43", "42", 0),
        ("none", "42", 0),
        ("about 0.00001", 1e-5, 1),
        ("9007199254740993", 9007199254740992, 0),  # equal in float64
        ("The capital is Paris.", "Paris", 1),
        ("It is New York!", "New York", 1),
        ("Paris is not it", "Paris", 0),
        ("so -5.0 degrees", -5, 1),
        ("x = -5", "5", 0),
        ('"It is Paris."*', "Paris", 1),
    ]:
        assert answer_found(completion, answer) == reward, completion


# Refused options, models and data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("group_size=1", "group_size: expected at least 2"),
        ("skip_zero_advantage=true kl_coef=0.1", "skip_zero_advantage: expected false or none with kl_coef=0.1, got"),
        ('advantages=[{"group_advantages":{"scale":"loo"}}]', "advantages: group_advantages: scale must be one of"),
        (
            'advantages=[{"subtract_kl":{"kl_coef":0.1}}]',
            "advantages: subtract_kl takes kl_coef and kl_estimator, got kl_coef",
        ),
        (
            'advantages=[{"token_returns":{"kl_coef":0.1,"kl":"k4"}}]',
            "advantages: token_returns: the KL's estimator must be one of 'k1'",
        ),
        ("advantages=[[whiten]]", "advantages: expected calls of group_advantages, "),
        ("advantages=clamp", "advantages: clamp takes min, max or both, got neither"),
        (
            'advantages=[{"clamp":{"max":.nan}}]',
            "advantages: clamp: max must be a finite number, within float32, got nan",
        ),
        (
            'advantages=[{"group_advantages":{"group_size":0}}]',
            "group_advantages: group_size must be an integer from 2",
        ),
        (
            'group_size=2 advantages=[token_returns,{"subtract_kl":{"kl_coef":1,"kl_estimator":"k1"}}]',
            "advantages: subtract_kl must come before the calls that make an advantage of each token",
        ),
        ("model=x data=x.jsonl task=sorting", "task: expected '' with data=x.jsonl, which has its own prompts, got"),
        ("gradient_budget=1e-3 entropy_coef=0.01", "gradient_budget: expected 0 with an entropy bonus"),
        ("eval_prompts=648", "expected fewer than the task's 648 prompts"),
        ("max_new_tokens=8190", "max_new_tokens=8190: with the longest prompt (11 tokens)"),
        ("model=somewhere", "model needs data=FILE, the jsonl file to train it on, or task=NAME"),
        ("data=some.jsonl", "model: expected a folder or a hub id to train on data=some.jsonl, got None"),
        ("reward=long", 'expected "module:function" or "file.py:function"'),
        ("clip_hihg=1e-3", "clip_hihg: there is no such option (is it 'clip_high'?)"),
        ("preset=mo", "(is it 'moe'?)"),
        ("sampler_precision=bf16 parallel=fsdp2", "sampler_precision: expected '' with parallel=fsdp2, got 'bf16'"),
        ("lora_head=true", "lora_head: expected false unless lora_rank is above 0"),
        ("--steps 5", "--steps: expected key=value, such as steps=100"),
        ("name=x resume=true overwrite=true", "overwrite: expected false with resume"),
        (
            'rollout_correction={"level":"token"} old_log_probs=sampler',
            "old_log_probs: expected trainer",
        ),
        ("updates_per_rollout=3", "updates_per_rollout: expected a divisor of the 256 answers of a rollout"),
        ("micro_batch_size=3", "micro_batch_size: expected a divisor of the 64 answers of an update"),
        ("warmup_updates=801", "warmup_updates: expected at most the 800 updates of the run"),
        ("device=cudaa", "device: expected a device torch can use, got 'cudaa'"),
        ("device=cuda:99", "device: expected a device torch can use, got 'cuda:99'"),
    ],
)
def test_bad_options_print_one_line(tmp_path: Path, arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, ["train", f"output={tmp_path}", *arguments.split()])
    assert result.exit_code == 1
    error = [line for line in result.stderr.splitlines() if not line.startswith("# importing the reward")]
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]
    assert not list(tmp_path.iterdir())


def test_a_missing_model_folder_does_not_access_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda *_: pytest.fail("asked transformers"))
    data = write_jsonl(tmp_path / "data.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2})
    for model in ("./models/mine", "no-such-model"):
        with pytest.raises(InputError, match=f"{model}: there is no such folder"):
            train(train_config(model=model, data=data, output=tmp_path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "at least 2 different prompts (one is held out), got 0"),
        ([{"prompt": "a", "answer": "b"}, "", "{oops"], "line 3: expected a JSON object"),
        ([{"prompt": "a"}], 'line 1: "answer" is missing'),
        ([{"answer": "a"}], 'line 1: "prompt" is missing'),
        ([{"prompt": 3, "answer": "a"}], 'line 1: "prompt" must be text'),
        ([{"prompt": " ", "answer": "a"}], 'line 1: "prompt" must be text that is not empty'),
        ([{"prompt": "a", "answer": None}], 'line 1: "answer" must be text or a number'),
        ([{"prompt": "a", "answer": " "}], 'line 1: "answer" must be text or a number, and not empty'),
    ],
)
def test_the_error_of_bad_data_names_its_line(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        jsonl_task(write_jsonl(tmp_path / "data.jsonl", *lines), held_out=1)
    assert message in str(caught.value) and "data.jsonl" in str(caught.value)
