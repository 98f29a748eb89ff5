"""Every argument of every public function is changed in every way below. A call then raises an error that names the
argument, what was expected and what came, or a line of `ACCEPTED` says why it succeeds, and with which result.

No call, failed or successful, writes to the caller's tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import device as on
from helpers.captured import arguments_of
from helpers.device import LIBRARY, on_device, to_device
from helpers.tiny_model import SHAPE
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map

import gspo_kernels
from gspo_kernels import KeptSets, Objective, advantages, distillation, metrics, sampler_mismatch, validation
from gspo_kernels import policy as policy_module
from gspo_kernels.advantages import RunningMoments
from gspo_kernels.backends.rows import PolicyRows
from gspo_kernels.backends.torch.sequence import policy_forward
from gspo_kernels.integrations.tasks import InputError
from gspo_kernels.sampler_mismatch import RolloutCorrection
from gspo_kernels.validation import SMALLEST

B, T, N, H, V, K, M = 2, 3, 7, 5, 11, 4, 6  # padded, packed, hidden size, vocabulary, ids per token, teachers
NAN, INF = math.nan, math.inf
LONGEST_MESSAGE = 380  # characters; the longest message lists the fields of Objective
RANDOM = torch.Generator().manual_seed(0)


# -- a valid call of each function


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=RANDOM)


def batch(*shape: int) -> dict[str, Any]:
    """Return arguments for tokens of a shape, of which only the last one is masked."""
    log_probs = -rand(*shape) - 0.5
    mask = torch.ones(shape, dtype=torch.bool)
    mask.view(-1)[-1] = False
    return {
        "hidden": rand(*shape, H).requires_grad_(), "lm_head": rand(V, H).requires_grad_(), "bias": rand(V),
        "target_ids": torch.arange(mask.numel()).view(shape) + 1, "mask": mask, "logit_scale": 0.9, "vocab_size": 10,
        "entropy": True, "gradient_budget": 0.0, "cache_mib": 0.0, "reduce_hidden": "all", "backend": "torch",
        "tp_group": None, "cp_group": None, "token_weights": rand(*shape), "log_probs": log_probs.requires_grad_(),
        "old_log_probs": log_probs.detach() - 1e-4, "ref_log_probs": log_probs.detach() - 0.1,
        "rollout_log_probs": log_probs.detach() + 0.01, "kl_log_probs": log_probs.detach() - 0.01,
        "objective": Objective(kl_coef=0.1, rollout_correction=RolloutCorrection()),
    }  # fmt: skip  # a table


PADDED: dict[str, Any] = {
    **batch(B, T), "advantages": torch.tensor([1.0, -1.0]), "logit_softcap": 30.0, "temperature": 1.5,
    "head_precision": "fp32", "normalizer": 2.0, "kl_normalizer": 3.0,
}  # fmt: skip
PACKED: dict[str, Any] = {
    **batch(N), "advantages": torch.tensor([1.0, -1.0, 0.5]), "cu_seqlens": torch.tensor([0, 2, 4, N]).int(),
    "temperature": 1 + rand(N), "normalizer": torch.tensor(3.0), "kl_normalizer": torch.tensor(3),
}  # fmt: skip
EXTRA = torch.arange(B * T * K).view(B, T, K) % 10
SETS = KeptSets((PADDED["target_ids"].view(-1, 1) + torch.tensor([0, 2])).view(-1) % 10, 2 * torch.arange(B * T + 1))
TEACHERS = torch.log_softmax(rand(B, T, M, K), -1) - 1.5
REWARDS, IDS = torch.tensor([1.0, 0.0, 2.0, 0.5]), torch.tensor([0, 1, 0, 1])
SEVERAL = torch.stack([REWARDS, REWARDS**2, 1 - REWARDS], 1)
GROUPS: dict[str, Any] = dict(group_size=2, baseline="mean", scale="group", ddof=1, eps=1e-6)
PARTS = [{"tokens": torch.tensor(3.0), "mine": 2.0}]
OBJECTIVE: dict[str, Any] = dict(
    ratio="sequence", surrogate="clip", clip_low=3e-4, clip_high=4e-4, dual_clip=3.0, delta=2.5, length_norm=100.0,
    aggregation="seq-mean-token-sum-norm", kl_coef=0.1, kl_estimator="k3", kl_aggregation="token-mean",
    kl_ratio_factor=False, entropy_coef=0.1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.0, vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, rollout_correction=RolloutCorrection(),
)  # fmt: skip


def call(function: Callable[..., Any], arguments: dict[str, Any], **more: Any) -> tuple[Callable[..., Any], Any]:
    names = inspect.signature(function).parameters
    return function, {name: x for name, x in {**arguments, **more}.items() if name in names}


def updated(rewards: Tensor) -> Tensor | None:
    moments = RunningMoments()
    moments.update(rewards)
    return moments.mean


def with_sets(**fields: Any) -> Any:
    function, arguments = call(LIBRARY.linear_log_probs, PADDED)
    return function(**arguments, kept_sets=KeptSets(*fields.values()))


# A name ends at its comma.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gspo_fused_loss": call(LIBRARY.gspo_fused_loss, PADDED),
    "gspo_fused_loss, packed": call(LIBRARY.gspo_fused_loss, PACKED),
    "gspo_fused_loss, sets": call(LIBRARY.gspo_fused_loss, PADDED, kept_sets=SETS),
    "linear_log_probs": call(LIBRARY.linear_log_probs, PADDED, extra_ids=EXTRA),
    "linear_log_probs, packed": call(LIBRARY.linear_log_probs, PACKED),
    "linear_log_probs, sets": (with_sets, {f"kept_sets.{name}": x for name, x in SETS._asdict().items()}),
    "policy_loss": call(LIBRARY.policy_loss, PADDED, entropy=1 + rand(B, T)),
    "policy_loss, packed": call(LIBRARY.policy_loss, PACKED, entropy=rand(N)),
    "linear_top_k": call(distillation.linear_top_k, PADDED, k=3),
    "teacher_advantages": call(
        distillation.teacher_advantages, PADDED, coef=0.5, level="token", bound=5.0, log_probs=PADDED["ref_log_probs"],
        teacher_log_probs=TEACHERS[..., 0], teacher_weights=rand(M),
    ),
    "teacher_advantages, packed": call(
        distillation.teacher_advantages, PACKED, level="sequence", log_probs=PACKED["ref_log_probs"],
        teacher_log_probs=PACKED["old_log_probs"],
    ),
    "topk_divergence": call(
        distillation.topk_divergence, PADDED, student=(TEACHERS - 0.1).requires_grad_(), teacher=TEACHERS,
        kind="jensen-shannon", tail="bucket", beta=0.3, ids=torch.arange(TEACHERS.numel()).view(TEACHERS.shape),
        teacher_weights=rand(B, M),
    ),
    "importance_weights": call(
        sampler_mismatch.importance_weights, PADDED, level="token", mode="truncate", low=0.5, high=2.0
    ),
    "importance_weights, packed": call(sampler_mismatch.importance_weights, PACKED, level="sequence", mode="mask"),
    "off_policy_mask": call(sampler_mismatch.off_policy_mask, PADDED, threshold=0.1),
    "off_policy_mask, packed": call(sampler_mismatch.off_policy_mask, PACKED, threshold=0.1),
    "RolloutCorrection": (RolloutCorrection, dict(level="token", mode="truncate", low=0.5, high=2.0)),
    "Objective": (Objective, OBJECTIVE),
    "Objective.preset": (Objective.preset, dict(name="dapo")),
    "group_advantages": (advantages.group_advantages, dict(rewards=REWARDS, **GROUPS)),
    "group_advantages, ids": (advantages.group_advantages, dict(rewards=REWARDS, group_ids=IDS)),
    "gdpo_advantages": (advantages.gdpo_advantages, dict(rewards=SEVERAL, weights=[1.0, 0.5, 0.2], **GROUPS)),
    "gdpo_advantages, ids": (advantages.gdpo_advantages, dict(rewards=SEVERAL, group_ids=IDS)),
    "normalize_rewards": (
        advantages.normalize_rewards, dict(rewards=REWARDS, by="group", group_size=2, shift=True, scale=True, eps=1e-6)
    ),
    "normalize_rewards, ids": (advantages.normalize_rewards, dict(rewards=REWARDS, by="group", group_ids=IDS)),
    "normalize_rewards, batch": (advantages.normalize_rewards, dict(rewards=REWARDS, by="batch")),
    "RunningMoments.update": (updated, dict(rewards=REWARDS)),
    "whiten": call(advantages.whiten, PADDED, advantages=rand(B, T), shift=True, eps=1e-8),
    "token_returns": call(
        advantages.token_returns, PADDED, rewards=REWARDS[:B], kl=rand(B, T), kl_coef=0.1, gamma=0.9, reward_clip=2.0
    ),
    "turn_advantages": (advantages.turn_advantages, dict(advantages=rand(B, K), turn_ids=EXTRA[..., 0] % K)),
    "turn_advantages, packed": call(
        advantages.turn_advantages, PACKED, advantages=rand(3, K), turn_ids=torch.arange(N)
    ),
    "combine": (metrics.combine, dict(parts=PARTS, group=None, divisors={"mine": "tokens"})),
    "KeptSets.from_padded": (KeptSets.from_padded, dict(ids=EXTRA, sizes=torch.full((B, T), 2), empty="error")),
    "KeptSets.from_padded, fill": (KeptSets.from_padded, dict(ids=EXTRA, fill=0)),
    "KeptSets.from_counts": (
        KeptSets.from_counts, dict(ids=torch.arange(3), counts=torch.tensor([2, 0, 1]), empty="error")
    ),
    "KeptSets.from_lists": (KeptSets.from_lists, dict(sets=[[[1, 2], [3]]], length=3, empty="error", device="cpu")),
    "KeptSets.from_samples": (
        KeptSets.from_samples, dict(samples=[(torch.arange(3), torch.tensor([0, 1, 3]))], length=3, empty="error")
    ),
    "KeptSets.from_mask": (KeptSets.from_mask, dict(mask=rand(B, T, V) > 0.5, empty="error")),
    "KeptSets.from_logits": (KeptSets.from_logits, dict(
        logits=rand(B, T, V), temperature=0.9, top_k=5, top_p=0.9, min_p=0.1, order="vllm", empty="error"
    )),
    "KeptSets.including": (SETS.including, dict(target_ids=PADDED["target_ids"])),
    "KeptSets.select": (SETS.select, dict(tokens=torch.tensor([0, 2]))),
    "KeptSets.to": (SETS.to, dict(device="cpu")),
}  # fmt: skip  # a table


def config_of_trl(**settings: Any) -> Any:
    pytest.importorskip("trl", minversion="1.15")
    from gspo_kernels.integrations.trl import GSPOConfig

    config = GSPOConfig("unused", use_cpu=True, bf16=False, report_to=[], **settings)
    return {name: getattr(config, name) for name in settings}


def config_of_gspo_train(**options: Any) -> Any:
    from gspo_kernels.integrations.reference_trainer import train_config

    return train_config(**options)


def of_model(name: str) -> Callable[..., Any]:
    """Return a function of a model of transformers, which is made in the first call."""

    def function(model: Any, **arguments: Any) -> Any:
        pytest.importorskip("transformers")
        from gspo_kernels.integrations import huggingface

        return getattr(huggingface, name)(tiny_model() if model == "tiny" else model, **arguments)

    return function


@functools.cache
def tiny_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def noise(before: Any, after: Any, objective: Any = None, **arguments: Any) -> Any:
    """Call `clip_noise`. "valid" stands for valid log-probs, and "after.fp32" sets a field of `after`."""
    pytest.importorskip("transformers")
    from gspo_kernels.integrations.huggingface import clip_noise
    from gspo_kernels.integrations.huggingface.rounding import LogProbsByPrecision

    valid = PADDED["old_log_probs"]
    scored = LogProbsByPrecision(valid, valid, arguments.pop("after.fp32"))
    before = LogProbsByPrecision(valid, valid, valid) if before == "valid" else before
    return clip_noise(before, scored if after == "valid" else after, **arguments, objective=objective)


def evaluation(source: Any, texts: Any, reward: Any = None) -> str:
    from gspo_kernels.integrations.reference_trainer import read_evaluation

    return str(read_evaluation(source, texts, reward))


def accelerated(trainer: Any, **settings: Any) -> Any:
    """Return the settings, because `accelerate_trainer` returns the trainer."""
    from gspo_kernels.integrations.trl import accelerate_trainer

    accelerate_trainer(trainer_of_trl() if trainer == "tiny" else trainer, **settings)
    return settings


@functools.cache
def trainer_of_trl() -> Any:
    from helpers.trl_trainer import checkpoint, make_trainer
    from trl import GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        return make_trainer(GRPOTrainer, checkpoint(Path(folder)), Path(folder))


OF_TRAINERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "train_config": (config_of_gspo_train, dict(
        {name: x for name, x in OBJECTIVE.items() if name != "rollout_correction"}, objective="luspo", preset="demo",
        name="mine", output="runs", overwrite=False, resume=False, seeds=(0, 1), steps=3, model="folder",
        task="sorting", reward=("file.py:name",), reward_timeout=2.0, max_prompt_tokens=9,
        chat_template_kwargs={"a": 1}, eval_every=2, eval_prompts=7, prompts_per_step=4, group_size=4, temperature=0.9,
        top_k=5, top_p=0.9, min_p=0.1, replay_kept_sets=False, sampler_precision="bf16", max_new_tokens=6,
        old_log_probs="sampler", advantages=[{"group_advantages": {"scale": "none"}}, "whiten"], teacher="folder",
        distillation_coef=0.7, distillation_k=3, cache_mib=0.5, head_precision="fp32", backend="torch",
        updates_per_rollout=2, epochs=2, skip_zero_advantage=False, micro_batch_size=2, learning_rate=1e-3,
        schedule="linear", warmup_updates=1, weight_decay=0.1, max_grad_norm=1.0, precision="autocast", lora_rank=2,
        lora_alpha=4.0, lora_head=False, gradient_checkpointing=False, device="cpu", threads=1, parallel="ddp",
        checkpoint_every=2, save=False, report_to=("wandb",),
    )),
    "train_config, data": (config_of_gspo_train, dict(
        model="folder", data="train.jsonl", eval_data="eval.jsonl", rollout_correction={"level": "token"},
        gradient_budget=0.1,
    )),
    "GSPOConfig": (config_of_trl, dict(
        importance_sampling_level="token", loss_type="grpo", epsilon=0.2, epsilon_high=0.3, delta=2.5, beta=0.1,
        temperature=0.9, sapo_temperature_pos=1.0, sapo_temperature_neg=1.0, steps_per_generation=8,
        gradient_budget=1e-3, cache_mib=1.0, head_precision="fp32", skip_zero_advantage=False,
        skip_rows_without_gradient=False, zero_equal_rewards=True, distillation_coef=0.5,
        distillation_schedule="linear", distillation_k=3, distillation_kind="reverse", distillation_tail="bucket",
    )),
    "GSPOConfig, vespo": (config_of_trl, dict(
        loss_type="vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )),
    "accelerate_trainer": (accelerated, dict(
        trainer="tiny", gradient_budget=0.1, cache_mib=1.0, head_precision="fp32", skip_zero_advantage=False,
        skip_rows_without_gradient=False,
    )),
    "fuse_head": (of_model("fuse_head"), dict(model="tiny")),
    "logit_options": (of_model("logit_options"), dict(model="tiny")),
    "skip_rows_without_gradient": (of_model("skip_rows_without_gradient"), dict(model="tiny")),
    "log_probs_by_precision": (of_model("log_probs_by_precision"), dict(
        model="tiny", input_ids=EXTRA[..., 0], attention_mask=torch.ones(B, T).long(),
        answer_mask=torch.ones(B, T).bool(), temperature=0.9,
    )),
    "read_evaluation": (evaluation, dict(source="folder", texts=["task=sorting", "n=1"], reward=len)),
    "clip_noise": (noise, {
        "before": "valid", "after": "valid", "after.fp32": PADDED["old_log_probs"] - 0.1, "mask": PADDED["mask"],
        "advantages": PADDED["advantages"], "objective": Objective(kl_coef=0.1, rollout_correction=RolloutCorrection()),
    }),
}  # fmt: skip  # a table
# What messages begin with, if it is not the name of the function.
PLACES = {
    "train_config": r"(objective: Objective(\.preset)?: )?",
    "log_probs_by_precision": "(log_probs_by_precision|linear_log_probs): ",
    "clip_noise": "(clip_noise|policy_loss): ",
    "read_evaluation": "",
}
ALL_CALLS = CALLS | OF_TRAINERS
UNCHECKED = {"Correction", "KeptSets", "LogProbOutput", "LossOutput", "RunningMoments", "TopK"}  # they only hold values


def test_every_argument_of_every_public_function_is_changed() -> None:
    public = {"combine": metrics.combine, "Objective.preset": Objective.preset}
    for module in (gspo_kernels, advantages, distillation, sampler_mismatch):
        public |= {name: getattr(module, name) for name in module.__all__ if name not in UNCHECKED}
    methods = {name: getattr(SETS, name) for name in vars(KeptSets) if name[0] != "_"}
    public |= {f"KeptSets.{name}": x for name, x in methods.items() if callable(x)}
    for name, function in public.items():
        calls = [arguments for key, (_, arguments) in CALLS.items() if key.split(",")[0] == name]
        changed = {argument.split(".")[0] for arguments in calls for argument in arguments}
        kinds = {key: x.kind for key, x in inspect.signature(function).parameters.items()}
        assert changed == {key for key, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD}, name


def test_every_setting_of_a_trainer_is_changed() -> None:
    from gspo_kernels.integrations.reference_trainer.config_file import OBJECTIVE as OF_OBJECTIVE
    from gspo_kernels.integrations.reference_trainer.config_file import TYPES

    assert {*TYPES, *OF_OBJECTIVE, "objective", "preset"} == {
        name for key, (_, arguments) in OF_TRAINERS.items() if "train_config" in key for name in arguments
    }
    trl = pytest.importorskip("trl", minversion="1.15")
    from gspo_kernels.integrations.trl import GSPOConfig, accelerate_trainer

    new = {x.name for x in fields(GSPOConfig)} - {x.name for x in fields(trl.GRPOConfig)}
    assert new <= {*OF_TRAINERS["GSPOConfig"][1]}
    assert {*inspect.signature(accelerate_trainer).parameters} == {*OF_TRAINERS["accelerate_trainer"][1]}


# -- the changes of a value


class Change(NamedTuple):
    name: str
    value: Any
    got: str  # a pattern of what the message says after "got"
    expected: str = "."  # and of what it says before


FLOATS, INTEGERS = (NAN, INF, -INF, -1, 0, 1e30), (-1, 0, 10**6)
NUMBERS = {"huge": 10**400, **{str(x).replace("+", ""): x for x in (NAN, INF, -INF, -1, -0.5, 0, 0.5, 1.5, 1e30)}}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.complex64)


def changes_of(value: Any) -> Iterator[Change]:
    yield Change("object", object(), "object")
    yield Change("None", None, "None|neither")
    yield Change("text", "text", "'text'|str")
    yield Change("bool", True, "True|bool")
    yield Change("list", [0.5], "0.5|list|float")
    yield Change("complex", 1j, "1j|complex")
    if isinstance(value, Tensor):
        yield from changes_of_tensor(value)
    elif isinstance(value, str):
        yield Change("bytes", value.encode(), "b'|bytes")
        yield Change("no text", "", "''|str")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        for name, x in NUMBERS.items():
            yield Change(name, x, "int" if name == "huge" else re.escape(str(x)))
        yield Change("NumPy", (np.float64 if isinstance(value, float) else np.int64)(value), "np")
        yield Change("tensor", torch.ones(2), "tensor")
    else:
        yield Change("int", 1, "1|int|True or False")
        yield Change("dict", {}, "{}|dict")
        yield Change("tensor", torch.ones(2), "tensor|Tensor")


def changes_of_tensor(value: Tensor) -> Iterator[Change]:
    plain = value.detach()
    yield Change("number", 0.5, "0.5|float")
    for x in (2, -1, 0.5) if plain.dtype == torch.bool else FLOATS if plain.is_floating_point() else INTEGERS:
        changed = plain.float() if plain.dtype == torch.bool else plain.clone()
        changed.view(-1)[0] = x
        yield Change(f"entry {x:g}".replace("+", ""), changed, f"{x}|float32".replace("1e+30", "e[+]"))
    shapes = {"more": plain[None]}
    if plain.ndim:
        shapes |= {"fewer": plain[0], "empty": plain[:0]}
        shapes |= {f"longer {i - plain.ndim}": torch.cat([plain, plain.narrow(i, 0, 1)], i) for i in range(plain.ndim)}
        yield Change("nested", torch.nested.nested_tensor([plain, plain]), "nested", "dense")
        yield Change("sparse", plain.to_sparse(), "sparse", "dense")
    for name, x in shapes.items():
        got = "|".join(re.escape(str(y)) for y in (list(x.shape), x.tolist()))
        yield Change(name, x, got, r"\[|dimension|tensor|offsets")
    for dtype in DTYPES:
        if dtype != plain.dtype:
            name = str(dtype)[6:]
            yield Change(name, plain.to(dtype), name, "float32|int64|bool")
    yield Change("meta", plain.to("meta"), "meta", "on |with values")
    yield Change("strides", torch.stack([plain, plain], -1)[..., 0].requires_grad_(value.requires_grad), "tensor")
    if plain.is_floating_point():
        yield Change("gradient", plain.clone().requires_grad_(), "requires_grad")
    with torch.inference_mode():
        yield Change("inference", plain.clone(), "inference", "inference_mode")


CASES = {
    f"{name}.{argument}: {change.name}": (name, argument, change)
    for name, (_, arguments) in ALL_CALLS.items() for argument, x in arguments.items() for change in changes_of(x)
}  # fmt: skip


# -- what is accepted

# Cases (patterns), the results that they may have, and why. The first line that matches a case counts. "equal" is the
# result of the call without the change, bitwise; "NaN" and "inf" are results with such values.
ACCEPTED: list[tuple[str, str, str]] = [
    (r".*: (strides|NumPy)", "equal", "a layout is not a value, and NumPy's numbers are numbers"),
    (r"(?!.*\.temperature).*: gradient", "equal", "constants are detached"),
    (r"(?!(gspo_fused|linear_log).*\.(hidden|lm_head|bias|target_ids|mask):|topk.*weights).*: inference", "equal",
     "autograd does not save it"),
    # numbers
    (r".*\.logit_scale: (-1|-0.5|0.5|1.5|1e30)", "finite inf", "any number but 0"),
    (r"train_config(?!, data\.(model|data)|.*length_norm).*: None", "finite equal", "as if it was missing"),
    (r"read_evaluation\.texts: (text|list|int)", "InputError", "names the text"),
    (r"read_evaluation\.source: text", "finite", "looked for when the evaluation begins"),
    (r"train_config.*\.(name|output|model|task|reward|teacher|device|(eval_)?data): text|train.*\.reward: (list|int)",
     "finite", "looked for when the run begins"),
    (r"train_config.*\.(output|task|preset|.*_precision|device|(eval_)?data): no text"
     r"|train.*_(kwargs|correction): dict", "finite equal", "the default"),
    (r"train_config.*\.seeds: int", "finite", "one seed"),
    (r"(GSPO|acc).*\.(epsilon_high|delta|steps.*|cache_mib|head_precision|skip.*): None|acc.*gradient_budget: None",
     "finite", "the default"),
    (r"log_probs_by.*input_ids: entry (-1|1e06)", "IndexError", "the model's own error: for some, these are images"),
    (r"clip_noise\.after.*: (entry (-1|0)|float64)", "finite equal", "valid log-probs"),
    (r"log_probs_by.*input_ids: entry 0|log_probs_by.*mask: (None|entry .*|(float|bfloat|u?int).*)", "finite equal",
     "0 or not"),

    (r".*\.(coef|entropy_coef): (-1|-0.5|0|0.5|1.5|1e30)", "finite equal", "any finite number"),
    (r".*\.(threshold|eps|kl_coef|vespo_k_...|weight_decay|epsilon_high): (0|0.5|1.5|1e30)"
     r"|GSPO.*(distillation_coef|lambda_...|beta): (0|0.5|1.5|1e30)", "finite equal", "from 0"),
    (r".*\.cache_mib: (0|0.5|1.5)", "finite equal", "from 0, but 1e30 MiB is more than there is"),
    (r".*\.(logit_softcap|temperature|(kl_)?normalizer|bound|reward_clip|length_norm|reward_timeout|.*learning_rate"
     r"|distillation_coef|max_grad_norm|lora_alpha): (0.5|1.5|1e30)",
     "finite equal inf", "above 0"),
    (r".*\.(sapo_temperature|vespo_lambda)_...: (0.5|1.5|1e30)", "finite", "above 0"),
    (r".*\.(dual_clip|delta): (1.5|1e30|inf)", "finite", "above 1; inf is no bound"),
    (r".*\.(reward_clip|threshold|high|epsilon_high): inf", "finite equal", "no bound"),
    (r".*\.(clip_low|clip_high|gamma|gradient_budget|min_p|epsilon): (0|0.5)", "finite equal", "from 0 to below 1"),
    (r".*\.(beta|top_p): 0.5", "finite", "between 0 and 1"),
    (r".*\.low: (0|0.5|1.5)|.*\.high: (0.5|1.5|1e30)", "finite equal", "low <= high"),
    (r".*\.(ddof|top_k|max_prompt_tokens|micro_batch_size|warmup_updates|threads|checkpoint_every|lora_rank): 0"
     r"|.*\.fill: (-1|0)", "finite equal", "an int"),
    (r".*\.(shift|kl_ratio_factor|overwrite|resume|replay.*|skip_zero.*|lora_head|gradient_ch.*|save|zero_.*): bool"
     r"|GSPO.*rows.*: bool|normalize.*\.scale: bool|(?!policy).*\.entropy: bool", "finite equal", "a bool"),
    (r"Kept.*\.device: bytes", "equal", "PyTorch reads bytes, too"),
    # entries of tensors
    (r".*, sets\.(lm_head|bias): entry .*", "equal", "not the row of an id in a set"),
    (r".*\.(hidden|lm_head|bias): entry nan", "NaN", "not checked, and seen in log-probs"),
    (r".*\.(hidden|lm_head|bias): entry (-?inf|1e30)", "finite inf NaN", "not checked; a bias of -inf removes an id"),
    (r"(policy|gspo).*\.(|old_|ref_|kl_)log_probs: entry nan|policy.*\.entropy: entry nan", "NaN", "seen in the loss"),
    (r"topk.*\.(student|teacher): entry nan|importance.*log_probs: entry nan", "NaN", "seen in the result"),
    (r"off_policy.*log_probs: entry (nan|-inf)", "equal", "as in TRL, an unknown distance is below the threshold"),
    (r"(?!.*, packed\.(teacher_)?log_probs|off).*log_probs: entry -inf|policy.*, packed\.log_probs: entry -inf"
     r"|topk.*\.(student|teacher): entry -inf|.*\.logits: entry -inf", "inf NaN finite", "a probability of 0"),
    (r"policy.*\.entropy: entry inf", "inf", "only a metric without a bonus"),
    (r".*(hidden|lm_head|bias|log_probs|student|teacher|advantages|rewards|kl|logits): entry (-1|0)",
     "finite equal inf", "any logit, log-prob, reward"),
    (r".*(advantages|rewards|kl|logits|weights|normalizer|temperature|entropy): entry (1e30|1e06)", "finite equal",
     "large, but finite"),
    (r"(?!.*, sets\.target).*(weights|entropy|target_ids|sizes|tokens|cu_seqlens|offsets): entry 0", "finite equal",
     "from 0"),
    (r".*\.extra_ids: entry (-1|0)|topk.*\.ids: entry .*", "finite equal", "negative ids are absent"),
    (r".*\.group_ids: entry .*|.*\.turn_ids: entry .*|KeptSets.*ids: entry .*", "finite equal", "any id"),
    # shapes, devices, dtypes
    (r".*\.(temperature|(kl_)?normalizer): number|.*\.temperature: fewer", "finite", "one number for all tokens"),
    (r"KeptSets.*(fill\.ids|\.mask|\.logits): (fewer|empty|longer .*)|.*\.tokens: (more|empty|longer -1)"
     r"|(linear.*\.extra_|turn_advantages\.turn_|KeptSets\.from_padded\.)ids: longer -1|topk.*_weights: fewer"
     r"|turn.*advantages: longer -1|(gdpo.*ids|normalize.*batch|Run.*)\.rewards: longer -1|.*\.counts: more",
     "finite equal", "any size"),
    (r"(?!.*ids\.|token).*\.rewards: (empty|meta)", "finite meta", "no answers or no values: a result without them"),
    (r"(?!Kept).*\.mask: (float64|float32|bfloat16|u?int.*)", "equal", "0 and 1"),
    (r".*(log_probs|student|entropy): float64", "finite equal", "more precise"),
    (r".*(advantages|rewards|weights|temperature|teacher|teacher_log_probs|kl|logits): (float64|bfloat16)",
     "finite equal", "any float"),
    (r"(?!.*packed).*\.hidden: bfloat16", "finite inf", "head_precision widens it"),
    (r".*normalizer: (float..|bfloat16|u?int.*)", "equal", "a sum or a count"),
    (r"(?!.*(linear.*|loss.*|turn.*)\.t.*_ids|.*input_ids)"
     r".*(ids|offsets|sizes|counts|tokens|cu_seqlens): int(32|64)", "equal", "an index"),
]  # fmt: skip  # a table
# Arguments whose change may make the message name one of these others, which no longer belong to them.
DECIDED_BY: dict[str, str] = {
    "hidden": "target_ids lm_head mask", "lm_head": "bias", "target_ids": "kept_sets", "log_probs": "mask",
    "kept_sets.ids": "kept_sets kept_sets.offsets", "student": "teacher", "cu_seqlens": "log_probs mask turn_ids",
    "teacher_log_probs": "teacher_weights", "teacher_weights": "teacher_log_probs mask", "clip_high": "delta",
    "mask": "old_log_probs log_probs cu_seqlens advantages rewards kl before.used", "low": "high",
    "group_ids": "group_size", "source": "model",
    "rewards": "group_size group_ids weights", "advantages": "turn_ids cu_seqlens", "turn_ids": "cu_seqlens",
    "input_ids": "attention_mask", "divisors": "parts", "objective": "name", "data": "eval_data", "ids": "sizes",
    "fill": "sizes", "counts": "ids",
}  # fmt: skip


def fingerprint(x: Any) -> list[Any]:
    """Return bits, version and gradient of all tensors in `x`."""
    if isinstance(x, nn.Module):
        x = [*x.parameters(), *x.buffers()]
    plain = [y for y in tree_leaves(x) if type(y) in (Tensor, nn.Parameter) and y.layout == torch.strided]
    plain = [y for y in plain if not y.is_nested]
    return [
        (None if y.is_inference() else y._version, y.requires_grad, y.grad if y.is_leaf else None,
         None if y.is_meta else y.detach().contiguous().view(-1).view(torch.uint8).tolist())
        for y in plain
    ]  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def kind_of(result: Any, valid: Any) -> str:
    of_result, of_valid = tensors(result), tensors(valid)
    if any(x.is_meta for x in of_result):
        return "meta"
    of_result = to_device(of_result, "cpu")
    if len(of_result) == len(of_valid) and all(map(torch.equal, of_result, of_valid)):
        return "equal" if of_valid or result == valid else "finite"
    if any(x.isnan().any() for x in of_result):
        return "NaN"
    return "inf" if any(x.isinf().any() for x in of_result) else "finite"


def is_default(name: str, argument: str, value: object) -> bool:
    parameter = inspect.signature(ALL_CALLS[name][0]).parameters.get(argument)
    return parameter is not None and value is None is parameter.default


def accepted_as(case: str) -> str | None:
    return next((results for cases, results, _ in ACCEPTED if re.fullmatch(cases, case)), None)


def problem(name: str, argument: str, change: Change, error: Exception) -> str | None:
    """Say what is wrong with an error: it must be "<function>: <argument> must be <expected>, got <got>"."""
    text = str(error)
    place = name.split(",")[0]
    form = r"(?P<name>.+?)( must be|: expected) (?P<expected>.+), got (?P<got>.+)"
    parts = re.fullmatch(PLACES.get(place, f"{re.escape(place)}: ") + form, text)
    if type(error) not in (ValueError, TypeError, InputError) or parts is None or len(text) > LONGEST_MESSAGE:
        return f"{type(error).__name__}: {text}"
    if parts["name"] != argument:
        return None if parts["name"] in DECIDED_BY.get(argument, "").split() else text
    clear = re.search(change.expected, parts["expected"]) and re.search(change.got, parts["got"], re.IGNORECASE)
    return None if clear else text


def moved(x: Any) -> Any:
    """Move a tensor to the device under test."""
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    with torch.inference_mode(x.is_inference()):
        return x.to(on.DEVICE)


def check_changes(name: str) -> None:
    function, arguments = ALL_CALLS[name]
    valid, problems = to_device(function(**tree_map(moved, arguments)), "cpu"), []
    for case, (call_name, argument, change) in CASES.items():
        if call_name != name:
            continue
        changed = tree_map(moved, {**arguments, argument: change.value})
        before, expected = fingerprint(changed), accepted_as(case)
        try:
            result = kind_of(function(**changed), valid)
            if is_default(name, argument, change.value):  # refused only where another argument needs it
                expected = "equal finite inf"
            wrong = None if expected and result in expected.split() else f"accepted, {result}"
        except Exception as error:
            is_expected = expected and type(error).__name__ in expected.split()
            unexpected = f"{error} (but ACCEPTED)" if expected else problem(name, argument, change, error)
            wrong = None if is_expected else unexpected
        if wrong or fingerprint(changed) != before:
            problems.append(f"{case}: {wrong or 'was written to'}")
    assert not problems, "\n".join(problems)


@on_device
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("KeptSets.")])
def test_a_changed_argument_is_named_or_accepted_for_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_CHECK", "1")
    check_changes(name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*(name for name in CALLS if name.startswith("KeptSets.")), *OF_TRAINERS])
def test_a_change_of_what_stays_on_the_cpu_is_named_or_accepted_for_a_reason(name: str) -> None:
    check_changes(name)


def test_every_line_of_the_table_is_used() -> None:
    matched = {next((i for i, line in enumerate(ACCEPTED) if re.fullmatch(line[0], case)), -1) for case in CASES}
    assert matched >= set(range(len(ACCEPTED)))


# -- arguments that do not fit together, other than the bans of tests/math/test_array.py


def above(x: float) -> float:
    return math.nextafter(x, INF)


def below(x: float) -> float:
    return math.nextafter(x, -INF)


C = torch.tensor
VESPO: dict[str, Any] = {"surrogate": "vespo", "ratio": "sequence-product", "rollout_correction": None}
TWICE = SETS.ids[::2].repeat_interleave(2)
CLIP: dict[str, Any] = dict.fromkeys(("dual_clip", "delta"))
# Values that only raise where values are checked: call, what the error says, changes.
WRONG_VALUES: list[tuple[str, str, dict[str, Any]]] = [
    *(("gspo_fused_loss, packed", f"cu_seqlens must be .*{text}", {"cu_seqlens": C(offsets)}) for text, offsets in (
        ("non-decreasing offsets, got [0, 4, 2, 7]", [0, 4, 2, 7]), ("ending at N = 7", [0, 2, 4, 5]),
        ("starting at 0", [3, 3, 4, 7]), ("starting at 0", [10_000, 10_002, 10_004, 10_007]),
        ("starting at 0", [-10_000, -5, 4, 7]),
    )),
    ("linear_log_probs, sets", "kept_sets.ids must be different ids", {"kept_sets.ids": TWICE}),
    ("linear_log_probs, sets", "kept_sets.offsets must be from 0 to K", {"kept_sets.offsets": SETS.offsets - 1}),
    ("gspo_fused_loss, sets", "kept_sets must be sets with at least one id",
     {"kept_sets": KeptSets.from_lists([[[]] * T] * B)}),
    ("topk_divergence", "teacher must be log-probs whose probabilities", {"teacher": TEACHERS + 2}),
    ("policy_loss", "normalizer must be a finite number > 0", {"normalizer": C(0)}),
    ("policy_loss", "log_probs must be <= 0", {"log_probs": torch.full((B, T), 0.3)}),
]  # fmt: skip  # a table
TOGETHER: list[tuple[str, str, dict[str, Any]]] = [
    ("gspo_fused_loss", "is it transposed", {"lm_head": torch.ones(H, V)}),
    ("gspo_fused_loss", "lm_head must be .*autocast casts both",
     {"lm_head": torch.ones(V, H).double(), "head_precision": None}),
    ("gspo_fused_loss", "lm_head must be .*for a float32 head pass head_precision='fp32'",
     {"hidden": torch.ones(B, T, H).bfloat16(), "head_precision": None}),
    ("gspo_fused_loss", "hidden must be .* H >= 1", {"hidden": torch.ones(B, T, 0)}),
    ("gspo_fused_loss", "cu_seqlens must be None for padded input", {"cu_seqlens": C([0, T, 2 * T])}),
    ("gspo_fused_loss, packed", "cu_seqlens must be given for packed", {"cu_seqlens": None}),
    ("policy_loss, packed", "pass log_probs[0]", {"log_probs": -torch.ones(1, N)}),
    ("gspo_fused_loss", "target_ids must be between 0 and 4", {"vocab_size": 5}),
    ("policy_loss", "ref_log_probs must be given", {"ref_log_probs": None}),
    ("policy_loss", "rollout_log_probs must be given", {"rollout_log_probs": None}),
    ("policy_loss", "rollout_log_probs must be None", {"objective": Objective(kl_coef=0.1)}),
    ("policy_loss", "entropy must be given", {"objective": Objective(kl_coef=0.1, entropy_coef=0.1),
                                              "rollout_log_probs": None, "entropy": None}),
    ("topk_divergence", "tail must be 'drop' for kind='generalized'", {"kind": "generalized"}),
    ("topk_divergence", "student must be [..., k] with k >= 2", dict(
        tail="renormalize", student=TEACHERS[..., :1], teacher=TEACHERS[..., :1], ids=None)),
    ("teacher_advantages", "expected gradient as an advantage is 0", dict(teacher_weights=None)),
    ("token_returns", "kl must be a tensor", {"kl": None}),
    ("group_advantages", "group_size must be given without group_ids", {"group_ids": IDS}),
    ("normalize_rewards, batch", "group_size must be None unless by='group', got 2", {"group_size": 2}),
    ("KeptSets.select", "tokens must be a mask of the 6 tokens", {"tokens": C([True])}),
    *(("KeptSets.from_lists", "sets must be for each answer, for each of its tokens", {"sets": sets})
      for sets in ([[1, 2]], [[[1.5]]])),
    ("KeptSets.from_samples", "samples must be a pair", {"samples": [C([1])]}),
    ("KeptSets.from_samples", "the offsets of samples must be non-decreasing", {"samples": [(C([1, 2]), C([1, 3]))]}),
    ("KeptSets.from_samples", "samples must be 9 ids", {"samples": [(C([1, 2]), C([0, 9]))]}),
    *(("combine", f"parts must be .*{text}", {"parts": parts, "divisors": None}) for text, parts in (
        ("at least one micro-batch", []), ("'tokens', which combines 'kl', got none", [{"kl": 0.1}]),
        ("got 'tokens' only in some", [{"tokens": 1}, {}]), ("got a str", ["kl"]), ("got empty ones", [{}]),
        ("or listed in divisors ({'mine': 'tokens'}", [{"mine": 1.0}]), ("keys, got 1", [{1: 1}]),
        ("a list of metrics, got a dict", {"tokens": 1}),
    )),
    ("gdpo_advantages, ids", "rewards must be", {"rewards": torch.ones(4, 0)}),
    ("KeptSets.from_logits", "logits must be", {"logits": torch.full((B, T, V), -INF)}),
    ("combine", "divisors['mine'] must be the name of a sum", {
        "parts": [dict.fromkeys(("tokens", "mine", "weight_mean", "weight_square_mean", "effective_sample_size"), 1.0)],
        "divisors": {"mine": "effective_sample_size"},
    }),
    ("combine", "tokens in parts must be", {"parts": [{"tokens": torch.ones(2)}], "divisors": None}),
    *(("combine", f"divisors{text}", {"divisors": x}) for text, x in (
        ("['mine'] must be the name of a sum in parts, one of tokens", {"mine": "token"}),
        ("['mine'] must be the name of a sum, such as 'tokens'", {"mine": "mine"}),
        (" must be a dict whose keys are metrics of your own in parts, got 'tokens'", {"mine": None, "tokens": None}),
    )),
    *(("Objective", text, {**CLIP, **fields}) for text, fields in (
        ("length_norm must be a number of tokens", {"length_norm": None}),
        ("length_norm must be a number of tokens", {"length_norm": None, "aggregation": "token-mean",
                                                    "kl_aggregation": "seq-mean-token-sum-norm"}),
        ("clip_low must be .* <= 1", {"surrogate": "cispo", "clip_low": 1.5}),
        ("clip_low must be .* >= 0", {"surrogate": "gmpo", "clip_low": -0.1}),
        ("vespo_k_pos must be .*exp(80)", {**VESPO, "vespo_k_pos": 50, "vespo_lambda_pos": 1}),
        ("vespo_k_neg must be .*exp(80)", {**VESPO, "vespo_k_neg": 50, "vespo_lambda_neg": 1}),
        ("vespo_k_pos must be .*exp(80)", {**VESPO, "vespo_k_pos": 0, "vespo_lambda_pos": above(80.0)}),
        *(("rollout_correction must be a RolloutCorrection, a tuple of at least one", {"rollout_correction": x})
          for x in ((), (RolloutCorrection(), 1.0))),
    )),
    ("Objective.preset", "field must be one of .*'clip_low'", {"cliplow": 0.1}),
    *(("GSPOConfig", "epsilon_high must be at least 1 with loss_type='cispo'", {"loss_type": "cispo", **x})
      for x in ({"epsilon": 5.0}, {"epsilon_high": None})),
    ("GSPOConfig", "distillation_tail must be one of 'drop'", {"distillation_kind": "generalized"}),
    ("policy_loss", "clip_low must be a field of the objective, objective=Objective(clip_low=...)", {"clip_low": 1e-3}),
]  # fmt: skip  # a table


@pytest.mark.parametrize(("name", "message", "changes"), WRONG_VALUES + TOGETHER)
def test_arguments_that_do_not_fit_together_are_named(name: str, message: str, changes: dict[str, Any]) -> None:
    function, arguments = ALL_CALLS[name]
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises((ValueError, TypeError), match=f"{name.split(',')[0]}: .*{pattern}") as caught:
        function(**{**arguments, **changes})
    assert re.search(" must be .+, got ", str(caught.value))


# -- the last value that is accepted, and the first that is refused


# call, argument, the last accepted value, the first refused value, other changes
ENDS: list[tuple[str, str, Any, Any, dict[str, Any]]] = [
    ("gspo_fused_loss", "gradient_budget", below(1.0), 1.0, {}),
    ("gspo_fused_loss", "vocab_size", V, V + 1, {}),
    ("gspo_fused_loss", "temperature", SMALLEST, SMALLEST / 2, {}),
    ("gspo_fused_loss", "temperature", C(1.0), C(0.0), {}),
    ("gspo_fused_loss", "normalizer", SMALLEST, SMALLEST / 2, {}),
    ("gspo_fused_loss", "target_ids", torch.full((B, T), 9), torch.full((B, T), 10), {}),
    ("gspo_fused_loss", "target_ids", torch.full((B, T), -100), torch.full((B, T), -1), {"mask": None}),
    ("linear_log_probs", "extra_ids", torch.full((B, T, K), 9), torch.full((B, T, K), 10), {}),
    ("linear_log_probs, sets", "kept_sets.ids", torch.where(SETS.ids == 7, 9, SETS.ids),
     torch.where(SETS.ids == 7, 10, SETS.ids), {}),
    ("linear_top_k", "k", 10, 11, {}),
    ("linear_top_k", "k", 1, 0, {}),
    ("topk_divergence", "beta", below(1.0), 1.0, {}),
    ("topk_divergence", "beta", above(0.0), 0.0, {}),
    ("off_policy_mask", "threshold", 0.0, below(0.0), {}),
    ("RolloutCorrection", "high", 0.5, below(0.5), {}),
    ("RolloutCorrection", "low", 0.0, below(0.0), {}),
    ("Objective", "clip_low", below(1.0), 1.0, {}),
    ("Objective", "clip_low", 1.0, above(1.0), {"surrogate": "cispo", **CLIP}),
    ("Objective", "clip_low", INF, below(0.0), {"surrogate": "dppo_kl", "ratio": "token", **CLIP}),
    ("Objective", "clip_low", 1.5, below(0.0), {"surrogate": "gmpo", "ratio": "sequence", **CLIP}),
    ("Objective", "vespo_k_pos", 0.0, 300.0, {**VESPO, **CLIP, "vespo_lambda_pos": 80.0}),  # phi reaches exp(80)
    ("Objective", "dual_clip", above(1.0), 1.0, {}),
    ("Objective", "delta", above(1 + 4e-4), 1 + 4e-4, {}),
    ("Objective", "kl_coef", 0.0, below(0.0), {}),
    ("Objective", "sapo_temperature_pos", 1e-30, below(1e-30), {}),
    ("Objective", "vespo_lambda_pos", 1e-4, below(1e-4), {**VESPO, **CLIP, "vespo_k_pos": 0.0}),
    ("token_returns", "gamma", 1.0, above(1.0), {}),
    ("token_returns", "gamma", 0.0, below(0.0), {}),
    ("token_returns", "kl_coef", 0.0, below(0.0), {}),
    ("token_returns", "reward_clip", above(0.0), 0.0, {}),
    ("group_advantages", "eps", 0.0, below(0.0), {}),
    ("group_advantages", "group_size", 4, 5, {}),
    ("KeptSets.from_padded", "sizes", torch.full((B, T), K), torch.full((B, T), K + 1), {}),
    ("KeptSets.from_padded", "sizes", torch.full((B, T), 0), torch.full((B, T), -1), {}),
    ("KeptSets.from_lists", "length", 2, 1, {}),
    ("KeptSets.from_samples", "length", 2, 1, {}),
    ("KeptSets.from_logits", "top_k", 0, -1, {}),
    ("KeptSets.from_logits", "top_p", 1.0, above(1.0), {}),
    ("KeptSets.from_logits", "top_p", above(0.0), 0.0, {}),
    ("KeptSets.from_logits", "min_p", below(1.0), 1.0, {}),
    ("KeptSets.from_logits", "min_p", 0.0, below(0.0), {}),
    ("KeptSets.select", "tokens", C([5]), C([6]), {}),
]  # fmt: skip  # a table


@pytest.mark.parametrize(("name", "argument", "last", "wrong", "changes"), ENDS)
def test_a_range_ends_where_its_error_says(
    name: str, argument: str, last: Any, wrong: Any, changes: dict[str, Any]
) -> None:
    function, arguments = ALL_CALLS[name]
    function(**{**arguments, **changes, argument: last})
    with pytest.raises(ValueError, match=f"{re.escape(argument)}.* must be"):
        function(**{**arguments, **changes, argument: wrong})


@on_device
@pytest.mark.parametrize(("name", "backend"), [
    *((name, "torch") for name in CALLS if not name.startswith("KeptSets.")),
    *((name, "triton") for name in CALLS if "loss" in name or "linear_log_probs" in name),
])  # fmt: skip
def test_bad_values_that_are_not_checked_make_the_result_nan(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where the host reads no values. Bad values index nothing."""
    monkeypatch.setattr(validation, "values_are_checked", lambda device: False)
    function, arguments = CALLS[name]
    arguments = {name: backend if name == "backend" else x for name, x in arguments.items()}
    bad: dict[str, dict[str, Any]] = {}
    for case, (call_name, argument, change) in CASES.items():
        is_bad = call_name == name and ": entry" in case and not accepted_as(case)
        if is_bad and not re.match("linear.*mask", case):  # a mask of 2 is a mask of 1
            bad[case if backend == "torch" else argument] = {argument: change.value}  # one for each argument of kernels
    bad |= {message: changes for call_name, message, changes in WRONG_VALUES if call_name == name}
    for case, changes in bad.items():
        result = to_device(function(**to_device({**arguments, **changes})), "cpu")
        assert any(x.isnan().any() for x in tensors(result)), case
        if hasattr(result, "loss"):
            assert result.loss.isnan() and result.metrics["invalid"] >= 1, case


