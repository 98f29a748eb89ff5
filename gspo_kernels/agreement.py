"""Raise on every rank if one rank's arguments are wrong, or if the ranks' arguments do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import validation
from .validation import Call

R = TypeVar("R")

_met: set[tuple[str, ...]] = set()  # function and groups of calls whose arguments the ranks have compared


def agree(
    call: Call, present: dict[str, Any], tokens: Any, make: Callable[[], R], facts: Callable[[R], dict[str, Any]]
) -> R:
    """Return `make()`. If it fails on a rank, or `facts` of its result differ between ranks, raise on every rank.

    A rank that raised alone would leave the others waiting in a collective. The comparison reads values on the host.
    So it runs where values are checked (on a CPU, or with GSPO_CHECK=1), and in the first call with a group.

    Args:
        call: names the public function in error messages.
        present: process groups by the name of their argument.
        tokens: the first argument of the call, on whose device values are checked.
        make: checks the arguments.
        facts: values that must be equal on all ranks of a group, by "<group's argument> <name of the value>".
    """
    key = (call.place, *(group.group_name for group in present.values()))
    device = tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")
    if key in _met and not validation.values_are_checked(device):
        return make()
    _met.add(key)
    error, result, own = None, None, {}
    try:
        result = make()
        own = facts(result)
    except Exception as raised:  # raised again below, after the other ranks know of it
        error = raised
    failure = "" if error is None else str(error)
    messages = []
    for name, group in present.items():
        mine = {key: value for key, value in own.items() if key.startswith(name)}
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, (failure or " ".join(messages), mine), group=group)
        failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text]
        messages += [f"{call.place}: rank {rank} of {name} raised: {text}" for rank, text in failed]
        if not failed:
            messages += _differences(call, name, [values for _, values in answers])
    if error is not None:
        raise error
    if messages:
        raise ValueError(messages[0])
    return result  # pyright: ignore[reportReturnType] - `make` has succeeded


def _differences(call: Call, group: str, answers: list[dict[str, Any]]) -> list[str]:
    """Return a message for each value that differs between ranks."""
    return [
        f"{call.place}: {key.removeprefix(group).strip()} must be equal on all ranks of {group}, "
        f"got {[answer.get(key) for answer in answers]}"
        for key in answers[0]
        if any(answer.get(key) != answers[0][key] for answer in answers)
    ]
