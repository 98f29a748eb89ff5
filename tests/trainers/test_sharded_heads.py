"""Heads in FSDP units and DDP on two CPU processes. A step of SGD must equal a step of one process on full logits.

All cases run in one start of the processes.
"""

from __future__ import annotations

import functools
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.tiny_model import SHAPE
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from tolerance import SHARDED_GRADIENT_RELATIVE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_kernels import gspo_fused_loss, policy_loss
from gspo_kernels.integrations.huggingface import base_model, fuse_head, is_fused

RANKS = 2
BODY = {"target_modules": ["q_proj"]}
HEADS: dict[str, tuple[bool, dict[str, Any] | None]] = {  # whether the head is tied to the embeddings, LoraConfig
    "plain": (False, None),
    "tied": (True, None),
    "lora": (False, {"target_modules": ["q_proj", "lm_head"]}),
    "modules_to_save": (False, {**BODY, "modules_to_save": ["lm_head"]}),
    "tokens of the embeddings": (False, {**BODY, "trainable_token_indices": [3, 40]}),
    "tied lora": (True, {"target_modules": ["q_proj", "lm_head"]}),
    "tied modules_to_save": (True, {**BODY, "modules_to_save": ["lm_head"]}),
}
FSDP1 = {"fsdp1 above": True, "fsdp1 inside": True, "fsdp1 peft": True, "fsdp1 peft, flat": False}  # use_orig_params
FSDP2 = ("fsdp2 above", "fsdp2 head", "fsdp2 inside", "fsdp2 both")
WHEN = ("fused, then sharded", "sharded, then fused")
# FSDP refuses, or unties, a tied weight in two units. So does the policy of PEFT if the embeddings are trained. With
# use_orig_params=False, FSDP1 refuses a unit of trained and frozen parameters.
UNTIED = {"fsdp1 inside", "fsdp2 inside", "fsdp2 both"}
REFUSED = {("tied", "fsdp1 peft"), ("tied", "fsdp1 peft, flat"), ("tokens of the embeddings", "fsdp1 peft, flat")}
# A plain head in both orders, and every other pair in one of them, so that each head and each unit sees both.
CASES = [
    (head, units, when)
    for i, head in enumerate(HEADS)
    for j, units in enumerate(("ddp", *FSDP1, *FSDP2))
    for when in (WHEN if head == "plain" else [WHEN[(i + j) % 2]])
    if not (HEADS[head][0] and units in UNTIED) and (head, units) not in REFUSED
]


def make(head: str) -> Any:
    torch.manual_seed(0)
    tied, config = HEADS[head]
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied))
    if config is not None:
        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **config))
    return model.double()


def batch(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [B, 7], completion mask [B, 6] and advantages [B]."""
    ids = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])
    return ids[rows], (torch.arange(6) >= 2).expand(4, 6)[rows], advantages[rows]


def fused_loss(model: Any, rows: slice, normalizer: float) -> Tensor:
    ids, mask, advantages = batch(rows)

    def loss(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return gspo_fused_loss(
            hidden[:, :-1], lm_head, ids[:, 1:], advantages, mask=mask, normalizer=normalizer, **options
        )

    return model(input_ids=ids, with_head=loss).result.loss


def dense_loss(model: Any, rows: slice, normalizer: float) -> Tensor:
    ids, mask, advantages = batch(rows)
    logits = model(input_ids=ids).logits[:, :-1]
    lp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return policy_loss(lp, advantages, mask=mask, normalizer=normalizer).loss


def leaves(head: Any) -> list[Any]:
    return [x for x in head.modules() if not [*x.children()] and [*x.parameters()]]


def shard(model: Any, units: str) -> Any:
    if units == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    base = base_model(model)
    layers, head = base.model.layers, base.lm_head
    inside = [head] if type(head) is nn.Linear else leaves(head)
    if units in FSDP1:
        alone = {*layers, *(inside if units == "fsdp1 inside" else [])}
        policy: Any = functools.partial(lambda_auto_wrap_policy, lambda_fn=alone.__contains__)
        if "peft" in units:
            policy = fsdp_auto_wrap_policy(model)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=FSDP1[units]
        )
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    if units in ("fsdp2 inside", "fsdp2 both"):
        for module in inside:
            fully_shard(module, mesh=mesh)
    if "head" in units or (units == "fsdp2 both" and head not in inside):
        tied = [base.model.embed_tokens] if base.config.tie_word_embeddings else []
        group = [*tied, *([base.model.norm] if "norm" in units else []), head]
        fully_shard(group if len(group) > 1 else head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parameters(model: Any, wrapped: Any) -> dict[str, Tensor]:
    fsdp1 = isinstance(wrapped, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(wrapped) if fsdp1 else nullcontext():
        return {
            name.replace("_fsdp_wrapped_module.", ""): (
                p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
            )
            for name, p in model.named_parameters()
        }


def state(model: Any) -> dict[str, Any]:
    """Return what `remove` must restore in each module: its class, parameters, forward and hooks."""
    return {
        name: (type(x), {k: id(p) for k, p in x._parameters.items()}, vars(x).get("forward"), len(hooks(x)))
        for name, x in model.named_modules()
    }


def hooks(module: Any) -> list[Any]:
    return [*module._forward_pre_hooks, *module._forward_hooks, *module._backward_pre_hooks, *module._backward_hooks]


def run(rank: int, head: str, units: str, when: str, loss: Any = fused_loss) -> dict[str, Tensor]:
    model = make(head)
    if loss is fused_loss and when == WHEN[0]:
        fuse_head(model)
    wrapped = shard(model, units)
    if loss is fused_loss and when == WHEN[1]:
        before = state(wrapped)
        fuse_head(wrapped).remove()
        assert state(wrapped) == before
    if loss is fused_loss:
        assert fuse_head(wrapped) is fuse_head(wrapped)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1.0)
    for micro in range(2):  # gradients of micro-batches add up
        rows = slice(2 * rank + micro, 2 * rank + micro + 1)
        # The wrappers average gradients over ranks. To get their sum, the normalizer is divided by the number of ranks.
        loss(wrapped, rows, 4 / RANKS).backward()
    optimizer.step()
    if loss is fused_loss:
        fuse_head(wrapped).remove()
        assert not is_fused(wrapped) and "forward" not in vars(base_model(wrapped))
    return parameters(model, wrapped)


def rank_main(rank: int, folder: Path, loss: Any = fused_loss, cases: Any = CASES) -> None:
    dist.init_process_group("gloo")
    results: dict[Any, Any] = {}
    for case in cases:
        try:
            results[case] = run(rank, *case, loss=loss)
        except Exception:
            results[case] = traceback.format_exc()
    if rank == 0:
        torch.save(results, folder / "parameters.pt")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(rank_main, RANKS, folder)
    return torch.load(folder / "parameters.pt")


def check_case(case: Any, result: Any) -> None:
    assert not isinstance(result, str), result
    model = make(case[0])
    dense_loss(model, slice(0, 4), 4.0).backward()
    assert {n for n, _ in model.named_parameters()} == set(result)
    for name, p in model.named_parameters():
        step = p.detach() - result[name]
        if p.grad is None:
            assert not step.any(), name
        else:
            assert (step - p.grad).norm() <= SHARDED_GRADIENT_RELATIVE * p.grad.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" / ".join)
def test_a_step_equals_that_of_one_process(case: tuple[str, str, str], sharded: Any) -> None:
    check_case(case, sharded[case])