# -- modules as heads


class DoublingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def linear(prepare: Callable[[Any], Any], make: Callable[..., nn.Module] = nn.Linear) -> nn.Module:
    module = make(H, V, bias=False)
    prepare(module)
    return module


def adapted(prepare: Callable[[Any], Any] = lambda head: None, kind: str = "LoraConfig", **config: Any) -> Any:
    """Return a head in PEFT's layer for a configuration of class `kind`, after `prepare` has changed it."""
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": nn.Linear(H, V, bias=False)})
    peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["lm_head"], **config), model)
    prepare(model["lm_head"])
    return model["lm_head"]


def shard_away(module: Any) -> None:  # as ZeRO-3, which also puts hooks on every module
    module.weight = nn.Parameter(torch.ones(0))
    module.register_forward_pre_hook(hook)


def hook(*_: Any) -> None: ...


QUANTIZED = TwoTensor(torch.randn(V, H), torch.randn(V, H))  # consists of other tensors, as torchao's weights do
HEADS: dict[str, Callable[[], Any]] = {
    "an unsharded weight .*, got an empty tensor [0]": lambda: linear(shard_away),
    "an initialized module, got a lazy module": lambda: nn.LazyLinear(V),
    "a plain tensor .*, got a TwoTensor of torch": lambda: QUANTIZED,
    "a plain tensor .*got a TwoTensor": lambda: linear(lambda m: setattr(m, "weight", nn.Parameter(QUANTIZED))),
    "nn.Linear.*, got .*Embedding": lambda: nn.Embedding(V, H),
    "nn.Linear.*, got .*DoublingLinear with a custom forward": lambda: DoublingLinear(H, V),
    "nn.Linear.*, got .*with a replaced forward": lambda: linear(lambda m: setattr(m, "forward", hook)),
    "nn.Linear.*, got .*with forward hooks": lambda: linear(lambda m: m.register_forward_hook(hook)),
    "nn.Linear.*, got .*Linear with forward hooks": lambda: linear(lambda m: m.register_forward_pre_hook(hook)),
    "nn.Linear.*, got .*with backward hooks": lambda: linear(lambda m: m.register_full_backward_hook(hook)),
    "nn.Linear.*, got .*Linear with backward hooks": lambda: linear(lambda m: m.register_full_backward_pre_hook(hook)),
    "plain LoRA .*, got .*Dora": lambda: adapted(use_dora=True),
    "no LoRA bias.*, got .*LoRA bias": lambda: adapted(lora_bias=True),
    "unmerged before .*, got .*still merged": lambda: adapted(lambda m: (m.merge(), m.enable_adapters(False))),
    "LoRA.*, got .*ia3": lambda: adapted(kind="IA3Config", feedforward_modules=[]),
    "LoRA.*, got .*hooks": lambda: adapted(lambda m: m.lora_A["default"].register_forward_hook(hook)),
    "LoRA.*, got .*DoublingLinear": lambda: adapted(lambda m: setattr(m.base_layer, "__class__", DoublingLinear)),
}


