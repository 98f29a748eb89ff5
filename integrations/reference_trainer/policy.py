"""`Policy`, the trained model with its tokenizer: the demo's small random model, or a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gspo_kernels import linear_log_probs

from ..huggingface import fuse_head, logit_options
from .config import InputError
from .tasks.sorting import LETTERS

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass
class Policy:
    """A model, its tokenizer, and the operations that the model applies to its logits."""

    model: Any  # a transformers model for causal language modelling
    tokenizer: Any
    head_options: dict[str, Any]  # keyword arguments of the loss: the operations that the model applies to its logits
    checkpoint_generation_config: GenerationConfig  # restored when the model is saved
    router_loss_weight: float = 0.0  # factor of the load-balancing loss of a mixture of experts

    @property
    def head(self) -> nn.Module:
        """The language-model head, with a weight [V, H]."""
        return self.model.get_output_embeddings()

    @property
    def counts_router_loss(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is part of the loss."""
        return self.router_loss_weight != 0

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor, first: int) -> Tensor:
        """Compute the hidden states that predict the tokens from position `first` on.

        Args:
            input_ids, attention_mask: [B, width] int64.

        Returns:
            [B, width - first, H].
        """
        return self.hidden_states_and_router_loss(input_ids, attention_mask, first)[0]

    def hidden_states_and_router_loss(
        self, input_ids: Tensor, attention_mask: Tensor, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the hidden states, and the routers' load-balancing loss [] over all unmasked tokens.

        The load-balancing loss is not yet multiplied by `router_loss_weight`. It is None unless `counts_router_loss`.
        """
        # Positions count unmasked tokens, so that left padding does not shift a prompt.
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # [B, width]
        inputs = dict(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
        if not self.counts_router_loss:
            return self.model.base_model(**inputs).last_hidden_state[:, first - 1 : -1], None
        # The full model computes the load-balancing loss, its base model does not. So run the full forward, and take
        # the hidden states at the head.
        inputs["output_router_logits"] = True
        hidden, output = self.model(**inputs, with_head=lambda hidden, head, **options: hidden)
        return hidden[:, first - 1 : -1], output.aux_loss

    @property
    def router_note(self) -> str:
        """A line that says whether the routers' loss of a mixture of experts is counted; "" for other models."""
        if self.counts_router_loss:
            return f"router auxiliary loss: counted, times router_aux_loss_coef={self.router_loss_weight:g}"
        if hasattr(decoder_config(self.model), "output_router_logits"):
            return "router auxiliary loss: not counted, as the checkpoint's config has no router_aux_loss_coef above 0"
        return ""

    def save(self, folder: Path) -> None:
        """Write the model and the tokenizer so that `load_policy` can load them."""
        sampling_config, self.model.generation_config = self.model.generation_config, self.checkpoint_generation_config
        try:
            self.model.save_pretrained(folder)
        finally:
            self.model.generation_config = sampling_config
        self.tokenizer.save_pretrained(folder)


def make_policy(model: Any, tokenizer: Any) -> Policy:
    """Check a model and a tokenizer, and prepare them for training.

    Raises:
        InputError: the tokenizer has no end-of-sequence token, no parameter is trainable, or `fuse_head` does not
            support the model.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("--model: the tokenizer has no end-of-sequence token, so no answer could ever end")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("--model: no parameter is trainable (merge a PEFT adapter into its model first)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so any id works
    # Train without dropout: with dropout, the ratio of a policy to itself would differ from 1.
    model.eval()
    checkpoint_config = model.generation_config
    ends = checkpoint_config.eos_token_id if checkpoint_config.eos_token_id is not None else []
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    # Drop the checkpoint's top_k, penalties and so on, so that sampling uses the same distribution as the loss.
    model.generation_config = GenerationConfig(eos_token_id=sorted(ends), pad_token_id=tokenizer.pad_token_id)
    router_loss_weight = get_router_loss_weight(model)
    try:
        if router_loss_weight:
            fuse_head(model)  # for `with_head`
        options = dict(logit_options(model))
    except (TypeError, ValueError) as error:
        raise InputError(f"--model: {error}") from error
    return Policy(model, tokenizer, options, checkpoint_config, router_loss_weight)


def decoder_config(model: Any) -> Any:
    """Return the configuration of the language model, which may be part of a larger model."""
    return model.config.get_text_config(decoder=True)


def get_router_loss_weight(model: Any) -> float:
    """Return the factor of the routers' loss, or 0 for a model without routers. TRL 1.16 has the same rule.

    A model has routers if its configuration has the entry `output_router_logits`, True or False.
    """
    config = decoder_config(model)
    return float(getattr(config, "router_aux_loss_coef", 0)) if hasattr(config, "output_router_logits") else 0.0


def check_head(policy: Policy, backend: str) -> None:
    """Compare log-probs computed from hidden states with those of the model's own logits.

    Raises:
        InputError: the log-probs differ by more than 1e-2 nats, so training would use wrong numbers; the loss does not
            support the model, device and backend; or the routers' loss is counted, but the model does not return it.
    """
    vocab_size = decoder_config(policy.model).vocab_size
    ids = torch.arange(8, device=policy.model.device)[None] % vocab_size  # [1, 8]
    ones = torch.ones_like(ids)
    with torch.no_grad():
        routers = {"output_router_logits": True} if policy.counts_router_loss else {}
        output = policy.model(input_ids=ids, attention_mask=ones, **routers)
        if policy.counts_router_loss and not isinstance(getattr(output, "aux_loss", None), Tensor):
            raise InputError(
                f"--model: the checkpoint's config has router_aux_loss_coef={policy.router_loss_weight:g}, but "
                f"{type(policy.model).__name__} returns no aux_loss: set it to 0 to train without the routers' loss"
            )
        logits = output.logits[:, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # [1, 7]
        hidden = policy.hidden_states(ids, ones, first=1)
        try:
            fused = linear_log_probs(hidden, policy.head, ids[:, 1:], backend=backend, **policy.head_options).log_probs
        except (TypeError, ValueError) as error:
            raise InputError(f"the loss does not support this model, device and backend: {error}") from error
    difference = (fused - expected).abs().max().item()
    if not difference <= 1e-2:
        raise InputError(
            f"--model: the logits of {type(policy.model).__name__} are not the product of its head and its hidden "
            f"states (log-probs differ by {difference:.2g}), so it cannot be trained from hidden states"
        )


def check_room(policy: Policy, prompts: Iterable[str], max_new_tokens: int) -> None:
    """Raise an InputError if the longest prompt and an answer of `max_new_tokens` exceed the model's positions."""
    positions = getattr(decoder_config(policy.model), "max_position_embeddings", None)
    longest = max(len(ids) for ids in policy.tokenizer(list(prompts))["input_ids"])
    if positions is not None and longest + max_new_tokens > positions:
        raise InputError(
            f"--max-new-tokens {max_new_tokens}: with the longest prompt ({longest} tokens) an answer would exceed the "
            f"model's {positions} positions"
        )


def demo_policy() -> Policy:
    """Make a Qwen3 with 76,000 random weights and a tokenizer of single characters. Downloads nothing."""
    symbols = ["<pad>", "<eos>", "<unk>", *LETTERS, *"sort", " ", ":"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    characters.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3Config(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.05,  # the default of 0.02 is for wider models
        tie_word_embeddings=False,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    return make_policy(Qwen3ForCausalLM(config), tokenizer)


def load_policy(source: str) -> Policy:
    """Load a checkpoint in fp32 from a folder, or from the hub if `source` is an org/name and not a folder.

    Raises:
        InputError: there is no such checkpoint, it cannot be loaded, or `make_policy` refuses it.
    """
    if not Path(source).expanduser().is_dir():
        if Path(source).expanduser().exists():
            raise InputError(f"--model {source}: expected the folder of a checkpoint, got a file")
        if not HUB_ID.fullmatch(source):
            raise InputError(
                f"--model {source}: there is no such folder, and this is not a hub id of the form org/name"
            )
        missing = "there is no such folder, and the hub did not provide it"
    else:
        source = str(Path(source).expanduser())
        missing = "the folder does not hold a checkpoint and tokenizer that transformers can load"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--model {source}: {missing}: {reason}") from error
    return make_policy(model, tokenizer)
