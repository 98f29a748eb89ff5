"""Which tokens have a gradient, and which parts of a model make a row depend on the other rows of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# Values of `model_type` in transformers. These models use positions for RoPE only: they have no recurrence, no
# convolution, and no scale that depends on the position.
RELATIVE_POSITIONS = {
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama",
    "minimax_m2", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
}  # fmt: skip  # names
# Of these, models that separate the sequences of a packed row wherever `position_ids` begin again and there is no mask.
PACKED_BY_POSITIONS = RELATIVE_POSITIONS - {"gpt_oss"}


def text_config(config: Any) -> Any:
    """The part of a model's configuration that describes its text model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_flash_attention(config: Any) -> bool:
    """True if attention takes the sequences of a packed row apart without a mask [T, T]."""
    return "flash" in str(getattr(text_config(config), "_attn_implementation", ""))


def live_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Find the unmasked tokens whose advantage is not 0. Returns bool [B, T].

    Args:
        advantages: [B], [B, 1] or [B, T].
        mask: [B, T], not 0 at unmasked tokens.
    """
    return (mask != 0) & (advantages[:, None] if advantages.ndim == 1 else advantages).ne(0)


def interaction_of_rows(model: nn.Module) -> str | None:
    """Name a part of the model that makes the gradients of a row depend on the rows that run with it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"dropout={module.p} in {name}"
        if "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0:  # such as PEFT's for BOFT
            return f"{type(module).__name__} in {name}"
        if any("ALora" in type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()):
            return f"aLoRA in {name}"  # finds its tokens by the ids of all rows
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"batch normalization in {name}"
        for key, value in vars(module).items():  # such as Qwen2Attention.attention_dropout and Mixtral's jitter_noise
            for rate in value.values() if isinstance(value, dict) else (value,):  # PEFT has one per adapter
                is_rate = isinstance(rate, int | float) and not isinstance(rate, bool)
                if ("drop" in key or "jitter" in key) and is_rate and rate > 0:
                    return f"{key}={rate} in {name}"
    return separate_experts(model)


def separate_experts(model: nn.Module) -> str | None:
    """Name a layer whose experts are separate modules.

    An expert that no token uses has a gradient of None instead of 0, and AdamW does not update its weights at all.
    """
    for name, module in model.named_modules():
        if isinstance(module._modules.get("experts"), nn.ModuleList):
            return f"experts that are separate modules in {name}"
    return None


def positions_are_relative(model: nn.Module) -> bool:
    """True if padding on the left is known to change the log-probs of a row by rounding only."""
    return getattr(text_config(getattr(model, "config", None)), "model_type", None) in RELATIVE_POSITIONS


def may_be_packed(model: nn.Module) -> bool:
    """True if packing a batch into one row without padding is known to change log-probs by rounding only, and to pay.

    With other attention than flash attention, a packed row needs a mask [T, T].
    """
    config: Any = getattr(model, "config", None)
    return getattr(text_config(config), "model_type", None) in PACKED_BY_POSITIONS and is_flash_attention(config)


def rope_of_longest_row(model: nn.Module) -> str | None:
    """Name a RoPE whose frequencies depend on the longest row of the batch."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if kind in ("dynamic", "longrope"):
                return f"rope_type={kind!r}"
    return None
