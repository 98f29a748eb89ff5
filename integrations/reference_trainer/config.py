"""The options of a run: a frozen dataclass, which converts and checks its values. `config_file.py` reads files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gspo_kernels import Objective
from gspo_kernels.inputs.head import HEAD_PRECISIONS
from gspo_kernels.sampler_mismatch import RolloutCorrection
from gspo_kernels.validation import describe, positive

from ..tasks import InputError


class Step(NamedTuple):
    """One call in the computation of advantages.

    Attributes:
        call: the name of a function of `gspo_kernels.advantages`; "clamp" for torch.clamp; or "subtract_kl": subtract
            kl_coef times the KL of an answer from the answer's reward. This KL is a sum over the answer's tokens:
            kl_estimator of old minus reference log-prob.
        options: the keyword arguments. For a tensor argument, a string describes which tensor to pass.
    """

    call: str
    options: dict[str, Any]


GROUP_ADVANTAGES = (Step("group_advantages", {}),)
CHOICES = {
    "schedule": ("constant", "linear", "cosine"),
    "precision": ("fp32", "bf16", "autocast", "fp16", "fp16-autocast"),
    "sampler_precision": ("", "bf16"),
    "head_precision": ("", *HEAD_PRECISIONS),
    "old_log_probs": ("trainer", "sampler"),
    "parallel": ("ddp", "fsdp2"),
    "backend": ("auto", "torch", "triton"),
}
AT_LEAST_ONE = "steps prompts_per_step updates_per_rollout epochs max_new_tokens eval_every eval_prompts distillation_k"
AT_LEAST_ZERO = (
    "micro_batch_size threads max_prompt_tokens warmup_updates lora_rank checkpoint_every weight_decay top_k"
)
STEPS = ("group_advantages", "normalize_rewards", "token_returns", "whiten", "clamp", "subtract_kl")
POSITIVE = "learning_rate max_grad_norm temperature reward_timeout lora_alpha distillation_coef"


class Truncation(NamedTuple):
    """Restricts sampling to likely tokens, in the order of vLLM: min_p, top_k, top_p."""

    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_on(self) -> bool:
        return self != UNTRUNCATED


UNTRUNCATED = Truncation()


@dataclass(frozen=True)
class TrainConfig:
    """The options of one run. The defaults here are for the demo. `train_config` has the defaults for a checkpoint.

    Sizes count sequences or tokens. On the command line and in a file, the fields of `Objective` are options too:
    objective=dapo clip_high=0.3.
    """

    # --8<-- [start:options]
    # The run
    name: str = "demo"  # the run's files go to <output>/<name>
    output: Path = Path("runs")
    overwrite: bool = False  # replace an earlier run of the same name
    resume: bool = False  # continue the run of the same name from its checkpoint
    seeds: tuple[int, ...] = (0, 1, 2)  # one training per seed
    steps: int = 200  # rollouts
    # Prompts and rewards
    model: str | None = None  # folder or hub id of a checkpoint; None: a tiny random Qwen3
    task: str = ""  # a name of `TASKS`, such as sorting; "": data, or without a model sorting
    data: Path | None = None  # jsonl with "prompt" (text or chat messages), "answer" and others, instead of a task
    eval_data: Path | None = None  # jsonl of the prompts to evaluate on; None: hold out a part of `data`
    reward: tuple[str, ...] = ()  # "module:function" or "file.py:function", with a weight "0.5*file.py:function"
    reward_timeout: float = 10.0  # seconds per call of a reward function
    max_prompt_tokens: int = 0  # 0: no limit
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the tokenizer's chat template
    eval_every: int = 25  # steps between evaluations; step 0 and the last step are always evaluated
    eval_prompts: int = 128  # held out, never trained on; at most a fifth of `data`
    # Sampling
    prompts_per_step: int = 32
    group_size: int = 8  # answers per prompt
    temperature: float = 1.0  # of sampling and of the loss; evaluation is greedy
    top_k: int = 0  # sample only from this number of likeliest tokens; 0: all
    top_p: float = 1.0  # sample only from the likeliest tokens with this total probability
    min_p: float = 0.0  # sample only tokens with this probability relative to the likeliest token's
    replay_kept_sets: bool = True  # with top_k, top_p or min_p: log-probs over the ids that the sampler kept
    sampler_precision: str = ""  # bf16: sample with weights rounded to bf16, as an inference engine has them
    max_new_tokens: int = 7  # longest answer
    # The loss
    objective: Objective = Objective()  # a preset's name, such as dapo  # noqa: RUF009 - frozen
    old_log_probs: str = "trainer"  # trainer: recomputed before the updates; sampler: as computed while sampling
    advantages: tuple[Step, ...] = GROUP_ADVANTAGES  # functions of gspo_kernels.advantages, applied in this order
    teacher: str | None = None  # folder or hub id of a model with the same vocabulary, to learn from; None: no teacher
    distillation_coef: float = 1.0  # weight of the divergence from the teacher, a mean over tokens
    distillation_k: int = 16  # the teacher's likeliest ids that are compared
    gradient_budget: float = 0.0  # share of the L1 mass of d_logits that the backward may drop; 0: exact
    cache_mib: float | None = None  # for exponentials of logits; None: GSPO_CACHE_MIB or the device's default
    head_precision: str = ""  # fp32, or bf16x3 on tensor cores: autocast does not round the head
    backend: str = "auto"  # of the loss: "triton", "torch" or "auto"
    # Updates
    updates_per_rollout: int = 4  # per epoch; with one update the ratio is always 1 and nothing is clipped
    epochs: int = 1  # passes over each rollout
    skip_zero_advantage: bool | None = None  # answers with advantage 0 skip the model; None: if gradients stay the same
    micro_batch_size: int = 0  # sequences per forward and backward; 0: all sequences of an update
    learning_rate: float = 5e-4
    schedule: str = "constant"  # after the warm-up: constant, or linear or cosine decay to 0
    warmup_updates: int = 0  # optimizer updates in which the learning rate grows linearly from 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    # The model
    # fp32; bf16, fp16: weights of this dtype, with fp32 masters; autocast, fp16-autocast: fp32 weights, products of
    # bf16 or fp16. With fp16 the loss is scaled (optimizer.py).
    precision: str = "fp32"
    lora_rank: int = 0  # 0: train all weights
    lora_alpha: float = 32.0
    lora_head: bool = False  # an adapter on the language-model head too
    gradient_checkpointing: bool = False
    # The machine
    device: str = "auto"
    threads: int = 0  # CPU threads; 0: torch's default
    parallel: str = "ddp"  # of several processes started by torchrun: ddp or fsdp2
    # Files and output
    checkpoint_every: int = 25  # steps between checkpoints for `resume`; 0: none
    save: bool = True  # write the trained model and tokenizer next to the metrics
    report_to: tuple[str, ...] = ()  # besides metrics.jsonl: tensorboard, wandb (with its variables, WANDB_PROJECT ...)
    # --8<-- [end:options]

    def __post_init__(self) -> None:
        for name, kind in TYPES.items():
            object.__setattr__(self, name, convert(name, kind, getattr(self, name)))
        require = self._require
        require("objective", isinstance(self.objective, Objective), "an Objective")
        for name in ("model", "teacher"):
            require(name, getattr(self, name) != "", "a folder or a hub id, or none")
        size = self.rollout_size
        plain = self.name not in ("", ".", "..") and Path(self.name).name == self.name
        require("name", plain, "a plain folder name")
        distinct = len(self.seeds) == len(set(self.seeds)) > 0 and 0 <= min(self.seeds) <= max(self.seeds) < 2**32
        require("seeds", distinct, "different numbers from 0 to 2**32 - 1, at least one")
        for name in AT_LEAST_ONE.split():
            require(name, getattr(self, name) >= 1, "at least 1")
        for name in AT_LEAST_ZERO.split():
            require(name, 0 <= getattr(self, name) < math.inf, "a number >= 0")
        for name in POSITIVE.split():
            require(name, positive(getattr(self, name)), "a number above 0, within float32")
        for name, values in CHOICES.items():
            require(name, getattr(self, name) in values, f"one of {', '.join(map(repr, values))}")
        require("report_to", set(self.report_to) <= {"tensorboard", "wandb"}, "tensorboard, wandb or both")
        require("group_size", self.group_size >= 2, "at least 2 (in a group of one the advantage is always 0)")
        require("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1")
        require("min_p", 0 <= self.min_p < 1, "a number from 0 to below 1")
        require("gradient_budget", 0 <= self.gradient_budget < 1, "a number from 0 (exact) to below 1")
        with_entropy = "0 with an entropy bonus (entropy_coef other than 0)"
        require("gradient_budget", not (self.gradient_budget and self.objective.entropy_coef), with_entropy)
        require("cache_mib", self.cache_mib is None or 0 <= self.cache_mib < 2**40, "a number of MiB >= 0")
        require("threads", self.threads < 2**15, "a number below 32,768")
        divides = size % self.updates_per_rollout == 0
        answers = f"the {size} answers of a rollout (prompts_per_step * group_size)"
        require("updates_per_rollout", divides, f"a divisor of {answers}")
        divides = self.mini_batch_size % (self.micro_batch_size or self.mini_batch_size) == 0
        require("micro_batch_size", divides, f"a divisor of the {self.mini_batch_size} answers of an update")
        updates = f"at most the {self.total_updates} updates of the run (steps * epochs * updates_per_rollout)"
        require("warmup_updates", self.warmup_updates <= self.total_updates, updates)
        require("lora_head", not self.lora_head or self.lora_rank > 0, "false unless lora_rank is above 0")
        require("overwrite", not (self.overwrite and self.resume), "false with resume, which keeps the earlier run")
        require("advantages", len(self.advantages) > 0, "at least one call, such as [group_advantages]")
        require("advantages", all(step.call in STEPS for step in self.advantages), f"calls of {', '.join(STEPS)}")
        require("task", not self.task or self.data is None, f"'' with data={self.data}, which has its own prompts")
        sharded = self.parallel == "fsdp2"
        require("sampler_precision", not (self.sampler_precision and sharded), "'' with parallel=fsdp2")
        recomputed = "trainer with rollout_correction, which compares the trainer's log-probs with the sampler's"
        require(
            "old_log_probs", self.objective.rollout_correction is None or self.old_log_probs == "trainer", recomputed
        )
        trained = f"a folder or a hub id to train on data={self.data}"
        require("model", self.data is None or self.model is not None, trained)
        require("eval_data", self.eval_data is None or self.data is not None, "none without data=FILE to train on")
        is_default = self.eval_prompts == TrainConfig.eval_prompts
        require("eval_prompts", self.eval_data is None or is_default, "no value with eval_data, which is used entirely")

    def _require(self, name: str, satisfied: bool, expected: str) -> None:
        """Raise an InputError that names the option unless `satisfied`."""
        if not satisfied:
            raise InputError(f"{name}: expected {expected}, got {describe(getattr(self, name))}")

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values, in the form in which a file holds them."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "objective"}
        plain = {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
        plain |= {name: str(x) for name, x in plain.items() if isinstance(x, Path)}
        of_objective = {f.name: getattr(self.objective, f.name) for f in fields(Objective)}
        correction = self.objective.rollout_correction
        if isinstance(correction, tuple):
            of_objective["rollout_correction"] = [asdict(x) for x in correction]
        elif correction is not None:
            of_objective["rollout_correction"] = asdict(correction)
        plain |= {"advantages": [{call: options} for call, options in self.advantages]}
        return {name: x for name, x in plain.items() if name not in ("resume", "overwrite")} | of_objective

    @property
    def truncation(self) -> Truncation:
        """How rollouts are restricted to likely tokens."""
        return Truncation(self.top_k, self.top_p, self.min_p)

    @property
    def rollout_size(self) -> int:
        """Number of answers sampled per step."""
        return self.prompts_per_step * self.group_size

    @property
    def mini_batch_size(self) -> int:
        """Number of answers per optimizer update."""
        return self.rollout_size // self.updates_per_rollout

    @property
    def total_updates(self) -> int:
        """Number of optimizer updates of a run."""
        return self.steps * self.epochs * self.updates_per_rollout

    @property
    def half_dtype(self) -> str | None:
        """The name of the half precision in which products are computed; None for fp32."""
        return {"fp32": None, "bf16": "bfloat16", "autocast": "bfloat16"}.get(self.precision, "float16")

    @property
    def uses_autocast(self) -> bool:
        """Whether weights stay fp32 and autocast rounds the operands of products."""
        return self.precision.endswith("autocast")

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self.output / self.name

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the advantages need the log-probs of the policy before training."""
        return self.objective.kl_coef > 0 or any(step.options.get("kl_coef") for step in self.advantages)

    def learning_rate_at(self, update: int) -> float:
        """The learning rate of `update` (from 0): linear warm-up, then the schedule's decay to 0."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        done = (update - self.warmup_updates) / max(1, self.total_updates - self.warmup_updates)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.learning_rate * factor


# Options -> the names of their types, which KINDS has.
TYPES = {f.name: str(f.type) for f in fields(TrainConfig) if f.name != "objective"}


def convert(name: str, kind: str, value: Any) -> Any:
    """Convert a value, or the text of key=value, to the type of an option, or raise an InputError."""
    if kind.endswith("| None") and str(value).lower() in ("none", "null"):
        return None
    expected, converter = KINDS[kind.removesuffix(" | None")]
    try:
        return converter(value)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, yaml.YAMLError) as error:
        optional = ", or none" if kind.endswith("| None") else ""
        raise InputError(f"{name}: expected {expected}{optional}, got {describe(value)}") from error


def items_of(value: Any) -> Sequence[Any]:
    """The items of a list, or of a text with commas such as "0,1,2"."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
    return value if isinstance(value, Sequence) else [value]


