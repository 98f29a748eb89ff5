"""Token ids of prompts. Chats use the tokenizer's chat template, if it has one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from textwrap import shorten
from typing import Any

from jinja2 import TemplateError

from ..tasks import Example, nearest
from ..tasks.rewards import Prompt
from .config import InputError


def encode(policy: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Encode prompts. Use the tokenizer's chat template; without one, join the messages of a chat by newlines.

    A chat that ends with a message of the assistant is continued. Otherwise the assistant's turn is begun.

    Args:
        policy: has a `tokenizer` and `chat_template_kwargs`.

    Raises:
        InputError: the chat template fails on a prompt.
    """
    tokenizer = policy.tokenizer
    if tokenizer.chat_template is None:
        texts = [p if isinstance(p, str) else "\n".join(message["content"] for message in p) for p in prompts]
        # Some tokenizers append an end-of-sequence token, after which an answer would not continue the prompt.
        added = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        appended = len(list(takewhile(bool, reversed(added))))
        return [ids[: len(ids) - appended] for ids in tokenizer(texts)["input_ids"]]
    texts = [rendered(policy, prompt) for prompt in prompts]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # a chat template has the special tokens


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Check that the chat template has the names of all variables of the option `chat_template_kwargs`.

    Raises:
        InputError: there is no template, or it does not have a name.
    """
    template = tokenizer.chat_template or ""
    names = set(re.findall(r"\w+", " ".join(template.values() if isinstance(template, dict) else [template])))
    for name in variables:
        if name not in names:
            expected = "variables that the tokenizer's chat template reads" if names else "none without a chat template"
            raise InputError(f"chat_template_kwargs: expected {expected}, got {name!r}{nearest(name, names)}")


def rendered(policy: Any, prompt: Prompt) -> str:
    """Apply the chat template. The text ends with the beginning of the policy's answer."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    continues = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not continues, "continue_final_message": continues}
    try:
        return policy.tokenizer.apply_chat_template(messages, tokenize=False, **options, **policy.chat_template_kwargs)
    except (TemplateError, TypeError, ValueError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InputError(f"prompt {Example(prompt).key[:60]!r}: the chat template fails: {reason}") from error
