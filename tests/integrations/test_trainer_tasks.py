"""Tasks, rewards and chats of the reference trainer."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.reference_runs import write_jsonl
from tokenizers import processors

from gspo_kernels.integrations.reference_trainer import InputError, TrainConfig, loading, policy
from gspo_kernels.integrations.reference_trainer.chat import encode
from gspo_kernels.integrations.reference_trainer.data import code_of, jsonl_task, load_reward, task_of
from gspo_kernels.integrations.reference_trainer.held_out import lines_of
from gspo_kernels.integrations.reference_trainer.sampling import fitting
from gspo_kernels.integrations.reference_trainer.stopping import StopSignals
from gspo_kernels.integrations.reference_trainer.trainer import Learner
from gspo_kernels.integrations.tasks import (
    TASKS,
    Example,
    RewardBatch,
    RewardComponent,
    Rewards,
    task_by_name,
)
from gspo_kernels.integrations.tasks.rewards import time_limit

EXAMPLE = Example("2+7:", "9")


@pytest.fixture
def demo() -> policy.Policy:
    return policy.demo_policy(policy.PRINTABLE)


# Rewards


def endless(*_: str) -> float:
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            pass


def lines(*_: str) -> float:
    raise ValueError("first\n\tsecond")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lines, "ValueError: first second"),
        (endless, "no result after 0.05 s"),
        (lambda *_: "good", "ValueError: could not convert string to float: 'good'"),
        (lambda *_: 1e39, "ValueError: expected a finite float32 number, got 1e+39"),
        (lambda *_: -1e39, "ValueError: expected a finite float32 number, got -1e+39"),
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
    answer: Any = SimpleNamespace(example=EXAMPLE, text="ab")
    assert [(x["reward"], x["components"]["equal"]) for x in lines_of([answer] * 4, batch)] == [
        (2.5, 1.0),
        (0.5, None),
        (2.0, 1.0),
        (None, None),
    ]
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
        (
            "prompts, **kwargs",
            {"prompts": PROMPTS, "kwargs": {"completions": SAID, "level": [1, 2], "answer": ANSWERS}},
        ),
    ],
)
def test_a_reward_gets_the_columns_that_it_asks_for(parameters: str, expected: dict[str, Any]) -> None:
    calls: list[dict[str, Any]] = []
    space: dict[str, Any] = {"calls": calls}
    takes_lists = parameters.startswith(("completions", "prompts"))
    returned = "[0.5, None]" if takes_lists else "0.5"
    exec(f"def reward({parameters}):\n    calls.append(dict(locals()))\n    return {returned}", space)
    rewards = Rewards((RewardComponent("mine", 2.0, space["reward"]),))
    rewards.check(ROWS)
    batch = rewards(["4", "6"], ROWS)
    if takes_lists:
        assert calls == [expected] and batch.components == {"mine": [0.5, None]} and batch.total == [1.0, 0.0]
    else:
        assert calls == [{name: x[i] for name, x in expected.items()} for i in (0, 1)] and batch.total == [1.0, 1.0]
    assert not batch.failures


THINKS = "{% if enable_thinking is defined %}.{% endif %}"


@pytest.mark.parametrize(
    ("template", "variable", "message"),
    [
        (None, "enable_thinking", "expected none without a chat template, got 'enable_thinking'"),
        (THINKS, "enable_thinkin", r"got 'enable_thinkin' \(is it 'enable_thinking'\?\)"),
        ({"default": "text", "other": THINKS}, "enable_thinking", ""),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(
    demo: policy.Policy, template: Any, variable: str, message: str
) -> None:
    demo.tokenizer.chat_template = template
    config = TrainConfig(chat_template_kwargs={variable: False})
    with pytest.raises(InputError, match=message) if message else nullcontext():
        loading.prepared(demo.model, demo.tokenizer, config)


def test_a_list_of_rewards_fails_as_a_whole_or_by_entry() -> None:
    for result, failed in [([1.0, float("nan")], [1]), ([1.0], [0, 1]), (3, [0, 1]), (("1", 2), [])]:
        batch = Rewards((RewardComponent("mine", 1.0, lambda completions, result=result: result),))(["a", "b"], ROWS)
        assert [failure.completion for failure in batch.failures] == ["ab"[i] for i in failed], result
        assert [x == 0 for x in batch.total] == [i in failed for i in (0, 1)]
    slow = RewardComponent("slow", 1.0, lambda completions: time.sleep(0.15) or [1.0, 1.0])
    assert not Rewards((slow,), timeout=0.1)(["a", "b"], ROWS).failures  # the limit is per completion
    assert len(Rewards((slow,), timeout=0.05)(["a", "b"], ROWS).failures) == 2
    assert task_of(TrainConfig(reward_timeout=9.0)).rewards.timeout == 9.0
    assert task_of(TrainConfig(), task_by_name("sorting", 32), len).rewards.components[0].name == "len"


def test_the_time_limit_restores_the_callers_timer_and_handler() -> None:
    arrived: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, _: arrived.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with time_limit(30):
            pass
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        time.sleep(0.3)
        assert arrived == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_rewards_and_runs_work_outside_the_main_thread() -> None:
    """Python lets only the main thread install signal handlers."""

    def rewarded() -> RewardBatch:
        with StopSignals():
            return Rewards((RewardComponent("one", 1.0, lambda *_: 1.0),))(["9"], [EXAMPLE])

    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(rewarded).result()
    assert batch.total == [1.0] and not batch.failures


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
        assert task_of(TrainConfig(reward=(spec,)), None, len).rewards.components[0].name == "len"
    assert sys.path == path


def test_the_code_of_a_reward_is_its_file(tmp_path: Path) -> None:
    mine = tmp_path / "rewards.py"
    text = "def f(text):\n    return 1\nclass C:\n    def __call__(self, text):\n        return 1\nc = C()\n"
    digests = []
    for content in (text, text, text + "# changed\n"):
        mine.write_text(content)
        functions = [load_reward(f"{mine}:{name}").function for name in "fc"]
        (digest,) = {code_of(x) for x in (*functions, partial(functions[0]))}
        digests.append(digest)
    assert digests[0] == digests[1] != digests[2] and code_of(abs) == ""


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
        right, wrong = task.rewards([example.answer, "~"], [example] * 2).total
        assert right == pytest.approx(1.0) and wrong < 0.5
        assert set(example.key + example.answer) <= set(task.characters)


def test_jsonl_prompts_may_be_chats(tmp_path: Path) -> None:
    chats = [[{"role": "system", "content": "s"}, {"role": "user", "content": str(n % 4)}] for n in range(8)]
    rows = ({"prompt": c, "answer": "1 " if n < 4 else "of a repeated prompt"} for n, c in enumerate(chats))
    task = jsonl_task(write_jsonl(tmp_path / "a.jsonl", *rows), held_out=1)
    assert [example.answer for example in task.train] == ["1"] * 3
    assert task.train[0].prompt in chats
    assert task.train[0].key.startswith("system: s\nuser: ")
    for prompt in ([], [{"role": "user"}], [{"role": "user", "content": 3}], [{**chats[0][1], "name": "b"}], ["text"]):
        data = write_jsonl(tmp_path / "b.jsonl", {"prompt": prompt, "answer": 1})
        with pytest.raises(InputError, match='line 1: "prompt" must be text that is not empty, or a list of chat'):
            jsonl_task(data, held_out=1)


def test_at_most_a_fifth_of_a_file_is_held_out(tmp_path: Path) -> None:
    for count, asked, expected in ((20, 128, 4), (20, 3, 3), (4, 128, 1)):
        data = write_jsonl(tmp_path / "a.jsonl", *({"prompt": str(i), "answer": i} for i in range(count)))
        task = jsonl_task(data, held_out=asked)
        assert (len(task.held_out), len(task.train)) == (expected, count - expected)


def test_columns_keep_their_json_types(tmp_path: Path) -> None:
    """The default reward compares texts. Only a line feed ends a line of the file."""
    values = (24, 2.5, "24", True, ["2", "\u2028\x85"], None)
    rows = ({"prompt": str(i), "answer": x, "n": x} for i, x in enumerate(values))
    data = write_jsonl(tmp_path / "a.jsonl", *(json.dumps(row, ensure_ascii=False) for row in rows))
    seen: dict[str, Any] = {}
    mine = RewardComponent("mine", 1.0, lambda completion, prompt, n, answer=None: seen.update({prompt: (answer, n)}))
    task = jsonl_task(data, held_out=1, rewards=[mine])
    task.rewards([""] * 6, [*task.train, *task.held_out])
    assert {key: repr(x) for key, x in seen.items()} == {str(i): repr((x, x)) for i, x in enumerate(values)}
    task = jsonl_task(write_jsonl(tmp_path / "b.jsonl", *({"prompt": str(x), "answer": x} for x in (24, 2.5))), 1)
    for example in (*task.train, *task.held_out):
        assert task.rewards([f"It is {example.prompt}.", "4"], [example] * 2).total == [1.0, 0.0]


def test_prompts_above_the_limit_are_left_out(demo: policy.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_by_name("sorting", 32)
    config = TrainConfig(max_prompt_tokens=len("sort abcd:"), max_new_tokens=8)
    kept, left_out = fitting(config, demo, task)
    assert {len(e.key) for e in [*kept.train, *kept.held_out]} == {9, 10}
    assert left_out == sum(len(e.key) > 10 for e in [*task.train, *task.held_out]) > 0
    assert left_out + len(kept.train) + len(kept.held_out) == len(task.train) + len(task.held_out)
    said: list[object] = []
    assert Learner(config, 0, task, demo, said.append).task == kept
    assert said == [f"max_prompt_tokens=10: {left_out} prompts are left out"]
    with pytest.raises(InputError, match="max_prompt_tokens: expected a limit that some prompts meet, got 8"):
        fitting(replace(config, max_prompt_tokens=8), demo, task)
    monkeypatch.setattr(policy.decoder_config(demo.inner), "max_position_embeddings", 18)  # longer prompts do not fit
    assert fitting(config, demo, task) == (kept, left_out)
    with pytest.raises(InputError, match=r"max_new_tokens=9: with the longest prompt \(10 tokens\) .* 18 positions"):
        fitting(replace(config, max_new_tokens=9), demo, task)
    with pytest.raises(InputError, match=r"with the longest prompt \(10 tokens\)"):
        fitting(replace(config, max_new_tokens=9), demo, replace(task, held_out=[Example("a:", "")]))


# Chats

TURNS = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<eos>{% endfor %}"


def test_prompts_use_the_chat_template(demo: policy.Policy) -> None:
    demo.tokenizer.chat_template = TURNS + "{% if add_generation_prompt %}[a]{% endif %}"
    system, user = {"role": "system", "content": "brief"}, {"role": "user", "content": "2+7"}
    for prompt, text in [
        ("2+7", "[u]2+7<eos>[a]"),
        ([system, user], "[s]brief<eos>[u]2+7<eos>[a]"),
        ([user, {"role": "assistant", "content": "It is "}], "[u]2+7<eos>[a]It is "),  # is continued
    ]:
        assert encode(demo, [prompt]) == [demo.tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_a_prompt_without_a_template_has_no_end_token(demo: policy.Policy) -> None:
    tokenizer = demo.tokenizer
    without = tokenizer(["2+7", ""])["input_ids"]
    names = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<unk>", "<eos>")]
    single = "<unk> $A <eos> <eos>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)
    assert tokenizer("2")["input_ids"][-1] == tokenizer.eos_token_id
    assert encode(demo, ["2+7", ""]) == [[tokenizer.unk_token_id, *ids] for ids in without]
