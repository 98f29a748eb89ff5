"""Numbers of the reference trainer, compared with formulas instead of another run of the trainer.

Two runs that share a wrong divisor, temperature or mask agree with each other. So every expected value here is computed
in float64 from logits, or by hand.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.reference_runs import rows_of, small
from tolerance import METRIC_ABSOLUTE, METRIC_RELATIVE, MODEL_GRADIENT_RELATIVE, PARAMETER_ABSOLUTE
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels.advantages import RunningMoments
from gspo_kernels.integrations.reference_trainer import TrainConfig, measures, policy, train, trainer, update
from gspo_kernels.integrations.reference_trainer.advantages import advantages_of
from gspo_kernels.integrations.reference_trainer.loading import load_policy
from gspo_kernels.integrations.reference_trainer.optimizer import Optimizer
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, sample
from gspo_kernels.integrations.settings import Step
from gspo_kernels.integrations.tasks import Example, RewardBatch, RewardComponent, task_by_name
from gspo_kernels.metrics import DIVISORS

WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def close(value: Any) -> Any:
    return pytest.approx(float(value), rel=METRIC_RELATIVE, abs=METRIC_ABSOLUTE)


# One update


def demo(seed: int, scale: float = 1.0) -> policy.Policy:
    torch.manual_seed(seed)
    made = policy.demo_policy()
    with torch.no_grad():
        made.head.weight.mul_(scale)  # pyright: ignore[reportOperatorIssue, reportCallIssue]
    return made


def table_of_logits(model: Any, rollout: Rollout, temperature: float) -> Tensor:
    """Return the log-probs of all ids, [B, T, V]."""
    positions = (rollout.attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(rollout.input_ids, attention_mask=rollout.attention_mask, position_ids=positions).logits
    return (logits[:, rollout.prompt_width - 1 : -1] / temperature).log_softmax(-1)


def log_probs_of_logits(model: Any, rollout: Rollout, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the answers from logits, [B, T]."""
    table = table_of_logits(model, rollout, temperature)
    return table.gather(-1, rollout.answer_ids[..., None])[..., 0], -(table.exp() * table).sum(-1)


def weights_of_tokens(aggregation: str, mask: Tensor, divisor: float) -> Tensor:
    """Return the weight of each token in a loss, [B, T]."""
    per_sequence = mask.sum(1, keepdim=True).clamp(min=1) if aggregation == "seq-mean-token-mean" else 1
    return mask / per_sequence / divisor


def expected_update(truth: Any, rollout: Rollout, batch: update.Batch, config: TrainConfig) -> dict[str, Tensor]:
    """Return the loss of an update and the metrics of its answers, in float64."""
    of, mask = config.objective, rollout.answer_mask
    filled = mask.any(1)
    lp, entropy = log_probs_of_logits(truth, rollout, config.temperature)
    assert batch.ref_log_probs is not None and batch.advantages is not None
    old, ref, advantages = (x.double() for x in (batch.old_log_probs, batch.ref_log_probs, batch.advantages))
    r = torch.where(mask, lp - old, 0)
    u = r.sum(1) / mask.sum(1).clamp(min=1)
    s, a = u.exp()[:, None], advantages[:, None]
    policy_term = -torch.minimum(s * a, s.clamp(1 - of.clip_low, 1 + of.clip_high) * a)
    k3 = torch.where(mask, (ref - lp).exp() - (ref - lp) - 1, 0)

    def divisor(aggregation: str) -> float:
        return float(mask.sum() if aggregation == "token-mean" else filled.sum())

    kl = of.kl_aggregation or of.aggregation
    loss = (weights_of_tokens(of.aggregation, mask, divisor(of.aggregation)) * policy_term).sum()
    loss = loss + of.kl_coef * (weights_of_tokens(kl, mask, divisor(kl)) * k3).sum()
    low, high = (a < 0) & (s < 1 - of.clip_low), (a > 0) & (s > 1 + of.clip_high)
    ratios = s[filled, 0]
    clipped = (low | high)[filled, 0].double()
    return {
        "loss": loss,
        "clip_fraction": clipped.mean(),
        "clip_fraction_low": low[filled, 0].double().mean(),
        "clip_fraction_high": high[filled, 0].double().mean(),
        "token_clip_fraction": ((low | high) & mask).sum() / mask.sum(),
        "token_clip_fraction_low": (low & mask).sum() / mask.sum(),
        "token_clip_fraction_high": (high & mask).sum() / mask.sum(),
        "ratio_mean": ratios.mean(),
        "ratio_min": ratios.min(),
        "ratio_max": ratios.max(),
        "kl_to_old": -r[mask].mean(),
        "kl": k3[mask].mean(),
        "entropy": entropy[mask].mean(),
        "token_log_ratio_std": r[mask].std(correction=0),
        "sequence_log_ratio_std": u[filled].std(correction=0),
    }


