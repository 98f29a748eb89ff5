"""`Policy`, the trained model with its tokenizer, and the demo's small random model. `loading.py` loads checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo_kernels.inputs.lm_head import is_a

from ..huggingface import FusedHead, fuse_head
from ..huggingface.fused_head import base_model
from ..huggingface.row_checkpoint import RowCheckpoint
from ..huggingface.rows import rope_of_longest_row
from .config import InputError

ROUNDED = "rounding merged weights to 16 bits may lose most of the adapter's change"
SORTING = "abcdefsort :"  # the characters of the sorting task
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


@dataclass
class Policy:
    """A model, its tokenizer and its fused head (`fuse_head`)."""

    model: Any  # a transformers model for causal language modelling, possibly wrapped by PEFT, sharded by FSDP2
    tokenizer: Any
    fused: FusedHead
    checkpoint_generation_config: GenerationConfig  # restored when the model is saved
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    router_loss_weight: float = 0.0  # factor of the load-balancing loss of a mixture of experts
    checkpointing: bool = False  # recompute activations in the backward
    row_checkpoint: RowCheckpoint | None = None  # leaves clipped answers out of the backward
    rounds_merged: bool = False  # the weights are a merged adapter's, rounded to 16 bits
    teacher: Policy | None = None
    initial: Policy | None = None  # the policy before training, in CPU memory; None with LoRA, or if not needed

    @property
    def inner(self) -> Any:
        """The transformers model inside PEFT."""
        return base_model(self.model)

    @property
    def head(self) -> nn.Module:
        """The language-model head, with a weight [V, H]."""
        return self.inner.get_output_embeddings()

    @functools.cached_property
    def keeps_padding(self) -> bool:
        """Whether RoPE depends on the longest row, so that cropping a batch would change its log-probs."""
        return rope_of_longest_row(self.inner) is not None

    @property
    def device(self) -> torch.device:
        return next(self.inner.parameters()).device

    @property
    def has_routers(self) -> bool:
        """True for a mixture of experts, whose configuration has `output_router_logits` (with either value)."""
        return hasattr(decoder_config(self.inner), "output_router_logits")

    def run(self, rollout: Any, with_head: Callable[..., Any], train: bool = False) -> tuple[Any, Any]:
        """Run the model on prompts and answers, and call `with_head` with the hidden states that predict the answers.

        Args:
            rollout: has input_ids, attention_mask [b, P + T] int64 and prompt_width P.
            with_head: called with hidden states [b, T, H], the head and the keyword arguments of the loss.
            train: whether a backward will follow.

        Returns:
            The result of `with_head`, and the model's output (aux_loss, router_logits, ...).
        """
        first = rollout.prompt_width
        mask = rollout.attention_mask
        positions = positions_of(mask)
        inputs = dict(input_ids=rollout.input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
        if self.has_routers:
            inputs["output_router_logits"] = train and self.router_loss_weight != 0

        def at_answers(hidden: Tensor, head: Any, **options: Any) -> Any:
            return with_head(hidden[:, first - 1 : -1], head, **options)

        # Layers recompute activations only in training mode. This sets the mode of the layers, not of their dropout.
        layers = [layer for layer in self.inner.modules() if isinstance(layer, GradientCheckpointingLayer)]
        try:
            for layer in layers:
                layer.training = train and self.checkpointing
            return self.model(**inputs, with_head=at_answers)
        finally:
            for layer in layers:
                layer.training = False

    @contextlib.contextmanager
    def reference(self) -> Iterator[Policy]:
        """Yield the policy before training: this one without its LoRA adapter, or `initial` on this device."""
        if self.initial is None:
            # PEFT switches `requires_grad` of the registered weights off and on. Register the sharded weights first,
            # because FSDP2 copies their setting to the gathered ones.
            self.reshard()
            with self.model.disable_adapter():
                try:
                    yield self
                finally:
                    self.reshard()
            return
        self.initial.model.to(self.device)
        try:
            yield self.initial
        finally:
            self.initial.model.to("cpu")

    def reshard(self) -> None:
        """Free the gathered weights of FSDP2's outermost group, which stay gathered after a forward."""
        if isinstance(self.inner, FSDPModule):
            self.inner.reshard()

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write the model (with LoRA, its adapter) and the tokenizer so that `load_policy` can load them.

        An adapter names the folder or hub id of its base.

        Args:
            weights: the state dict to write; required if the model is sharded.
        """
        inner = self.inner
        adapter: dict[str, Any] = {} if inner is self.model else {"save_embedding_layers": False}
        sampling_config, inner.generation_config = inner.generation_config, self.checkpoint_generation_config
        try:
            self.model.save_pretrained(folder, state_dict=weights, **adapter)
        finally:
            inner.generation_config = sampling_config
        self.tokenizer.save_pretrained(folder)


def merged(adapted: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Merge the adapter of a PEFT model into its weights in fp32. Round all weights to `dtype`.

    If the embeddings or the head have an adapter and share their weight, the head gets a weight of its own. Otherwise
    merging would change both.

    Returns:
        The transformers model.

    Raises:
        InputError: PEFT cannot merge this adapter.
    """
    untie(base_model(adapted.float()))
    try:
        model = cast(adapted.merge_and_unload(), dtype)
    except RuntimeError as error:
        raise InputError(f"model: PEFT cannot merge the adapter: {error}") from error
    left = [name for name, module in model.named_modules() if is_a(module, "peft")]
    if left:  # such as one of two adapters of a layer
        raise InputError(f"model: PEFT cannot merge the adapter: it leaves a part of it in {left[0]}")
    return model


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model's weights in place. Buffers keep their dtype: rounded rotary frequencies would move positions."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def untie(model: Any) -> None:
    """Give the head a weight of its own if the embeddings or the head have an adapter and share their weight."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(is_a(module, "peft") for side in (embeddings, head) for module in side.modules()):
        return
    shared = {id(weight) for weight in embeddings.parameters()}
    for module in head.modules():
        if id(module._parameters.get("weight")) in shared:
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = decoder_config(model).tie_word_embeddings = False


def positions_of(attention_mask: Tensor) -> Tensor:
    """Number the unmasked tokens of each row, [b, P + T], so that left padding does not shift a prompt."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def make_policy(model: Any, tokenizer: Any) -> Policy:
    """Check a model and a tokenizer, and prepare them for training.

    Raises:
        InputError: the tokenizer has no end-of-sequence token, no parameter is trainable, or `fuse_head` does not
            support the model.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("model: the tokenizer has no end-of-sequence token, so no answer could ever end")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model: no parameter is trainable (merge a PEFT adapter into its model, or set lora_rank)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so any id works
    # Train without dropout: with dropout, the ratio of a policy to itself would differ from 1.
    model.eval()
    inner = base_model(model)
    checkpoint_config = inner.generation_config
    ends = checkpoint_config.eos_token_id if checkpoint_config.eos_token_id is not None else []
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    # Drop the checkpoint's top_k, penalties and so on, so that sampling uses the same distribution as the loss.
    inner.generation_config = GenerationConfig(eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id)
    try:
        fused = fuse_head(model)
    except (TypeError, ValueError) as error:
        raise InputError(f"model: {error}") from error
    policy = Policy(model, tokenizer, fused, checkpoint_config)
    if policy.has_routers:
        policy.router_loss_weight = float(getattr(decoder_config(inner), "router_aux_loss_coef", 0))
    return policy


def decoder_config(model: Any) -> Any:
    """The configuration of the language model, which may be part of a larger model."""
    return model.config.get_text_config(decoder=True)


def demo_policy(characters: str = SORTING) -> Policy:
    """Make a Qwen3 with 76,000 random weights and a tokenizer of single characters. Downloads nothing."""
    symbols = ["<pad>", "<eos>", "<unk>", *characters]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    per_character = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    per_character.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")  # type: ignore[assignment]
    per_character.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=per_character, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3Config(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.05,  # the default of 0.02 is for wider models
        tie_word_embeddings=False,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    return make_policy(Qwen3ForCausalLM(config), tokenizer)
