"""Compare all results of a row of `helpers.features` with formulas in float64, built on `gspo_kernels.reference`."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from helpers.device import DEVICE, gspo_fused_loss, linear_log_probs, policy_loss, to_device
from helpers.features import (
    DTYPES,
    TEMPERATURES,
    Case,
    Tensors,
    divergence,
    kept_of,
    leaves_in,
    logits_of,
    module_of,
    moved,
    project,
    restrided,
)
from helpers.tile_choices import Chosen, choices, live_entries, small_tiles
from tolerance import (
    DROPPED_MASS_RELATIVE,
    LOG_PROB_RMS_BF16X3,
    LOG_RATIO_RELATIVE,
    LOSS_PER_ADVANTAGE,
    METRIC_ABSOLUTE,
    METRIC_RELATIVE,
    PLAIN_ORDERS,
    RELATIVE_RMS,
    check,
    check_loss,
    softcap_slope,
    truncation,
)
from torch import Tensor, nn

import gspo_kernels
from gspo_kernels import metrics
from gspo_kernels.backends.torch import backward, tiles
from gspo_kernels.backends.triton import slabs, tuning
from gspo_kernels.distillation import linear_top_k
from gspo_kernels.inputs import head as inputs
from gspo_kernels.objective import DIVERGENCES, SCORES
from gspo_kernels.reference import (
    aggregation_weight,
    default_normalizer,
    dppo,
    kl_to_reference,
    log_ratios_of_sequence,
    projection_log_probs,
    score,
    surrogate,
)

UPSTREAM = 1.5  # gradient of the loss


@dataclass
class Results:
    """What a row gives: by the library, or by the formulas, for which `parts` has more."""

    outputs: Tensors  # loss, log_probs, entropy, log_ratio, extra_log_probs
    gradients: Tensors
    metrics: dict[str, Tensor]
    dropped: Tensor | None = None  # entries [rows, V] of the vocabulary's d_logits that a budget leaves out
    parts: Any = None


# -- by the library


def head_options(case: Case, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    row = case.row
    temperature = case.lay_out("temperature")
    return {
        "bias": leaves["bias"] if row["bias"] == "argument" else None,
        "logit_scale": row["logit_scale"],
        "logit_softcap": row["logit_softcap"],
        "temperature": TEMPERATURES[row["temperature"]] if temperature is None else temperature,
        "vocab_size": case.vocab if row["vocab_size"] != "all" else None,
        "head_precision": row["head_precision"],
    }


def cache_mib(case: Case) -> float:
    bytes_of_most = case.mask.sum().item() * len(case.leaves["weight"]) * case.tokens["hidden"].element_size() * 2 / 3
    return {0: 0.0, "some rows": bytes_of_most / 2**20, "all rows": 4.0}[case.row["cache_mib"]]


def leaves_of(case: Case) -> Tensors:
    """Return new leaves: the hidden states in the row's layout, and the parameters of the head."""
    leaves = to_device({"hidden": case.lay_out("hidden"), **case.leaves})
    if case.row["strides"] == "hidden":
        leaves["hidden"] = restrided(leaves["hidden"])
    frozen = case.row["frozen"]
    return {name: nn.Parameter(x, requires_grad=frozen not in ("everything", name)) for name, x in leaves.items()}


def arguments_of(case: Case, leaves: Mapping[str, Tensor], **changes: Any) -> dict[str, Any]:
    """Return the arguments of `gspo_fused_loss`, and of other functions by `of_function`."""
    row = case.row
    mask = case.lay_out("mask")
    packed = row["layout"] == "packed"
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), case.tokens["inside"].sum(1).cumsum(0)]) if packed else None
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "token_weights", "kept_sets", "advantages")
    return {
        "hidden": leaves["hidden"],
        "lm_head": module_of(case, leaves),
        "mask": {"bool": mask, "integer": mask.long(), "by target": None}[row["mask"]],
        "cu_seqlens": offsets,
        "objective": case.objective,
        "gradient_budget": row["gradient_budget"],
        "cache_mib": cache_mib(case),
        "entropy": row["entropy"],
        "backend": row["backend"],
        **{name: case.lay_out(name) for name in ("target_ids", *names)},
        **head_options(case, leaves),
        **case.normalizers,
        **changes,
    }


def of_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts."""
    names = inspect.signature(getattr(gspo_kernels, function.__name__, function)).parameters
    return {name: x for name, x in arguments.items() if name in names}


def call_of(case: Case, arguments: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return a call of the public functions. It returns the outputs, and the metrics as "metrics"."""
    row, mask = case.row, case.lay_out("mask")
    extra = {} if row["extra_ids"] == 0 else {"extra_ids": case.lay_out("extra_ids")}
    wants_entropy = row["entropy"] or row["entropy_coef"] != 0
    of_head, of_policy = (of_function(function, arguments) for function in (linear_log_probs, policy_loss))
    exact = {name: x for name, x in of_head.items() if name not in ("entropy", "kept_sets", "gradient_budget")}

    def fused() -> dict[str, Any]:
        unknown = extra | ({"kl_log_probs": mask} if row["kl_log_probs"] else {})
        return gspo_fused_loss(**arguments, **unknown)._asdict()

    def chained() -> dict[str, Any]:
        lp = linear_log_probs(**of_head | {"entropy": wants_entropy}, **extra)
        full = linear_log_probs(**exact | {"cache_mib": None}).log_probs if row["kl_log_probs"] else None
        given = of_policy | {"mask": mask, "entropy": lp.entropy, "kl_log_probs": full}
        out = policy_loss(lp.log_probs, **given)
        return {**out._asdict(), "extra_log_probs": lp.extra_log_probs, "kl_log_probs": full}

    return fused if row["entry"] == "fused" else chained


