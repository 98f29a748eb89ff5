"""Compare the arguments of ranks that share a group, and raise on all of them if one is wrong or differs.

A rank that raised alone would leave the others waiting in a collective. Ranks with different arguments would compute a
mixture of two losses. So ranks compare every argument and every environment variable that the call reads. EXCUSED lists
the exceptions.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import validation
from .backends import self_check
from .backends.dispatch import backend_variable
from .backends.workspace import cache_variable, workspace_bytes
from .inputs.head import HeadArguments, HeadInputs
from .inputs.memory import needed_by_autograd
from .inputs.policy import PolicyArguments, PolicyInputs
from .parallel import all_columns, is_dtensor, shard_of
from .validation import Call, Unquoted, dtype_name

# Values with one entry per token. Entries of masked tokens may be anything, so they are not compared.
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
    "h A^T of the adapter",
)
# What may differ between the ranks of a group, and why. Ranks compare only whether it is given. Numbers are never
# excused, such as a temperature that is not per token.
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
        "lm_head": "parameters, too many to compare in each call",
        "bias": "parameters, too many to compare in each call",
        "cache_mib": "the default of this rank's device",  # each rank keeps rows of its own tokens
        "tp_group": "a group of other ranks",
        "cp_group": "the group itself",
    },
}
# Environment variables that change what a rank allocates or does, and how their values are read on a device.
ENVIRONMENT: dict[str, Callable[[torch.device], Any]] = {
    "GSPO_CHECK": lambda device: validation.values_are_checked(device),
    "GSPO_WORKSPACE_MIB": lambda _: workspace_bytes() // 2**20,
    "GSPO_CACHE_MIB": lambda _: cache_variable(),
    "GSPO_SELF_CHECK": lambda _: self_check.is_enabled(),
    "GSPO_BACKEND": lambda _: backend_variable(),
}

# Function and groups of calls whose arguments the ranks have compared, and the device of these calls.
_met: dict[tuple[str, ...], torch.device] = {}


def same_on_all_ranks(call: Call, groups: dict[str, Any], tokens: Any) -> AbstractContextManager[dict[str, Any] | None]:
    """Return a context in which a call checks its arguments. When it ends, ranks exchange errors and compare values.

    The context yields a dict, to which the call adds the values to compare, by name (`head_values`, `policy_values`);
    None if nothing is compared. The comparison reads values on the host. So it runs in every call where values are
    checked (on a CPU, or with GSPO_CHECK=1), and elsewhere only in the first call with a group.

    Args:
        call: names the public function in error messages.
        groups: process groups or None, by the name of their argument.
        tokens: the first argument of the call, on whose device values are checked.
    """
    present = {name: group for name, group in groups.items() if group is not None}
    if not present or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    key = (call.place, *(group.group_name for group in present.values()))
    device = tokens.device if isinstance(tokens, Tensor) else _met.get(key, torch.device("cpu"))
    if key in _met and not compares_every_call(device):
        return contextlib.nullcontext()
    return _compared(call, present, key, device)


def compares_every_call(device: torch.device) -> bool:
    """Return whether ranks compare arguments in every call on `device`, or only in the first call."""
    # On a CPU, the variable GSPO_CHECK is not read here: a rank where it is invalid must tell the others.
    return device.type == "cpu" or validation.values_are_checked(device)


@contextlib.contextmanager
def _compared(
    call: Call, groups: dict[str, Any], key: tuple[str, ...], device: torch.device
) -> Iterator[dict[str, Any]]:
    error: Exception | None = None
    values: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    try:
        yield values
        values |= {f"environment variable {name}": read(device) for name, read in ENVIRONMENT.items()}
        facts = {name: _facts(values, name) for name in groups}
    except Exception as raised:  # raised again below, after the other ranks know of it
        error = raised
    failure = "" if error is None else str(error) or type(error).__name__
    messages = []
    for name, group in groups.items():
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, (failure or " ".join(messages), facts.get(name, {})), group=group)
        failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text]
        messages += [f"{call.place}: rank {rank} of {name} raised: {text}" for rank, text in failed]
        if not failed:
            messages += _differences(call, name, [answer for _, answer in answers])
    if error is not None:
        raise error
    if messages:
        raise ValueError(messages[0])
    _met[key] = device


def _differences(call: Call, group: str, answers: list[dict[str, Any]]) -> list[str]:
    """Return a message for each fact that differs between ranks. A fact that a rank lacks is not compared there."""
    messages = []
    for name in dict.fromkeys(name for answer in answers for name in answer):
        known = [answer[name] for answer in answers if name in answer]
        if any(fact != known[0] for fact in known):
            messages.append(f"{call.place}: {name} must be equal on all ranks of {group}, got {known}")
    return messages


def _facts(values: dict[str, Any], group: str) -> dict[str, Any]:
    """Return what the ranks of a group compare: for each value a number or a text, equal if the values are."""
    facts, mask = {}, values["mask"].reshape(-1)
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim == 0:
            number = value.item()
            facts[name] = number if number == number else Unquoted("nan")  # NaN does not equal NaN
        elif name in EXCUSED[group] and not isinstance(value, Real | None):
            facts[name] = Unquoted(EXCUSED[group][name])
        elif isinstance(value, Tensor):
            checksum = _checksum(value[mask] if name in PER_TOKEN else value)
            facts[name] = Unquoted(f"{dtype_name(value.dtype)} {list(value.shape)} with checksum {checksum:08x}")
        else:
            facts[name] = value
    return facts


def _checksum(x: Tensor) -> int:
    """Return the CRC-32 of the bytes of `x`. -0.0 counts as 0.0."""
    x = (x.detach() + 0).cpu().contiguous()
    return zlib.crc32(ctypes.string_at(x.data_ptr(), x.nbytes))


# -- the values of a call


def head_values(
    arguments: HeadArguments, head: HeadInputs, cache_mib: float | None, cache: int, gradient_budget: float
) -> dict[str, Any]:
    """Return the arguments that determine log-probs, and facts about the head, by name.

    Arguments are returned as the call computes with them, so that two spellings of a value are equal. `cache` is the
    size that `cache_mib` means, in bytes. With a tp_group it must be equal, because kept rows come first when the
    cells of a budget are chosen, and all ranks must choose alike.
    """
    rows, mib = head.rows, cache / 2**20
    return {
        "the number of rows of lm_head": shard_of(rows.shard).rows if rows.shard else rows.weight.shape[0],
        "the hidden size": rows.hidden.shape[1],
        "the dtype of hidden": dtype_name(rows.hidden.dtype),
        "the shape of hidden": list(rows.hidden.shape),
        "mask": rows.mask,  # before the values of unmasked tokens, so that an error names the mask
        **_as_computed(arguments, rows),
        "target_ids": arguments.target_ids.reshape(-1),  # those of `rows` count from the first column of this rank
        "vocab_size": all_columns(rows.shard, rows.vocab_size),
        "temperature": 1.0 if rows.temperature is None else rows.temperature,
        "gradient_budget": gradient_budget,
        "cache_mib": Unquoted(f"{mib:g} (default)") if cache_mib is None and cache else mib,
        "tp_group": head.tp_group,
        # The gradient of a DTensor is never summed here.
        "reduce_hidden": "none" if is_dtensor(arguments.hidden) else arguments.reduce_hidden,
        "backend": head.backend,
        "the rank of the adapter": None if rows.adapter_hidden is None else rows.adapter_hidden.shape[1],
        "h A^T of the adapter": rows.adapter_hidden,  # differs if A differs, or the random state of LoRA's dropout
        "the operands that need a gradient": tuple(needed_by_autograd(rows)),
    }


def policy_values(arguments: PolicyArguments, policy: PolicyInputs, mask: Tensor) -> dict[str, Any]:
    """Return the arguments of a loss by name, as the call computes with them."""
    rows, rollout = policy.rows, arguments.rollout_log_probs
    flat = arguments._replace(
        cu_seqlens=rows.offsets,
        rollout_log_probs=None if rollout is None else rollout.reshape(-1),
        cp_group=policy.cp_group,
    )
    values = {
        "the number of sequences": policy.layout.sequences,
        "cu_seqlens": rows.offsets,  # before advantages, so that an error names the offsets
        "the dtype of log-probs": dtype_name(rows.advantages.dtype),
        **_as_computed(flat, rows),
        **{f"objective.{x.name}": getattr(arguments.objective, x.name) for x in fields(arguments.objective)},
    }
    del values["objective"]
    if policy.cp_group is not None:  # otherwise the values of all tokens are compared
        values |= _of_sequences("advantages", arguments.advantages, policy, mask)
        values |= _of_sequences("token_weights", arguments.token_weights, policy, mask)
    return values


def _as_computed(arguments: Any, rows: Any) -> dict[str, Any]:
    """Return the arguments by name. Those that are fields of `rows`, too, are taken from there."""
    return arguments._asdict() | {name: x for name, x in rows._asdict().items() if name in arguments._fields}


def _of_sequences(name: str, x: Tensor | None, policy: PolicyInputs, mask: Tensor) -> dict[str, Any]:
    """Return the values of an argument with one value per sequence, which the ranks of a cp_group share.

    Nothing is returned if the values may as well be of this rank's tokens.
    """
    if x is None:
        return {}
    layout, key = policy.layout, f"{name} (one value per sequence)"
    flat = x.detach().to(policy.rows.advantages.dtype).reshape(-1)
    if not (x.ndim == 1 or x.shape[1] == 1 if layout.padded else name == "advantages" and len(x) == layout.sequences):
        return {key: Unquoted("one value per token")}
    either = len(flat) == layout.rows and bool((layout.per_row(flat) == flat)[mask.reshape(-1)].all())
    return {} if either else {key: flat}
