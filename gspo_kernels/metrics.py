"""The metrics that losses and backwards report, and how metrics of several batches combine.

Values are 0-dim tensors on the device. Every metric is a mean, a minimum, a maximum or a sum. The divisors of the means
are metrics too, so `combine` can turn each mean back into its sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .ranks.agreement import process_group, same_on_all_ranks
from .ranks.collectives import gather
from .sampler_mismatch import sample_size
from .validation import TensorChecks, Unquoted

__all__ = [
    "combine",
    "last_backward",
]

NAMES = (
    "clip_fraction",  # share of non-empty sequences that have a clipped token
    "clip_fraction_low",  # the same, for tokens clipped at 1 - clip_low (negative advantage)
    "clip_fraction_high",  # at 1 + clip_high (positive advantage), or at dual_clip or delta (negative advantage)
    "token_clip_fraction",  # share of unmasked tokens that are clipped (the paper's "fraction of clipped tokens")
    "token_clip_fraction_low",
    "token_clip_fraction_high",
    "ratio_mean",  # mean of s over non-empty sequences, or over tokens for ratio="token"; 1 if there are none
    "ratio_min",
    "ratio_max",
    "kl_to_old",  # mean over tokens of old - new log-prob, nats: the k1 estimate of KL(old || new)
    "zero_coefficient_share",  # share of unmasked tokens without a gradient, which cost no backward; 1 without tokens
    "kl",  # mean over tokens of the objective's estimator against ref_log_probs, nats; only with ref_log_probs
    "entropy",  # mean over tokens, nats; only if entropies are computed
    "tokens",  # number of unmasked tokens
    "sequences",  # number of non-empty sequences
    "ratios",  # number of ratios in ratio_mean: tokens for ratio="token", else sequences
)
WORK_NAMES = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes", "gradient_mass")

# `combine` adds SUMS. It weights means by their divisor, and takes extremes over the parts whose divisor is not 0.
COUNTS = ("tokens", "sequences", "ratios", "gradient_mass")
SUMS = (*COUNTS, "invalid")
DIVISORS = {
    **dict.fromkeys(("clip_fraction", "clip_fraction_low", "clip_fraction_high"), "sequences"),
    **dict.fromkeys(("token_clip_fraction", "token_clip_fraction_low", "token_clip_fraction_high"), "tokens"),
    **dict.fromkeys(("ratio_mean", "ratio_min", "ratio_max"), "ratios"),
    **dict.fromkeys(("kl_to_old", "zero_coefficient_share", "kl", "entropy"), "tokens"),
    **dict.fromkeys(("kept_mass", "kept_singletons"), "tokens"),
    **dict.fromkeys(("live_row_share", "live_tile_share", "passes"), "tokens"),
    "dropped_gradient_mass": "gradient_mass",
    # of `sampler_mismatch.Correction`
    **dict.fromkeys(("weight_mean", "weight_square_mean", "weight_max", "bound_share"), "tokens"),
    **dict.fromkeys(("kl_sampler_trainer", "masked_share"), "tokens"),
}


def combine(
    parts: Iterable[Mapping[str, Tensor | float]],
    group: Any = None,
    *,
    divisors: Mapping[str, str | None] | None = None,
) -> dict[str, Tensor]:
    """Combine metrics of micro-batches, and of the ranks of a group, into the metrics of one undivided batch.

    A plain mean over micro-batches is wrong if their numbers of tokens or sequences differ. This function weights each
    metric by the number of values (tokens, sequences, ratios) over which it is a mean. The host does not wait for the
    device.

    Losses are not among the metrics. If all parts have the same `normalizer`, their losses add up.

    Args:
        parts: `LossOutput.metrics` of each micro-batch, or `Correction.metrics`, or results of `last_backward` or of
            `combine`. All have the same keys. Metrics of your own may also be Python numbers.
        group: process group or one-dimensional DeviceMesh whose ranks have different sequences. Every rank calls this
            function with at least one part, and gets the metrics of all ranks, by one all-gather of a few fp64 numbers.
            The ranks of a tp_group or cp_group have equal metrics, so `group` should contain only one of them. If it
            contains all of them, the counts of tokens and sequences are too large, but everything else is right.
            None: this process only.
        divisors: for each metric of your own in the parts, the name of the sum by which its mean was divided, or None
            for a sum. With `{"teacher_kl": "tokens"}`, the parts' `teacher_kl` is a mean over unmasked tokens. With
            `{"turn_reward": "turns", "turns": None}`, it is a mean over your own count. A name that ends in _min or
            _max is the extreme over parts whose divisor is not 0.

    Returns:
        Metrics with the keys of the parts, 0-dim fp64 tensors ("invalid" is int64). With a gradient budget, each
        micro-batch's backward chooses what to drop. The results tell what was dropped and computed in all of them, not
        what an undivided batch would drop.

    Raises:
        ValueError, TypeError: `parts` is empty, parts have different keys, a key is neither ours nor in `divisors`, or
            the metric by which another one is weighted is missing or not a sum.
    """
    check = TensorChecks("combine")
    group = process_group(check, "group", group)
    # One dict would be an iterable of names.
    is_list = isinstance(parts, Iterable) and not isinstance(parts, Mapping | Tensor | str)
    listed = list(parts) if is_list else []
    values = [value for part in listed if isinstance(part, Mapping) for value in part.values()]
    on_device = next((value for value in values if isinstance(value, Tensor)), None)
    with same_on_all_ranks(check, {"group": group}, on_device) as compared:
        if not is_list:
            check.fail("parts", "a list of metrics", Unquoted(f"a {type(parts).__name__}"), TypeError)
        by_name = _divisors(check, listed, divisors)
        if compared is not None:
            compared["the keys of parts"] = list(by_name)
            compared["divisors"] = [*by_name.values()]
    device = None if on_device is None else on_device.device
    table = torch.stack([torch.stack([_fp64(part[name], device) for name in by_name]) for part in listed])
    combined = _combined(by_name, table)  # [metrics]
    if group is not None:
        combined = _combined(by_name, gather(combined, group.group_name))
    metrics = dict(zip(by_name, combined.unbind(), strict=True))
    if "invalid" in metrics:
        metrics["invalid"] = metrics["invalid"].long()
    return metrics


def _fp64(value: Tensor | float, device: torch.device | None) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().double()
    return torch.full((), value, dtype=torch.float64, device=device)  # unlike a copy, the host does not wait


def _divisors(
    check: TensorChecks, parts: Sequence[Mapping[str, Tensor | float]], own: Mapping[str, str | None] | None
) -> dict[str, str | None]:
    """Check the parts. Return the divisor of each metric, or None for sums and effective sample sizes."""
    if not parts:
        check.fail("parts", "the metrics of at least one micro-batch", Unquoted("none"))
    for part in parts:
        if not isinstance(part, Mapping):
            got = Unquoted(f"a {type(part).__name__}")
            check.fail("parts", "dicts of metrics, such as LossOutput.metrics", got, TypeError)
        for name, value in part.items():
            if not isinstance(name, str):
                check.fail("parts", "dicts with the names of metrics as keys", name, TypeError)
            if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.ndim):
                check.fail(f"{name} in parts", "a tensor [] or a number", value, TypeError)
        for name in part.keys() ^ parts[0].keys():
            check.fail("parts", "dicts with the same keys", Unquoted(f"{name!r} only in some"))
    if not parts[0]:
        check.fail("parts", "dicts with at least one metric", Unquoted("empty ones"))
    if own is not None and not isinstance(own, Mapping):
        check.fail("divisors", "a dict from names of your own metrics to names of sums", own, TypeError)
    own = own or {}
    for name in own:
        if name not in parts[0] or _is_ours(name):
            expected = "a dict whose keys are metrics of your own in parts"
            check.fail("divisors", expected, Unquoted(f"{name!r}{'' if name in parts[0] else ', which is not there'}"))
    for name in parts[0]:
        if name not in own and not _is_ours(name):
            expected = f"metrics of gspo_kernels, or listed in divisors ({{{name!r}: 'tokens'}} for a mean over tokens)"
            check.fail("parts", expected, Unquoted(repr(name)))
    divisors = {name: own[name] if name in own else divisor_of(name) for name in parts[0]}
    for name, divisor in own.items():
        if divisor not in (None, *divisors):
            check.fail(
                f"divisors[{name!r}]",
                f"the name of a sum in parts, one of {', '.join(x for x in divisors if divisors[x] is None)}",
                divisor,
            )
    for name, divisor in divisors.items():
        for needed in (divisor, *_components(name)):
            if needed not in (None, *divisors):
                check.fail("parts", f"dicts with {needed!r}, which combines {name!r}", Unquoted("none"))
        if name in own and divisor is not None and (divisors[divisor] is not None or _components(divisor)):
            expected = f"the name of a sum, such as 'tokens' or one of yours with {{{divisor!r}: None}}"
            check.fail(f"divisors[{name!r}]", expected, divisor)
    return divisors


def _is_ours(name: str) -> bool:
    return name in SUMS or divisor_of(name) is not None or bool(_components(name))


def divisor_of(name: str) -> str | None:
    """The metric by which `combine` weights a mean or an extreme. None for other metrics and unknown names."""
    name = name.removeprefix("rollout_")  # the prefix in `LossOutput.metrics`
    if name.startswith("bound_share_"):  # of one of several corrections
        name = "bound_share"
    return DIVISORS.get(name)


def _components(name: str) -> tuple[str, ...]:
    """The metrics from which an effective sample size is computed; () for other metrics."""
    prefix, found, _ = name.partition("effective_sample_size")
    return (f"{prefix}weight_mean", f"{prefix}weight_square_mean") if found else ()


def _combined(divisors: Mapping[str, str | None], table: Tensor) -> Tensor:
    """Combine the parts of a table [parts, metrics] fp64 to [metrics]."""
    columns = dict(zip(divisors, table.unbind(1), strict=True))  # [parts]
    ones = torch.ones_like(table[:, 0])
    weights = [ones if divisor is None else columns[divisor] for divisor in divisors.values()]
    weights = torch.stack(weights, 1)  # like `table`
    empty = weights == 0  # these parts have defaults, such as a ratio of 1
    sums = torch.where(empty, 0, table * weights).sum(0)
    totals = weights.sum(0)
    smallest = torch.where(empty, torch.inf, table).amin(0)
    largest = torch.where(empty, -torch.inf, table).amax(0)
    combined: dict[str, Tensor] = {}
    for i, (name, divisor) in enumerate(divisors.items()):
        value = {"_min": smallest[i], "_max": largest[i]}.get(name[-4:], sums[i] / totals[i])
        combined[name] = sums[i] if divisor is None else torch.where(totals[i] == 0, table[0, i], value)
    for name in filter(_components, divisors):
        combined[name] = sample_size(*(combined[component] for component in _components(name)))
    return torch.stack([*combined.values()])


def named_work(work: Tensor, products: int) -> dict[str, Tensor]:
    """Name the fields of `live_tiles.Work` except `tokens`; `products` is the number of products per live tile."""
    dropped, rows, tiles, recomputed, mass, _ = work.unbind()
    passes = 1 + (products - 1) * tiles + recomputed if products else torch.ones_like(tiles)
    return dict(zip(WORK_NAMES, (dropped, rows, tiles, passes, mass), strict=True))


_last_backward: dict[str, Tensor] = {}


def record_backward(work: Tensor, *, d_hidden: bool, d_weight: bool) -> None:
    """Record the metrics that `last_backward` returns. `work` [6] holds the fields of `live_tiles.Work`.

    Compiled backwards record nothing, because this runs only while they are traced, on tensors without values.
    """
    global _last_backward
    if type(work) is Tensor:
        _last_backward = {**named_work(work, d_hidden + d_weight + 1), "tokens": work[-1]}


def last_backward() -> dict[str, Tensor]:
    """The metrics of the most recent backward of `linear_log_probs` in this process.

    The keys are dropped_gradient_mass, live_row_share, live_tile_share, passes, gradient_mass and tokens, documented in
    `LossOutput`. The dict is empty before the first backward. Values are 0-dim fp64 tensors on the device of the
    backward; the host does not wait for them. Each backward creates a new dict, so a dict that you hold does not
    change. `combine` takes the dicts of several backwards.
    """
    return _last_backward
