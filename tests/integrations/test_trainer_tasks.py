"""Tasks, rewards and dialogues of the reference trainer."""

from __future__ import annotations

import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import chat_model
from helpers.reference_runs import write_jsonl
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import InputError, TrainConfig, loading, policy
from gspo_kernels.integrations.reference_trainer.chat import check_replies, encode, encode_reply
from gspo_kernels.integrations.reference_trainer.data import code_of, jsonl_task, load_reward
from gspo_kernels.integrations.reference_trainer.held_out import collect
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, fitting, sample
from gspo_kernels.integrations.tasks import TASKS, Example, RewardComponent, Rewards, answer_found, task_by_name
from gspo_kernels.integrations.tasks.arithmetic import problem, steps_add_up
from gspo_kernels.integrations.tasks.calculator import calculate
from gspo_kernels.integrations.tasks.rewards import time_limit
from gspo_kernels.tools.cli import app

SYMBOLS = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127)), "\n"]
EXAMPLE = Example("2+7-4 by calculator:", "2+7;9-4;5")


@pytest.fixture
def character_policy() -> policy.Policy:
    """Return a tiny random policy with a tokenizer of single characters."""
    characters = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), "isolated")  # type: ignore[assignment]
    characters.decoder = decoders.Fuse()  # type: ignore[assignment]
    names = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    demo = policy.demo_policy()
    demo.model.resize_token_embeddings(len(SYMBOLS))
    return policy.make_policy(demo.model, PreTrainedTokenizerFast(tokenizer_object=characters, **names))


def speak(speaker: policy.Policy, monkeypatch: pytest.MonkeyPatch, answers: Callable[[str], str]) -> None:
    """Make the policy generate `answers(text so far)` instead of its own tokens. Padding is removed from the text."""

    def generate(ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        texts = [speaker.tokenizer.decode(row).replace("<pad>", "") for row in ids]
        rows = [speaker.tokenizer(answers(text))["input_ids"][:max_new_tokens] for text in texts]
        width = max(map(len, rows))
        return torch.cat([ids, torch.tensor([row + [0] * (width - len(row)) for row in rows])], dim=1)

    monkeypatch.setattr(speaker.model, "generate", generate)


# Rewards


def endless(*_: str) -> float:
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            pass


def backtracking(*_: str) -> float:
    return float(bool(re.match("(a+)+$", "a" * 60 + "b")))


def broken(completion: str) -> float:
    return 1 / (len(completion) - 3)


def lines(*_: str) -> float:
    raise ValueError("first\n\tsecond")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lines, "ValueError: first second"),
        (endless, "no result after 0.05 s"),
        (backtracking, "no result after 0.05 s"),
        (broken, "ZeroDivisionError: division by zero"),
        (lambda *_: "good", "ValueError: could not convert string to float: 'good'"),
        (lambda *_: float("inf"), "expected 1 finite float32 number, got inf"),
        (lambda *_: 1e39, "expected 1 finite float32 number, got 1e+39"),
    ],
)
def test_a_failed_component_scores_zero_and_is_reported(function: Callable[..., float], reason: str) -> None:
    one = RewardComponent("one", 1.0, lambda *_: 1.0)
    rewards = Rewards((RewardComponent("custom", 3.0, function), one), timeout=0.05)
    batch = rewards(["a\nb"], [Example("", "ab")])
    assert batch.total == [1.0] and batch.components == {"custom": [0.0], "one": [1.0]}
    assert [str(failure) for failure in batch.failures] == [f"custom: {reason}; completion 'a\\nb'"]