def expected_distillation(truth: Any, teacher: Any, rollout: Rollout, config: TrainConfig) -> dict[str, Tensor]:
    """Return the mean KL(teacher || student), whose last outcome is all ids but the teacher's likeliest, in float64."""
    mask = rollout.answer_mask
    p, q = (table_of_logits(model, rollout, config.temperature)[mask].exp() for model in (truth, teacher))
    q, ids = q.detach().topk(config.distillation_k)
    p = p.gather(-1, ids)
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    return {"distillation": (q * (q / p).log()).sum(-1).mean(), "teacher_mass": 1 - q[:, -1].mean()}


UPDATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the objective, options of the run
    "sequences, KL of tokens": ({"kl_aggregation": "token-mean"}, {}),
    "tokens, KL of sequences": (
        {"aggregation": "token-mean", "kl_aggregation": "seq-mean-token-mean"},
        {"temperature": 0.7},
    ),
    "a teacher": ({}, {"teacher": "unused", "distillation_coef": 0.5, "distillation_k": 3}),
}


@pytest.mark.parametrize("micro_batch_size", [0, 1, 4])
@pytest.mark.parametrize("name", UPDATES)
def test_an_update_equals_the_formulas(tmp_path: Path, name: str, micro_batch_size: int) -> None:
    """Loss, gradient and metrics. Answers differ in length, one has no tokens, and the gradient is clipped.

    With micro-batches of 1, the answer without tokens has its own.
    """
    fields, options = UPDATES[name]
    of = Objective(**{**WIDE, "kl_coef": 0.3, **fields})
    sizes: dict[str, Any] = dict(updates_per_rollout=1, max_grad_norm=0.01)
    config = small(tmp_path, objective=of, micro_batch_size=micro_batch_size, **sizes, **options)
    trained = demo(0)
    trained.initial = demo(1, scale=3.0)
    rollout = sample(trained, [Example("sort ba:", "")] * 4, group_size=4, max_new_tokens=7, temperature=1.0)
    rollout.answer_mask[:5, 2:] = False
    rollout.answer_mask[7] = False
    (epoch,) = update.mini_batches(config, seed=0, step=1)
    batch = update.with_log_probs(config, trained, rollout, epoch)
    truth = demo(0).model.double()
    trained.teacher = demo(2, scale=3.0) if config.teacher else None
    mask = rollout.answer_mask
    assert batch.ref_log_probs is not None
    for ours, model in ((batch.old_log_probs, truth), (batch.ref_log_probs, demo(1, scale=3.0).model.double())):
        expected = log_probs_of_logits(model, rollout, config.temperature)[0].detach()
        torch.testing.assert_close(ours[mask].double(), expected[mask], rtol=METRIC_RELATIVE, atol=METRIC_ABSOLUTE)
    generator = torch.Generator().manual_seed(0)
    shift = (
        torch.randn(16, 1, generator=generator) / 2 + torch.randn(16, 7, generator=generator)[:, : mask.shape[1]] / 5
    )
    advantages = torch.randn(16, generator=generator)
    batch = replace(batch, old_log_probs=batch.old_log_probs + shift, advantages=advantages)
    optimizer = Optimizer(trained, config)
    numbers = update.update(config, trained, optimizer, batch, epoch[0]).numbers

    whole = expected_update(truth, rollout, batch, config)
    if config.teacher:
        whole |= expected_distillation(truth, demo(2, scale=3.0).model.double(), rollout, config)
        whole["loss"] = whole["loss"] + config.distillation_coef * whole["distillation"]
    whole["loss"].backward()
    true = torch.cat([weight.grad.flatten() for weight in truth.parameters()])
    ours = torch.cat([weight.grad.flatten().double() for weight in optimizer.weights])  # type: ignore[union-attr]
    assert numbers["grad_norm"] == close(true.norm()) and true.norm() > 10 * config.max_grad_norm
    scaled = true * config.max_grad_norm / true.norm()
    assert (ours - scaled).norm() <= 2 * MODEL_GRADIENT_RELATIVE[torch.float32] * scaled.norm()
    for metric, value in whole.items():
        assert numbers[metric] == close(value.detach()), metric
    assert 0 < numbers["clip_fraction_low"] != numbers["clip_fraction_high"] > 0


