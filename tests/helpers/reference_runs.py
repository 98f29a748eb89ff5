"""Small runs of the reference trainer."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_model import SHAPE
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_kernels.integrations.reference_trainer import TrainConfig, train_config
from gspo_kernels.integrations.reference_trainer.policy import Policy, demo_policy

SMALL = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "eval_every": 2, "eval_prompts": 8, "threads": 1}


def small(tmp_path: Path, **changes: object) -> TrainConfig:
    """Return the options of a run that takes a few seconds."""
    return train_config(**{"output": tmp_path, "seeds": (0,), "save": False, **SMALL, **changes})


def hidden_states(policy: Policy, rollout: Any) -> Tensor:
    """Return the hidden states that predict the answers, [B, T, H]."""
    return policy.run(rollout, lambda hidden, *_, **options: hidden)[0]


def rows_of(folder: Path) -> list[dict]:
    """Read metrics.jsonl, one entry per line."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_jsonl(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def stopping(patch: pytest.MonkeyPatch, owner: Any, name: str, what: list[int] | Exception, call: int) -> None:
    """Send this process signals, or raise an error, at a call of a function, counted from 1."""
    original, calls = getattr(owner, name), itertools.count(1)
    is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1

    def stopped(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call and is_last:
            if isinstance(what, Exception):
                raise what
            for x in what:
                signal.raise_signal(x)
        return original(*arguments, **options)

    patch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # shells may ignore SIGINT
    patch.setattr(owner, name, stopped)


def moe_checkpoint(folder: Path, **config: Any) -> Path:
    """Save a small mixture of experts with random weights."""
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    ids = {"vocab_size": 15, "max_position_embeddings": 64, "eos_token_id": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **experts, **ids, **config})).save_pretrained(folder)
    demo_policy().tokenizer.save_pretrained(folder)
    return folder