def test_a_component_that_returns_none_does_not_apply() -> None:
    """It adds nothing to the total and is no failure, as in TRL."""
    short = RewardComponent("short", 0.5, lambda text: 1.0 if len(text) < 3 else None)
    equal = RewardComponent("equal", 2.0, lambda text, answer: None if answer == "?" else text == answer)
    batch = Rewards((short, equal))(
        ["ab", "ab", "abc", "abc"], [Example("", "ab"), Example("", "?"), Example("", "abc"), Example("", "?")]
    )
    assert batch.components == {"short": [1.0, 1.0, None, None], "equal": [1.0, None, 1.0, None]}
    assert batch.total == [2.5, 0.5, 2.0, 0.0] and batch.scored == [True, True, True, False] and not batch.failures
    assert batch.mean == pytest.approx(5 / 3)
    metrics = batch.metrics(group_size=2)
    assert metrics["reward"] == pytest.approx(5 / 3) and metrics["unscored"] == 0.25
    assert metrics["reward/short"] == metrics["reward/equal"] == 1.0
    assert metrics["groups_without_signal"] == 0.5  # of the second group, only one answer has a reward
    never = Rewards((RewardComponent("never", 1.0, lambda *_: None),))(["a", "b"], [EXAMPLE] * 2)
    assert never.metrics(2) == {"reward": 0.0, "groups_without_signal": 1.0, "unscored": 1.0}
    assert never.all_failed == []  # a call that returns None has not failed


ROWS = [
    Example("2+2?", ["4", "four"], {"level": 1}),
    Example([{"role": "user", "content": "3+3?"}], ["6"], {"level": 2}),
]
ANSWERS, PROMPTS = [["4", "four"], ["6"]], ["2+2?", ROWS[1].prompt]
SAID = ["4", [{"role": "assistant", "content": "6"}]]  # TRL's form of a completion to text, and to a chat


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("completion", {"completion": ["4", "6"]}),
        ("text, answer", {"text": ["4", "6"], "answer": ANSWERS}),
        ("answer, completion", {"completion": ["4", "6"], "answer": ANSWERS}),
        ("prompt, completion, *, level", {"completion": ["4", "6"], "prompt": PROMPTS, "level": [1, 2]}),
        ("completion, level=3, other=4", {"completion": ["4", "6"], "level": [1, 2], "other": [4, 4]}),
        ("completion, **kwargs", {"completion": ["4", "6"], "kwargs": [row.row for row in ROWS]}),
        ("*args", {"args": [("4", ["4", "four"]), ("6", ["6"])]}),
        (
            "completions, answer, **kwargs",
            {"completions": SAID, "answer": ANSWERS, "kwargs": {"prompts": PROMPTS, "level": [1, 2]}},
        ),
        ("prompts, completions, level", {"completions": SAID, "prompts": PROMPTS, "level": [1, 2]}),
    ],
)
def test_a_reward_gets_the_columns_that_it_asks_for(parameters: str, expected: dict[str, Any]) -> None:
    calls: list[dict[str, Any]] = []
    space: dict[str, Any] = {"calls": calls}
    returned = "[0.5, None]" if "completions" in parameters else "0.5"
    exec(f"def reward({parameters}):\n    calls.append(dict(locals()))\n    return {returned}", space)
    rewards = Rewards((RewardComponent("mine", 2.0, space["reward"]),))
    rewards.check(ROWS)
    batch = rewards(["4", "6"], ROWS)
    if "completions" in parameters:
        assert calls == [expected] and batch.components == {"mine": [0.5, None]} and batch.total == [1.0, 0.0]
    else:
        assert calls == [{name: x[i] for name, x in expected.items()} for i in (0, 1)] and batch.total == [1.0, 1.0]
    assert not batch.failures


async def coroutine(completion: str) -> float:
    return 1.0


def without_default(completions: list, completion_ids: list) -> list:
    return []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion, levle: 1.0, "got 'levle', which 2 of 2 rows lack; .* level, prompt (is it 'level'?)"),
        (lambda completion, *, tests: 1.0, "completion, prompt, answer or another column of each row, got 'tests'"),
        (without_default, "named completions, prompts, answer or another column of each row, got 'completion_ids'"),
        (lambda completions, prompt: [], "got 'prompt', which 2 of 2 rows lack"),
        (lambda: 1.0, "expected a function with a parameter for the completion, such as (completion, answer), got ()"),
        (lambda answer, level: 1.0, "parameter for the completion, such as (completion, answer), got (answer, level)"),
        (lambda prompts, answer: [], "parameter for the completion"),
        (lambda x, y, z, /: 1.0, "parameter for the completion"),
        (coroutine, "got a coroutine function (async def)"),
    ],
)
def test_a_reward_that_asks_for_something_else_is_refused(function: Callable[..., Any], message: str) -> None:
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(InputError, match=f"^reward 'mine': .*{pattern}"):
        Rewards((RewardComponent("mine", 1.0, function),)).check(ROWS)


