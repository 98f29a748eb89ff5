"""From a rollout to an optimizer step: old log-probs, mini-batches, the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import KeptSets, LossOutput, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.distillation import TopK, linear_top_k, topk_divergence

from .config import TrainConfig
from .distributed import gather, gather_rows, share, world
from .measures import Measures, Update, joined, measured, numbers
from .optimizer import Optimizer
from .policy import Policy
from .sampling import Rollout
from .zero_advantage import rows_to_run


@dataclass(frozen=True)
class Batch:
    """Answers with everything that the loss needs. All tensors have B rows."""

    rollout: Rollout
    old_log_probs: Tensor  # [B, T] fp32, of the policy before the updates; the sampler's for answers that do not run
    ref_log_probs: Tensor | None  # [B, T] fp32, of the policy before training
    advantages: Tensor | None = None  # [B] or [B, T]
    live: Tensor | None = None  # [B] bool in CPU memory: answers with a gradient; None: all answers run


class TrainingError(RuntimeError):
    """Training cannot continue."""


class NotFiniteError(TrainingError):
    """The loss or the gradient of an update is not finite. The weights have not been changed by this update."""

    def __init__(self, numbers: dict[str, float]) -> None:
        super().__init__(
            f"an update is not finite (loss {numbers['loss']}, gradient norm {numbers['grad_norm']}); "
            "training stops before this update. A lower learning_rate may help"
        )


def take(record: Any, rows: Tensor) -> Any:
    """Select `rows` of a dataclass whose tensors and lists have one entry per row."""

    def taken(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[rows.to(x.device)]
        if isinstance(x, list):
            return [x[row] for row in rows.tolist()]
        return take(x, rows) if hasattr(x, "__dataclass_fields__") else x

    return replace(record, **{f.name: taken(getattr(record, f.name)) for f in fields(record)})


def autocast(config: TrainConfig, policy: Policy) -> torch.autocast:
    """An autocast to bf16 or fp16, enabled only if the precision asks for it."""
    dtype = getattr(torch, config.half_dtype or "bfloat16")
    return torch.autocast(policy.device.type, dtype, enabled=config.uses_autocast)


def mini_batches(config: TrainConfig, seed: int, step: int) -> list[list[Tensor]]:
    """Divide the rows of a rollout into mini-batches, for each epoch anew.

    Returns:
        For each epoch the row numbers of each mini-batch, int64. They depend on seed, step and epoch only.
    """
    epochs = []
    for epoch in range(config.epochs):
        generator = torch.Generator().manual_seed(hash((seed, step, epoch)) % 2**63)
        rows = torch.randperm(config.rollout_size, generator=generator)
        epochs.append(list(rows.split(config.mini_batch_size)))
    return epochs


def rows_by_length(policy: Policy, rollout: Rollout, live: Tensor | None, rows: Tensor) -> Tensor:
    """Order the rows of a mini-batch that run, so that micro-batches have little padding.

    Each process gets a consecutive part of them. The k-th micro-batches of all processes get answers of similar length.
    With a router loss the order stays, because it is a mean over the tokens of a micro-batch.
    """
    rows = rows_to_run(live, rows)
    if policy.router_loss_weight:
        return rows
    lengths = rollout.answer_mask[rows.to(rollout.answer_mask.device)].sum(1).cpu()
    order = lengths.argsort(stable=True).view(-1, world())
    return rows[order.t().flatten()]


def cropped(policy: Policy, rollout: Rollout) -> Rollout:
    """Take the columns of prompts and answers that some row needs."""
    columns, width = columns_to_run(policy, rollout), rollout.prompt_width
    ids, mask = rollout.input_ids[:, columns], rollout.attention_mask[:, columns]
    count = columns.stop - width
    kept = [KeptSets(x.ids[: int(x.offsets[count])], x.offsets[: count + 1], x.empty) for x in rollout.kept or ()]
    answers = {name: getattr(rollout, name)[:, :count] for name in ("answer_mask", "log_probs")}
    prompt = width - columns.start
    return replace(rollout, input_ids=ids, attention_mask=mask, prompt_width=prompt, kept=kept or None, **answers)


def cropped_batch(policy: Policy, batch: Batch) -> Batch:
    """Crop the rollout of a batch, and everything that has a column per token of its answers."""
    rollout = cropped(policy, batch.rollout)
    count = rollout.answer_mask.shape[1]

    def taken(x: Tensor | None) -> Any:
        return x if x is None or x.ndim == 1 else x[:, :count]

    per_token = {name: taken(getattr(batch, name)) for name in ("old_log_probs", "ref_log_probs", "advantages")}
    return replace(batch, rollout=rollout, **per_token)


def columns_to_run(policy: Policy, rollout: Rollout) -> slice:
    """The columns of prompts and answers that some row needs. All columns, if RoPE depends on the longest row."""
    width, total = rollout.prompt_width, rollout.input_ids.shape[1]
    if policy.keeps_padding:
        return slice(0, total)
    needed = torch.cat([rollout.attention_mask[:, :width].bool(), rollout.answer_mask], 1).any(0).nonzero()[:, 0]
    first, last = needed[[0, -1]].tolist()
    return slice(min(first, width - 1), max(last + 1, width + 1))


def micro_batches(config: TrainConfig, rows: Tensor) -> list[Tensor]:
    """Divide this process's rows of a mini-batch into micro-batches."""
    own: Any = share(rows)  # type: ignore[type-var]
    return list(own.split(config.micro_batch_size or len(own)))


