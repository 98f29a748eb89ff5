"""Answers with advantage 0 in TRL's trainer: they do not run, and losses, gradients and weights equal stock TRL's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.trl_trainer import LETTERS, SEQUENCE, checkpoint, make_trainer

pytest.importorskip("trl", minversion="0.29")
pytest.importorskip("datasets")
import datasets
import transformers
from tolerance import LOSS_PER_ADVANTAGE, TRAINER_ABSOLUTE, TRAINER_LOG_RELATIVE
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer, accelerate_trainer, restore_trainer
from gspo_kernels.integrations.trl.zero_advantage import live_rows, loss_mask

METHOD = "_get_per_token_logps_and_entropies"
ADAM: dict[str, Any] = {**SEQUENCE, "optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 3e-3, "max_steps": 6}
# The dead share of the prompts, and settings. Rollouts of four batches, and two batches per update, unless set.
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "none dead": (0.0, {}),
    "half dead": (0.5, {}),
    "all dead": (1.0, {}),
    "two iterations, four updates": (0.5, {"num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 8}),
    "updates across rollouts": (0.5, {"steps_per_generation": 2, "gradient_accumulation_steps": 3}),
    "one update per rollout, checkpointing": (0.5, {"steps_per_generation": 2, "gradient_checkpointing": True}),
    "LoRA, token ratios, off-policy mask": (0.5, {"lora": True, "loss_type": "dapo", "off_policy_mask_threshold": 1e-4}),
    "evaluation, truncated answers": (0.75, {"eval_strategy": "steps", "eval_steps": 1, "mask_truncated_completions": True}),
    "cispo, resumed in a rollout": (0.5, {"loss_type": "cispo", "epsilon_high": 5.0, "save_strategy": "steps", "save_steps": 3}),
    "bnpo, tool mask": (0.5, {"loss_type": "bnpo", "tool_mask": True}),
}  # fmt: skip


class Prompts:
    """A reward: 1 for every answer to some prompts, otherwise the letters a minus the letters b."""

    __name__ = "reward"

    def __init__(self, dead: float) -> None:
        self.dead = dead

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        dead = [LETTERS.index(prompt[1]) < 8 * self.dead for prompt in prompts]
        scores = [float(text.count("a") - text.count("b")) for text in completions]
        return [1.0 if is_dead else score for is_dead, score in zip(dead, scores, strict=True)]


def trainer_of(kind: type[GRPOTrainer], folder: Path, reward: Any, lora: bool = False, **options: Any) -> Any:
    peft = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"]) if lora else None
    prompts = datasets.Dataset.from_list([{"prompt": "ab"}, {"prompt": "ah"}])
    trainer = make_trainer(kind, checkpoint(folder / "model"), folder, peft, prompts, **{**ADAM, **options})
    trainer.reward_funcs = [reward]
    return trainer


def spy(trainer: Any) -> list[tuple[Any, Tensor]]:
    """Record the batch and the entropies of each loss in training."""
    loss, method, seen = trainer._compute_loss, getattr(trainer, METHOD), []

    def entropies(*args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        if kwargs.get("compute_entropy") and trainer.model.training:
            seen[-1] = seen[-1], out[1].detach()
        return out

    def compute_loss(model: Any, inputs: Any) -> Any:
        if trainer.model.training:
            seen.append(dict(inputs))
        return loss(model, inputs)

    trainer._compute_loss, trainer._get_per_token_logps_and_entropies = compute_loss, entropies
    return seen


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def train(kind: type[GRPOTrainer], folder: Path, dead: float, tool_mask: bool = False, **options: Any) -> Any:
    trainer = trainer_of(kind, folder, Prompts(dead), **options)
    if tool_mask:
        generate = trainer._generate_and_score_completions

        def with_tools(inputs: Any) -> Any:
            output = generate(inputs)
            tools = (torch.arange(output["completion_ids"].shape[1]) % 3 != 2).long()
            return output | {"tool_mask": tools.expand_as(output["completion_ids"]).contiguous()}

        trainer._generate_and_score_completions = with_tools
    seen = spy(trainer) if kind is GRPOTrainer else []
    trainer.train()
    if "save_steps" in options:  # the rollout of step 3 has another update, and its batches are gone
        last = trainer.state.global_step
        trainer.args.max_steps = last + 3
        trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{last - 3}"))
    return trainer, seen


def compare(stock: Any, ours: Any, seen: list[tuple[Any, Tensor]]) -> None:
    logs, our_logs = steps_of(stock), steps_of(ours)
    assert len(our_logs) == len(logs) > 5
    for a, b in zip(our_logs, logs, strict=True):
        for key in b.keys() - {"entropy"}:
            relative = LOSS_PER_ADVANTAGE if key == "loss" else TRAINER_LOG_RELATIVE
            if "time" not in key:
                assert a[key] == pytest.approx(b[key], rel=relative, abs=LOSS_PER_ADVANTAGE, nan_ok=True), key
    for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    if len(seen) != len(logs) * stock.args.gradient_accumulation_steps:  # resumed
        return
    for i, log in enumerate(our_logs):
        count = stock.args.gradient_accumulation_steps
        live = [live_rows(batch, stock.loss_type) for batch, _ in seen[i * count : (i + 1) * count]]
        assert log["gspo/rows_run"] == pytest.approx(torch.cat(live).float().mean().item())
        masks = [loss_mask(batch) * x[:, None] for (batch, _), x in zip(seen[i * count :], live, strict=False)]
        means = [(e * m).sum() / m.sum() for (_, e), m in zip(seen[i * count :], masks, strict=False) if m.any()]
        assert ("entropy" in log) == bool(means)
        if means:
            assert log["entropy"] == pytest.approx(torch.stack(means).mean().item(), rel=TRAINER_LOG_RELATIVE)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_stock_trl(name: str, tmp_path: Path) -> None:
    dead, options = CASES[name]
    stock, seen = train(GRPOTrainer, tmp_path / "stock", dead, **options)
    ours, _ = train(GSPOTrainer, tmp_path / "ours", dead, **options)
    compare(stock, ours, seen)
    rows = [log["gspo/rows_run"] for log in steps_of(ours)]
    assert max(rows) == 0 if dead == 1 else max(rows) > 0 and (min(rows) < 1) == (dead > 0)
