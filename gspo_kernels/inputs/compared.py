"""What ranks that share a group compare: every argument and every environment variable that a call reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .. import validation
from ..backends.dispatch import backend_variable
from ..backends.rows import ExtraRows, HeadRows, KeptRows
from ..backends.self_check import verdict
from ..backends.workspace import cache_variable, workspace_bytes
from ..ranks.dtensors import is_dtensor
from ..ranks.shards import columns_of_all_ranks, first_column, shard_of
from ..validation import Unquoted, dtype_name
from .head import HeadArguments, HeadInputs
from .policy import PolicyArguments, PolicyInputs

# Environment variables that change what a rank allocates or does, and how their values are read on a device.
ENVIRONMENT: dict[str, Callable[[torch.device], Any]] = {
    "GSPO_CHECK": lambda device: validation.values_are_checked(device),
    "GSPO_WORKSPACE_MIB": lambda _: workspace_bytes() // 2**20,
    "GSPO_CACHE_MIB": lambda _: cache_variable(),
    "GSPO_SELF_CHECK": lambda _: verdict.is_enabled(),
    "GSPO_BACKEND": lambda _: backend_variable(),
}


def environment(device: torch.device) -> dict[str, Any]:
    """Return the values of the environment variables, by name."""
    return {f"environment variable {name}": read(device) for name, read in ENVIRONMENT.items()}


def head_values(arguments: HeadArguments, head: HeadInputs) -> dict[str, Any]:
    """Return the arguments that determine log-probs, and facts about the head, by name.

    Values are normalized first, so that 1 and 1.0 compare equal. The cache must match within a tp_group, because it
    influences which cells a gradient budget drops.
    """
    rows, mib = head.rows, head.cache_bytes / 2**20
    return {
        "the number of rows of lm_head": shard_of(rows.shard).rows if rows.shard else rows.weight.shape[0],
        "the hidden size": rows.hidden.shape[1],
        "the dtype of hidden": dtype_name(rows.hidden.dtype),
        "the shape of hidden": list(rows.hidden.shape),
        "mask": rows.mask,  # before the values of unmasked tokens, so that an error names the mask
        **_as_computed(arguments, rows),
        "target_ids": arguments.target_ids.reshape(-1),  # `rows.target_ids` are relative to this rank's first column
        "vocab_size": columns_of_all_ranks(rows.shard, rows.vocab_size),
        "temperature": 1.0 if rows.temperature is None else rows.temperature,
        "gradient_budget": float(arguments.gradient_budget),
        "cache_mib": Unquoted(f"{mib:g} (default)") if arguments.cache_mib is None and mib else mib,
        # The gradient of a DTensor is never summed here.
        "reduce_hidden": "none" if is_dtensor(arguments.hidden) else arguments.reduce_hidden,
        "backend": head.backend,
        "the rank of the adapter": None if rows.adapter_hidden is None else rows.adapter_hidden.shape[1],
        "h A^T of the adapter": rows.adapter_hidden,  # differs if A differs, or the random state of LoRA's dropout
        "the operands that need a gradient": tuple(head.needs),
        **environment(rows.hidden.device),
    }


def pair_values(kept: KeptRows | None, extra: ExtraRows | None, rows: HeadRows) -> dict[str, Any]:
    """Return the kept sets and the extra ids by name. Entries of masked rows are arbitrary and not compared."""
    values: dict[str, Any] = {"kept_sets": None, "kept_sets.empty": None, "extra_ids": None}
    for name, of_argument in (("kept_sets", kept), ("extra_ids", extra)):
        if of_argument is not None:
            pairs = of_argument.pairs
            first = first_column(rows.shard)
            values[name] = torch.cat([pairs.offsets, torch.where(pairs.live, pairs.ids + first, -1)])
    if kept is not None:
        values["kept_sets.empty"] = "error" if kept.full is None else "vocabulary"
    return values


def policy_values(arguments: PolicyArguments, policy: PolicyInputs, mask: Tensor) -> dict[str, Any]:
    """Return the arguments of a loss by name, as the call computes with them."""
    rows, rollout = policy.rows, arguments.rollout_log_probs
    flat = arguments._replace(
        cu_seqlens=rows.offsets,
        rollout_log_probs=None if rollout is None else rollout.reshape(-1),
    )
    values = {
        "the number of sequences": policy.layout.sequences,
        "cu_seqlens": rows.offsets,  # before advantages, so that an error names the offsets
        "the dtype of log-probs": dtype_name(rows.advantages.dtype),
        **_as_computed(flat, rows),
        **{f"objective.{x.name}": getattr(arguments.objective, x.name) for x in fields(arguments.objective)},
    }
    del values["objective"]
    values |= environment(mask.device)
    if arguments.cp_group is not None:  # otherwise the values of all tokens are compared
        values |= _of_sequences("advantages", arguments.advantages, policy, mask)
        values |= _of_sequences("token_weights", arguments.token_weights, policy, mask)
    return values


def _as_computed(arguments: Any, rows: Any) -> dict[str, Any]:
    """Return the arguments by name. Those that are also fields of `rows` are taken from there."""
    return arguments._asdict() | {name: x for name, x in rows._asdict().items() if name in arguments._fields}


def _of_sequences(name: str, x: Tensor | None, policy: PolicyInputs, mask: Tensor) -> dict[str, Any]:
    """Return the values of an argument with one value per sequence, which the ranks of a cp_group share.

    Return nothing if the values could also be per-token values.
    """
    if x is None:
        return {}
    layout, key = policy.layout, f"{name} (one value per sequence)"
    flat = x.detach().to(policy.rows.advantages.dtype).reshape(-1)
    if layout.padded:
        per_sequence = x.ndim == 1 or x.shape[1] == 1
    else:
        per_sequence = name == "advantages" and len(x) == layout.sequences
    if not per_sequence:
        return {key: Unquoted("one value per token")}
    either = len(flat) == layout.rows and bool((layout.per_row(flat) == flat)[mask.reshape(-1)].all())
    return {} if either else {key: flat}
