"""Sample rollouts: padded answers to prompts, with a mask of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import Policy


@dataclass(frozen=True)
class Rollout:
    """Sampled answers: prompts padded on the left, answers on the right."""

    input_ids: Tensor  # [B, P + T] int64: prompt, then answer
    attention_mask: Tensor  # [B, P + T] int64, 0 at padding
    prompt_width: int  # P
    texts: list[str]  # B answers, without the end-of-sequence token

    @property
    def answer_ids(self) -> Tensor:
        """The ids of the answers, [B, T] int64."""
        return self.input_ids[:, self.prompt_width :]

    @property
    def answer_mask(self) -> Tensor:
        """The tokens of each answer up to and including its first end-of-sequence token, [B, T] bool."""
        return self.attention_mask[:, self.prompt_width :].bool()

    def select(self, start: int, stop: int) -> Rollout:
        """Return the answers `start` to `stop` - 1, with the same padded width."""
        return Rollout(
            self.input_ids[start:stop],
            self.attention_mask[start:stop],
            self.prompt_width,
            self.texts[start:stop],
        )


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[str],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    temperature: float | None,
) -> Rollout:
    """Sample `group_size` consecutive answers per prompt. A temperature of None means greedy decoding.

    An answer that reaches max_new_tokens is cut there and has no end-of-sequence token.
    """
    prompt_ids, prompt_mask = encode(policy, prompts)
    prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.repeat_interleave(group_size, dim=0)
    if temperature is None:
        sampling = {"do_sample": False}
    else:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if policy.counts_router_loss:
        # The routers' loss needs all positions, but a generation step with a cache sees only one position.
        sampling["output_router_logits"] = False
    input_ids = policy.model.generate(prompt_ids, attention_mask=prompt_mask, max_new_tokens=max_new_tokens, **sampling)
    answers = input_ids[:, prompt_ids.shape[1] :]  # [B, T]
    ends = torch.tensor(policy.model.generation_config.eos_token_id, device=answers.device)
    is_end = torch.isin(answers, ends)  # [B, T]
    ended_before = is_end.cumsum(-1) - is_end.long()  # [B, T], number of end tokens before each position
    mask = torch.cat([prompt_mask, (ended_before == 0).long()], dim=1)  # [B, P + T]
    # Keep special tokens in the text. Otherwise a model could pad its answers with tokens that the reward cannot see.
    before_end = (ended_before == 0) & ~is_end
    answer_ids = [row[keep].tolist() for row, keep in zip(answers, before_end, strict=True)]
    texts = policy.tokenizer.batch_decode(answer_ids, skip_special_tokens=False)
    return Rollout(input_ids, mask, prompt_ids.shape[1], texts)


def encode(policy: Policy, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Encode prompts as left-padded ids and attention mask, [B, P] int64. Use the tokenizer's chat template, if any."""
    tokenizer = policy.tokenizer
    texts = list(prompts)
    is_chat = tokenizer.chat_template is not None
    if is_chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    # A chat template already contains the special tokens.
    encoded = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=not is_chat, return_tensors="pt")
    device = policy.model.device
    return encoded["input_ids"].to(device), encoded["attention_mask"].to(device)