def with_log_probs(
    config: TrainConfig,
    policy: Policy,
    rollout: Rollout,
    first_epoch: list[Tensor],
    live: Tensor | None = None,
    reuses_first: bool = False,
) -> Batch:
    """Compute old and reference log-probs of a rollout, [B, T].

    Old log-probs are computed with the micro-batches and the padding of the first epoch. So the first update has a
    ratio of exactly 1, and later ratios measure only the updates, not rounding that depends on the batch shape.

    Args:
        live: see `Batch`. The other answers keep the sampler's log-probs.
        reuses_first: leave out the first mini-batch, whose update writes its log-probs (see `update`).
    """
    to_run = [
        rows_by_length(policy, rollout, live, rows) for rows in (first_epoch[1:] if reuses_first else first_epoch)
    ]

    def computed(model: Policy) -> Tensor:
        """Compute log-probs in the order of `to_run`."""
        done = []
        for rows in to_run:
            parts = [log_probs_of(config, model, take(rollout, part)) for part in micro_batches(config, rows)]
            done.append(gather_rows(torch.cat(parts)))
        return torch.cat(done)

    old = rollout.log_probs.clone()
    if to_run and config.old_log_probs == "trainer":
        old[torch.cat(to_run).to(old.device)] = computed(policy)
    batch = Batch(rollout, old, None, live=live)
    if config.needs_reference:  # then all rows run
        with policy.reference() as reference:
            order = torch.cat(to_run).argsort().to(old.device)
            batch = replace(batch, ref_log_probs=computed(reference)[order])
    return batch


@torch.no_grad()
def log_probs_of(config: TrainConfig, policy: Policy, rollout: Rollout) -> Tensor:
    """Compute the log-probs of answers, [b, T] fp32."""
    width = rollout.answer_mask.shape[1]
    rollout = cropped(policy, rollout)

    def log_probs(hidden: Tensor, head: Any, **options: Any) -> Tensor:
        options |= {"mask": rollout.answer_mask, "temperature": config.temperature, "backend": config.backend}
        options |= {"kept_sets": kept_sets(config, rollout), "head_precision": config.head_precision or None}
        return linear_log_probs(hidden, head, rollout.answer_ids, **options).log_probs

    with autocast(config, policy):
        return widened(policy.run(rollout, log_probs)[0], width)


def widened(log_probs: Tensor, width: int) -> Tensor:
    """Fill log-probs of cropped answers with 0, up to [b, width]."""
    return torch.nn.functional.pad(log_probs, (0, width - log_probs.shape[1]))


def kept_sets(config: TrainConfig, rollout: Rollout) -> KeptSets | None:
    """The ids over which log-probs are computed; None: the full vocabulary."""
    return rollout.kept_sets if config.replay_kept_sets else None


