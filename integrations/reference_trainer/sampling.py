"""Sample rollouts: padded answers to prompts, with a mask of the tokens that the policy sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from gspo_kernels import KeptSets
from gspo_kernels.kept_sets import kept_by_sampler

from ..tasks import Example, Task
from .chat import check_replies, encode, encode_reply
from .config import UNTRUNCATED, InputError, TrainConfig, Truncation
from .policy import Policy, decoder_config


@dataclass(frozen=True)
class Rollout:
    """Sampled answers: prompts padded on the left, answers on the right.

    The answer of a dialogue has all turns of the policy, with the environment's replies between them.
    """

    input_ids: Tensor  # [B, P + T] int64: prompt, then answer
    attention_mask: Tensor  # [B, P + T] int64, 0 at padding
    prompt_width: int  # P
    texts: list[str]  # B answers, without end-of-sequence tokens
    answer_mask: Tensor  # [B, T] bool: tokens that the policy sampled, with end-of-sequence tokens
    turn_of_token: Tensor  # [B, T] int64: the turn of a token, from 0; a reply belongs to the turn before it
    truncated: Tensor  # [B] bool: the answer was cut at max_new_tokens
    turns: list[list[str]]  # what the policy wrote in each turn of B answers
    log_probs: Tensor  # [B, T] fp32, computed while sampling; 0 for greedy decoding and at tokens of replies or padding
    # With truncated sampling: the ids that each answer's tokens were sampled from, as a `KeptSets` of T tokens each.
    kept: list[KeptSets] | None = None

    @property
    def kept_sets(self) -> KeptSets | None:
        """The ids that the B * T tokens were sampled from; None without truncated sampling."""
        if self.kept is None:
            return None
        return KeptSets.from_samples([(sets.ids, sets.offsets) for sets in self.kept]).to(self.input_ids.device)

    @property
    def answer_ids(self) -> Tensor:
        """The ids of the answers, [B, T] int64."""
        return self.input_ids[:, self.prompt_width :]


@dataclass
class Dialogue:
    """One answer while it is sampled: the tokens of all turns and replies."""

    example: Example
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # for each token of `ids`: whether the policy sampled it
    turn_of: list[int] = field(default_factory=list)  # for each token of `ids`: its turn
    log_probs: list[float] = field(default_factory=list)  # for each token of `ids`; 0 in replies and greedy answers
    kept: list[list[int]] = field(default_factory=list)  # for each token of `ids`: the ids kept; [] if not truncated
    text: str = ""  # turns and replies
    turns: list[str] = field(default_factory=list)
    done: bool = False
    truncated: bool = False

    def add(
        self, ids: Sequence[int], text: str, log_probs: Sequence[float] | None, kept: Sequence[list[int]] = ()
    ) -> None:
        """Append the tokens of a turn, which the policy sampled, or of a reply. A reply has no `log_probs`."""
        sampled = log_probs is not None
        if sampled:
            self.turns.append(text)
        self.text += text
        self.ids += ids
        self.kept += kept or [[] for _ in ids]
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(ids)
        self.sampled += [sampled] * len(ids)
        self.turn_of += [len(self.turns) - 1] * len(ids)


def sample(policy: Policy, examples: Sequence[Example], **options: Any) -> Rollout:
    """Sample answers as `converse` does, and pad them to a rollout."""
    return padded(policy, converse(policy, examples, **options))


@contextmanager
def sampler_weights(policy: Policy, precision: str) -> Iterator[None]:
    """Round the policy's weights while sampling, as an inference engine does. Precision "" changes nothing."""
    exact = [(parameter, parameter.data) for parameter in policy.model.parameters()]
    try:
        for parameter, data in exact if precision == "bf16" else ():
            parameter.data = data.to(torch.bfloat16)
        yield
    finally:
        for parameter, data in exact:
            parameter.data = data


