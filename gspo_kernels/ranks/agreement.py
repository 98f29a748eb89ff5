"""Check process groups, and compare arguments between ranks.

If an argument is wrong on one rank, or differs between ranks, all ranks of the group raise. If only one rank raised,
the others would wait for it in a collective. If arguments differed, the ranks would compute a mixture of two losses. So
ranks compare every argument and every environment variable that the call reads (`inputs/compared.py`). EXCUSED lists
the exceptions.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import validation
from ..validation import TensorChecks, Unquoted, dtype_name
from .dtensors import is_dtensor

# Values with one entry per token. Entries at masked tokens are arbitrary and not compared.
PER_TOKEN = (
    "hidden",
    "target_ids",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "token_weights",
    "temperature",
    "log_probs",
    "entropy",
    "kl_log_probs",
    "h A^T of the adapter",
)
# Arguments that may differ between the ranks of a group, and why. Ranks only compare whether they are given. Numbers
# are always compared, such as a temperature that is not per token.
# A tp_group compares everything that a cp_group compares, and more. So on a mesh all ranks raise together.
EXCUSED: dict[str, dict[str, str]] = {
    "tp_group": {
        "lm_head": "rows of this rank",
        "bias": "rows of this rank",
        "tp_group": "the group itself",
        "cp_group": "a group of other ranks",
    },
    "cp_group": {
        **dict.fromkeys(PER_TOKEN, "tokens of this rank"),
        "the shape of hidden": "tokens of this rank",
        "mask": "tokens of this rank",
        "cu_seqlens": "tokens of this rank",
        "kept_sets": "tokens of this rank",
        "lm_head": "parameters, too many to compare in each call",
        "bias": "parameters, too many to compare in each call",
        "cache_mib": "the default of this rank's device",  # each rank keeps rows of its own tokens
        "tp_group": "a group of other ranks",
        "cp_group": "the group itself",
    },
}
# Calls that were compared: (function, groups) -> device.
_met: dict[tuple[str, ...], torch.device] = {}


def process_group(check: TensorChecks, name: str, group: Any) -> Any:
    """Check a process group or a one-dimensional DeviceMesh. Return the group, or None if it has one rank."""
    if group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        check.fail(name, "None, because torch.distributed is not initialized", Unquoted(f"a {type(group).__name__}"))
    if type(group).__name__ == "DeviceMesh":  # importing its module would take 20 ms
        if group.ndim != 1:
            check.fail(name, "a device mesh of one dimension, such as mesh['tp']", Unquoted(f"{group.ndim} dimensions"))
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        got = Unquoted(f"a {type(group).__name__}")
        check.fail(name, "a ProcessGroup of which this rank is a member, a DeviceMesh or None", got, TypeError)
    return group if group.size() > 1 else None


def vocabulary_group(check: TensorChecks, weight: Any, tp_group: Any) -> Any:
    """The process group that shares the vocabulary, or None. A DTensor weight brings its own group."""
    group = None if tp_group is None else process_group(check, "tp_group", tp_group)
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
        check.fail("lm_head", expected, Unquoted(f"a DTensor with placements {tuple(placements)}"), TypeError)
    of_weight = mesh.get_group(sharded[0])
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(of_weight):
        check.fail("tp_group", "None or the group of the DTensor lm_head", Unquoted("a group of other ranks"))
    return of_weight if of_weight.size() > 1 else None


def same_on_all_ranks(
    check: TensorChecks, groups: dict[str, Any], tokens: Any
) -> AbstractContextManager[dict[str, Any] | None]:
    """Check arguments inside this context. When it exits, ranks exchange errors and compare values.

    The context yields a dict, to which the caller adds the values to compare, by name (`inputs/compared.py`). It yields
    None if nothing is compared. The comparison reads values on the host. So it runs in every call if values are checked
    (on a CPU, or with GSPO_CHECK=1), otherwise only in the first call with a group.

    Args:
        check: names the public function in error messages.
        groups: process groups or None, by the name of their argument.
        tokens: the first argument of the public function; values are checked on its device.
    """
    present = {name: group for name, group in groups.items() if group is not None}
    if not present or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    key = (check.place, *(group.group_name for group in present.values()))
    device = tokens.device if isinstance(tokens, Tensor) else _met.get(key, torch.device("cpu"))
    if key in _met and not compares_every_call(device):
        return contextlib.nullcontext()
    return _compared(check, present, key, device)


def compares_every_call(device: torch.device) -> bool:
    """True if ranks compare arguments in every call on `device`, not only in the first call."""
    # On a CPU, do not read GSPO_CHECK here: a rank with an invalid value must tell the others.
    return device.type == "cpu" or validation.values_are_checked(device)


@contextlib.contextmanager
def _compared(
    check: TensorChecks, groups: dict[str, Any], key: tuple[str, ...], device: torch.device
) -> Iterator[dict[str, Any]]:
    error: Exception | None = None
    values: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    try:
        yield values
        facts = {name: _facts(values, name) for name in groups}
    except Exception as raised:  # raised again below, once the other ranks know
        error = raised
    failure = "" if error is None else str(error) or type(error).__name__
    messages = []
    for name, group in groups.items():
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, (failure or " ".join(messages), facts.get(name, {})), group=group)
        failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text]
        messages += [f"{check.place}: rank {rank} of {name} raised: {text}" for rank, text in failed]
        if not failed:
            messages += _differences(check, name, [answer for _, answer in answers])
    if error is not None:
        raise error
    if messages:
        raise ValueError(messages[0])
    _met[key] = device


def _differences(check: TensorChecks, group: str, answers: list[dict[str, Any]]) -> list[str]:
    """Write a message for each fact that differs between ranks. Ranks that lack a fact are skipped."""
    messages = []
    for name in dict.fromkeys(name for answer in answers for name in answer):
        known = [answer[name] for answer in answers if name in answer]
        if any(fact != known[0] for fact in known):
            messages.append(f"{check.place}: {name} must be equal on all ranks of {group}, got {known}")
    return messages


def _facts(values: dict[str, Any], group: str) -> dict[str, Any]:
    """Reduce each value to a number or a text, which the ranks of a group compare."""
    facts = {}
    excused = EXCUSED.get(group, {})
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim == 0:
            number = value.item()
            facts[name] = number if number == number else Unquoted("nan")  # NaN does not equal NaN
        elif name in excused and not isinstance(value, Real | None):
            facts[name] = Unquoted(excused[name])
        elif isinstance(value, Tensor):
            checksum = _checksum(value[values["mask"].reshape(-1)] if name in PER_TOKEN else value)
            facts[name] = Unquoted(f"{dtype_name(value.dtype)} {list(value.shape)} with checksum {checksum:08x}")
        else:
            facts[name] = value
    return facts


def _checksum(x: Tensor) -> int:
    """CRC-32 of the bytes of `x`. -0.0 counts as 0.0."""
    x = (x.detach() + 0).cpu().contiguous()
    return zlib.crc32(ctypes.string_at(x.data_ptr(), x.nbytes))