def test_a_list_of_rewards_fails_as_a_whole_or_by_entry() -> None:
    for result, failed in [([1.0, float("nan")], [1]), ([1.0], [0, 1]), (3, [0, 1]), (("1", 2), [])]:
        batch = Rewards((RewardComponent("mine", 1.0, lambda completions, result=result: result),))(["a", "b"], ROWS)
        assert [failure.completion for failure in batch.failures] == ["ab"[i] for i in failed], result
        assert [x == 0 for x in batch.total] == [i in failed for i in (0, 1)]
    slow = RewardComponent("slow", 1.0, lambda completions: time.sleep(0.15) or [1.0, 1.0])
    assert not Rewards((slow,), timeout=0.1)(["a", "b"], ROWS).failures  # the limit is per completion
    assert len(Rewards((slow,), timeout=0.05)(["a", "b"], ROWS).failures) == 2


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_a_wrong_signature_is_an_error_before_anything_is_sampled(tmp_path: Path, mode: list[str]) -> None:
    policy.demo_policy("sort abcdef:").save(tmp_path / "tiny")
    rows = [{"prompt": f"sort {x}:", "tests": [x]} for x in "abcdef"]
    data = write_jsonl(tmp_path / "data.jsonl", *rows)
    (tmp_path / "mine.py").write_text(
        "def f(completion, test):\n    return 1\ndef g(text, tests):\n    return len(tests)\n"
    )
    arguments = ["train", *mode, f"model={tmp_path}/tiny", f"data={data}", f"output={tmp_path}/runs"]
    result = CliRunner().invoke(app, [*arguments, f"reward={tmp_path}/mine.py:f"])
    assert result.exit_code == 1 and not (tmp_path / "runs").exists()
    assert "error: reward 'f': " in result.stderr and "got 'test', which 6 of 6 rows lack" in result.stderr
    assert "(is it 'tests'?)" in result.stderr
    without_reward = CliRunner().invoke(app, arguments)
    assert 'line 1: "answer" is missing, which the default reward needs' in without_reward.stderr
    assert not CliRunner().invoke(app, [*arguments, "--dry-run", f"reward={tmp_path}/mine.py:g"]).exit_code


