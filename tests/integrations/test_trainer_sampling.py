"""Each answer has random numbers of its own, and its tokens have the probabilities that the loss assumes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.reference_runs import rows_of, small

from gspo_kernels.integrations.reference_trainer import distributed, held_out, policy, train
from gspo_kernels.integrations.reference_trainer.config import Truncation
from gspo_kernels.integrations.reference_trainer.sampling import ChosenTokens, answers_to, choose, sampler_weights
from gspo_kernels.integrations.tasks import Example, RewardComponent

SIX = [Example(f"sort {letters}:", "") for letters in ("abc", "fed", "abc", "c", "fedcba", "ab")]
SEEDS = [(3, 1, place) for place in range(6)]


@pytest.fixture
def demo() -> policy.Policy:
    """Return a demo policy whose distributions are far from uniform."""
    torch.manual_seed(0)
    demo = policy.demo_policy()
    with torch.no_grad():
        demo.head.get_parameter("weight").mul_(4)
    return demo


# The distribution


def test_a_token_is_chosen_in_proportion_to_its_probability() -> None:
    """With equally spaced numbers, every share is within one spacing of the probability, whatever the seed."""
    count = 20_000
    logits = torch.tensor([-math.inf, 0.3, -200.0, 2.0, -3.0, 1.0, -math.inf, -200.0])
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shares = torch.bincount(choose(logits.expand(count, -1), numbers), minlength=8) / count
    torch.testing.assert_close(shares.double(), logits.double().softmax(-1), rtol=0, atol=1.01 / count)


@pytest.mark.parametrize("number", [0.0, 2**-53, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_chosen(number: float) -> None:
    """At both ends of the vocabulary, and where the cumulative sum is rounded."""
    logits = torch.randn(500, 1_000, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, :3] = logits[:, -3:] = -math.inf
    logits[:, 500] = logits.amax(-1) - 200  # its probability is 0 in fp32
    tokens = choose(logits, torch.full((500,), number, dtype=torch.float64))
    assert (logits.softmax(-1).gather(1, tokens[:, None]) > 0).all()
    only = torch.full((1, 5), -math.inf).index_fill(1, torch.tensor([3]), 7.0)
    assert choose(only, torch.tensor([number], dtype=torch.float64)).item() == 3


def test_a_sum_that_is_not_monotonic_chooses_no_token_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU adds in parallel, so rounding may raise the sum at a token of probability 0, or lower it."""
    cumsum = torch.Tensor.cumsum
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    logits[:, ::2] = -math.inf
    uneven = torch.arange(100) % 4 * 1e-3
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, *args, **options: cumsum(self, *args, **options) + uneven)
    numbers = torch.arange(10_000, dtype=torch.float64) / 10_000
    assert (choose(logits.expand(10_000, -1), numbers) % 2 == 1).all()


def test_small_probabilities_of_a_large_vocabulary_are_kept() -> None:
    """After a token with nearly all of the mass, 2**17 tokens have a probability of 2**-27 each."""
    logits = torch.zeros(1, 2**17 + 1)
    logits[0, 0] = 27 * math.log(2)
    numbers = 1 - (torch.arange(64, dtype=torch.float64) + 1000) / 2**27
    tokens = choose(logits.expand(64, -1), numbers)
    assert len(set(tokens.tolist())) == len(numbers)


def test_kept_ids_and_log_probs_are_those_at_the_temperature() -> None:
    scores = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    for temperature in (0.4, 1.5):
        chosen = ChosenTokens(torch.rand(5, 1, dtype=torch.float64), temperature, Truncation(top_p=0.8))
        tokens = chosen(torch.zeros(5, 1, dtype=torch.long), scores).argmax(1)
        p, ids = (scores.double() / temperature).softmax(1).sort(descending=True)
        kept = [row[: int((q.cumsum(0) < 0.8).sum()) + 1] for row, q in zip(ids, p, strict=True)]
        assert [sorted(x) for x in chosen.kept[0]] == [sorted(x.tolist()) for x in kept]
        for row, token, log_prob, of_row in zip(scores / temperature, tokens, chosen.log_probs[0], kept, strict=True):
            torch.testing.assert_close(log_prob, row[token] - row[of_row].logsumexp(0))


# Streams


def test_an_answer_does_not_depend_on_the_others_of_its_batch(demo: policy.Policy) -> None:
    options: dict[str, Any] = dict(group_size=3, max_new_tokens=7, temperature=1.0)
    whole = [answer.ids for answer in answers_to(demo, SIX, seeds=SEEDS, **options)]
    for parts in ([1] * 6, [3, 3], [2, 4], [5, 1]):
        shares = [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(parts)])]
        apart = [
            x.ids for share in shares for x in answers_to(demo, SIX[share], seeds=SEEDS[share], width=12, **options)
        ]
        assert apart == whole, parts
    assert len(set(map(tuple, whole))) > 15  # of 18, although two prompts are the same


def test_each_position_of_an_answer_has_a_random_number_of_its_own(demo: policy.Policy) -> None:
    """If all tokens are equally likely, the numbers can be read from the tokens."""
    with torch.no_grad():
        demo.head.get_parameter("weight").zero_()
    answers = answers_to(demo, SIX, group_size=4, max_new_tokens=40, temperature=1.0, seeds=SEEDS)
    numbers = [row for seed in SEEDS for row in np.random.default_rng(seed).random((4, 40))]
    for answer, row in zip(answers, numbers, strict=True):
        assert answer.ids == (row * demo.model.config.vocab_size).astype(int).tolist()[: len(answer.ids)]
    assert len({len(answer.ids) for answer in answers}) > 3


def test_a_run_names_each_stream_by_seed_step_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def recorded(*args: Any, **options: Any) -> Any:
        used.extend(options.get("seeds") or [])
        return answers_to(*args, **options)

    monkeypatch.setattr(held_out, "answers_to", recorded)
    # Reorder the prompts, as if this process had another part of them. A stream is named by the place of its prompt in
    # the whole step.
    monkeypatch.setattr(distributed, "share", lambda items: [*items[2:], *items[:2]])
    train(small(tmp_path, seeds=(0, 7), steps=2))
    assert used == list(itertools.product((0, 7), (1, 2), (2, 3, 0, 1)))


# A sampler in bf16


def test_rounded_weights_sample_and_the_exact_ones_come_back(demo: policy.Policy) -> None:
    demo.head.requires_grad_(False)  # as without an adapter on the head
    weights = list(demo.model.parameters())
    before = [weight.detach().clone() for weight in weights]
    with pytest.raises(KeyboardInterrupt), sampler_weights(demo, "bf16"):
        assert all(torch.equal(x.to(torch.bfloat16), y) for x, y in zip(before, weights, strict=True))
        raise KeyboardInterrupt
    assert all(map(torch.equal, before, weights))


# Rewards that use random numbers


def noisy(completion: str, answer: str) -> float:
    import random

    return random.random() + float(np.random.rand()) + torch.rand(()).item()


def test_rewards_with_random_numbers_are_the_same_after_a_resume(tmp_path: Path) -> None:
    reward = [RewardComponent("noisy", 1.0, noisy)]
    whole = rows_of(train(small(tmp_path / "whole", steps=3), reward=reward).folder)
    train(small(tmp_path, steps=2, checkpoint_every=1), reward=reward)
    noisy("", "")
    resumed = rows_of(train(small(tmp_path, steps=3, checkpoint_every=1, resume=True), reward=reward).folder)
    for name in ("reward", "eval_reward"):
        assert [row.get(name) for row in resumed] == [row.get(name) for row in whole], name
    assert len({row["reward"] for row in whole[1:]}) == 3
