"""Padding on the left: the types of models whose log-probs it changes by rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tolerance import TRAINER_ABSOLUTE
from torch import nn

from gspo_kernels.integrations.huggingface.rows import RELATIVE_POSITIONS, positions_are_relative

# Settings of a tiny model. A type ignores those that it does not have.
SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip  # numbers


@pytest.mark.parametrize("name", sorted(RELATIVE_POSITIONS))
def test_padding_on_the_left_changes_roundings_only(name: str) -> None:
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = transformers.CONFIG_MAPPING[name](**SMALL)
    torch.manual_seed(0)
    model: Any = mapping[type(config)](config).eval()
    assert positions_are_relative(model) and not positions_are_relative(nn.Linear(1, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.ndim > 1 else None
    ids = torch.randint(2, SMALL["vocab_size"], (2, 14))
    log_probs = []
    for padding in (0, 1, 3, 9):
        padded, mask = (nn.functional.pad(x, (padding, 0)) for x in (ids, torch.ones_like(ids)))
        with torch.no_grad():
            out = model(input_ids=padded, attention_mask=mask, use_cache=False)
        log_probs.append(out.logits[:, padding:].log_softmax(-1))
    assert log_probs[0].std() > 0.01
    for x in log_probs[1:]:
        torch.testing.assert_close(x, log_probs[0], rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