@torch.no_grad()
def converse(
    policy: Policy,
    examples: Sequence[Example],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    temperature: float | None,
    truncation: Truncation = UNTRUNCATED,
    task: Task | None = None,
    seeds: Sequence[Sequence[int]] | None = None,
    width: int = 0,
) -> list[Dialogue]:
    """Sample `group_size` consecutive answers per example. A temperature of None means greedy decoding.

    `truncation` restricts the tokens to sample from. Log-probs are then over the kept ids.

    `task` has the replies of a dialogue; without it, an answer has one turn. An answer ends after `task.max_turns`
    turns, or when `task.reply` returns None. It has at most `max_new_tokens` tokens, replies included. An answer that
    is cut at that limit has no end-of-sequence token. A reply that leaves no room for the next turn is dropped.

    `seeds` has a few integers >= 0 per example. They determine the random numbers of its answers, whatever else is
    sampled in the same call. None: draw them from torch's generator. Prompts are padded to at least `width` tokens,
    because the amount of padding changes how logits are rounded.
    """
    prompts = encode(policy, [example.prompt for example in examples])
    dialogues = [Dialogue(e, ids) for e, ids in zip(examples, prompts, strict=True) for _ in range(group_size)]
    if seeds is None:
        seeds = [[0]] * len(examples) if temperature is None else torch.randint(2**62, (len(examples), 1)).tolist()
    # One number per token of an answer, [B, max_new_tokens].
    numbers = np.concatenate([np.random.default_rng(seed).random((group_size, max_new_tokens)) for seed in seeds])
    for turn in range(1 if task is None else task.max_turns):
        active = [dialogue for dialogue in dialogues if not dialogue.done]
        if not active:
            break
        rooms = [max_new_tokens - len(dialogue.ids) for dialogue in active]
        ahead = [row[len(d.ids) :] for row, d in zip(numbers, dialogues, strict=True) if not d.done]
        contexts = [d.prompt + d.ids for d in active]
        answers, log_probs, kept = generate(policy, contexts, ahead, temperature, truncation, width)
        cut = [ids[:room] for ids, room in zip(answers, rooms, strict=True)]
        ends = [bool(ids) and ids[-1] in end_tokens(policy) for ids in cut]
        # Keep special tokens in the text. Otherwise a model could pad its answers with tokens that rewards do not see.
        bodies = [ids[: len(ids) - ended] for ids, ended in zip(cut, ends, strict=True)]
        texts = policy.tokenizer.batch_decode(bodies, skip_special_tokens=False)
        for dialogue, ids, text, ended, row, sets in zip(active, cut, texts, ends, log_probs, kept, strict=True):
            dialogue.add(ids, text, row[: len(ids)], sets[: len(ids)])
            dialogue.truncated = not ended
            dialogue.done = True
            if ended and task is not None and task.reply is not None and turn + 1 < task.max_turns:
                reply_to(policy, dialogue, task.reply(text, dialogue.example), max_new_tokens)
    return dialogues


def reply_to(policy: Policy, dialogue: Dialogue, reply: str | None, max_new_tokens: int) -> None:
    """Append the environment's reply to a dialogue. None, or a reply that does not fit, ends the dialogue."""
    if reply is None:
        return
    ids = encode_reply(policy, dialogue.example.prompt, reply, end=dialogue.ids[-1])
    if len(dialogue.ids) + len(ids) >= max_new_tokens:
        dialogue.truncated = True
        return
    dialogue.add(ids, reply, log_probs=None)
    dialogue.done = False


