"""Token ids of prompts and of an environment's replies. Chats use the tokenizer's chat template, if it has one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from textwrap import shorten
from typing import Any

from jinja2 import Environment, TemplateError

from ..tasks import Example, nearest
from ..tasks.rewards import Prompt
from .config import InputError

Messages = list[dict[str, str]]
ANSWER = re.compile(r"\[the-answer-of-turn-\d+\]")  # any of the first placeholders of `placeholders`


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
    texts = [rendered(policy, messages_of(prompt)) for prompt in prompts]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # a chat template has the special tokens


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Check that the chat template reads all variables of the option `chat_template_kwargs`.

    Raises:
        InputError: there is no template, its syntax is wrong, or it does not have the name of a variable.
    """
    if not variables:
        return
    template = tokenizer.chat_template
    if template is None:
        raise InputError(
            f"chat_template_kwargs: expected none, because the tokenizer has no chat template, got {dict(variables)}"
        )
    sources = template.values() if isinstance(template, dict) else [template]
    try:
        tokens = [token for source in sources for token in Environment().lex(source)]
    except TemplateError as error:
        raise InputError(f"model: the chat template cannot be parsed: {error}") from error
    names = {text for _, kind, text in tokens if kind == "name"}
    for name in variables:
        if name not in names:
            raise InputError(
                f"chat_template_kwargs: expected variables that the chat template reads, got {name!r}, which it does "
                f"not{nearest(name, names)}"
            )


def encode_reply(policy: Any, prompt: Prompt, reply: str, end: int) -> list[int]:
    """Encode the environment's reply to a turn that ended with the token `end`.

    With a chat template, the reply is a user message. Its tokens are all that the template writes between the end of
    the turn and the beginning of the next turn.
    """
    tokenizer = policy.tokenizer
    last = tokenizer.decode([end])
    text = reply if tokenizer.chat_template is None else reply_text(policy, messages_of(prompt), reply, last)
    # Some tokenizers encode the beginning of a text differently, so encode the reply after the end token.
    ids = tokenizer(last + text, add_special_tokens=False)["input_ids"]
    return ids[1:] if ids[:1] == [end] else tokenizer(text, add_special_tokens=False)["input_ids"]


def check_replies(policy: Any, prompts: Sequence[Prompt]) -> None:
    """Check that replies can be appended to these prompts: try the chat template on each sequence of roles once.

    Earlier turns are never rendered again, so a message must look the same whatever follows it.

    Raises:
        InputError: the chat template fails, or does not preserve prefixes.
    """
    if policy.tokenizer.chat_template is None:
        return
    chats = {tuple(message["role"] for message in chat): chat for chat in map(messages_of, prompts)}
    for messages in chats.values():
        answer, reply = placeholders(messages)
        reply_text(policy, messages, reply, end=reply)  # no end token, so that all renderings are tried
        asked = messages[:-1] if is_begun(messages) else messages
        if asked:
            # The two differ where the assistant's turn begins.
            start = common_prefix(rendered(policy, asked), rendered(policy, asked, begin=False))
            if not rendered(policy, [*answered(messages, answer), user(reply)]).startswith(start):
                refuse(messages, "renders the prompt differently when an answer and a reply follow it")


def placeholders(messages: Messages, reply: str = "") -> tuple[str, str]:
    """Texts for an answer and a reply that can be found in a rendering, because the chat does not contain them."""
    texts = [reply, *(message["content"] for message in messages)]
    number = next(n for n in count() if not any(f"-turn-{n}]" in text for text in texts))
    return f"[the-answer-of-turn-{number}]", f"[the-reply-to-turn-{number}]"


def messages_of(prompt: Prompt) -> Messages:
    return [user(prompt)] if isinstance(prompt, str) else prompt


def common_prefix(a: str, b: str) -> str:
    return "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def is_begun(messages: Messages) -> bool:
    """True if a prompt has the beginning of the policy's turn."""
    return messages[-1]["role"] == "assistant"


def answered(messages: Messages, answer: str) -> Messages:
    """The prompt with the policy's turn, in which `answer` is what the policy wrote."""
    if is_begun(messages):
        return [*messages[:-1], {"role": "assistant", "content": messages[-1]["content"] + answer}]
    return [*messages, {"role": "assistant", "content": answer}]


def rendered(policy: Any, messages: Messages, begin: bool = True) -> str:
    """Apply the chat template. `begin`: end with the beginning of the policy's turn."""
    continues = begin and is_begun(messages)
    options = {"add_generation_prompt": begin and not continues, "continue_final_message": continues}
    try:
        return policy.tokenizer.apply_chat_template(messages, tokenize=False, **options, **policy.chat_template_kwargs)
    except (TemplateError, TypeError, ValueError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InputError(f"prompt {name_of(messages)}: the chat template fails: {reason}") from error


def after_answer(policy: Any, messages: Messages, answer: str, begin: bool = True) -> str:
    """The rendering of a chat after `answer`, a placeholder."""
    parts = rendered(policy, messages, begin).split(answer)
    if len(parts) != 2:
        refuse(messages, f"renders the assistant's message {len(parts) - 1} times")
    return parts[1]


def reply_text(policy: Any, messages: Messages, reply: str, end: str) -> str:
    """The text of a reply after the end token of the policy's turn.

    The end token takes the place of the template's end-of-turn token, even if they differ, as in TRL.
    """
    answer, placeholder = placeholders(messages, reply)
    chat = answered(messages, answer)
    tail, example = (after_answer(policy, [*chat, user(text)], answer) for text in (reply, placeholder))
    between, found, _ = example.partition(placeholder)
    if not found:
        refuse(messages, "does not render the reply to an answer")
    if end in between:
        place = between.index(end) + len(end)
    else:
        special = [token.content for token in policy.tokenizer.added_tokens_decoder.values() if token.special]
        pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        closing = common_prefix(between, after_answer(policy, chat, answer, begin=False))
        ends = list(pattern.finditer(closing))
        if not ends:  # GPT-OSS closes the last answer with another token than all other messages
            replied = after_answer(policy, [*chat, user(placeholder)], answer, begin=False)
            after_reply = replied.partition(placeholder)[2].lstrip()
            ends = [x for x in [pattern.search(between)] if x and after_reply.startswith(x[0])]
        place = ends[-1].end() if ends else 0
    if tail[:place] != between[:place]:
        refuse(messages, f"ends the assistant's message differently before the reply {reply[:60]!r}")
    return tail[place:]


def name_of(messages: Messages) -> str:
    """The prompt of a chat, for messages."""
    prompt = list(takewhile(lambda message: not ANSWER.search(message["content"]), messages))
    return repr(Example(prompt).key[:60])


def refuse(messages: Messages, fault: str) -> None:
    raise InputError(
        f"prompt {name_of(messages)}: expected a chat template that renders a message identically, whatever "
        f"follows it, because the task replies to answers. The tokenizer's template {fault}"
    )
