"""Load a checkpoint as a `Policy`: precision of its weights, LoRA, gradient checkpointing."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_kernels.extras import needs

from ..huggingface.fused_head import base_model
from ..huggingface.row_checkpoint import RowCheckpoint
from ..huggingface.rows import separate_experts
from ..huggingface.teacher import shared_vocabulary
from .chat import check_variables
from .config import InputError, TrainConfig
from .distributed import shard, world
from .policy import SORTING, Policy, cast, demo_policy, make_policy, merged

ADAPTER = "adapter_config.json"  # the file by which a folder is recognized as an adapter
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch. The function of this name in transformers would import PEFT."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def weight_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the weights. FSDP2 keeps them in fp32, and gathers them in bf16 or fp16."""
    if config.half_dtype is None or config.uses_autocast or config.parallel == "fsdp2":
        return torch.float32
    return getattr(torch, config.half_dtype)


def policy_of_seed(config: TrainConfig, seed: int, characters: str, device: torch.device) -> Policy:
    """Make the policy of a seed on a device. Add the reference and the teacher of its loss. With fsdp2, shard it."""
    set_seed(seed)
    policy = initial_policy(config, characters)
    policy.model.to(device)
    if config.needs_reference and not config.lora_rank:
        set_seed(seed)
        policy.initial = initial_policy(config, characters)
        policy.initial.model.requires_grad_(False)
    if config.teacher is not None:
        policy.teacher = load_teacher(config.teacher, config, policy)
    if config.parallel == "fsdp2" and world() > 1:
        shard(policy, config)
    return policy


def initial_policy(config: TrainConfig, characters: str = SORTING) -> Policy:
    """Make the policy that training begins with: the checkpoint, or the demo's random model for these characters.

    Raises:
        InputError: the checkpoint cannot be loaded or trained as the options say.
    """
    if config.model is not None:
        return load_policy(config.model, config)
    if config.lora_rank and config.save:
        raise InputError("lora_rank: expected 0 without model, or save=false, because an adapter names a saved base")
    policy = demo_policy(characters)
    return prepared(cast(policy.model, weight_dtype(config)), policy.tokenizer, config)


def load_policy(source: str, config: TrainConfig | None = None, merge: bool = True) -> Policy:
    """Load a checkpoint from a folder, or from the hub if `source` is an org/name and not a folder.

    Without `config`, load in fp32.

    Args:
        merge: merge an adapter into its base model. If False, return the base with the trainable adapter.

    Raises:
        InputError: there is no such checkpoint, it cannot be loaded, or `make_policy` refuses it.
    """
    place, missing = located(source)
    is_adapter = (Path(place) / ADAPTER).is_file()
    if is_adapter and merge and config and config.lora_rank:
        raise InputError(f"lora_rank: expected 0, because model={source} is an adapter; merge it first by gspo export")
    options: dict[str, Any] = {"dtype": weight_dtype(config) if config else torch.float32}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
        if is_adapter:
            model = load_adapter(place, tokenizer, options)
            if merge:
                model = merged(model, options["dtype"])
                model.requires_grad_(True)
        else:
            model = AutoModelForCausalLM.from_pretrained(place, **options)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"model {source}: {missing}: {' '.join(str(error).split())}") from error
    policy = prepared(model, tokenizer, config or TrainConfig())
    policy.rounds_merged = is_adapter and merge and options["dtype"] != torch.float32
    return policy


def load_teacher(source: str, config: TrainConfig, policy: Policy) -> Policy:
    """Load a frozen teacher on the device of the policy.

    Raises:
        InputError: it cannot be loaded, has another vocabulary than the policy, or has fewer than `distillation_k` ids.
    """
    try:
        teacher = load_policy(source, replace(config, lora_rank=0, lora_head=False, gradient_checkpointing=False))
        shared_vocabulary(policy.model, teacher.model, policy.tokenizer, teacher.tokenizer)
    except ValueError as error:
        raise InputError(
            f"teacher: {error}" if isinstance(error, InputError) else f"teacher: expected {error}"
        ) from error
    columns = min(x.fused.options.vocab_size for x in (policy, teacher))
    if config.distillation_k > columns:
        expected = f"distillation_k: expected at most the {columns} ids of the vocabulary"
        raise InputError(f"{expected}, got {config.distillation_k}")
    teacher.model.requires_grad_(False).to(policy.device)
    return teacher