def generate(
    policy: Policy,
    prompts: Sequence[list[int]],
    numbers: Sequence[np.ndarray],
    temperature: float | None,
    truncation: Truncation,
    width: int,
) -> tuple[list[list[int]], list[list[float]], list[list[list[int]]]]:
    """Continue token ids up to and including the first end-of-sequence token, or for as many tokens as `numbers` has.

    `numbers` has a row of uniform numbers in [0, 1) per prompt, which choose the tokens, unless temperature is None.

    Returns:
        For each prompt the new ids, for each new id its log-prob (0 if temperature is None), and for each new id the
        ids that were kept (none if not truncated).
    """
    ids, mask = left_padded(policy, prompts, width)
    room = max(map(len, numbers))
    options: dict[str, Any] = {"do_sample": False}
    chosen = None
    if temperature is not None:
        uniform = pad_sequence([torch.from_numpy(row) for row in numbers], batch_first=True)  # [B, room]
        chosen = ChosenTokens(uniform.to(ids.device), temperature, truncation)
        options["logits_processor"] = LogitsProcessorList([chosen])
    if policy.has_routers:  # the routers' loss needs all positions, but a step with a cache sees only one
        options["output_router_logits"] = False
    # All weights are gathered already, so processes may sample different numbers of tokens.
    options |= {"max_new_tokens": room, "synced_gpus": False}
    out = policy.inner.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]  # [B, T]
    is_end = torch.isin(out, torch.tensor(sorted(end_tokens(policy)), device=out.device))
    lengths = ((is_end.cumsum(-1) - is_end.long()) == 0).sum(-1)  # [B], no end token before these positions
    computed = chosen.log_probs if chosen else []
    log_probs = torch.stack(computed, dim=1) if computed else torch.zeros(out.shape)  # [B, T]
    rows = zip(out.tolist(), log_probs.tolist(), lengths.tolist(), strict=True)
    cut = [(ids[:length], of_ids[:length]) for ids, of_ids, length in rows]
    steps = chosen.kept if chosen else []
    kept = [[step[row] for step in steps[:length]] for row, length in enumerate(lengths.tolist())]
    return [ids for ids, _ in cut], [of_ids for _, of_ids in cut], kept


class ChosenTokens(LogitsProcessor):
    """Make greedy decoding sample: the logits of a step become infinite at the token that a random number chooses.

    `generate` would draw all answers of a batch from one stream, so that each answer depended on the others.
    """

    def __init__(self, uniform: Tensor, temperature: float, truncation: Truncation) -> None:
        self._columns = iter(uniform.unbind(1))
        self._temperature = temperature
        self._truncation = truncation
        self.log_probs: list[Tensor] = []  # [B] fp32 for each step
        self.kept: list[list[list[int]]] = []  # for each step and row, the kept ids; [] if nothing is truncated

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores / self._temperature
        if self._truncation.is_on:
            kept = kept_by_sampler(logits.double(), *self._truncation)
            logits = logits.masked_fill(~kept, -math.inf)
            ids, sizes = kept.nonzero()[:, 1].cpu(), kept.sum(1).tolist()
            self.kept.append([row.tolist() for row in ids.split(sizes)])
        tokens = choose(logits, next(self._columns))
        self.log_probs.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return scores.scatter(1, tokens[:, None], math.inf)


def choose(logits: Tensor, uniform: Tensor) -> Tensor:
    """Choose a token per row of logits [B, V] fp32 by a number in [0, 1) [B] float64.

    The first token whose cumulative probability exceeds the number is chosen, so never a token of probability 0.
    """
    probabilities = logits.softmax(-1)
    # In fp32, the sum over a large vocabulary would round small probabilities away.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64).masked_fill_(probabilities == 0, 0)
    total = cumulative.amax(-1, keepdim=True)  # 1, up to rounding
    # A float64 below 1 times the total is rounded to less than the total, so that some token exceeds it.
    return (cumulative > uniform[:, None] * total).byte().argmax(-1)


def end_tokens(policy: Policy) -> set[int]:
    """The ids of the tokens that end a turn."""
    return set(policy.inner.generation_config.eos_token_id)


def padded(policy: Policy, dialogues: Sequence[Dialogue]) -> Rollout:
    """Make a rollout of finished dialogues."""
    device = policy.device
    pad = policy.tokenizer.pad_token_id
    prompt_ids, prompt_mask = left_padded(policy, [dialogue.prompt for dialogue in dialogues])
    answer_ids = right_padded([dialogue.ids for dialogue in dialogues], pad).to(device)
    truncated = any(any(dialogue.kept) for dialogue in dialogues)
    length = answer_ids.shape[1]
    kept = [KeptSets.from_lists([dialogue.kept], length=length) for dialogue in dialogues] if truncated else None
    attended = right_padded([[1] * len(dialogue.ids) for dialogue in dialogues]).to(device)
    return Rollout(
        torch.cat([prompt_ids, answer_ids], dim=1),
        torch.cat([prompt_mask, attended], dim=1),
        prompt_ids.shape[1],
        [dialogue.text for dialogue in dialogues],
        right_padded([dialogue.sampled for dialogue in dialogues]).to(device).bool(),
        right_padded([dialogue.turn_of for dialogue in dialogues]).to(device),
        torch.tensor([dialogue.truncated for dialogue in dialogues], device=device),
        [dialogue.turns for dialogue in dialogues],
        right_padded([dialogue.log_probs for dialogue in dialogues], dtype=torch.float32).to(device),
        kept,
    )