@pytest.mark.parametrize("is_list", [False, True])
def test_a_slow_reward_is_reported_once_with_the_answer_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, is_list: bool
) -> None:
    printed, hangs, arrived = [], threading.Event(), threading.Event()
    stream = SimpleNamespace(write=lambda text: (printed.append(text), arrived.set()), flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    # The time is over as soon as the second answer hangs.
    monkeypatch.setattr(threading.Timer, "run", lambda timer: (hangs.wait(30), timer.function()))

    def slow(text: str) -> float:
        return float(text == "a" or (hangs.set(), arrived.wait(30))[1])

    component = RewardComponent("slow", 1.0, (lambda completions: [*map(slow, completions)]) if is_list else slow)
    rewards = Rewards((component,))
    before = threading.active_count()
    assert rewards(["a", "b"], ROWS).total == [1.0, 1.0] and threading.active_count() == before
    of = "a batch of 2 answers" if is_list else "answer 2 in a batch of 2 answers, 'b'"
    assert "".join(printed) == f"still waiting after 30 s for the reward 'slow' of {of}\n"
    assert rewards.patience == {"slow": 60.0}


def test_a_turn_without_a_number_is_a_failure() -> None:
    rewards = Rewards(turn_reward=lambda turns, _: [1.0, None])  # type: ignore[list-item, return-value]
    batch = rewards(["ab"], [EXAMPLE], [["a", "b"]])
    assert batch.total == [0.0] and batch.turns == [[0.0, 0.0]] and len(batch.failures) == 1


def test_the_digest_of_a_task_depends_on_prompts_answers_and_their_order() -> None:
    task = task_by_name("sorting", 8)
    first, second, *others = task.train
    changed = [
        replace(task, train=[second, first, *others]),
        replace(task, train=[replace(first, answer="?"), second, *others]),
        replace(task, train=others, held_out=[first, second, *task.held_out]),
        replace(task, train=[replace(first, prompt=[{"role": "user", "content": first.key}]), second, *others]),
        replace(task, train=[replace(first, columns={"level": 1}), second, *others]),
    ]
    assert task.digest == task_by_name("sorting", 8).digest and len({x.digest for x in (task, *changed)}) == 6


def test_the_time_limit_restores_the_callers_timer_and_handler() -> None:
    arrived: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: arrived.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with time_limit(30):
            time.sleep(0.05)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.15
        time.sleep(0.3)
        assert arrived == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_outside_the_main_thread_rewards_work_without_a_limit() -> None:
    slow = RewardComponent("slow", 1.0, lambda *_: time.sleep(0.05) or 1.0)
    batches: list[Any] = []
    worker = threading.Thread(target=lambda: batches.append(Rewards((slow,), timeout=0.01)([""], [EXAMPLE])))
    worker.start()
    worker.join(30)
    assert batches[0].total == [1.0] and not batches[0].failures


def test_a_keyboard_interrupt_in_a_reward_stops_the_run() -> None:
    def interrupted(*_: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rewards((RewardComponent("x", 1.0, interrupted),))([""], [EXAMPLE])


def test_a_reward_is_loaded_from_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_mine.py").write_text("FACTOR = 3\n")
    (tmp_path / "mine_reward.py").write_text(
        "from beside_mine import FACTOR\ndef long(completion, answer):\n    return FACTOR * len(completion)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    for spec, weight in [
        (f"{tmp_path}/mine_reward.py:long", 1.0),
        ("mine_reward.py:long", 1.0),
        ("-0.5*mine_reward:long", -0.5),
    ]:
        component = load_reward(spec)
        assert component[:2] == ("long", weight) and component.function("ab", "") == 6
    assert sys.path == path


def test_the_code_of_a_reward_is_its_files_or_its_lines(tmp_path: Path) -> None:
    (package := tmp_path / "mine").mkdir()
    (tmp_path / "plain").mkdir()  # without an __init__.py, as a folder of logs that has the name of a package
    for name, text in [("__init__", ""), ("near", "import json"), ("far", "X = 1"), ("../plain/deep", "")]:
        (package / f"{name}.py").write_text(text)
    (package / "rewards.py").write_text(
        "import torch, plain.deep\nfrom . import near\ndef f(text):\n    from mine.far import X\nclass C:\n"
        "    def __call__(self, text):\n        return 1\nc = C()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        functions = [load_reward(f"mine.rewards:{name}").function for name in ("f", "c")]
    finally:
        sys.path.remove(str(tmp_path))
    files = {f"file {name}.py" for name in ("rewards", "__init__", "near", "far", "deep")}
    before, of_object = (code_of([partial(function), None]) for function in functions)
    assert set(before) == files and of_object == before
    (package / "far.py").write_text("X = 2")
    after = code_of(functions)
    assert {name for name in files if after[name] != before[name]} == {"file far.py"}
    assert set(code_of([answer_found])) == {"function answer_found"}
    (package / "rewards.py").unlink()
    assert code_of([abs, functions[0]]) == {"function abs": "", "function f": ""}


def test_bad_rewards_are_refused() -> None:
    one = RewardComponent("one", 1.0, lambda *_: 1.0)
    for components, options, message in [
        ((one, one), {}, "got two named 'one'"),
        ((one._replace(weight=float("nan")),), {}, "expected a finite weight of 'one', got nan"),
        ((one,), {"timeout": 0}, "reward_timeout: expected a number of seconds above 0, got 0"),
    ]:
        with pytest.raises(InputError, match=re.escape(message)):
            Rewards(components, **options)


# Tasks


@pytest.mark.parametrize("name", TASKS)
def test_a_task_rewards_the_right_answer_with_one_and_holds_out_examples(name: str) -> None:
    task = task_by_name(name, 32)
    assert len(task.held_out) == 32 < len(task.train)
    for example in task.held_out:
        turns = example.answer.split(";") if task.reply else [example.answer]
        text = f"{example.prompt} 3 + 4 = {example.answer}" if name == "arithmetic" else example.answer
        (total,) = task.rewards([text], [example], [turns]).total
        # Of the arithmetic task, this text has wrong steps.
        assert total == pytest.approx(0.9 if name == "arithmetic" and example.answer != "7" else 1.0)
        assert task.rewards(["~"], [example], [["~"]]).total[0] < 0.5
        assert set(example.key + example.answer) <= set(task.characters)


def test_the_solutions_of_arithmetic_problems_have_right_steps() -> None:
    generator = random.Random(0)
    for made in (problem(generator) for _ in range(50)):
        assert steps_add_up(made.solution, made.answer) == 1
        assert steps_add_up(made.solution, made.answer + "0") == 0
    assert steps_add_up("22", "22") == 0 == steps_add_up("1 + 1 = 3, 20 + 2 = 22", "22")


def test_the_format_task_rewards_letters_and_marks_apart() -> None:
    task = task_by_name("format", 32)
    example = Example("abc as list:", "[a,b,c]")
    for text, content, marks in [("[a,b,c]", 1, 1), ("abc", 1, 0), ("[c,d,e]", 0, 1), ("f(a,b,c)", 1, 0)]:
        components = task.rewards([text], [example]).components
        assert components == {"content": [content], "format": [pytest.approx(marks, abs=0.15)]}, text


def test_jsonl_prompts_may_be_chats(tmp_path: Path) -> None:
    chats = [[{"role": "system", "content": "s"}, {"role": "user", "content": str(n % 4)}] for n in range(8)]
    task = jsonl_task(write_jsonl(tmp_path / "a.jsonl", *({"prompt": c, "answer": "1 "} for c in chats)), held_out=1)
    assert task.train[0].answer == "1"
    assert len(task.train) == 3 and task.train[0].prompt in chats
    assert task.train[0].key.startswith("system: s\nuser: ")
    for prompt in ([], [{"role": "user"}], [{"role": "user", "content": 3}], ["text"]):
        data = write_jsonl(tmp_path / "b.jsonl", {"prompt": prompt, "answer": 1})
        with pytest.raises(InputError, match='line 1: "prompt" must be text that is not empty, or a list of chat'):
            jsonl_task(data, held_out=1)


def test_columns_keep_their_json_types(tmp_path: Path) -> None:
    """The default reward compares texts."""
    values = (24, 2.5, "24", True, ["2", "4"], None)
    data = write_jsonl(tmp_path / "a.jsonl", *({"prompt": str(i), "answer": x, "n": x} for i, x in enumerate(values)))
    seen: dict[str, Any] = {}
    mine = RewardComponent("mine", 1.0, lambda completion, prompt, n, answer=None: seen.update({prompt: (answer, n)}))
    task = jsonl_task(data, held_out=1, rewards=[mine])
    task.rewards([""] * 6, [*task.train, *task.held_out])
    assert {key: repr(x) for key, x in seen.items()} == {str(i): repr((x, x)) for i, x in enumerate(values)}
    task = jsonl_task(write_jsonl(tmp_path / "b.jsonl", *({"prompt": str(x), "answer": x} for x in (24, 2.5))), 1)
    for example in (*task.train, *task.held_out):
        assert task.rewards([f"It is {example.prompt}.", "4"], [example] * 2).total == [1.0, 0.0]


def test_prompts_above_the_limit_are_left_out(character_policy: policy.Policy) -> None:
    task = task_by_name("sorting", 32)
    config = TrainConfig(max_prompt_tokens=len("sort abcd:"), max_new_tokens=8)
    kept, left_out = fitting(config, character_policy, task)
    assert {len(e.key) for e in [*kept.train, *kept.held_out]} == {9, 10}
    assert left_out == sum(len(e.key) > 10 for e in [*task.train, *task.held_out]) > 0
    assert left_out + len(kept.train) + len(kept.held_out) == len(task.train) + len(task.held_out)
    with pytest.raises(InputError, match="max_prompt_tokens: expected a limit that some prompts meet, got 8"):
        fitting(replace(config, max_prompt_tokens=8), character_policy, task)


# Dialogues


def solve(text: str) -> str:
    """Continue a dialogue with the calculator as the task expects."""
    prompt, _, said = text.partition(":")
    terms = re.findall(r"[+-]\d", prompt)
    results = re.findall(r"=(-?\d+);", said)
    if len(results) == len(terms):
        return f"{results[-1]}<eos>"
    return f"{results[-1] if results else prompt[0]}{terms[len(results)]}<eos>"


def dialogue(character_policy: policy.Policy, max_new_tokens: int = 30) -> Rollout:
    task = task_by_name("calculator", 8)
    examples = [EXAMPLE, Example("3+4 by calculator:", "3+4;7")]
    return sample(character_policy, examples, max_new_tokens=max_new_tokens, temperature=1.0, task=task)


def test_a_dialogue_masks_the_calculators_replies(
    character_policy: policy.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(character_policy, monkeypatch, solve)
    rollout = dialogue(character_policy)
    assert rollout.texts == ["2+7=9;9-4=5;5", "3+4=7;7"]
    assert rollout.turns == [["2+7", "9-4", "5"], ["3+4", "7"]]
    assert not rollout.truncated.any()
    decode = character_policy.tokenizer.decode
    for row, sampled in enumerate(["2+7<eos>9-4<eos>5<eos>", "3+4<eos>7<eos>"]):
        assert decode(rollout.answer_ids[row][rollout.answer_mask[row]]) == sampled
    replies = rollout.attention_mask[:, rollout.prompt_width :].bool() & ~rollout.answer_mask
    assert decode(rollout.answer_ids[0][replies[0]]) == "=9;=5;"
    assert rollout.turn_of_token[0].tolist() == [0] * 7 + [1] * 7 + [2] * 2
    batch = task_by_name("calculator", 8).rewards(rollout.texts, [EXAMPLE, Example("", "3+4;7")], rollout.turns)
    assert batch.total == [pytest.approx(1), 1] and batch.turns == [[pytest.approx(1 / 3)] * 3, [0.5, 0.5]]


def test_a_dialogue_ends_at_the_limits(character_policy: policy.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(character_policy, monkeypatch, solve)
    for limit, texts in [
        (2, ["2+", "3+"]),  # a turn is cut
        (7, ["2+7", "3+4"]),  # no room for the next turn, so no reply
        (8, ["2+7=9;9", "3+4=7;7"]),  # 7<eos> does not fit
        (9, ["2+7=9;9-", "3+4=7;7"]),
    ]:
        rollout = dialogue(character_policy, limit)
        assert rollout.texts == texts and rollout.answer_ids.shape[1] <= limit
        assert rollout.truncated.tolist() == [True, limit < 9]
    speak(character_policy, monkeypatch, lambda _: "1+1<eos>")
    endless_calls = dialogue(character_policy)
    assert endless_calls.texts == ["1+1=2;1+1=2;1+1"] * 2 and not endless_calls.truncated.any()


def test_the_calculator_replies_only_to_calls() -> None:
    assert calculate("12+7", EXAMPLE) == "=19;" and calculate(" -3 * 4 ", EXAMPLE) == "=-12;"
    for text in ("5", "2+7=9;9-4", "__import__('os')", "2**9", "", "9" * 99 + "*9"):
        assert calculate(text, EXAMPLE) is None


def test_text_that_looks_like_the_calculators_earns_nothing(
    character_policy: policy.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(character_policy, monkeypatch, lambda _: "2+7=9;9-4=5;5<eos>")
    rollout = dialogue(character_policy)
    task = task_by_name("calculator", 8)
    assert task.rewards(rollout.texts[:1], [EXAMPLE], rollout.turns[:1]).total[0] < 0.1


def test_replies_use_the_chat_template(character_policy: policy.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    character_policy.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    speak(character_policy, monkeypatch, lambda text: solve(re.sub(r"\[.\]|<eos>|\n", "", text)))
    rollout = dialogue(character_policy, max_new_tokens=60)
    ids = rollout.input_ids[1][rollout.attention_mask[1].bool()]
    conversation = [
        {"role": "user", "content": "3+4 by calculator:"},
        {"role": "assistant", "content": "3+4"},
        {"role": "user", "content": "=7;"},
        {"role": "assistant", "content": "7"},
    ]
    whole = character_policy.tokenizer.apply_chat_template(conversation, tokenize=False)
    assert character_policy.tokenizer.decode(ids) + "\n" == whole
    assert encode(character_policy, ["x"]) == encode(character_policy, [[{"role": "user", "content": "x"}]])


TRL: Any = find_spec("trl")
FOLDER = Path(TRL.origin).parent / "chat_templates" if TRL else Path("nowhere")
TEMPLATES = sorted(FOLDER.glob("*.jinja"))  # none in old releases
SPECIAL = re.compile(r"<[^<>\s]+>")
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many legs?"}
WITHOUT_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEGUN, SAID = {"role": "assistant", "content": "It is "}, {"role": "assistant", "content": "It is eight"}


def encoder(template: str, *special: str) -> Any:
    """Return what `encode` needs of a policy."""
    tokenizer: Any = chat_model.tokenizer(*special)
    tokenizer.chat_template = template
    tokenizer.bos_token = chat_model.PAD
    return SimpleNamespace(tokenizer=tokenizer, chat_template_kwargs={})


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_reply_is_what_the_template_writes_between_two_turns(path: Path) -> None:
    """Compare with a rendering of the complete conversation, for every template that TRL has."""
    template = path.read_text()
    policy = encoder(template, *SPECIAL.findall(template))
    tokenizer = policy.tokenizer
    for prompt in ([QUESTION], [SYSTEM, QUESTION], [QUESTION, BEGUN]):
        for reply in ("Wrong. Try again.", "", " <|im_end|>\n<|return|> x "):
            chat = [*(message for message in prompt if message is not BEGUN), SAID, {"role": "user", "content": reply}]
            try:
                whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            except TemplateError:
                whole = ""
            following = whole.partition("eight")[2]
            if not following:  # there are no system prompts, or contents that are text are left out
                with pytest.raises(
                    InputError, match=r"^prompt '.*: (the chat template fails|expected a chat template)"
                ):
                    check_replies(policy, [prompt])
                continue
            check_replies(policy, [prompt])
            end = SPECIAL.match(following)[0]  # type: ignore[index]
            ids = encode_reply(policy, prompt, reply, tokenizer.convert_tokens_to_ids(end))
            assert end + tokenizer.decode(ids) == following
            (asked,) = encode(policy, [prompt])
            assert (BEGUN in prompt) == tokenizer.decode(asked).rstrip().endswith("It is")


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("qwen3", "<|endoftext|>", "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        ("phi3_5", "<|endoftext|>", "\n<|user|>\nNo.<|end|>\n<|assistant|>\n"),
        ("gptoss", "<|return|>", "<|start|>user<|message|>No.<|end|><|start|>assistant"),
        ("cohere2", "<eos>", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>No.<|END_OF_TURN_TOKEN|>"),
        ("glm4moe", "<|endoftext|>", "<|user|>\nNo.<|assistant|>"),  # only a user message writes <|user|>
        ("glm4moe", "<|user|>", "\nNo.<|assistant|>"),
        ("without_ends", "<eos>", "\n<|im_start|>user\nNo.\n<|im_start|>assistant\n"),
    ],
)
def test_any_end_token_stands_for_the_end_of_a_turn(name: str, end: str, expected: str) -> None:
    if not TEMPLATES:
        pytest.skip("no release of TRL with chat templates is installed")
    template = WITHOUT_ENDS if name == "without_ends" else (FOLDER / f"{name}.jinja").read_text()
    policy = encoder(template, end, *SPECIAL.findall(template))
    ids = encode_reply(policy, "How many legs?", "No.", policy.tokenizer.convert_tokens_to_ids(end))
    assert policy.tokenizer.decode(ids).startswith(expected)


TURNS = "{% for m in messages %}[{{ m.role[0] }}]{{ CONTENT }}<|im_end|>{% endfor %}"
THINKS = "{% generation %}{% endgeneration %}Think{% if enable_thinking is defined %}.{% endif %}"


def test_a_chat_may_contain_the_placeholders(character_policy: policy.Policy) -> None:
    character_policy.tokenizer.chat_template = TURNS.replace("CONTENT", "m.content")
    tokens = []
    for n in (0, 9):
        taken = f"[the-answer-of-turn-{n}][the-reply-to-turn-{n}]"
        check_replies(character_policy, [taken])
        end = character_policy.tokenizer.eos_token_id
        tokens.append(encode_reply(character_policy, taken, f"{taken} 1", end))
        assert character_policy.tokenizer.decode(tokens[-1]) == f"<|im_end|>[u]{taken} 1<|im_end|>"


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        (None, {"enable_thinking": False}, r"expected none, because the tokenizer has no chat template, got \{'enable"),
        (THINKS, {"enable_thinkin": False}, r"got 'enable_thinkin', which it does not \(is it 'enable_thinking'\?\)"),
        (THINKS, {"Think": 1}, "got 'Think', which it does not"),  # text, not a variable
        ({"default": TURNS, "other": THINKS}, {"enable_thinking": True}, None),
        (THINKS, {"enable_thinking": True}, None),
        (None, {}, None),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(
    character_policy: policy.Policy, template: Any, variables: dict[str, Any], message: str | None
) -> None:
    character_policy.tokenizer.chat_template = template
    config = TrainConfig(chat_template_kwargs=variables)
    with pytest.raises(InputError, match=f"^chat_template_kwargs: .*{message}") if message else nullcontext():
        loading.prepared(character_policy.model, character_policy.tokenizer, config)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("m.content ~ (' Think.' if loop.last and m.role == 'user' else '')", "the prompt differently when an answer"),
        ("(messages[0].content ~ m.content) if loop.last else m.content", "the prompt differently when an answer"),
        ("m.content if m.role == 'user' else ''", "the assistant's message 0 times"),
        ("m.content if loop.index < 3 else ''", "does not render the reply to an answer"),
    ],
)
def test_templates_that_do_not_preserve_prefixes_are_refused(
    character_policy: policy.Policy, content: str, reason: str
) -> None:
    character_policy.tokenizer.chat_template = TURNS.replace("CONTENT", content)
    task = task_by_name("calculator", 8)
    with pytest.raises(InputError, match=f"^prompt 'user: .* by calculator:': .*{reason}"):
        fitting(TrainConfig(), character_policy, task)
    fitting(TrainConfig(), character_policy, replace(task, reply=None))


def test_a_prompt_without_a_template_has_no_end_token(character_policy: policy.Policy) -> None:
    tokenizer = character_policy.tokenizer
    without = tokenizer(["2+7", ""])["input_ids"]
    names = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<unk>", "<eos>")]
    single = "<unk> $A <eos> <eos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)
    assert tokenizer("2")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode(character_policy, ["2+7", ""]) == [[tokenizer.unk_token_id, *ids] for ids in without]


def test_the_users_rewards_replace_those_of_turns_and_get_what_the_policy_wrote(
    character_policy: policy.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calculator writes the answer, 9. The policy does not."""
    seen: list[tuple[str, str]] = []
    mine = RewardComponent("mine", 0.5, lambda *pair: seen.append(pair) or 1.0)
    task = task_by_name("calculator", 8, [mine, RewardComponent("found", 1.0, answer_found)])
    example = Example(EXAMPLE.prompt, "9")
    speak(character_policy, monkeypatch, lambda text: "<eos>" if "=9;" in text else "2+7<eos>")
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0}
    (answer,), batch = collect(TrainConfig(), character_policy, task, [example], **options)
    assert answer.text == "2+7=9;" and seen == [("2+7\n", "9")]
    assert batch == ([0.5], {"mine": [1.0], "found": [0.0]}, [], None)