def load_adapter(adapter: str, tokenizer: Any, options: dict[str, Any], base: str | None = None) -> Any:
    """Load a LoRA adapter on its base model, as a PEFT model.

    Args:
        options: of the base's `from_pretrained`.
        base: folder or hub id of the base, instead of the one that the adapter names.

    Raises:
        InputError: the base cannot be loaded.
    """
    with needs(f"model {adapter}, a LoRA adapter,", "lora", "peft"):
        from peft import PeftConfig, PeftModel
    named = base or PeftConfig.from_pretrained(adapter).base_model_name_or_path or ""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(located(named)[0], **options)
    except (OSError, ValueError) as error:
        source = "--base" if base else "base_model_name_or_path in its adapter_config.json"
        hint = "" if base else ". `gspo export RUN OUT --base FOLDER` merges it with the base in FOLDER"
        raise InputError(
            f"model {adapter}: expected the adapter's base model at {named!r} ({source}), which cannot be loaded: "
            f"{' '.join(str(error).split())}{hint}"
        ) from error
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))  # as when the adapter was trained
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def located(source: str) -> tuple[str, str]:
    """Find the absolute folder or the hub id of a checkpoint. Also return the reason to give if it cannot be loaded.

    Raises:
        InputError: `source` is not a folder and does not look like a hub id.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        expected = "the folder does not hold a checkpoint and tokenizer that transformers can load"
        return str(path.resolve()), expected  # absolute, because an adapter stores it as the name of its base
    if HUB_ID.fullmatch(source) and not path.exists():
        return source, "there is no such folder, and the hub did not provide it"
    raise InputError(f"model {source}: there is no such folder, and this is not a hub id of the form org/name")


def prepared(model: Any, tokenizer: Any, config: TrainConfig) -> Policy:
    """Add LoRA and gradient checkpointing to a model if `config` asks for them. Return its Policy.

    A model that already has an adapter keeps it and gets no other.
    """
    if config.lora_rank and base_model(model) is model:
        model = with_lora(model, config)
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise InputError(f"gradient_checkpointing: expected false, as {type(model).__name__} does not support it")
        # transformers 5 has renamed this method, and warns of the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    policy = make_policy(model, tokenizer)
    policy.checkpointing = config.gradient_checkpointing
    # Dropout is no reason against it, because policies train in evaluation mode.
    if config.gradient_checkpointing and not (policy.router_loss_weight or separate_experts(policy.inner)):
        policy.row_checkpoint = RowCheckpoint(policy.inner)
    check_variables(tokenizer, config.chat_template_kwargs)
    policy.chat_template_kwargs = config.chat_template_kwargs
    return policy


def with_lora(model: Any, config: TrainConfig) -> Any:
    """Freeze a model and add LoRA adapters to its linear layers, and with `lora_head` to its head."""
    with needs("lora_rank", "lora", "peft"):
        from peft import LoraConfig, get_peft_model
    targets: Any = "all-linear"
    if config.lora_head:
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise InputError("lora_head: expected a head that is an nn.Linear, got another module")
        targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    sizes: Any = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": 0.0}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **sizes))


def pick_device(name: str) -> torch.device:
    """Find the named device; "auto" is a GPU if torch has one. Raise an InputError if torch cannot use it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it supports the device
        reason = str(error).split("\n")[0]
        raise InputError(f"device: expected a device torch can use, got {name!r}: {reason}") from error