def normalizers(config: TrainConfig, mask: Tensor) -> dict[str, float | None]:
    """The divisors of the loss for a mini-batch with this mask [B, T]. They make its micro-batches add up exactly.

    Gradients are averaged over processes, so the counts are divided by their number.
    """
    of = config.objective

    def divisor(aggregation: str) -> float:
        counted = mask if aggregation == "token-mean" else mask.any(1)
        return max(1, int(counted.sum())) / world()

    kl = divisor(of.kl_aggregation or of.aggregation) if of.kl_coef > 0 else None
    return {"normalizer": divisor(of.aggregation), "kl_normalizer": kl}


def update(
    config: TrainConfig, policy: Policy, optimizer: Optimizer, batch: Batch, rows: Tensor, is_first: bool = False
) -> Update:
    """Take one optimizer step on a mini-batch, the `rows` of `batch`. Return its metrics, over all processes.

    Answers without a gradient may not run (`rows_to_run`), but the divisors of the loss count them. In fp16, gradients
    that overflow are computed again with a smaller loss scale.

    Args:
        is_first: the weights are still those of the old policy, so the ratio is 1. The update writes the log-probs
            that it computes into `batch.old_log_probs`.

    Raises:
        NotFiniteError: the loss or the norm of the gradient is not finite. The step is not taken.
    """
    shown, together = gradients(config, policy, optimizer, batch, rows, is_first)
    while not math.isfinite(shown["grad_norm"]) and math.isfinite(shown["loss"]) and optimizer.lower_loss_scale():
        shown, together = gradients(config, policy, optimizer, batch, rows, is_first)
    if not math.isfinite(shown["loss"]) or not math.isfinite(shown["grad_norm"]):
        raise NotFiniteError(shown)
    optimizer.step()
    return Update(shown, together)


def gradients(
    config: TrainConfig, policy: Policy, optimizer: Optimizer, batch: Batch, rows: Tensor, is_first: bool
) -> tuple[dict[str, float], Measures]:
    """Compute the clipped gradients of a mini-batch. Return the numbers to show, and its measures as sums."""
    optimizer.zero_grad()
    mask = take(batch.rollout, rows).answer_mask
    divisors = normalizers(config, mask)
    to_run = rows_by_length(policy, batch.rollout, batch.live, rows)
    parts = micro_batches(config, to_run)
    measures = []
    losses = []
    router_losses = []
    log_probs = []
    for part in parts:
        micro_batch = cropped_batch(policy, take(batch, part))
        of = loss_of(config, micro_batch, divisors, is_first)
        with autocast(config, policy):
            if policy.teacher is not None:
                tokens = max(1, int(mask.sum())) / world()
                of = loss_with_teacher(config, policy, micro_batch, divisors, is_first, tokens)
            out, model_output = policy.run(micro_batch.rollout, of, train=True)
        old = out.log_probs if is_first else micro_batch.old_log_probs
        measures.append(measured(micro_batch.rollout.answer_mask, old, out))
        loss = out.loss
        if policy.router_loss_weight:
            loss = loss + policy.router_loss_weight * model_output.aux_loss / len(parts)  # a mean over micro-batches
            router_losses.append(model_output.aux_loss.detach())
        optimizer.backward(loss)
        losses.append(loss.detach())
        log_probs.append(widened(out.log_probs, mask.shape[1]))
    if is_first:
        batch.old_log_probs[to_run] = gather_rows(torch.cat(log_probs))
    # Normalizers count all micro-batches and are divided by the number of processes. So losses of micro-batches add up,
    # and the loss is the mean over processes.
    counts = policy.row_checkpoint.take() if policy.row_checkpoint else (0, 0)
    own = (sum(x.item() for x in losses), [x.item() for x in router_losses], counts, joined(measures).cpu())
    of_processes = gather(own)
    together = joined([of_process for *_, of_process in of_processes])
    ran = take(batch.rollout, to_run).answer_mask
    skipped = mask.any(1).sum() - ran.any(1).sum(), mask.sum() - ran.sum()
    together = together._replace(skipped=torch.stack(skipped).cpu())
    shown = {"loss": fmean(loss for loss, *_ in of_processes), "rows_run": len(to_run) / len(rows), **numbers(together)}
    differentiated, checkpointed = (sum(x) for x in zip(*[counts for _, _, counts, _ in of_processes], strict=True))
    if checkpointed:
        shown["rows_differentiated"] = differentiated / checkpointed
    if router_losses:
        shown["router_aux_loss"] = fmean(x for _, values, *_ in of_processes for x in values)
    if config.half_dtype == "float16":
        shown["loss_scale"] = optimizer.loss_scale
    shown["grad_norm"] = optimizer.clip()
    return shown, together


