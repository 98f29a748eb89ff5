"""Heads wrapped by FSDP and DDP on two CPU processes. Gradients must equal those of a single process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.tiny_model import SHAPE
from tolerance import SHARDED_GRADIENT_RELATIVE
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_kernels import gspo_fused_loss
from gspo_kernels.integrations.huggingface import fuse_head

RANKS = 2


def make(tied: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    return Qwen3ForCausalLM(config).double()


def loss_of(model: Any, rows: slice, normalizer: float) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (2 * RANKS, 7), generator=rng)[rows]
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])[rows]
    mask = torch.arange(6)[None, :].expand(len(ids), 6) >= 2

    def loss(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return gspo_fused_loss(
            hidden[:, :-1], lm_head, ids[:, 1:], advantages, mask=mask, normalizer=normalizer, **options
        )

    return model(input_ids=ids, with_head=loss).result.loss


def shard(model: Any, how: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how.startswith("fsdp1"):
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params="original" in how
        )
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if how == "tail":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    elif how == "head":
        fully_shard(model.lm_head, mesh=mesh)
    elif how == "head, resharded":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def rank_main(rank: int, folder: Path, how: str, tied: bool, first: bool) -> None:
    dist.init_process_group("gloo")
    model = make(tied)
    if first:
        fuse_head(model)
    wrapped = shard(model, how)
    if not first:
        fuse_head(wrapped)
    for micro in range(2):  # gradients of micro-batches add up
        rows = slice(2 * rank + micro, 2 * rank + micro + 1)
        # The wrappers average gradients over ranks. To get their sum, the normalizer is divided by the number of ranks.
        loss_of(wrapped, rows, normalizer=4 / RANKS).backward()
    fsdp1 = isinstance(wrapped, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True) if fsdp1 else nullcontext():
        gradients = {
            name.replace("_fsdp_wrapped_module.", ""): (
                p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
            )
            for name, p in model.named_parameters()
        }
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["fused, then sharded", "sharded, then fused"])
@pytest.mark.parametrize(
    ("how", "tied"),
    [
        ("root", True),
        ("root", False),
        ("tail", False),
        ("head", False),
        ("head, resharded", False),
        ("ddp", True),
        ("fsdp1, original parameters", False),
        ("fsdp1, original parameters", True),
    ],
)
def test_gradients_equal_those_of_one_process(how: str, tied: bool, first: bool, tmp_path: Path) -> None:
    run_ranks(rank_main, RANKS, tmp_path, how, tied, first, imported="transformers.models.qwen3.modeling_qwen3")
    sharded = torch.load(tmp_path / "gradients.pt")
    model = make(tied)
    fuse_head(model)
    loss_of(model, slice(0, 4), normalizer=4.0).backward()
    assert {n for n, _ in model.named_parameters()} == set(sharded)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (sharded[name] - p.grad).norm() <= SHARDED_GRADIENT_RELATIVE * p.grad.norm(), name