@pytest.mark.parametrize("message", HEADS)
@pytest.mark.parametrize("name", ["gspo_fused_loss", "linear_log_probs", "linear_top_k"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_head_that_cannot_be_reproduced_is_named(name: str, message: str) -> None:
    function, arguments = CALLS[name]
    arguments = {**arguments, "lm_head": HEADS[message](), "bias": None}
    before = fingerprint(arguments)
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises((ValueError, TypeError), match=f"^{name}: lm_head must be .*{pattern}"):
        function(**arguments)
    assert fingerprint(arguments) == before


def test_a_bias_of_a_head_that_has_one_is_named() -> None:
    function, arguments = CALLS["linear_log_probs"]
    with pytest.raises(ValueError, match="bias must be None, because lm_head has a bias"):
        function(**{**arguments, "lm_head": nn.Linear(H, V)})


# -- the rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_successful_call_and_its_backward_write_to_no_input(dtype: torch.dtype, backend: str) -> None:
    for name in ("gspo_fused_loss, packed", "gspo_fused_loss", "linear_log_probs", "policy_loss"):
        function, arguments = CALLS[name]
        narrow = {"hidden", "lm_head", "bias"} if dtype != torch.float64 else {*arguments}
        inputs = {
            key: x.detach().to(dtype).requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.dtype == torch.float32 and key in narrow else x
            for key, x in arguments.items()
        } | {"backend": backend}  # fmt: skip
        upstream = torch.tensor(0.5)
        before = fingerprint([inputs, upstream])
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16 and name == "gspo_fused_loss"):
            out = function(**inputs)
        loss = out.loss if hasattr(out, "loss") else out.log_probs.sum() + out.extra_log_probs.sum()
        leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
        assert fingerprint([inputs, upstream]) == before, name


@pytest.mark.parametrize("name", [name for name in CALLS if not re.match(r"KeptSets\.|linear_top_k", name)])
def test_no_value_is_read_on_the_host(name: str) -> None:
    """Fake tensors have no values, so reading a value raises."""
    function, arguments = CALLS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        function(**tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, arguments))


