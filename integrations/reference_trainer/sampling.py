"""Sample rollouts: padded answers to prompts, with a mask of the tokens that the policy sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from gspo_kernels import KeptSets
from gspo_kernels.kept_sets import kept_by_sampler

from ..tasks import Example, Task
from .chat import encode
from .config import UNTRUNCATED, InputError, TrainConfig, Truncation
from .policy import Policy, decoder_config


@dataclass(frozen=True)
class Rollout:
    """Sampled answers: prompts padded on the left, answers on the right."""

    input_ids: Tensor  # [B, P + T] int64: prompt, then answer
    attention_mask: Tensor  # [B, P + T] int64, 0 at padding
    prompt_width: int  # P
    texts: list[str]  # B answers, without end-of-sequence tokens
    answer_mask: Tensor  # [B, T] bool: tokens of the answer, with the end-of-sequence token
    truncated: Tensor  # [B] bool: the answer was cut at max_new_tokens
    log_probs: Tensor  # [B, T] fp32, computed while sampling; 0 for greedy decoding and at padding
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


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    example: Example
    prompt: list[int]
    ids: list[int]  # with the end-of-sequence token, unless the answer is truncated
    log_probs: list[float]  # of each token of `ids`; 0 for greedy decoding
    kept: list[list[int]]  # for each token of `ids`, the ids it was sampled from; [] if all
    text: str  # without the end-of-sequence token
    truncated: bool  # cut at max_new_tokens


def sample(policy: Policy, examples: Sequence[Example], **options: Any) -> Rollout:
    """Sample answers as `answers_to` does, and pad them to a rollout."""
    return padded(policy, answers_to(policy, examples, **options))


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
def answers_to(
    policy: Policy,
    examples: Sequence[Example],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    temperature: float | None,
    truncation: Truncation = UNTRUNCATED,
    seeds: Sequence[Sequence[int]] | None = None,
    width: int = 0,
) -> list[Answer]:
    """Sample `group_size` consecutive answers per example. A temperature of None means greedy decoding.

    `truncation` restricts the tokens to sample from. Log-probs are then over the kept ids.

    `seeds` has a few integers >= 0 per example. They determine the random numbers of its answers, whatever else is
    sampled in the same call. None: draw them from torch's generator. Prompts are padded to at least `width` tokens,
    because the amount of padding changes how logits are rounded.
    """
    groups = zip(examples, encode(policy, [example.prompt for example in examples]), strict=True)
    asked = [(example, prompt) for example, prompt in groups for _ in range(group_size)]
    ids, mask = left_padded(policy, [prompt for _, prompt in asked], width)
    # All weights are gathered already, so processes may sample different numbers of tokens.
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "synced_gpus": False}
    chosen = None
    if temperature is not None:
        if seeds is None:
            seeds = torch.randint(2**62, (len(examples), 1)).tolist()
        numbers = np.concatenate([np.random.default_rng(seed).random((group_size, max_new_tokens)) for seed in seeds])
        chosen = ChosenTokens(torch.from_numpy(numbers).to(ids.device), temperature, truncation)
        options["logits_processor"] = LogitsProcessorList([chosen])
    if policy.has_routers:  # the routers' loss needs all positions, but a step with a cache sees only one
        options["output_router_logits"] = False
    out = policy.inner.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]  # [B, T]
    log_probs = torch.stack(chosen.log_probs, dim=1) if chosen else torch.zeros(out.shape)  # [B, T]
    ends = end_tokens(policy)
    answers = []
    for row, (new, of_new) in enumerate(zip(out.tolist(), log_probs.tolist(), strict=True)):
        end = next((place for place, token in enumerate(new) if token in ends), None)
        length = len(new) if end is None else end + 1
        kept = [step[row] for step in chosen.kept[:length]] if truncation.is_on and chosen else [[]] * length
        # Keep special tokens in the text. Otherwise a model could pad its answers with tokens that rewards do not see.
        text = policy.tokenizer.decode(new[:end], skip_special_tokens=False)
        answers.append(Answer(*asked[row], new[:length], of_new[:length], kept, text, end is None))
    return answers


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
    """The ids of the tokens that end an answer."""
    return set(policy.inner.generation_config.eos_token_id)


def padded(policy: Policy, answers: Sequence[Answer]) -> Rollout:
    """Make a rollout of answers."""
    device = policy.device
    prompt_ids, prompt_mask = left_padded(policy, [answer.prompt for answer in answers])
    answer_ids = right_padded([answer.ids for answer in answers], policy.tokenizer.pad_token_id).to(device)
    answer_mask = right_padded([[1] * len(answer.ids) for answer in answers]).to(device)
    length = answer_ids.shape[1]
    truncated = any(any(answer.kept) for answer in answers)
    return Rollout(
        torch.cat([prompt_ids, answer_ids], dim=1),
        torch.cat([prompt_mask, answer_mask], dim=1),
        prompt_ids.shape[1],
        [answer.text for answer in answers],
        answer_mask.bool(),
        torch.tensor([answer.truncated for answer in answers], device=device),
        right_padded([answer.log_probs for answer in answers], dtype=torch.float32).to(device),
        [KeptSets.from_lists([answer.kept], length=length) for answer in answers] if truncated else None,
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
            exceed the model's positions; or the chat template fails on a prompt.
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
