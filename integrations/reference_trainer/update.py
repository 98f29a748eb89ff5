"""From a rollout to an optimizer step: old log-probs, mini-batches, the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import LossOutput, gspo_fused_loss, linear_log_probs

from .config import TrainConfig
from .distributed import gather_lists, gather_rows, share, world
from .optimizer import Optimizer
from .policy import Policy, decoder_config
from .routing import changed_share, routing, stacked
from .sampling import Rollout


@dataclass(frozen=True)
class Batch:
    """Answers with everything that the loss needs. All tensors have B rows."""

    rollout: Rollout
    old_log_probs: Tensor  # [B, T] fp32, of the policy before the updates
    ref_log_probs: Tensor | None  # [B, T] fp32, of the policy before training
    experts: Tensor | None = None  # [B, P + T, layers, k] int64, that the routers of a mixture chose for old_log_probs
    advantages: Tensor | None = None  # [B] or [B, T]


class TrainingError(RuntimeError):
    """Training cannot continue."""


class NotFiniteError(TrainingError):
    """The loss or the gradient of an update is not finite. The weights have not been changed by this update."""

    def __init__(self, numbers: dict[str, float], batch: Batch) -> None:
        super().__init__(
            f"an update is not finite (loss {numbers['loss']}, gradient norm {numbers['grad_norm']}); "
            "training stops before this update. A lower learning_rate may help"
        )
        self.batch = batch


def take(record: Any, rows: Tensor) -> Any:
    """Return some rows of a dataclass whose tensors and lists have one entry per row."""

    def taken(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[rows.to(x.device)]
        if isinstance(x, list):
            return [x[row] for row in rows.tolist()]
        return take(x, rows) if hasattr(x, "__dataclass_fields__") else x

    return replace(record, **{f.name: taken(getattr(record, f.name)) for f in fields(record)})


def autocast(config: TrainConfig, policy: Policy) -> torch.autocast:
    """Return an autocast to bfloat16, enabled by precision="autocast"."""
    return torch.autocast(policy.device.type, torch.bfloat16, enabled=config.precision == "autocast")


def mini_batches(config: TrainConfig, seed: int, step: int) -> list[list[Tensor]]:
    """Divide the rows of a rollout into mini-batches, for each epoch anew.

    Returns:
        For each epoch the row numbers of each mini-batch, int64. They depend on seed, step and epoch only.
    """
    epochs = []
    for epoch in range(config.epochs):
        generator = torch.Generator().manual_seed(hash((seed, step, epoch)) % 2**63)
        rows = torch.arange(config.rollout_size)
        rows = rows[torch.randperm(len(rows), generator=generator)] if config.shuffle else rows
        epochs.append(list(rows.split(config.mini_batch_size)))
    return epochs


def micro_batches(config: TrainConfig, rows: Tensor) -> list[Tensor]:
    """Return this process's rows of a mini-batch, divided into micro-batches."""
    own: Any = share(rows)  # type: ignore[type-var]
    return list(own.split(config.micro_batch_size or len(own)))


def with_log_probs(config: TrainConfig, policy: Policy, rollout: Rollout, first_epoch: list[Tensor]) -> Batch:
    """Compute old and reference log-probs of a rollout, [B, T].

    Old log-probs are computed with the micro-batches and the padding of the first epoch. So the first update has a
    ratio of exactly 1, and later ratios measure only the updates, not rounding that depends on the batch shape.
    """
    order = torch.cat(first_epoch).argsort().to(rollout.input_ids.device)

    def computed(model: Policy) -> list[Tensor]:
        """Return log-probs, and experts if there are any, in the order of the rollout."""
        done = []
        for rows in first_epoch:
            parts = [log_probs_of(config, model, take(rollout, part)) for part in micro_batches(config, rows)]
            done.append([gather_rows(torch.cat(pieces)) for pieces in zip(*parts, strict=True)])
        return [torch.cat(pieces)[order] for pieces in zip(*done, strict=True)]

    experts: list[Tensor] = []
    old = rollout.log_probs
    if config.old_log_probs == "trainer" or policy.has_routers:
        recomputed, *experts = computed(policy)
        old = recomputed if config.old_log_probs == "trainer" else old
    batch = Batch(rollout, old, None, *experts)
    if config.needs_reference:
        with policy.reference() as reference:
            batch = replace(batch, ref_log_probs=computed(reference)[0])
    return batch


@torch.no_grad()
def log_probs_of(config: TrainConfig, policy: Policy, rollout: Rollout) -> list[Tensor]:
    """Return the log-probs of answers, [b, T] fp32, and for a mixture the experts that its routers chose."""

    def log_probs(hidden: Tensor, head: Any, **options: Any) -> Tensor:
        options |= {"mask": rollout.answer_mask, "temperature": config.temperature, "backend": config.backend}
        return linear_log_probs(hidden, head, rollout.answer_ids, **options).log_probs

    with autocast(config, policy), routing(policy.inner) as chosen:
        computed, _ = policy.run(rollout, log_probs)
    return [computed, *([stacked(chosen, len(computed))] if chosen else [])]