def test_divisors_count_the_whole_mini_batch_and_are_shared_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over processes. So each process divides by its share of the counts."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]).bool()
    monkeypatch.setattr(update, "world", lambda: 2)
    config = TrainConfig(objective=Objective(kl_coef=0.1, kl_aggregation="token-mean"))
    assert update.normalizers(config, mask) == {"normalizer": 3 / 2, "kl_normalizer": 6 / 2}


def test_every_seed_step_and_epoch_has_mini_batches_of_its_own() -> None:
    config = TrainConfig(epochs=2, updates_per_rollout=2, prompts_per_step=2)
    drawn = [
        torch.cat(epoch) for seed in (0, 1) for step in (1, 2) for epoch in update.mini_batches(config, seed, step)
    ]
    assert all(torch.equal(rows.sort().values, torch.arange(16)) for rows in drawn)
    assert len({tuple(rows.tolist()) for rows in drawn}) == len(drawn)


def test_the_optimizer_takes_the_step_of_adamw() -> None:
    """With equal gradients, a step is learning rate times (sign of the gradient + weight decay times weight)."""
    config = TrainConfig(learning_rate=0.01, warmup_updates=4, weight_decay=0.5, max_grad_norm=1e9)
    trained = demo(0)
    optimizer = Optimizer(trained, config)
    for count in (1, 2, 3):
        before = [weight.detach().clone() for weight in optimizer.weights]
        for weight in optimizer.weights:
            weight.grad = -torch.ones_like(weight)
        optimizer.step()
        for weight, start in zip(optimizer.weights, before, strict=True):
            expected = start + 0.01 * count / 4 * (1 - 0.5 * start)
            torch.testing.assert_close(weight.detach(), expected, rtol=METRIC_RELATIVE, atol=PARAMETER_ABSOLUTE)


# One run


def score(text: str, answer: str) -> int:
    """Return a number of two texts, 0 to 9, which differs for almost all of them."""
    return zlib.crc32(f"{text} {answer}".encode()) % 10


def sometimes(text: str, answer: str) -> float:
    return 1.0 if score(text, answer) < 5 else float("nan")


COMPONENTS = [RewardComponent("score", 0.5, score), RewardComponent("sometimes", 2.0, sometimes)]


