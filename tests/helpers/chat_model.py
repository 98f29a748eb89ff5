"""A small Qwen2 with random weights and a byte-level tokenizer with a chat template, saved to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PAD, END, START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer(*special: str) -> transformers.PreTrainedTokenizerFast:
    """Make the tokenizer. `special` tokens are added to those of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate(dict.fromkeys([PAD, START, END, *special, *alphabet]))}
    plain = Tokenizer(models.BPE(ids, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    plain.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=PAD, eos_token=END, additional_special_tokens=[START, *special]
    )
    made.chat_template = TEMPLATE
    return made


def save(folder: Path, vocab_size: int = 512) -> str:
    """Write model and tokenizer to `folder`, and return it. The vocabulary has ids without a token, as usual."""
    made: Any = tokenizer()
    made.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=made.pad_token_id,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        initializer_range=0.3,  # far from uniform distributions
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)