def loss_of(
    config: TrainConfig, batch: Batch, divisors: dict[str, float | None], is_first: bool
) -> Callable[..., LossOutput]:
    """Make a `with_head` function that computes the loss of a micro-batch."""

    def loss(hidden: Tensor, head: Any, **options: Any) -> LossOutput:
        return gspo_fused_loss(
            hidden,
            head,
            batch.rollout.answer_ids,
            kept_sets=kept_sets(config, batch.rollout),
            entropy=True,
            **head_options(config, batch),
            **policy_options(config, batch, is_first),
            **divisors,
            **options,
        )

    return loss


def loss_with_teacher(
    config: TrainConfig,
    policy: Policy,
    batch: Batch,
    divisors: dict[str, float | None],
    is_first: bool,
    tokens: float,
) -> Callable[..., LossOutput]:
    """Ask the teacher for its likeliest ids. Make a `with_head` function whose loss has the divergence at these ids.

    The divergence is the forward KL, in which all other ids are one more outcome. Its sum is divided by `tokens`.
    """
    teacher = teacher_top_k(config, policy, batch.rollout)

    def loss(hidden: Tensor, head: Any, **options: Any) -> LossOutput:
        options |= head_options(config, batch)
        ids, mask = batch.rollout.answer_ids, batch.rollout.answer_mask
        kept = kept_sets(config, batch.rollout)
        full = linear_log_probs(hidden, head, ids, extra_ids=teacher.ids, entropy=kept is None, **options)
        scores = full
        if kept is not None:
            scores = linear_log_probs(hidden, head, ids, kept_sets=kept, entropy=True, **options)
        shared: dict[str, Any] = {"mask": mask, "backend": config.backend, **divisors}
        out = policy_loss(scores.log_probs, entropy=scores.entropy, **policy_options(config, batch, is_first), **shared)
        assert full.extra_log_probs is not None
        total = topk_divergence(
            full.extra_log_probs, teacher.log_probs, kind="forward", tail="bucket", ids=teacher.ids, mask=mask
        ).sum()
        count = mask.sum().clamp(min=1)
        means = {"distillation": total.detach() / count, "teacher_mass": teacher.log_probs.exp().sum() / count}
        loss = out.loss + config.distillation_coef * total / tokens
        return out._replace(loss=loss, metrics=out.metrics | means)

    return loss


@torch.no_grad()
def teacher_top_k(config: TrainConfig, policy: Policy, rollout: Rollout) -> TopK:
    """Find the teacher's likeliest ids for each token of the answers, [b, T, k]."""
    columns = policy.fused.options.vocab_size

    def top_k(hidden: Tensor, head: Any, vocab_size: int, **options: Any) -> TopK:
        options |= {"mask": rollout.answer_mask, "temperature": config.temperature}
        options |= {"head_precision": config.head_precision or None}
        return linear_top_k(hidden, head, config.distillation_k, vocab_size=min(columns, vocab_size), **options)

    assert policy.teacher is not None
    return policy.teacher.run(rollout, top_k)[0]


def head_options(config: TrainConfig, batch: Batch) -> dict[str, Any]:
    """Arguments of the functions that compute log-probs."""
    return {
        "mask": batch.rollout.answer_mask,
        "temperature": config.temperature,
        "head_precision": config.head_precision or None,
        "gradient_budget": config.gradient_budget,
        "cache_mib": config.cache_mib,
        "backend": config.backend,
    }


def policy_options(config: TrainConfig, batch: Batch, is_first: bool) -> dict[str, Any]:
    """Arguments of the losses."""
    assert batch.advantages is not None
    return {
        "advantages": batch.advantages,
        "old_log_probs": None if is_first else batch.old_log_probs,
        "ref_log_probs": batch.ref_log_probs,
        "rollout_log_probs": batch.rollout.log_probs if config.objective.rollout_correction else None,
        "objective": config.objective,
    }