def test_the_torch_policy_forward_reads_no_value_on_the_host() -> None:
    """The test above does not run this function: fake tensors run the operator's fake implementation."""
    function, arguments = CALLS["policy_loss"]
    objective = Objective(kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.1, dual_clip=2.0)
    arguments = {**arguments, "objective": objective, "rollout_log_probs": None, "kl_log_probs": None}
    call = partial(function, **arguments)
    log_probs, entropy, mask, policy, _, _ = arguments_of(policy_module, "policy_loss_op", call)
    with FakeTensorMode() as mode, torch.no_grad():
        to_fake = partial(tree_map, lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x)
        rows = PolicyRows._make(to_fake(tuple(policy)))
        fake_log_probs, fake_entropy, fake_mask = to_fake((log_probs, entropy, mask))
        assert policy_forward(fake_log_probs, fake_entropy, fake_mask, rows, objective).loss.shape == ()


@on_device
@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy"])
def test_values_of_the_wrong_sign_are_counted_once_per_token(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "values_are_checked", lambda device: False)
    function, arguments = CALLS["policy_loss"]
    wrong = -arguments[name].detach()
    wrong[0, 1:] *= -1
    out = function(**to_device({**arguments, name: wrong, "backend": backend}))
    assert out.metrics["invalid"] == 3 and out.loss.isnan()  # one of five wrong tokens is masked


