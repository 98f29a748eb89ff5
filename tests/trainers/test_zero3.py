"""Heads partitioned by DeepSpeed's ZeRO-3 on two CPU processes. Gradients must equal those of a single process.

`make test-trainers` runs these tests in an environment with DeepSpeed. Without DeepSpeed they are skipped.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.tiny_model import SHAPE
from tolerance import MODEL_GRADIENT_RELATIVE
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_kernels import gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.integrations.huggingface import HeadError, base_model, fuse_head, logit_options

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it on import
deepspeed: Any = pytest.importorskip("deepspeed")

RANKS, MICRO = 2, 4  # DeepSpeed begins to prefetch in the third forward
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": MICRO,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    # Partition every parameter, and release it as early as possible.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
}
BODY = {"r": 2, "target_modules": ["q_proj"]}
HEADS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "lora": {"r": 2, "target_modules": ["lm_head", "q_proj"]},
    "modules_to_save": {**BODY, "modules_to_save": ["lm_head"]},
    "tokens": {**BODY, "trainable_token_indices": [3, 7]},  # rows of the embeddings, and so of a tied head
    "tokens of the head": {**BODY, "trainable_token_indices": {"lm_head": [3, 7]}},
}
CASES = [
    (head, tied, when)
    for head in HEADS
    for tied in (False, True)
    for when in ("fused first", "partitioned first", "built partitioned")
    if not (head == "tokens of the head" and tied) and not (head != "plain" and when == "built partitioned")
]


def make(head: str, tied: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    model: Any = Qwen3ForCausalLM(config)
    options = HEADS[head]
    if options is not None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **options))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "trainable_tokens_delta" in name:
                    p.add_(torch.randn_like(p) / 4)
    return model


def batch(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [B, 7], completion mask [B, 6] and advantages [B]."""
    number = RANKS * MICRO
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (number, 7), generator=rng)
    advantages = torch.randn(number, generator=rng)
    return ids[rows], (torch.arange(6) >= 2).expand(number, 6)[rows], advantages[rows]


def fused_loss(engine: Any, row: int) -> Tensor:
    """Compute the loss of a sequence: inside the head's call if `row` is even, else from log-probs computed there."""
    ids, mask, advantages = batch(slice(row, row + 1))
    if row % 2 == 0:
        return engine(
            input_ids=ids,
            with_head=lambda hidden, lm_head, **options: gspo_fused_loss(
                hidden[:, :-1], lm_head, ids[:, 1:], advantages, mask=mask, **options
            ),
        ).result.loss
    lp = engine(
        input_ids=ids,
        with_head=lambda hidden, lm_head, **options: linear_log_probs(
            hidden[:, :-1], lm_head, ids[:, 1:], mask=mask, entropy=True, **options
        ),
    ).result.log_probs
    return policy_loss(lp, advantages, mask=mask).loss


def gradients(rank: int, head: str, tied: bool, when: str) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_grad

    with deepspeed.zero.Init(config_dict_or_path=ZERO3) if when == "built partitioned" else nullcontext():
        model = make(head, tied)
    if when == "built partitioned":  # each rank drew other random values, so copy the values of `make`
        for p, value in zip(model.parameters(), make(head, tied).parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
                p.copy_(value)
    if when != "partitioned first":
        fuse_head(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO3)[0]
    if when == "partitioned first":
        with pytest.raises(HeadError, match="before ZeRO-3 partitions it"):
            logit_options(engine)
        fuse_head(engine)
    for micro in range(MICRO):
        loss = fused_loss(engine, rank * MICRO + micro)
        if head == "plain" and micro == 0:  # the backward has to gather the weight again
            assert base_model(engine).lm_head.weight.numel() == 0
        engine.backward(loss)
        if micro < MICRO - 1:
            engine.step()
    grads = {name: safe_get_full_grad(p) for name, p in trained.items()}
    engine.destroy()
    return grads


def rank_main(rank: int, folder: Path) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it compiles C++
    deepspeed.init_distributed("gloo", verbose=False)
    results = {case: gradients(rank, *case) for case in CASES}
    if rank == 0:
        torch.save(results, folder / "gradients.pt")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("zero3")
    run_ranks(rank_main, RANKS, folder)
    return torch.load(folder / "gradients.pt")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_one_process(case: tuple[str, bool, str], sharded: Any) -> None:
    model = make(*case[:2])
    ids, mask, advantages = batch(slice(None))
    logits = model(input_ids=ids).logits[:, :-1]
    lp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    policy_loss(lp, advantages, mask=mask).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert expected.keys() == sharded[case].keys()
    for name, grad in expected.items():
        error = (sharded[case][name] - grad).norm()
        assert grad.norm() > 0 and error <= MODEL_GRADIENT_RELATIVE[grad.dtype] * grad.norm(), name