def normalizers(config: TrainConfig, mask: Tensor) -> dict[str, float | None]:
    """Return the divisors of the loss for a mini-batch with this mask [B, T], so that its micro-batches add up exactly.

    Gradients are averaged over processes, so the counts are divided by their number.
    """
    of = config.objective
    counts = {"rows": len(mask), "sequences": int(mask.any(1).sum()), "tokens": int(mask.sum()), "one": 1}

    def divisor(aggregation: str) -> float:
        default = "tokens" if aggregation == "token-mean" else "sequences"
        return max(1, counts[config.normalizer or default]) / world()

    kl = divisor(of.kl_aggregation or of.aggregation) if of.kl_coef > 0 else None
    return {"normalizer": divisor(of.aggregation), "kl_normalizer": kl}


def update(config: TrainConfig, policy: Policy, optimizer: Optimizer, batch: Batch, rows: Tensor) -> dict[str, float]:
    """Take one optimizer step on a mini-batch, the `rows` of `batch`. Return the means of its metrics.

    Raises:
        NotFiniteError: the loss or the norm of the gradient is not finite. The step is not taken.
    """
    optimizer.zero_grad()
    divisors = normalizers(config, take(batch.rollout, rows).answer_mask)
    parts = micro_batches(config, rows)
    measured = []
    for part in parts:
        micro_batch = take(batch, part)
        replayed = micro_batch.experts if config.routing_replay else None
        with autocast(config, policy), routing(policy.inner, replayed) as chosen:
            out, model_output = policy.run(micro_batch.rollout, loss_of(config, micro_batch, divisors), train=True)
        metrics = loss_metrics(micro_batch, out)
        loss = out.loss
        if policy.has_routers:
            metrics |= router_metrics(policy, model_output, micro_batch, chosen)
        if policy.router_loss_weight:
            loss = loss + policy.router_loss_weight * model_output.aux_loss / len(parts)  # a mean over micro-batches
            metrics["router_aux_loss"] = model_output.aux_loss.item()
        loss.backward()
        optimizer.collect()
        measured.append({"loss": loss.item() * len(parts), **metrics})
    means = average(gather_lists(measured)) | {"grad_norm": optimizer.clip()}
    if not math.isfinite(means["loss"]) or not math.isfinite(means["grad_norm"]):
        raise NotFiniteError(means, take(batch, rows))
    optimizer.step()
    return means


def loss_of(config: TrainConfig, batch: Batch, divisors: dict[str, float | None]) -> Callable[..., LossOutput]:
    """Return the function of hidden states and head that computes the loss of a micro-batch."""

    def loss(hidden: Tensor, head: Any, **options: Any) -> LossOutput:
        assert batch.advantages is not None
        return gspo_fused_loss(
            hidden,
            head,
            batch.rollout.answer_ids,
            batch.advantages,
            mask=batch.rollout.answer_mask,
            old_log_probs=batch.old_log_probs,
            ref_log_probs=batch.ref_log_probs,
            rollout_log_probs=batch.rollout.log_probs if config.objective.rollout_correction else None,
            temperature=config.temperature,
            objective=config.objective,
            entropy=True,
            gradient_budget=config.gradient_budget,
            cache_mib=config.cache_mib,
            backend=config.backend,
            **divisors,
            **options,
        )

    return loss


def loss_metrics(batch: Batch, out: LossOutput) -> dict[str, float]:
    """Return metrics of the loss, and the standard deviations of the log-ratios of tokens and of sequences."""
    mask = batch.rollout.answer_mask
    log_ratios = torch.where(mask, out.log_probs - batch.old_log_probs, 0)  # [b, T]
    of_sequences = log_ratios.sum(1) / mask.sum(1).clamp(min=1)
    return {name: x.item() for name, x in out.metrics.items()} | {
        "token_log_ratio_std": log_ratios[mask].std(correction=0).item(),
        "sequence_log_ratio_std": of_sequences.std(correction=0).item(),
    }


def router_metrics(policy: Policy, output: Any, batch: Batch, chosen: list[Tensor]) -> dict[str, float]:
    """Measure how evenly the routers use the experts, as means over the layers, and which experts have changed.

    router_max_load: load of the busiest expert divided by the mean load, from 1 (even) to the number of experts.
    router_entropy: entropy of the routing distribution of a token, in nats.
    router_changed: share of experts that differ from the old policy's; only if `chosen` has the experts.
    """
    mask = batch.rollout.attention_mask.bool()
    logits = torch.stack(tuple(output.router_logits)).detach().float()[:, mask.flatten()]  # [layers, tokens, experts]
    top = logits.topk(decoder_config(policy.inner).num_experts_per_tok).indices.flatten(1)  # [layers, choices]
    load = torch.stack([row.bincount(minlength=logits.shape[-1]) for row in top]).float()
    metrics = {
        "router_max_load": (load.amax(1) / load.mean(1)).mean().item(),
        "router_entropy": torch.distributions.Categorical(logits=logits).entropy().mean().item(),
    }
    if batch.experts is not None:
        metrics["router_changed"] = changed_share(batch.experts, stacked(chosen, len(mask)), mask)
    return metrics


def average(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every entry; of entries whose names end in _min or _max the extreme."""
    reductions: dict[str, Callable[[list[float]], float]] = {"_min": min, "_max": max}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: reductions.get(name[-4:], fmean)(column) for name, column in columns.items()}
