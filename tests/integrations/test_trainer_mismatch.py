"""A sampler whose weights are rounded to bf16, and the option for corrections."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gspo_kernels.integrations.reference_trainer.policy import Policy, demo_policy
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, sample, sampler_weights
from gspo_kernels.integrations.tasks import Example

EXAMPLES = [Example("sort ba:", "ab"), Example("sort fedcb:", "bcdef")] * 4


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    made = demo_policy()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(2)  # so that rounding to bf16 changes log-probs by about 0.02
    return made


def rollout_of(policy: Policy, precision: str) -> Rollout:
    torch.manual_seed(1)
    with sampler_weights(policy, precision):
        return sample(policy, EXAMPLES, group_size=4, max_new_tokens=7, temperature=1.0)


@torch.no_grad()
def log_probs_by(model: Any, rollout: Rollout) -> torch.Tensor:
    """Log-probs of the answers by full logits, [B, T]; 0 where no token was sampled."""
    positions = (rollout.attention_mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask, position_ids=positions)
    logits = out.logits[:, rollout.prompt_width - 1 : -1]
    log_probs = logits.float().log_softmax(-1)
    return torch.where(rollout.answer_mask, log_probs.gather(-1, rollout.answer_ids[..., None])[..., 0], 0)


def test_rounded_weights_sample_and_the_exact_ones_come_back(policy: Policy) -> None:
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    with sampler_weights(policy, "bf16"):
        rounded = list(map(torch.Tensor.detach, policy.model.parameters()))
    assert all(torch.equal(x.to(torch.bfloat16), y) for x, y in zip(before, rounded, strict=True))
    rollout = rollout_of(policy, "bf16")
    off = [
        (rollout.log_probs - log_probs_by(model, rollout)).abs().mean()
        for model in (policy.model, copy.deepcopy(policy.model).to(torch.bfloat16))
    ]
    assert off[0] > 0.01 and off[1] < 0.7 * off[0]  # with a cache, generation rounds differently from one forward
    with pytest.raises(KeyboardInterrupt), sampler_weights(policy, "bf16"):
        raise KeyboardInterrupt
    assert all(map(torch.equal, before, policy.model.parameters()))
