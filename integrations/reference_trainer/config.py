"""The options of a run: one frozen dataclass, which checks its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """An option or a file cannot be used. The message names it, the expected value and the actual value."""


@dataclass(frozen=True)
class TrainConfig:
    """The options of one run. The defaults here are for the demo. `train_config` has the defaults for a checkpoint.

    Sizes count sequences or tokens. Clip bounds are distances of the sequence ratio from 1.
    """

    name: str = "demo"  # the run's files go to <output>/<name>
    output: Path = Path("runs")
    model: str | None = None  # folder or hub id of a checkpoint; None: a tiny random Qwen3
    data: Path | None = None  # jsonl with "prompt" and "answer"; None: the sorting task
    seeds: tuple[int, ...] = (0, 1, 2)  # one training per seed
    steps: int = 200  # rollouts
    prompts_per_step: int = 32
    group_size: int = 8  # answers per prompt
    updates_per_rollout: int = 4  # with one update the ratio is always 1 and nothing is clipped
    micro_batch_size: int = 0  # sequences per forward and backward; 0: all sequences of an update
    learning_rate: float = 5e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    gradient_budget: float = 0.0  # share of the L1 mass of d_logits that the backward may drop; 0: exact
    cache_mib: float | None = (
        None  # memory for exponentials of logits; None: the environment variable GSPO_CACHE_MIB, or 0
    )
    temperature: float = 1.0
    max_new_tokens: int = 7
    eval_every: int = 25  # steps between evaluations; step 0 and the last step are always evaluated
    eval_prompts: int = 128  # held out, never trained on
    warn_after: int = 10  # consecutive steps in which no group has different rewards
    device: str = "auto"
    bf16: bool = False  # autocast; the weights stay fp32
    threads: int = 0  # CPU threads; 0: torch's default
    backend: str = "auto"  # backend of the loss: "triton", "torch" or "auto"
    save: bool = True  # write the trained model and tokenizer next to the metrics
    overwrite: bool = False  # replace an earlier run of the same name

    def __post_init__(self) -> None:
        require = self._require
        require(
            "name",
            self.name not in ("", ".", "..") and Path(self.name).name == self.name,
            "a plain folder name",
        )
        require("seeds", len(self.seeds) > 0, "at least one seed")
        require("seeds", all(seed >= 0 for seed in self.seeds), "numbers >= 0")
        require("seeds", len(set(self.seeds)) == len(self.seeds), "different numbers")
        for name in (
            "steps",
            "prompts_per_step",
            "updates_per_rollout",
            "max_new_tokens",
            "eval_every",
            "eval_prompts",
            "warn_after",
        ):
            require(name, getattr(self, name) >= 1, "at least 1")
        require("group_size", self.group_size >= 2, "at least 2 (in a group of one the advantage is always 0)")
        for name in ("micro_batch_size", "threads"):
            require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("learning_rate", "max_grad_norm", "temperature", "clip_high"):
            require(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        require("weight_decay", 0 <= self.weight_decay < math.inf, "a number >= 0")
        require("clip_low", 0 < self.clip_low < 1, "a number between 0 and 1")
        require("gradient_budget", 0 <= self.gradient_budget < 1, "a number from 0 (exact) to below 1")
        require("cache_mib", self.cache_mib is None or 0 <= self.cache_mib < 2**40, "a number of MiB >= 0")
        require("backend", self.backend in ("auto", "torch", "triton"), '"auto", "torch" or "triton"')
        require(
            "updates_per_rollout",
            self.rollout_size % self.updates_per_rollout == 0,
            f"a divisor of the {self.rollout_size} answers of a rollout (prompts_per_step * group_size)",
        )
        require(
            "micro_batch_size",
            self.mini_batch_size % (self.micro_batch_size or self.mini_batch_size) == 0,
            f"a divisor of the {self.mini_batch_size} answers of an update",
        )
        if (self.model is None) != (self.data is None):
            present, missing = ("--model", "--data") if self.data is None else ("--data", "--model")
            raise InputError(f"{present} needs {missing}: give both a checkpoint and the jsonl file to train it on")

    def _require(self, name: str, satisfied: bool, expected: str) -> None:
        """Raise an InputError that names the option unless `satisfied`."""
        if not satisfied:
            option = name.replace("_", "-")
            raise InputError(f"{name} (--{option}): expected {expected}, got {getattr(self, name)!r}")

    @property
    def rollout_size(self) -> int:
        """Number of answers sampled per step."""
        return self.prompts_per_step * self.group_size

    @property
    def mini_batch_size(self) -> int:
        """Number of answers per optimizer update."""
        return self.rollout_size // self.updates_per_rollout

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self.output / self.name


# Defaults that differ for a pretrained model.
CHECKPOINT_DEFAULTS: dict[str, Any] = {
    "seeds": (0,),
    "prompts_per_step": 16,
    "learning_rate": 1e-6,
    "max_new_tokens": 512,
}


def train_config(**options: Any) -> TrainConfig:
    """Make a TrainConfig from `options`. Missing options take the defaults of a checkpoint or of the demo.

    The defaults of a checkpoint apply if `model` or `data` is set. An option of None counts as missing. The demo
    overwrites the files of its earlier run. The demo uses one CPU thread: its model is too small to gain from several
    threads, and on a busy machine threads wait for each other.

    Raises:
        InputError: the value of an option cannot be used, or options contradict each other.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    if "model" in chosen or "data" in chosen:
        name = Path(str(chosen.get("model", "model"))).name
        return TrainConfig(**{"name": name, **CHECKPOINT_DEFAULTS, **chosen})
    return TrainConfig(**{"threads": 1, "overwrite": "name" not in chosen, **chosen})