def test_every_number_of_a_step_equals_its_definition(tmp_path: Path) -> None:
    """Train for three steps. Compare every number of metrics.jsonl with its definition."""
    rollouts: list[tuple[Rollout, list[tuple[str, str]]]] = []
    updates: list[list[measures.Update]] = []

    def noted_rollout(*arguments: Any) -> Rollout:
        pairs = [(x.text, x.example.answer) for x in arguments[1]]
        rollouts.append((padded(*arguments), pairs))
        updates.append([])
        return rollouts[-1][0]

    def noted_update(*arguments: Any) -> measures.Update:
        updates[-1].append(updated(*arguments))
        return updates[-1][-1]

    padded, updated = trainer.padded, trainer.update
    sizes: dict[str, Any] = dict(steps=3, updates_per_rollout=2, eval_every=2, eval_prompts=21, save=True)
    rates: dict[str, Any] = dict(learning_rate=0.01, warmup_updates=1, schedule="linear")
    config = small(tmp_path, micro_batch_size=4, skip_zero_advantage=False, **sizes, **rates)
    with patch.multiple(trainer, padded=noted_rollout, update=noted_update):
        report = train(config, reward=COMPONENTS)
    rows = rows_of(report.folder)[1:]
    for row, (rollout, pairs), parts in zip(rows, rollouts, updates, strict=True):
        assert len(parts) == 2
        scores, worked = [score(*pair) for pair in pairs], [score(*pair) < 5 for pair in pairs]
        total = [0.5 * x + 2.0 * works for x, works in zip(scores, worked, strict=True)]
        assert row["reward"] == close(fmean(total))
        assert (row["reward/score"], row["reward/sometimes"]) == (close(fmean(scores)), close(fmean(worked)))
        assert row["reward_failures"] == worked.count(False) > 0
        assert row["groups_without_signal"] == close(fmean(len(set(total[i : i + 4])) == 1 for i in range(0, 16, 4)))
        assert row["truncated"] == close(rollout.truncated.double().mean()) and rollout.truncated.any()
        assert row["answer_tokens"] == close(rollout.answer_mask.sum() / 16)
        assert row["learning_rate"] == close(0.01 * (7 - 2 * row["step"]) / 5)  # of its second update
        log_ratios = torch.cat([part.measures.log_ratios for part in parts])  # tokens, mean, variance of each answer
        tokens = log_ratios[:, 0]
        square = (tokens * (log_ratios[:, 2] + log_ratios[:, 1] ** 2)).sum() / tokens.sum()
        for name in parts[0].numbers:
            values = [part.numbers[name] for part in parts]
            weights = [log_ratios.new_tensor(1.0)] * 2  # both updates have 8 answers
            if DIVISORS.get(name) == "tokens":
                weights = [part.measures.log_ratios[:, 0].sum() for part in parts]
            expected = sum(x * w for x, w in zip(values, weights, strict=True)) / sum(weights)
            if name[-4:] in ("_min", "_max"):
                expected = min(values) if name.endswith("_min") else max(values)
            if name == "token_log_ratio_std":
                expected = (square - row["kl_to_old"] ** 2) ** 0.5
            if name == "sequence_log_ratio_std":
                expected = log_ratios[:, 1].std(correction=0)
            assert row[name] == close(expected), name
    pairs_of_tokens = [[part.measures.metrics["tokens"] for part in parts] for parts in updates]
    assert any(first != second for first, second in pairs_of_tokens)  # so means of means would be wrong
    saved = load_policy(str(report.folder / "model-seed0"))
    held_out = task_by_name("sorting", 21).held_out
    greedy = sample(saved, held_out, max_new_tokens=7, temperature=None)
    pairs = [(text, example.answer) for text, example in zip(greedy.texts, held_out, strict=True)]
    assert rows[2]["eval_reward"] == close(fmean(0.5 * score(*pair) + 2.0 * (score(*pair) < 5) for pair in pairs))
    (result,) = report.results
    assert (result.start_reward, result.end_reward) == (
        rows_of(report.folder)[0]["eval_reward"],
        rows[2]["eval_reward"],
    )


# Advantages


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
