"""SkyRL's policy loss, and its log-probs at the head of a Megatron model.

    PolicyLossRegistry.register("gspo_kernels", skyrl.loss)
    model_utils._fused_lm_head_logprob_apply                = skyrl.fused_log_probs
    megatron_model_wrapper.from_parallel_hidden_to_logprobs = skyrl.log_probs

Sizes in the last two: B sequences of S positions, hidden size H, V ids. Every rank of the tensor-parallel group has
V / TP rows of the head, and vocab_start_index is the first id of its rows. vocab_end_index and chunk_size are not used.
`options` are gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`; set them by `functools.partial`.
Without vocab_size, Megatron's padding of the vocabulary counts, as in SkyRL's functions. Results are fp32
(fp64 for fp64 inputs) and equal on the ranks of the tensor-parallel group.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_kernels import LossOutput, Objective
from gspo_kernels.metrics import COUNTS
from gspo_kernels.validation import Checks

from .common import GSPO, USE_CORRECTION, check_settings, loss_of_log_probs
from .shards import log_probs_of_shard, next_tokens

__all__ = ["fused_log_probs", "log_probs", "loss"]


def loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor,
    rollout_logprobs: Tensor | None = None,
    *,
    objective: Objective = GSPO,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the GSPO loss of a micro-batch, for use as SkyRL's policy loss.

    The loss is a sum, because SkyRL has already divided the advantages. SkyRL adds the KL term and the entropy bonus.
    SkyRL's own GSPO is the token form, ratio="sequence-token". The default here is the sequence form. The two are equal
    if all tokens of an answer have the same advantage and the same weight.

    Args:
        log_probs, old_log_probs, rollout_logprobs, loss_mask: [B, T], fp32.
        advantages: [B, T], divided by (sequences of the mini-batch * unmasked tokens of the answer), as SkyRL does with
            loss_reduction="sequence_mean".
        config: SkyRL's AlgorithmConfig.

    Returns:
        The loss [], and Python numbers for SkyRL's log.

    Raises:
        ValueError: a setting of SkyRL disagrees with `objective`.
    """
    correction = config.off_policy_correction
    switches = [f.name for f in fields(correction) if f.default is None]
    settings = {
        "trainer.algorithm.eps_clip_low": (config.eps_clip_low, objective.clip_low),
        "trainer.algorithm.eps_clip_high": (config.eps_clip_high, objective.clip_high),
        "trainer.algorithm.loss_reduction": (config.loss_reduction, "sequence_mean"),
        "objective.kl_coef": (objective.kl_coef, 0.0),
        "objective.entropy_coef": (objective.entropy_coef, 0.0),
    }
    for name in switches:
        setting = f"trainer.algorithm.off_policy_correction.{name} {USE_CORRECTION}"
        settings[setting] = (getattr(correction, name), None)
    check_settings("skyrl.loss", objective, settings)
    lengths = (loss_mask != 0).sum(1, keepdim=True)  # [B, 1]
    out = loss_of_log_probs(
        log_probs,
        advantages * lengths,
        loss_mask,
        old_log_probs=old_log_probs,
        rollout=rollout_logprobs,
        normalizer=1.0,
        objective=objective,
    )
    return out.loss, _logged(out)


def _logged(out: LossOutput) -> dict[str, float]:
    """Our metrics as "gspo/<name>", without counts, and SkyRL's `clip_ratio`.

    SkyRL averages metrics over micro-batches, except that it takes the minimum of names that end in _min and the
    maximum of names that end in _max. So a micro-batch without ratios has inf and -inf there, instead of 1.
    """
    names = [name for name in out.metrics if name not in COUNTS]
    values = torch.stack([out.metrics[name].double() for name in (*names, "ratios")]).tolist()
    logged = dict(zip(names, values, strict=False))
    if values[-1] == 0:
        logged |= {"ratio_min": math.inf, "ratio_max": -math.inf}
    return {"clip_ratio": logged["token_clip_fraction"], **{f"gspo/{name}": x for name, x in logged.items()}}


def fused_log_probs(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
    **options: Any,
) -> Tensor:
    """Compute log-probs of packed and padded batches. Replaces SkyRL's `_fused_lm_head_logprob_apply`.

    The gradient of hidden is as in `log_probs`.

    Args:
        hidden: [B, S, H], cast to the dtype of the weight.
        weight: [V / TP, H], which SkyRL has divided by the temperature.
        target: [B, S] int64, already shifted.
        inference_only: run under `no_grad`.
        backend: not used.

    Returns:
        [B, S].
    """
    check = Checks("skyrl.fused_log_probs")
    with torch.no_grad() if inference_only else nullcontext():
        return log_probs_of_shard(check, hidden, weight, target, vocab_start_index, tp_group=tp_group, **options)


def log_probs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    fused_backend: str = "torch",
    **options: Any,
) -> Tensor:
    """Compute log-probs of each next token. Replaces SkyRL's `from_parallel_hidden_to_logprobs`.

    As in SkyRL, the gradient of hidden is only this rank's term of the sum over the tensor-parallel group. SkyRL has
    gathered the hidden states of sequence parallelism before this call, and the backward of that gather adds the terms.

    Args:
        hidden: [B, S / CP, H], cast to the dtype of the weight. Under context parallelism, S / CP positions in
            Megatron's order: of 2 CP equal parts, rank r has parts r and 2 CP - 1 - r.
        lm_head_weight: [V / TP, H].
        target: [B, S] int64, the input ids of all ranks: this function shifts them. S may leave out padding at the end.
        inference_only: run under `no_grad`.
        fused_backend: not used.

    Returns:
        [B, S - 1] on every rank of cp_group, for the tokens of all of them. As in SkyRL, the backward adds up the
        gradients of these ranks.
    """
    check = Checks("skyrl.log_probs")
    ranks = 1 if cp_group is None else dist.get_world_size(cp_group)
    width = target.shape[1]
    if hidden.shape[1] * ranks < width or (ranks > 1 and hidden.shape[1] % 2):
        expected = f"[B, S / CP, H], S / CP even with CP > 1, and S at least the {width} positions of target"
        check.fail("hidden", expected, hidden)
    ids, mask = (torch.nn.functional.pad(x, (0, hidden.shape[1] * ranks - width)) for x in next_tokens(target))
    order = _order(ids.shape[1], ranks).to(ids.device)  # [CP, S / CP]
    mine = order[0 if cp_group is None else dist.get_rank(cp_group)]
    options |= {"mask": mask[:, mine], "temperature": temperature, "tp_group": tp_group}
    with torch.no_grad() if inference_only else nullcontext():
        own = log_probs_of_shard(check, hidden, lm_head_weight, ids[:, mine], vocab_start_index, **options)
        every = own if ranks == 1 else _Gathered.apply(own, cp_group)
    return every[:, order.flatten().argsort()][:, : width - 1]


def _order(width: int, ranks: int) -> Tensor:
    """Positions of each rank in Megatron's order of context parallelism, [ranks, width / ranks]."""
    if ranks == 1:
        return torch.arange(width)[None]
    parts = torch.arange(width).view(2 * ranks, -1)
    return torch.stack([torch.cat([parts[rank], parts[-1 - rank]]) for rank in range(ranks)])


class _Gathered(torch.autograd.Function):
    """Concatenate [B, S] of all ranks to [B, ranks S]. The backward adds up the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.width = x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.width, 1)[dist.get_rank(ctx.group)], None
