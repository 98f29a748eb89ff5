"""Several processes started by torchrun: their shares of the samples, sums over processes, and sharded weights.

With parallel=ddp every process has all weights, and `average_gradients` averages their gradients before each optimizer
step. With parallel=fsdp2 every process has a part of each weight, and FSDP2 averages the gradients. Either way, all
processes know the whole rollout, because token ids are small. So advantages, mini-batches and normalizers are computed
as in one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from .config import InputError, TrainConfig
from .policy import Policy, decoder_config

DEADLINE = timedelta(minutes=30)  # of a collective; a process that waits longer ends with an error
Item = TypeVar("Item")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def processes(config: TrainConfig) -> Iterator[None]:
    """Join the processes that torchrun started, if any. Raise an InputError if they cannot share the batch evenly."""
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if count == 1 or dist.is_initialized():
        yield
        return
    sizes = {"prompts_per_step": config.prompts_per_step, "updates_per_rollout": config.mini_batch_size}
    if config.micro_batch_size:
        sizes["micro_batch_size"] = config.mini_batch_size // config.micro_batch_size
    for name, size in sizes.items():
        if size % count:
            expected = "prompts_per_step, the answers of an update and its micro-batches to be multiples"
            raise InputError(f"WORLD_SIZE: expected {expected} of the {count} processes, got {name} with {size}")
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=DEADLINE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def share(items: Sequence[Item]) -> Sequence[Item]:
    """Take this process's consecutive part of the items, or of the rows of a tensor."""
    start, stop = (round(len(items) * part / world()) for part in (rank(), rank() + 1))
    return items[start:stop]


def gather(value: Item) -> list[Item]:
    """Gather the values of all processes, in rank order."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def gather_lists(items: list[Item]) -> list[Item]:
    """Concatenate the lists of all processes."""
    return [item for part in gather(items) for item in part]


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate the rows of all processes."""
    return rows if world() == 1 else torch.cat(gather(rows.cpu())).to(rows.device)


def average_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Average gradients over the processes. FSDP2 has already averaged its sharded gradients."""
    for weight in weights:
        if world() > 1 and not isinstance(weight, DTensor):
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
            weight.grad /= world()


def shard(policy: Policy, config: TrainConfig) -> None:
    """Shard the weights of a policy over the processes with FSDP2, one group of weights per decoder layer."""
    mesh = init_device_mesh(policy.device.type, (world(),))
    low = None if config.uses_autocast or config.half_dtype is None else getattr(torch, config.half_dtype)
    options: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}
    layers = decoder_config(policy.inner).num_hidden_layers
    for module in policy.inner.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            for layer in module:
                fully_shard(layer, **options)
    fully_shard(policy.inner, **options)


@contextmanager
def gathered(policy: Policy) -> Iterator[None]:
    """Hold all weights of a sharded policy in every process, so that each process can sample at its own pace."""
    modules = [module for module in policy.inner.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not policy.inner, recurse=False)
            module.reshard()


def full(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded, in CPU memory. All processes must call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def whole_weights(policy: Policy) -> dict[str, Tensor] | None:
    """State dict of a sharded model, with whole tensors; None if the model is not sharded."""
    if not isinstance(policy.inner, FSDPModule):
        return None
    return {name: full(weight) for name, weight in policy.model.state_dict().items()}


def like(whole: Tensor, example: Tensor) -> Tensor:
    """Move a whole tensor to the device of `example`, and shard it in the same way. Scalars are returned unchanged."""
    if whole.ndim == 0:
        return whole
    whole = whole.to(example.device)
    return distribute_tensor(whole, example.device_mesh, example.placements) if isinstance(example, DTensor) else whole
