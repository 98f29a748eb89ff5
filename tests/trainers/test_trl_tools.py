"""Answers of several turns in TRL: training with its log-probs and with ours must be equal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.16")  # examples/trl_tools.py describes the calls as this version reads them
pytest.importorskip("datasets")
import datasets
from helpers.examples import imported
from helpers.trl_trainer import SEQUENCE
from tolerance import LOSS_PER_ADVANTAGE, TRAINER_ABSOLUTE, TRAINER_LOG_ABSOLUTE, TRAINER_LOG_RELATIVE
from trl import GRPOTrainer

from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return answers of several turns, in which the environment wrote the tokens whose env_mask is 0."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    answers = [torch.randint(3, 12, (4 + i % 5,), generator=generator).tolist() for i in range(len(prompts))]
    return {
        "prompt_ids": [[3, 11, 4]] * len(prompts),
        "completion_ids": answers,
        "env_mask": [[int(t % 3 != 1) for t in range(len(answer))] for answer in answers],
        "logprobs": None,
    }


def look() -> str:
    """Look into the box."""
    return "b"


def length(completions: Any, **columns: Any) -> list[float]:
    return [float(sum(len(message["content"]) for message in messages)) for messages in completions]


def train(kind: Any, source: str, folder: Path) -> tuple[Any, list[torch.Tensor]]:
    """Train for eight updates. Return the trainer, and the masks of the tools in stock TRL's batches."""
    example = imported("trl_tools")
    torch.manual_seed(0)
    random.seed(0)
    model, tokenizer = example.tiny_policy()
    options = {**SEQUENCE, "max_completion_length": 24, "max_tool_calling_iterations": 2, "learning_rate": 0.05}
    args = GSPOConfig(
        str(folder),
        **options,
        per_device_train_batch_size=8,
        max_steps=8,
        logging_steps=1,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    values = {"tools": [look], "environment_factory": example.Box, "rollout_func": rollout}
    messages = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]
    prompts = datasets.Dataset.from_list([{"prompt": messages}] * 16)
    trainer = kind(model, length, args, prompts, processing_class=tokenizer, **{source: values[source]})
    masks: list[torch.Tensor] = []
    if kind is GRPOTrainer:
        loss = trainer._compute_loss

        def compute_loss(model: Any, batch: Any) -> Any:
            masks.append(batch["tool_mask"])
            return loss(model, batch)

        trainer._compute_loss = compute_loss
    trainer.train()
    return trainer, masks


@pytest.mark.parametrize("source", ["tools", "environment_factory", "rollout_func"])
def test_training_on_answers_of_several_turns_equals_training_with_trls_log_probs(source: str, tmp_path: Path) -> None:
    stock, masks = train(GRPOTrainer, source, tmp_path)
    ours, _ = train(GSPOTrainer, source, tmp_path)
    assert len(masks) == 8 and sum((mask == 0).any().item() for mask in masks) > 4
    logs, our_logs = ([row for row in x.state.log_history if "loss" in row] for x in (stock, ours))
    for a, b in zip(our_logs, logs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0, abs=LOSS_PER_ADVANTAGE)
        for name in b.keys() & {"grad_norm", "reward", "tools/call_frequency", "completions/mean_length"}:
            assert a[name] == pytest.approx(b[name], rel=TRAINER_LOG_RELATIVE, abs=TRAINER_LOG_ABSOLUTE), name
    assert max(row["grad_norm"] for row in logs) > 1e-3
    assert 0 < max(row["clip_ratio/region_mean"] for row in our_logs)
    for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