def left_padded(policy: Policy, rows: Sequence[list[int]], width: int = 0) -> tuple[Tensor, Tensor]:
    """Pad token ids on the left, to at least `width`. Return ids and attention mask, [B, P] int64."""
    pad = policy.tokenizer.pad_token_id
    missing = [max(width, *map(len, rows)) - len(row) for row in rows]
    ids = torch.tensor([[pad] * count + row for count, row in zip(missing, rows, strict=True)], dtype=torch.long)
    mask = torch.tensor([[0] * count + [1] * len(row) for count, row in zip(missing, rows, strict=True)])
    return ids.to(policy.device), mask.to(policy.device)


def right_padded(rows: Sequence[Sequence[float]], value: int = 0, dtype: torch.dtype = torch.long) -> Tensor:
    """Pad rows on the right to the length of the longest row."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


def fitting(config: TrainConfig, policy: Policy, task: Task) -> tuple[Task, int]:
    """Leave out prompts of more than `max_prompt_tokens` tokens (0: none). Return the task and how many were left out.

    Raises:
        InputError: no prompt is left to train or evaluate on; the longest prompt and an answer of `max_new_tokens`
            exceed the model's positions; a prompt has no tokens, or a token id beyond the model's embeddings; or the
            chat template fails on a prompt, or cannot be used for the task's replies.
    """
    kept: list[list[Example]] = []
    longest = 0
    max_prompt_tokens = config.max_prompt_tokens
    max_new_tokens = config.max_new_tokens
    for examples in (task.train, task.held_out):
        if not examples:  # `gspo eval` trains on none
            kept.append([])
            continue
        prompts = encode(policy, [example.prompt for example in examples])
        check_tokens(config, policy, examples, prompts)
        if task.reply is not None:
            check_replies(policy, [example.prompt for example in examples])
        lengths = [len(ids) for ids in prompts]
        fits = [length <= (max_prompt_tokens or math.inf) for length in lengths]
        if not any(fits):
            raise InputError(f"max_prompt_tokens: expected a limit that some prompts meet, got {max_prompt_tokens}")
        kept.append([example for example, fit in zip(examples, fits, strict=True) if fit])
        longest = max(longest, *(length for length, fit in zip(lengths, fits, strict=True) if fit))
    positions = getattr(decoder_config(policy.inner), "max_position_embeddings", None) or math.inf
    if longest + max_new_tokens > positions:
        raise InputError(
            f"max_new_tokens={max_new_tokens}: with the longest prompt ({longest} tokens) an answer would exceed the "
            f"model's {positions} positions"
        )
    left_out = len(task.train) + len(task.held_out) - sum(map(len, kept))
    return replace(task, train=kept[0], held_out=kept[1]), left_out


def check_tokens(config: TrainConfig, policy: Policy, examples: Sequence[Example], prompts: list[list[int]]) -> None:
    """Raise an InputError for a prompt without tokens, or a token id beyond the model's embeddings."""
    source = config.data or config.task or "task"
    rows = policy.inner.get_input_embeddings().weight.shape[0]
    beyond = f"model {config.model}: expected token ids below {rows}, the rows of its embeddings, got"
    for name in ("pad_token", "eos_token"):
        token = getattr(policy.tokenizer, name)
        number = getattr(policy.tokenizer, f"{name}_id")
        if number is not None and number >= rows:
            raise InputError(f"{beyond} {number} for the tokenizer's {name} {token!r}")
    for example, ids in zip(examples, prompts, strict=True):
        if not ids:
            raise InputError(f"data {source}: expected prompts with at least 1 token, got 0 tokens for {example.key!r}")
        if max(ids) >= rows:
            raise InputError(f"{beyond} {max(ids)} for the prompt {example.key[:60]!r} of data {source}")
