"""Load a checkpoint as a `Policy`: precision of its weights, LoRA, quantised weights, gradient checkpointing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gspo_kernels.extras import needs

from .checkpoints import seed_all
from .config import InputError, TrainConfig
from .distributed import shard, world
from .policy import SORTING, Policy, check_head, decoder_config, demo_policy, make_policy

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def weight_dtype(config: TrainConfig) -> torch.dtype:
    """Return the dtype of the weights. FSDP2 keeps them in fp32, and gathers them in bf16 for precision="bf16"."""
    return torch.bfloat16 if config.precision == "bf16" and config.parallel != "fsdp2" else torch.float32


def policy_of_seed(config: TrainConfig, seed: int, characters: str, device: torch.device) -> Policy:
    """Make the policy of a seed on a device, with its reference if the loss needs one, and sharded with fsdp2."""
    seed_all(seed)
    policy = initial_policy(config, characters)
    policy.model.to(device)
    check_head(policy, config.backend)
    if config.needs_reference and not config.lora_rank:
        seed_all(seed)
        policy.initial = initial_policy(config, characters)
        policy.initial.model.requires_grad_(False)
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
    policy = demo_policy(characters)
    return prepared(policy.model.to(weight_dtype(config)), policy.tokenizer, config)


def load_policy(source: str, config: TrainConfig | None = None) -> Policy:
    """Load a checkpoint from a folder, or from the hub if `source` is an org/name and not a folder.

    The folder may hold a LoRA adapter, which is merged into its base model. Without `config`, load in fp32.

    Raises:
        InputError: there is no such checkpoint, it cannot be loaded, or `make_policy` refuses it.
    """
    if not Path(source).expanduser().is_dir():
        if Path(source).expanduser().exists():
            raise InputError(f"model {source}: expected the folder of a checkpoint, got a file")
        if not HUB_ID.fullmatch(source):
            raise InputError(f"model {source}: there is no such folder, and this is not a hub id of the form org/name")
        missing = "there is no such folder, and the hub did not provide it"
    else:
        source = str(Path(source).expanduser())
        missing = "the folder does not hold a checkpoint and tokenizer that transformers can load"
    options: dict[str, Any] = {"dtype": weight_dtype(config) if config else torch.float32}
    if config and config.quantization:
        options["quantization_config"] = quantization(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if (Path(source) / "adapter_config.json").is_file():
            with needs(f"model {source}, a LoRA adapter,", "lora", "peft"):
                from peft import AutoPeftModelForCausalLM
            adapted: Any = AutoPeftModelForCausalLM.from_pretrained(source, **options)
            model: Any = adapted.merge_and_unload().requires_grad_(True)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"model {source}: {missing}: {reason}") from error
    return prepared(model, tokenizer, config)


def quantization(config: TrainConfig) -> Any:
    """Return transformers' settings for weights in 8 or 4 bits. The language-model head keeps its weights."""
    from transformers import BitsAndBytesConfig

    try:
        with needs(f"quantization={config.quantization}", "lora", "bitsandbytes"):
            import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401
    except RuntimeError as error:  # bitsandbytes has no library for this machine
        raise InputError(f"quantization={config.quantization}: bitsandbytes cannot be used here: {error}") from error
    if config.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = torch.bfloat16 if config.precision != "fp32" else torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def prepared(model: Any, tokenizer: Any, config: TrainConfig | None) -> Policy:
    """Add what `config` asks for to a model: LoRA, gradient checkpointing. Return its Policy."""
    if config is None:
        return make_policy(model, tokenizer)
    if config.lora_rank:
        model = with_lora(model, config)
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise InputError(f"gradient_checkpointing: expected false, as {type(model).__name__} does not support it")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = make_policy(model, tokenizer)
    policy.checkpointing = config.gradient_checkpointing
    return policy


def with_lora(model: Any, config: TrainConfig) -> Any:
    """Freeze a model and add LoRA adapters to its linear layers, and with `lora_head` to its head."""
    with needs("lora_rank", "lora", "peft"):
        from peft import LoraConfig, get_peft_model
    targets: Any = "all-linear"
    if config.lora_head:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not any(model.get_submodule(name) is model.get_output_embeddings() for name in names):
            raise InputError("lora_head: expected a head that is an nn.Linear, got another module")
        targets = names
    sizes: Any = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": 0.0}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **sizes))


def check_room(policy: Policy, prompts: Iterable[Any], max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise an InputError if the longest prompt and an answer of `max_new_tokens` exceed the model's positions."""
    positions = getattr(decoder_config(policy.inner), "max_position_embeddings", None)
    if positions is None:
        return
    texts = [prompt if isinstance(prompt, str) else " ".join(turn["content"] for turn in prompt) for prompt in prompts]
    longest = max(len(ids) for ids in policy.tokenizer(texts)["input_ids"])
    longest = min(longest, max_prompt_tokens or longest)
    if longest + max_new_tokens > positions:
        raise InputError(
            f"max_new_tokens={max_new_tokens}: with the longest prompt ({longest} tokens) an answer would exceed the "
            f"model's {positions} positions"
        )


def empty_model(config: TrainConfig) -> Any:
    """Make the model of a run on the meta device, without weights. Raise an InputError if there is no such model."""
    if config.model is None:
        return initial_policy(config).inner
    source = str(Path(config.model).expanduser())
    try:
        settings = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise InputError(f"model {source}: no configuration: {' '.join(str(error).split())}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings)


def pick_device(name: str) -> torch.device:
    """Return the named device; "auto" is a GPU if torch has one. Raise an InputError if torch cannot use it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it supports the device
        reason = str(error).split("\n")[0]
        raise InputError(f"device: expected a device torch can use, got {name!r}: {reason}") from error
    return device
