"""Which ids a local teacher and the policy share."""

from __future__ import annotations

from typing import Any

from .fused_head import base_model
from .rows import text_config


def shared_vocabulary(policy: Any, teacher: Any, tokenizer: Any, teacher_tokenizer: Any) -> int:
    """Count the ids that both models have. Their heads may have different padding, as Qwen2.5's 0.5B and 7B do.

    Args:
        policy, teacher: transformers models, possibly wrapped.
        teacher_tokenizer: None if unknown. Then both heads must have equally many columns.

    Raises:
        ValueError: the vocabularies differ. The message lacks its beginning, "teacher must be", which callers add.
    """
    columns = [text_config(base_model(model).config).vocab_size for model in (policy, teacher)]
    if teacher_tokenizer is None:
        if columns[0] != columns[1]:
            raise ValueError(f"a model with {columns[0]} ids, like the policy, got one with {columns[1]}")
        return columns[0]
    known = teacher_tokenizer.get_vocab()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        if known.get(token) != number:
            raise ValueError(
                f"a model with the policy's vocabulary, where {token!r} has the id {number}, got one where it has "
                f"{'no id' if token not in known else f'the id {known[token]}'}"
            )
    return min(columns)
