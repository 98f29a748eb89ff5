"""Process groups, device meshes and DTensors among the arguments of the public functions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F

from ..validation import Call, Unquoted


def process_group(call: Call, name: str, group: Any) -> Any:
    """Check a process group, or a device mesh of one dimension. Return the group; None if it has one rank."""
    if group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        call.fail(name, "None, because torch.distributed is not initialised", Unquoted(f"a {type(group).__name__}"))
    if type(group).__name__ == "DeviceMesh":  # an import of its module takes 20 ms
        if group.ndim != 1:
            call.fail(name, "a device mesh of one dimension, such as mesh['tp']", Unquoted(f"{group.ndim} dimensions"))
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        got = Unquoted(f"a {type(group).__name__}")
        call.fail(name, "a ProcessGroup of which this rank is a member, a DeviceMesh or None", got, TypeError)
    return group if group.size() > 1 else None


def is_dtensor(x: Any) -> bool:
    """Return whether `x` is a DTensor, without importing the module that defines it."""
    return type(x).__name__ == "DTensor"


def vocabulary_group(call: Call, weight: Any, tp_group: Any) -> Any:
    """Return the process group over which the head is sharded, or None. A DTensor weight says it itself."""
    group = None if tp_group is None else process_group(call, "tp_group", tp_group)
    if not is_dtensor(weight):
        return group
    mesh, placements = weight.device_mesh, weight.placements
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if (
        len(sharded) != 1
        or not placements[sharded[0]].is_shard(0)
        or "Strided" in type(placements[sharded[0]]).__name__
    ):
        expected = (
            "a DTensor with Shard(0) over exactly one mesh dimension (under FSDP, call inside the forward of the "
            "module, for example by fuse_head, so that the other dimension is gathered)"
        )
        call.fail("lm_head", expected, Unquoted(f"a DTensor with placements {tuple(placements)}"), TypeError)
    of_weight = mesh.get_group(sharded[0])
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(of_weight):
        call.fail("tp_group", "None or the group of the DTensor lm_head", Unquoted("a group of other ranks"))
    return of_weight if of_weight.size() > 1 else None


def local(x: Any) -> Any:
    """Return this rank's part of a DTensor, and other objects unchanged. The gradient becomes a DTensor again."""
    return x.to_local() if is_dtensor(x) else x


def local_rows(x: Any) -> Any:
    """Return this rank's rows of a DTensor, and other objects unchanged. A rank without rows gets a row of padding."""
    rows = local(x)
    return F.pad(rows, (0,) * (2 * rows.ndim - 1) + (1,)) if is_dtensor(x) and rows.shape[0] == 0 else rows


def local_hidden(call: Call, hidden: Any, group: Any) -> tuple[Any, bool]:
    """Return plain hidden states, and whether their gradient remains to be summed over the ranks of `group`.

    Hidden states may be a DTensor that is replicated over the mesh of the head. Their gradient is a DTensor of partial
    sums, which the next redistribution of the model adds up.
    """
    if not is_dtensor(hidden):
        return hidden, True
    from torch.distributed.tensor import Partial

    if group is None or hidden.device_mesh.ndim != 1 or not hidden.placements[0].is_replicate():
        expected = "a plain tensor, or a DTensor that is replicated over the mesh dimension of a DTensor lm_head"
        got = Unquoted(f"a DTensor with placements {tuple(hidden.placements)}")
        call.fail("hidden", expected, got, TypeError)
    return hidden.to_local(grad_placements=[Partial()]), False