def steps_of(value: Any) -> tuple[Step, ...]:
    """Convert calls such as [{group_advantages: {scale: none}}, whiten]."""
    value = yaml.safe_load(value) if isinstance(value, str) else value
    steps = []
    for call in [value] if isinstance(value, str | Mapping) else value:
        if isinstance(call, Mapping):
            ((name, options),) = call.items()
        else:
            name, options = call if isinstance(call, Step) else (call, {})
        if not isinstance(options, Mapping | None):
            raise TypeError
        steps.append(Step(name, {key: number(x) for key, x in (options or {}).items()}))
    return tuple(steps)


def correction_of(value: Any) -> RolloutCorrection | tuple[RolloutCorrection, ...]:
    """Convert fields such as {level: sequence, mode: mask, high: 3.0}, or a list of them."""
    value = yaml.safe_load(value) if isinstance(value, str) else value
    if isinstance(value, list | tuple):
        return tuple(_correction_of_fields(x) for x in value)
    return _correction_of_fields(value)


def _correction_of_fields(value: Any) -> RolloutCorrection:
    if isinstance(value, RolloutCorrection):
        return value
    if not isinstance(value, Mapping):
        raise TypeError
    try:
        return RolloutCorrection(**{name: number(x) for name, x in value.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"rollout_correction: {error}") from error


def number(value: Any) -> Any:
    """Convert a number such as 1e-6, which YAML takes for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def mapping_of(value: Any) -> dict[str, Any]:
    """Convert keys and values such as {enable_thinking: false}."""
    value = yaml.safe_load(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


def real(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def whole(value: Any) -> int:
    if not real(value).is_integer() or abs(real(value)) >= 2**32:
        raise ValueError
    return int(real(value))


def text_of(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | os.PathLike | int | float):
        raise TypeError
    return str(value)


# The type of an option -> its accepted spellings, and how to convert them.
KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("true or false", lambda x: {"true": True, "false": False}[str(x).lower()]),
    "int": ("a whole number below 2**32, such as 8 or 1e3", whole),
    "float": ("a number, such as 0.001 or 1e-3", real),
    "str": ("a text", text_of),
    "Path": ("a path", Path),
    "dict[str, Any]": ("keys and values, such as {enable_thinking: false}", mapping_of),
    "tuple[int, ...]": ("whole numbers, such as 0 or 0,1,2 or [0, 1, 2]", lambda x: tuple(map(whole, items_of(x)))),
    "tuple[str, ...]": ("texts, such as a or a,b or [a, b]", lambda x: tuple(map(text_of, items_of(x)))),
    "RolloutCorrection | tuple[RolloutCorrection, ...]": (
        "fields of a correction, such as {level: sequence, mode: mask, high: 3.0}, or a list of corrections",
        correction_of,
    ),
    "tuple[Step, ...]": ("calls, such as group_advantages or [{group_advantages: {scale: none}}, whiten]", steps_of),
}
