"""Say what a run would do and how much memory it needs, for `gspo train --dry-run`."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gspo_kernels import memory
from gspo_kernels.backends import dispatch
from gspo_kernels.backends.rows import NeedsGradient
from gspo_kernels.backends.workspace import cache_limit
from gspo_kernels.validation import Checks, TensorChecks

from ..backwards import BackwardSettings
from ..tasks import Task
from .config import InputError, TrainConfig
from .data import Reward
from .loading import located, pick_device, weight_dtype
from .policy import PRINTABLE, SORTING, decoder_config, demo_policy
from .resuming import start_of
from .sampling import fitting

MIB = 2**20


def untrained(config: TrainConfig, characters: str = SORTING) -> Any:
    """Make the model without weights, as `inner`, with its `tokenizer` and `chat_template_kwargs`.

    Raises:
        InputError: there is no such model.
    """
    if config.model is None:
        return demo_policy(characters)
    source, missing = located(config.model)
    try:
        settings = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise InputError(f"model {config.model}: {missing}: {' '.join(str(error).split())}") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    return SimpleNamespace(inner=model, tokenizer=tokenizer, chat_template_kwargs=config.chat_template_kwargs)


def predicted_memory(config: TrainConfig, device: torch.device, model: Any = None) -> dict[str, float]:
    """Predict the memory of model, gradients, optimizer and loss on one device, in MiB.

    This leaves out activations of the layers and the cache of keys and values, which depend on the model's code.
    With parallel=fsdp2 and n processes, all but the loss is divided by n. `model` may be on the meta device; without
    it, `untrained(config)` makes one.
    """
    model = untrained(config).inner if model is None else model
    item = weight_dtype(config).itemsize
    head = model.get_output_embeddings().weight  # [V, H]
    linear = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight is not head}
    total = sum(weight.numel() for weight in model.parameters())
    weights = total * item
    trainable, trained_item = total, item
    if config.lora_rank:
        shapes = [weight.shape for weight in (*linear, *([head] if config.lora_head else []))]
        trainable, trained_item = config.lora_rank * sum(a + b for a, b in shapes), 4  # adapters are fp32
        weights += trainable * trained_item
    rows = (config.micro_batch_size or config.mini_batch_size) * config.max_new_tokens
    with FakeTensorMode():
        dtype = getattr(torch, config.half_dtype or "float32")
        sizes = memory.Batch(rows, head.shape[1], decoder_config(model).vocab_size).head(dtype, device)
        backend = dispatch.pick_backend(TensorChecks("gspo train"), config.backend, device)
        needs = NeedsGradient(True, not config.lora_rank, False, False, False)
        cast_from = item if item > dtype.itemsize else 0
        largest = partial(memory.largest_default_cache, sizes, needs, backend, cast_from)
        cache = cache_limit(Checks("gspo train"), config.cache_mib, device, largest_default=largest)
        loss = memory.bound(sizes, backend, min(cache, memory.full_cache_mib(sizes, backend) * MIB)).total
    parts = {
        "weights": weights,
        "reference": weights if config.needs_reference and not config.lora_rank else 0,
        "gradients": trainable * trained_item,
        "optimizer": (8 + 4 * (trained_item == 2)) * trainable,  # two moments, and masters of bf16 weights
        "loss": loss,
    }
    return {name: size / MIB for name, size in parts.items() if size}


def forecast(config: TrainConfig, task: Task | None = None, reward: Reward | None = None) -> str:
    """Describe a run: all options as YAML, its prompts and updates, and the predicted memory.

    Takes arguments of `train`.

    Raises:
        InputError: the model's configuration, the prompts or a reward cannot be loaded, or `train` would refuse to
            resume the run.
    """
    task, record, _, notes = start_of(config, task, reward)
    model = untrained(config, task.characters or PRINTABLE)
    task, left_out = fitting(config, model, task)
    if left_out:
        notes.append(f"max_prompt_tokens={config.max_prompt_tokens}: {left_out} prompts are left out")
    rewards = ", ".join(x.name for x in task.rewards.components)
    size = config.mini_batch_size
    updates = config.updates_per_rollout * config.epochs
    device = pick_device(config.device)
    parts = predicted_memory(config, device, model.inner)
    backward = BackwardSettings(config.gradient_budget, config.cache_mib)
    listed = ", ".join(f"{name} {mib:,.1f}" for name, mib in parts.items())
    return "\n".join(
        [
            *(f"{name}: {json.dumps(value)}" for name, value in config.to_dict().items()),
            "",
            *(f"# {note}" for note in notes),
            f"# {len(task.train):,} prompts for training, {len(task.held_out):,} for evaluation; rewards: {rewards}",
            f"# held out: {record['held_out']}",
            f"# {config.rollout_size} answers per rollout, {updates} updates per rollout, "
            f"{config.total_updates} per seed",
            f"# {size} answers per update, in {size // (config.micro_batch_size or size)} micro-batches",
            f"# the loss has {backward.describe(device)}",
            f"# predicted memory in MiB, at most and without activations: {sum(parts.values()):,.1f} ({listed})",
        ]
    )