def sums_of(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@contextlib.contextmanager
def settings_of(row: Mapping[str, Any]) -> Iterator[list[Chosen]]:
    """Set the sizes of tiles and the precision of products, and record the cells that a backward computes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if row["tiles"] == "many":
            stack.enter_context(small_tiles(16, 29))
        if row["tiles"] == "parts":
            stack.enter_context(patch.object(inputs, "workspace_bytes", lambda: 2**17))
            stack.enter_context(patch.object(slabs, "_ROWS_AT_ONCE", 64))
        if row["products"] == "half":
            stack.enter_context(patch.object(tiles, "operand_dtype", lambda device, dtype, of_sums: dtype))
            stack.enter_context(patch.object(tiles, "_product", lambda a, b: a.to(sums_of(a)) @ b.to(sums_of(b))))
        if row["products"] == "native":
            stack.enter_context(patch.object(backward, "multiplies_bf16", lambda device: device.type == "cpu"))
            stack.enter_context(patch.object(backward, "_D_LOGITS_BYTES", 2**13))  # several products of d_weight
        if row["architecture"]:
            stack.enter_context(tuning.assume(row["architecture"]))
        made = stack.enter_context(choices())
        yield made


def autocast_of(row: Mapping[str, Any]) -> torch.autocast:
    return torch.autocast(DEVICE.type, DTYPES.get(row["autocast"]), enabled=row["autocast"] is not None)


def run(case: Case, **groups: Any) -> Results:
    """Compute the results of a row by the library. `groups`: tp_group, cp_group, reduce_hidden and cache_mib."""
    row = case.row
    leaves = leaves_of(case)
    arguments = arguments_of(case, leaves, **groups)
    extra = case.lay_out("extra_factors")

    function = call_of(case, arguments)
    if row["compile"]:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    with settings_of(row) as chosen:
        with autocast_of(row):
            out = function()
        total = UPSTREAM * out["loss"]
        total = total if extra is None else total + (extra * out["extra_log_probs"]).sum()
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        differentiable = {name for name, x in out.items() if isinstance(x, Tensor) and x.requires_grad}
        of_head = {name for name in ("extra_log_probs", "kl_log_probs") if out.get(name) is not None}
        assert differentiable == ({"loss", *of_head} if wanted else set())
        gradients = to_device(torch.autograd.grad(total, list(wanted.values())) if wanted else (), "cpu")
    found = dict(out.pop("metrics"))
    assert all(type(x) is Tensor for x in metrics.last_backward().values())  # not the tracer's
    if row["entry"] == "chained" and wanted and not row["compile"]:
        found |= {f"backward {name}": x for name, x in to_device(metrics.last_backward(), "cpu").items()}
    outputs = {name: x.detach() for name, x in out.items() if x is not None}
    if row["top_k"]:
        top = top_k_of(case, arguments)
        outputs |= {"top_ids": top.ids, "top_log_probs": top.log_probs}
    return Results(outputs, dict(zip(wanted, gradients, strict=True)), found, dropped_of(case, chosen))


def top_k_of(case: Case, arguments: dict[str, Any]) -> Any:
    options = of_function(linear_top_k, arguments) | {"mask": case.lay_out("mask")}
    with settings_of(case.row), autocast_of(case.row):
        top = linear_top_k(**to_device(options), k=width_of_top_k(case))
    assert not top.log_probs.requires_grad
    return to_device(top, "cpu")


def width_of_top_k(case: Case) -> int:
    k = case.row["top_k"]
    return case.vocab if k == "all" else min(k, case.vocab)


def dropped_of(case: Case, chosen: list[Chosen]) -> Tensor | None:
    if not case.row["gradient_budget"] or not chosen:
        return None
    (seen,) = chosen
    assert case.row["frozen"] != "everything", "nothing has a gradient that could be left out"
    keep = live_entries(seen) | ~(seen.head.mask & (seen.coefficient != 0))[:, None]
    return torch.nn.functional.pad(~keep, (0, len(case.leaves["weight"]) - keep.shape[1]), value=True)


# -- by formulas, over the n unmasked tokens


@dataclass
class Tokens:
    """The unmasked tokens of a case in float64, [n]."""

    sequence: Tensor
    advantages: Tensor
    weights: Tensor
    old: Tensor | None
    ref: Tensor | None
    rollout_metrics: Tensors


def unmasked(case: Case) -> Tokens:
    mask = case.mask
    sequence = mask.nonzero()[:, 0]
    pick = lambda name: None if name not in case.tokens else case.tokens[name].double()  # noqa: E731
    advantages = case.tokens["advantages"].double()
    advantages = (advantages[:, None] if advantages.ndim == 1 else advantages).expand(mask.shape)[mask]
    weights = pick("token_weights")
    weights = torch.ones(len(sequence)).double() if weights is None else weights.expand(mask.shape)[mask]
    old, ref, rollout = (
        None if x is None else x[mask] for x in map(pick, ("old_log_probs", "ref_log_probs", "rollout_log_probs"))
    )
    found: Tensors = {}
    if rollout is not None and old is not None:
        rho = old - rollout
        correction = case.objective.rollout_correction
        parts = correction if isinstance(correction, tuple) else (correction,)
        w, outsides = torch.ones_like(rho), []
        for part in parts:
            logs = rho
            if part.level != "token":
                logs = torch.zeros(len(mask)).double().index_add_(0, sequence, rho)
                logs = logs / (mask.sum(1).clamp(min=1) if part.level == "geometric" else 1)
                logs = logs[sequence]
            raw = logs.exp()
            outsides.append((raw < part.low) | (raw > part.high))
            inside = {"truncate": raw.clamp(part.low, part.high), "mask": raw, "gate": torch.ones_like(raw)}[part.mode]
            w = w * (inside if part.mode == "truncate" else torch.where(outsides[-1], 0, inside))
        n = max(len(rho), 1)
        square = w.square().sum()
        found = {
            "weight_mean": w.sum() / n,
            "weight_square_mean": square / n,
            "weight_max": torch.cat([w, w.new_zeros(1)]).max(),
            "effective_sample_size": w.sum() ** 2 / (n * square) if square > 0 else w.new_zeros(()),
            "bound_share": torch.stack(outsides).any(0).sum() / n,
            "kl_sampler_trainer": (rho.exp() - 1 - rho).sum() / n,
        }
        if len(parts) > 1:
            found |= {f"bound_share_{i}": x.sum() / n for i, x in enumerate(outsides)}
        weights = weights * w
    return Tokens(sequence, advantages, weights, old, ref, {f"rollout_{name}": x for name, x in found.items()})


def clipped(u: Tensor, advantages: Tensor, lp: Tensor, o: Any) -> tuple[Tensor, Tensor]:
    """Say which log-ratios are clipped at the lower and at an upper bound, as docs/reference.md defines it."""
    positive, negative = advantages > 0, advantages < 0
    low, high = -math.inf if o.clip_low >= 1 else math.log1p(-o.clip_low), math.log1p(o.clip_high)
    if o.surrogate == "clip":
        ceiling = min(math.log(x) for x in (o.dual_clip, o.delta, math.inf) if x is not None)
        return negative & (u < low), (positive & (u > high)) | (negative & (u > ceiling))
    if o.surrogate == "gmpo":
        return negative & (u < -o.clip_low), positive & (u > o.clip_high)
    if o.surrogate in DIVERGENCES:
        d = divergence(o.surrogate, lp, u)
        change = lp.clamp(max=0) - (lp - u).clamp(max=0)
        return negative & (change < 0) & (d > o.clip_low), positive & (change > 0) & (d > o.clip_high)
    never = torch.zeros_like(positive)
    if o.surrogate == "topr":
        return never, negative & (u > 0)
    if o.surrogate == "vespo":
        low, high = math.log(1e-8), 20.0
    moves = (positive | negative) if o.surrogate in ("cispo", "vespo") else never
    return moves & (u < low), moves & (u > high)


@dataclass
class Policy:
    loss: Tensor
    log_ratio: Tensor  # [S], or [n] for ratio="token"
    size: float  # for `check_loss`
    metrics: Tensors


STEP = 2.0**-20  # of a difference quotient in float64


def policy_of(case: Case, tokens: Tokens, lp: Tensor, entropy: Tensor, kl_lp: Tensor) -> Policy:
    """Compute the loss and its metrics from log-probs and entropies [n]."""
    o, mask = case.objective, case.mask
    lengths = mask.sum(1).tolist()
    numbers = {name: float(x) for name, x in case.normalizers.items()}
    normalizer = numbers.get("normalizer", default_normalizer(o.aggregation, lengths))
    kl_aggregation = o.kl_aggregation or o.aggregation
    kl_normalizer = normalizer if kl_aggregation == o.aggregation else default_normalizer(kl_aggregation, lengths)
    kl_normalizer = numbers.get("kl_normalizer", kl_normalizer)
    loss, size = lp.new_zeros(()), 0.0
    ratios, log_ratios, kls, lows, highs = [], [], [], [], []
    for i, length in enumerate(lengths):
        at = tokens.sequence == i
        a, x, h = tokens.advantages[at].to(lp.dtype), lp[at], entropy[at]
        old = None if tokens.old is None else tokens.old[at].to(lp.dtype)
        token_log_ratio, u, log_ratio = log_ratios_of_sequence(x, old, a, o)
        log_ratios.append(token_log_ratio if o.ratio == "token" else u[None])
        if not length:
            continue
        ratios.append(log_ratios[-1].exp())
        low, high = clipped(token_log_ratio if o.surrogate == "gmpo" else log_ratio, a, x, o)
        lows.append(low)
        highs.append(high)
        weighted = a * tokens.weights[at].to(lp.dtype)
        weight = aggregation_weight(o.aggregation, length, o.length_norm) / normalizer
        if o.surrogate in SCORES:
            terms = score(log_ratio, weighted, x, o)
            if o.ratio == "sequence-product":  # the factor is a function of L log-probs
                near = score(log_ratio + length * STEP, weighted, x + STEP, o)
                size += weight * ((near - terms) / STEP).detach().abs().sum().item()
        elif o.surrogate in DIVERGENCES:
            terms = dppo(log_ratio, weighted, x, o)
        else:
            terms = surrogate(log_ratio, weighted, o)
        terms = weight * (terms - o.entropy_coef * h)
        size += weight * abs(o.entropy_coef) * length  # a small entropy is off by as much as a log-prob
        if tokens.ref is not None:
            kl = kl_to_reference(kl_lp[at], tokens.ref[at].to(lp.dtype), token_log_ratio, o.kl_estimator)
            kls.append(kl)
            if o.kl_coef:
                ratio = log_ratio.exp() if o.kl_ratio_factor else torch.ones_like(log_ratio)
                factor = o.kl_coef * aggregation_weight(kl_aggregation, length, o.length_norm) / kl_normalizer
                terms = terms + factor * kl * ratio
                # A KL near 0 is a difference of larger numbers. Its slope says how far an error of a log-prob moves it.
                near = kl_to_reference(kl_lp[at] + STEP, tokens.ref[at].to(lp.dtype), token_log_ratio, o.kl_estimator)
                size += (factor * ratio * (near - kl) / STEP).detach().abs().sum().item()
        loss = loss + terms.sum()
        size += terms.detach().abs().sum().item()
    n, filled = max(len(lp), 1), max(len(ratios), 1)
    join = lambda parts: torch.cat(parts) if parts else lp.new_zeros(0)  # noqa: E731
    old = lp.detach() if tokens.old is None else tokens.old
    s = join(ratios) if ratios else lp.new_ones(1)
    ends = {"_low": lows, "_high": highs, "": [x | y for x, y in zip(lows, highs, strict=True)]}
    found: dict[str, Any] = {
        **{f"clip_fraction{end}": sum(x.any().item() for x in where) / filled for end, where in ends.items()},
        **{f"token_clip_fraction{end}": join(where).sum() / n for end, where in ends.items()},
        "ratio_mean": s.mean(),
        "ratio_min": s.min(),
        "ratio_max": s.max(),
        "kl_to_old": (old - lp).sum() / n,
        "tokens": len(lp),
        "sequences": len(ratios),
        "ratios": len(lp) if o.ratio == "token" else len(ratios),
        "invalid": 0,
        **tokens.rollout_metrics,
    }
    if tokens.ref is not None:
        found["kl"] = join(kls).sum() / n
    if case.row["entropy"] or o.entropy_coef:
        found["entropy"] = entropy.sum() / n
    if case.row["kept_sets"] and case.row["entry"] == "fused":
        found["kept_singletons"] = (case.tokens["kept_sets"].sizes[mask.reshape(-1)] == 1).sum() / n
    if case.row["kl_log_probs"]:
        found["kept_mass"] = (kl_lp - lp).exp().sum() / n
    known = {name: torch.as_tensor(x).detach().double() for name, x in found.items()}
    return Policy(loss, join(log_ratios), max(size, tokens.advantages.abs().sum().item() / n), known)


def is_split(case: Case) -> bool:
    """Whether kernels multiply fp32 operands as two bf16 numbers."""
    return case.row["head_precision"] == "bf16x3" and case.row["backend"] == "triton"


def operand_dtype(case: Case) -> torch.dtype:
    """The dtype in which PyTorch multiplies the operands of the head."""
    dtype = DTYPES[case.row["dtype"]]
    if dtype == torch.float64:
        return dtype
    if case.row["head_precision"]:
        return torch.bfloat16 if is_split(case) else torch.float32
    return DTYPES[case.row["autocast"]] if case.row["autocast"] else dtype


def loss_scale(slopes: list[Tensor]) -> float:
    """Return the power of two that makes the largest slope at least 1, so that fp16 gradients do not underflow."""
    largest = max(x.abs().max().item() if x.numel() else 0.0 for x in slopes)
    return 2.0 ** -math.floor(math.log2(largest)) if largest else 1.0


def by_formulas(case: Case, dtype: torch.dtype, dropped: Tensor | None = None, order: int = 0) -> Results:
    """Compute all results. The head multiplies in `dtype`, the rest is at least fp32.

    `dropped` [n, V] marks the entries of the vocabulary's d_logits that a budget leaves out.
    """
    mask, tokens = case.mask, unmasked(case)
    leaves = leaves_in(case, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    projection = project(case, leaves, order)
    options = logits_of(case, projection.to(wide))
    if order >= PLAIN_ORDERS[torch.float32]:  # rounding behind a soft-cap, which hides what comes before it
        temperature = torch.as_tensor(options["temperature"], dtype=wide).expand(len(projection))
        options["temperature"] = moved(temperature, order)
    ids, kept = case.tokens["target_ids"][mask], kept_of(case)
    full_lp, full_entropy = projection_log_probs(target_ids=ids, **options)
    lp, entropy = (
        (full_lp, full_entropy) if kept is None else projection_log_probs(target_ids=ids, kept=kept, **options)
    )
    inner = [x.detach().requires_grad_() for x in (lp, entropy, full_lp)]
    policy = policy_of(case, tokens, inner[0], inner[1], inner[2] if case.row["kl_log_probs"] else inner[0])
    slopes: list[Any] = [torch.zeros_like(x) for x in inner]
    if policy.loss.requires_grad:
        slopes = list(torch.autograd.grad(UPSTREAM * policy.loss, inner, allow_unused=True))
        slopes = [torch.zeros_like(x) if g is None else g for g, x in zip(slopes, inner, strict=True)]
    totals = [(g * x).sum() for g, x in zip(slopes, (lp, entropy, full_lp), strict=True)]
    calls = [totals[0] + totals[1], totals[2]] if case.row["kl_log_probs"] else [totals[0] + totals[1]]
    # The weight of the softmax in the vocabulary's pass, [n]
    factor = slopes[0] if case.row["kept_sets"] is None else torch.where(kept.all(1) & _empty(case), slopes[0], 0)
    extra = None
    if "extra_ids" in case.tokens:
        extra_ids, f = case.tokens["extra_ids"][mask], case.tokens["extra_factors"][mask].to(wide)
        columns = [projection_log_probs(target_ids=x.clamp(0), **options)[0] for x in extra_ids.unbind(1)]
        extra = torch.where(extra_ids >= 0, torch.stack(columns, 1), 0)
        calls[0] = calls[0] + (f * extra).sum()
        factor = factor + torch.where(extra_ids >= 0, f, 0).sum(1)
    lift = loss_scale([*slopes, factor]) if dtype == torch.float16 else 1.0
    d = [torch.autograd.grad(lift * x, projection, retain_graph=True)[0] for x in calls]  # each is rounded
    d_vocabulary = torch.autograd.grad((lift * factor * full_lp).sum(), projection, retain_graph=True)[0]
    if dropped is not None:
        d[0] = d[0] - torch.where(dropped, d_vocabulary, 0)
    if options["logit_softcap"] and order >= PLAIN_ORDERS[torch.float32]:
        error = softcap_slope(wide) * (-1) ** order
        d = [x * (1 + error / _slope(options).clamp(min=abs(error))) for x in d]
    of_calls = [torch.autograd.grad(projection, list(leaves.values()), x, retain_graph=True) for x in d]
    gradients = [torch.stack(x).sum(0) for x in zip(*of_calls, strict=True)]
    named = {name: x.to(wide) / lift for name, x in zip(leaves, gradients, strict=True)}
    if kept is not None and dtype == torch.float32:
        named |= _from_pairs(case, leaves, torch.stack(d).sum(0))

    def per_token(x: Tensor) -> Tensor:
        out = torch.zeros(*mask.shape, *x.shape[1:], dtype=x.dtype)
        out[mask] = x.detach()
        return out

    log_ratio = per_token(policy.log_ratio) if case.objective.ratio == "token" else policy.log_ratio.detach()
    named["hidden"] = per_token(named["hidden"])
    outputs = {"loss": policy.loss.detach(), "log_probs": per_token(lp), "log_ratio": log_ratio}
    if case.row["entropy"] or case.objective.entropy_coef:
        outputs["entropy"] = per_token(entropy)
    if case.row["kl_log_probs"]:
        outputs["kl_log_probs"] = per_token(full_lp)
    if extra is not None:
        outputs["extra_log_probs"] = per_token(extra)
    parts = {"policy": policy, "slopes": slopes, "factor": factor, "d_vocabulary": d_vocabulary.detach() / lift}
    temperature = torch.as_tensor(options["temperature"]).reshape(-1, 1)
    parts["logits"] = (options["logit_scale"] * projection[:, : case.vocab] / temperature).detach()
    return Results(outputs, named, policy.metrics, parts=parts)


@torch.no_grad()
def _slope(options: dict[str, Any]) -> Tensor:
    """Compute the slope of a soft-cap, 1 - tanh^2, as 1 / cosh^2, which does not cancel near 1."""
    return 1 / (options["logit_scale"] * options["projection"] / options["logit_softcap"]).cosh().square()


@torch.no_grad()
def _from_pairs(case: Case, leaves: Tensors, d: Tensor) -> Tensors:
    """Compute gradients with products that add one (row, id) pair after another, as in the backward of kept sets."""

    def product(d: Tensor, matrix: Tensor) -> Tensor:
        row, of = d.nonzero(as_tuple=True)
        return torch.zeros(len(d), matrix.shape[1]).index_add_(0, row, d[row, of, None] * matrix[of])

    h = leaves["hidden"]
    named = {"hidden": product(d, leaves["weight"]), "weight": product(d.t(), h)}
    for i, scaling in enumerate(case.scaling):
        d_left = scaling * product(d, leaves[f"B{i}"])
        named["hidden"] += d_left @ leaves[f"A{i}"]
        named |= {f"A{i}": d_left.t() @ h, f"B{i}": product(d.t(), scaling * h @ leaves[f"A{i}"].t())}
    return named


def _empty(case: Case) -> Tensor:
    return case.tokens["kept_sets"].sizes[case.mask.reshape(-1)] == 0


# -- comparison


def assert_right(case: Case) -> None:
    """Assert that every output, gradient and metric of a row is right."""
    ours = run(case)
    truth = assert_results(case, ours)
    if case.row["backend"] == "torch" and len(case.mask) == 7:  # interpreted kernels are slow
        assert_parts_combine(case, ours, size_of_loss(truth))


def assert_results(case: Case, ours: Results) -> Results:
    """Assert that results are right. Return what the formulas give."""
    dropped = None if ours.dropped is None else ours.dropped[case.lay_out("mask").reshape(-1)]
    top = {name: ours.outputs.pop(name) for name in ("top_ids", "top_log_probs") if name in ours.outputs}
    truth, dtype = by_formulas(case, torch.float64, dropped), operand_dtype(case)
    plain = [by_formulas(case, dtype, dropped, order) for order in range(PLAIN_ORDERS.get(dtype, 1))]
    try:
        assert_values(case, ours, truth, plain)
    except AssertionError:
        if dtype != torch.float32:
            raise
        # In 5 of 1,500 rows, four orders of additions do not show how large an error of plain PyTorch may be. In rare
        # ones, 16 do not.
        plain += [by_formulas(case, dtype, dropped, order) for order in range(len(plain), MANY_ORDERS)]
        assert_values(case, ours, truth, plain)
    assert_metrics(case, ours, truth, dropped)
    if top:
        assert_top_k(case, **top)
    return truth


MANY_ORDERS = 32


def assert_values(case: Case, ours: Results, truth: Results, plain: list[Results]) -> None:
    """Compare outputs and gradients with the truth, within the law of tolerance.py. `plain` are same-dtype runs."""
    row, inside, dtype = case.row, case.tokens["inside"], operand_dtype(case)
    wide = torch.promote_types(dtype, torch.float32)

    def laid_out(x: Tensor) -> Tensor:
        return x[inside] if row["layout"] == "packed" and x.shape[:2] == inside.shape else x

    assert ours.outputs.keys() == truth.outputs.keys()
    of_split = LOG_PROB_RMS_BF16X3 * is_split(case)
    for name, true in truth.outputs.items():
        x, true = ours.outputs[name], laid_out(true)
        assert x.dtype == wide and x.shape == true.shape, f"{name} is {x.dtype} {tuple(x.shape)}"
        if name == "loss":
            truncates = row["backend"] == "triton" and dtype == torch.bfloat16  # Triton's interpreter
            check_loss(x, true, (1 + truncates + of_split / LOSS_PER_ADVANTAGE) * size_of_loss(truth))
        elif not (x.numel() and inside.numel()):
            assert not x.any(), name
        elif name == "log_ratio":
            limit = LOG_RATIO_RELATIVE[wide] * max(truth.outputs["log_probs"].abs().max().item(), 1) + of_split
            limit *= case.mask.sum(1).max().item() if row["ratio"] == "sequence-product" else 1
            error = x - true
            assert (_rms(error) if is_split(case) else error.abs().max()) <= limit, "log_ratio"
        else:
            logits = truth.parts["logits"]
            largest = logits.abs().max().item() if logits.numel() else 0.0
            rms = of_split + truncation(DEVICE, dtype, case.tokens["hidden"].shape[-1], largest)
            # A log-prob near 0 is a difference of two logits, whose errors of eps * max|z| are its relative error.
            rms += 2 * torch.finfo(wide).eps * largest * _rms(true)
            # An entropy near 0 is a difference of numbers near 1.
            rms += 2 * torch.finfo(wide).eps * (name == "entropy")
            same = _worst([laid_out(y.outputs[name]) for y in plain], true)
            check(name, x.reshape(-1), same.reshape(-1), true.reshape(-1), wide, rms)
    for name, x in ours.gradients.items():
        runs = [y.gradients[name] for y in (truth, *plain)]
        true, *others = map(laid_out, runs) if name == "hidden" else runs
        same = _worst(others, true)
        leaf = case.leaves[name] if name in case.leaves else case.tokens["hidden"]
        assert x.dtype == leaf.dtype, f"d_{name} is {x.dtype}"
        if not case.mask.any():
            assert x.shape == true.shape and not x.any(), f"d_{name}"
            continue
        # Adapters stay fp32 under autocast, unless the exponentials in their gradients were kept in half precision.
        is_rounded = name[0] not in "AB" or row["cache_mib"] != 0
        law = dtype if x.dtype == torch.float32 and is_rounded else x.dtype
        law = torch.bfloat16 if dtype == torch.bfloat16 and x.dtype == torch.float16 else law
        # The law is for one rounding. With extra ids, kept sets, a second call, adapters or ranks, PyTorch adds several
        # rounded gradients. Their errors add up. If the gradients nearly cancel, the sum may have another direction.
        # The gradient of A is computed from the gradient of hidden @ A.T, which is rounded too.
        sums = "extra_ids" in case.tokens, row["kept_sets"] == "empty is all", row["kl_log_probs"], name[0] == "A"
        sums = *sums, (name == "hidden" or name[0] == "A") and row.get("tp", 1) > 1
        sums = *sums, name != "hidden" and row.get("cp", 1) > 1
        more = sum((*sums, name == "hidden" and len(case.scaling) > 0))
        more += law == torch.bfloat16 and row["backend"] == "triton"  # Triton's interpreter truncates to bf16
        rms = more * RELATIVE_RMS[law] * _rms(true)
        is_fp16 = torch.float16 in (x.dtype, dtype)
        if is_fp16:  # below 2^-14 numbers are 2^-24 apart, so rounding moves them by up to 2^-25
            same, rms = same.half().double() + more * 2**-25, rms + 2**-25
        # Where terms cancel, plain PyTorch has larger errors too. Allow twice as much.
        of_plain = _rms(same - true)
        rms = max(rms + of_plain * (dtype == torch.float32), 2 * (1 + more) * of_plain - RELATIVE_RMS[law] * _rms(true))
        columns = -1 if more and law.itemsize == 2 else x.shape[-1]
        if is_fp16:  # rounding may change the direction of rows near 0
            sizes = true.abs().amax(-1)
            columns = -1 if ((sizes > 0) & (sizes < 2**-14)).any() else columns
        flat = [y.reshape(-1, columns) if columns > 0 else y.reshape(-1) for y in (x, same, true)]
        check(f"d_{name}", flat[0], flat[1], flat[2], law, rms)


def size_of_loss(truth: Results) -> float:
    """Return the size for `check_loss`, whose limit is for log-probs that are off by at most LOSS_PER_ADVANTAGE.

    A log-prob is off by about eps of the largest logit, which is at least as large as the largest log-prob.
    """
    lp = truth.outputs["log_probs"]
    error = torch.finfo(torch.float32).eps * (lp.abs().max().item() if lp.numel() else 0.0)
    return max(1, error / LOSS_PER_ADVANTAGE) * truth.parts["policy"].size


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _worst(runs: list[Tensor], true: Tensor) -> Tensor:
    return max(runs, key=lambda x: (x.double() - true).abs().max().item() if x.numel() else 0.0)


TOKEN_OUTPUTS = {"log_probs", "entropy", "kl_log_probs"}


def metrics_of(case: Case, outputs: Tensors) -> Tensors:
    """Compute the metrics of the loss by formulas, from log-probs and entropies [n] in float64."""
    lp = outputs["log_probs"]
    entropy = outputs.get("entropy", torch.zeros_like(lp))
    return policy_of(case, unmasked(case), lp, entropy, outputs.get("kl_log_probs", lp)).metrics


def assert_metrics(case: Case, ours: Results, truth: Results, dropped: Tensor | None) -> None:
    """Compare every metric with its formula over the log-probs and entropies that the library returned."""
    row = case.row
    inside = case.lay_out("mask")
    n = int(inside.sum())
    outputs = {name: ours.outputs[name][inside].double() for name in TOKEN_OUTPUTS & ours.outputs.keys()}
    expected = metrics_of(case, outputs)
    g_lp, g_entropy, _ = truth.parts["slopes"]
    live = (g_lp != 0) | (g_entropy != 0)
    expected["zero_coefficient_share"] = 1 - live.sum().double() / max(n, 1)
    has_pass = row["kept_sets"] in (None, "empty is all") and not row["kl_log_probs"]
    recorded = any(name.startswith("backward ") for name in ours.metrics)
    if recorded and not has_pass:  # the record is of another backward
        ours.metrics = {name: x for name, x in ours.metrics.items() if not name.startswith("backward ")}
    elif recorded or (row["entry"] == "fused" and row["kept_sets"] is None):
        prefix = "backward " if recorded else ""
        rows = _empty(case) if row["kept_sets"] else torch.ones(n, dtype=torch.bool)
        live = ((truth.parts["factor"] != 0) | (g_entropy != 0)) & rows
        work = {name.removeprefix(prefix): x for name, x in ours.metrics.items() if name.startswith(prefix)}
        assert_work(case, work, live, int(rows.sum()), ours, truth, dropped)
        expected |= {prefix + name: work[name] for name in metrics.WORK_NAMES}
        expected |= {"backward tokens": rows.sum().double()} if recorded else {}
    assert_close(ours.metrics, expected)


def assert_work(
    case: Case, work: Tensors, live: Tensor, rows: int, ours: Results, truth: Results, dropped: Tensor | None
) -> None:
    """Check the metrics of a backward's work. `live` [n] are the rows with a gradient, of `rows` in the pass."""
    n, columns = max(rows, 1), case.vocab
    mass = truth.parts["d_vocabulary"].abs()
    computed = live[:, None] if dropped is None else live[:, None] & ~dropped[:, :columns]
    tiles = computed.expand(-1, columns).sum().item() / (n * columns)
    total = mass.sum().item() if dropped is not None else 0.0
    # The forward does not know the upstream gradient.
    total_of_loss = total / UPSTREAM if case.row["entry"] == "fused" else total
    share = 0.0 if dropped is None or not total else mass[dropped].sum().item() / total
    exact = {"live_row_share": live.sum().item() / n, "live_tile_share": tiles}
    assert_close({name: work[name] for name in exact}, exact)
    reported, of_mass = work["dropped_gradient_mass"].item(), work["gradient_mass"].item()
    assert share <= reported * (1 + DROPPED_MASS_RELATIVE) + 1e-9 and reported <= case.row["gradient_budget"]
    assert of_mass <= total_of_loss * (1 + DROPPED_MASS_RELATIVE) + 1e-12
    least = total_of_loss
    if case.row["logit_softcap"] is None:
        assert abs(share - reported) <= DROPPED_MASS_RELATIVE * reported + 1e-9
    elif total:  # a lower bound, the mass in the targets' columns
        at_target = mass.gather(1, case.tokens["target_ids"][case.mask][:, None])
        least *= at_target.sum().item() / total
    assert abs(least - of_mass) <= DROPPED_MASS_RELATIVE * total + 1e-12
    needed = ours.gradients.keys()
    products = ("hidden" in needed) + ("weight" in needed) + bool(needed)
    least, most = (1 + (products - cached) * tiles for cached in (bool(products), 0))
    least = most if case.row["cache_mib"] == 0 else least
    most = least if case.row["cache_mib"] == "all rows" else most
    assert least * (1 - METRIC_RELATIVE) <= work["passes"].item() <= most * (1 + METRIC_RELATIVE)


def assert_close(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert ours.keys() == expected.keys(), f"metrics {ours.keys() ^ expected.keys()} are only in one"
    for name, x in expected.items():
        x, y = torch.as_tensor(x).double(), ours[name].double()
        assert abs(y - x) <= METRIC_RELATIVE * abs(x) + METRIC_ABSOLUTE, f"{name} is {y}, expected {x}"


def assert_parts_combine(case: Case, ours: Results, size: float) -> None:
    """Divide the batch into uneven micro-batches. Losses must add up, and metrics combine to the whole batch's."""
    lengths, o = case.mask.sum(1).tolist(), case.objective
    longest = case.tokens["inside"].sum(1).argsort(descending=True).tolist()
    divisions = [longest[:1], [longest[i] for i in (1, 6, 5)], longest[2:5]]  # no packed part has a row per sequence
    of_kl = o.kl_aggregation or o.aggregation
    numbers: dict[str, Any] = {"normalizer": default_normalizer(o.aggregation, lengths)} | case.normalizers
    if o.kl_coef and "kl_normalizer" not in numbers:
        same = of_kl == o.aggregation
        numbers["kl_normalizer"] = numbers["normalizer"] if same else default_normalizer(of_kl, lengths)
    eager = replace(case, normalizers=numbers, row={**case.row, "compile": False, "top_k": 0})
    cases = [eager.take(rows) for rows in divisions]
    parts = [run(x) for x in cases]
    check_loss(torch.stack([x.outputs["loss"] for x in parts]).double().sum(), ours.outputs["loss"].double(), size)
    names = [name for name in ours.metrics if not name.startswith("backward ")]
    chosen = ("dropped_gradient_mass", "live_tile_share", "passes")  # what a budget drops is chosen for each part
    combined = metrics.combine([{name: x.metrics[name] for name in names} for x in parts])
    assert combined.keys() == set(names)
    if case.row["gradient_budget"] and "passes" in names:
        mass, share = (torch.stack([x.metrics[name] for x in parts]) for name in ("gradient_mass", chosen[0]))
        assert share.max() <= case.row["gradient_budget"]
        mean = (mass * share).sum() / mass.sum().clamp(min=1e-30)
        torch.testing.assert_close(combined[chosen[0]], mean, rtol=METRIC_RELATIVE, atol=METRIC_ABSOLUTE)
        names = [name for name in names if name not in chosen]
    if case.row["cache_mib"] == "some rows":
        names = [name for name in names if name != "passes"]

    def joined(name: str) -> Tensor:
        """Return an output of the parts in the order of the batch. Its last bits may differ from the batch's."""
        of_sequence = {}
        for rows, part, small in zip(divisions, parts, cases, strict=True):
            x = part.outputs[name][small.lay_out("mask")].double()
            of_sequence |= dict(zip(rows, x.split(small.mask.sum(1).tolist()), strict=True))
        return torch.cat([of_sequence[i] for i in range(len(lengths))])

    of_parts = metrics_of(case, {name: joined(name) for name in TOKEN_OUTPUTS & parts[0].outputs.keys()})
    expected = {**ours.metrics, **of_parts}
    assert_close({name: combined[name] for name in names}, {name: expected[name] for name in names})


def assert_top_k(case: Case, top_ids: Tensor, top_log_probs: Tensor) -> None:
    """The k likeliest ids have the largest log-probs of the row, up to rounding."""
    k = width_of_top_k(case)
    inside = case.lay_out("mask")

    def log_probs(dtype: torch.dtype, order: int = 0) -> Tensor:
        projection = project(case, leaves_in(case, dtype), order).detach()
        options = logits_of(case, projection.to(torch.promote_types(dtype, torch.float32)))
        z, cap, t = options["logit_scale"] * options["projection"], options["logit_softcap"], options["temperature"]
        z = cap * torch.tanh(z / cap) if cap else z
        z = z / (t[:, None] if isinstance(t, Tensor) and t.ndim else t)
        return z[:, : case.vocab].log_softmax(1)

    truth, dtype = log_probs(torch.float64), torch.promote_types(operand_dtype(case), torch.float32)
    plain = [log_probs(dtype, order) for order in range(MANY_ORDERS if dtype == torch.float32 else 1)]
    ids, ours = top_ids[inside], top_log_probs[inside]
    assert all(len(set(row)) == k for row in ids.tolist()) and (top_ids[~inside] == -1).all()
    if not len(ids):
        return
    for expected in (lambda x: x.gather(1, ids), lambda x: x.topk(k).values):
        true = expected(truth)
        same = _worst([expected(x) for x in plain], true)
        # The log-probs of ids with a probability near 1 are differences of large numbers.
        rms = (same - true).square().mean().sqrt().item() if dtype == torch.float32 else 0.0
        check("top k", ours, same, true, ours.dtype, rms)