@on_device
@pytest.mark.parametrize(("level", "count"), [("token", 1), ("sequence", 3)])
def test_a_nan_of_the_sampler_is_counted_once_per_weight(
    level: str, count: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequence, without an advantage, and the third, without weights, may have NaN."""
    monkeypatch.setattr(validation, "values_are_checked", lambda device: False)
    old = -torch.ones(4, 3)
    rollout = old.clone()
    rollout[:3, 1] = torch.nan
    weights = torch.ones(4, 3)
    objective = Objective(rollout_correction=RolloutCorrection(level=level))
    for silent, loss, invalid in ((2, None, count), (1, -0.25, 0)):
        weights[silent] = 0
        advantages = torch.tensor([0.0, 1.0, 1.0, 1.0])
        inputs = dict(old_log_probs=old, rollout_log_probs=rollout, token_weights=weights)
        out = on.policy_loss(old, advantages, **inputs, objective=objective, backend=backend)
        assert out.metrics["invalid"] == invalid
        assert out.loss.isnan() if loss is None else out.loss == loss


def test_gspo_check_enables_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = torch.device("cuda")
    assert not validation.values_are_checked(accelerator)
    monkeypatch.setenv("GSPO_CHECK", "1")
    assert validation.values_are_checked(accelerator)


def test_rounded_and_masked_log_probs_and_entropies_are_accepted() -> None:
    """In bf16, the difference of a logit and a log-sum-exp near 128 is off by at most ROUNDING."""
    steps = torch.arange(64, 128, 0.05).double()
    assert (steps.bfloat16().double() - steps).abs().max() <= validation.ROUNDING
    log_probs = torch.full((B, T), validation.ROUNDING)
    log_probs[-1, -1] = 1e6  # masked
    function, arguments = CALLS["policy_loss"]
    names = [name for name in arguments if name.endswith("log_probs")]
    out = function(**{**arguments, **dict.fromkeys(names, log_probs), "entropy": -log_probs})
    assert out.loss.isfinite() and out.metrics["invalid"] == 0
    assert out.log_probs[-1, -1] == out.entropy[-1, -1] == 0


@pytest.mark.parametrize(("variable", "text", "form"), [
    ("GSPO_WORKSPACE_MIB", "0", "an integer number of MiB from 1 to"), ("GSPO_CHECK", "yes", "0 or 1"),
    ("GSPO_CACHE_MIB", "many", "an integer number of MiB from 0 to"),
])  # fmt: skip  # a table
def test_a_bad_environment_variable_is_named(
    variable: str, text: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    function, arguments = CALLS["linear_log_probs"]
    with pytest.raises(ValueError, match=f"{variable} must be {form}.*, got '{text}'"):
        function(**{**arguments, "cache_mib": None})


def test_an_empty_environment_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GSPO_BACKEND", "GSPO_CHECK", "GSPO_SELF_CHECK", "GSPO_CACHE_MIB", "GSPO_WORKSPACE_MIB"):
        monkeypatch.setenv(variable, "")
    function, arguments = CALLS["gspo_fused_loss"]
    assert function(**{**arguments, "cache_mib": None, "backend": "auto"}).loss.isfinite()


def test_an_unknown_keyword_stays_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'cliplow'"):
        LIBRARY.policy_loss(-torch.ones(1, 1), torch.ones(1), cliplow=1e-3)
