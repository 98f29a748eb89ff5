"""Make batches that contain every clip case, and compute their loss by the library and by the oracle.

A clip case is a side of the clip window (below, inside, above) together with a sign of the advantage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers.device import gspo_fused_loss, policy_loss
from tolerance import PLAIN_ORDERS
from torch import Tensor

from gspo_kernels import KeptSets, LossOutput, Objective
from gspo_kernels.objective import DIVERGENCES
from gspo_kernels.reference import ReferenceOutput, gspo_reference_loss
from gspo_kernels.validation import ROUNDING


@dataclass(frozen=True)
class Sample:
    """The arguments of a call of `gspo_fused_loss`. `leaves` are the tensors that get gradients."""

    leaves: dict[str, Tensor]  # hidden, weight, and optionally bias
    target_ids: Tensor
    advantages: Tensor
    objective: Objective
    options: dict[str, Any] = field(default_factory=dict)  # mask, cu_seqlens, old_log_probs, temperature, ...

    def cast(self, dtype: torch.dtype) -> Sample:
        """Return the sample cast to another dtype.

        Used to compute the truth: bf16 inputs are cast to fp64, and the arithmetic is fp64.
        """

        def to(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        leaves = {name: to(x.detach()).requires_grad_() for name, x in self.leaves.items()}
        options = {name: to(x) for name, x in self.options.items()}
        return replace(self, leaves=leaves, advantages=to(self.advantages), options=options)

    def with_options(self, **options: Any) -> Sample:
        return replace(self, options={**self.options, **options})


def new_leaves(sample: Sample) -> dict[str, Tensor]:
    """Return copies of the sample's leaves without history or gradient. They share the memory of the originals."""
    return {name: x.detach().requires_grad_() for name, x in sample.leaves.items()}


def call_fused(sample: Sample, leaves: dict[str, Tensor], backend: str = "auto", **options: Any) -> LossOutput:
    """Call the fused loss on the device under test, with `leaves` in place of the sample's."""
    return gspo_fused_loss(
        leaves["hidden"],
        leaves["weight"],
        sample.target_ids,
        sample.advantages,
        bias=leaves.get("bias"),
        objective=sample.objective,
        backend=backend,
        **sample.options,
        **options,
    )


def run_fused(sample: Sample, backend: str = "auto", **options: Any) -> tuple[LossOutput, dict[str, Tensor]]:
    """Compute values and gradients of the fused loss on the device under test."""
    leaves = new_leaves(sample)
    out = call_fused(sample, leaves, backend, **options)
    return out, gradients(out.loss, leaves)


def run_policy(log_probs: Tensor, advantages: Tensor, **options: Any) -> tuple[LossOutput, Tensor]:
    """Compute the loss from log-probs, and its gradient with respect to them."""
    leaf = log_probs.detach().clone().requires_grad_()
    out = policy_loss(leaf, advantages, **options)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return out, gradient


def run_oracle(
    sample: Sample, dtype: torch.dtype = torch.float64, order: int = 0
) -> tuple[ReferenceOutput, dict[str, Tensor]]:
    """Compute values and gradients by the oracle. `order` permutes the terms of each logit, which changes rounding."""
    sample = sample.cast(dtype)
    out = call_oracle(sample, order)
    return out, gradients(out.loss, sample.leaves)


def call_oracle(sample: Sample, order: int = 0) -> ReferenceOutput:
    hidden, weight = sample.leaves["hidden"], sample.leaves["weight"]
    if order:
        terms = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(order))
        hidden, weight = hidden[..., terms], weight[:, terms]
    return gspo_reference_loss(
        hidden,
        weight,
        sample.target_ids,
        sample.advantages,
        bias=sample.leaves.get("bias"),
        objective=sample.objective,
        **sample.options,
    )


def run_plain(
    sample: Sample, dtype: torch.dtype, truth: ReferenceOutput, true_grads: dict[str, Tensor]
) -> tuple[ReferenceOutput, dict[str, Tensor]]:
    """Run the oracle in `dtype`, with the logits summed in PLAIN_ORDERS[dtype] different orders.

    For each output, return the result with the largest error.
    """
    runs = [run_oracle(sample, dtype, order) for order in range(PLAIN_ORDERS.get(dtype, 1))]

    def worst(results: Iterable[Tensor], true: Tensor) -> Tensor:
        errors = ((x, (x.double() - true)[true.isfinite()].abs()) for x in results)
        return max(errors, key=lambda pair: pair[1].max().item() if pair[1].numel() else 0.0)[0]

    values = [worst((out[i] for out, _ in runs), true) for i, true in enumerate(truth)]
    grads = {name: worst((run_grads[name] for _, run_grads in runs), true) for name, true in true_grads.items()}
    return ReferenceOutput(*values), grads


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    if not loss.requires_grad:  # the loss is a constant, as in an empty batch
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}


def make_sample(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = (9, 5, 12, 7, 3, 11, 8, 6, 10, 4, 7, 9),
    hidden_size: int = 16,
    vocab: int = 37,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    holes: bool = True,
    bias: bool = False,
    padded_vocab: int = 0,  # padding columns after the vocabulary
    per_token_advantages: bool = False,
    token_weights: bool = False,
    temperature: float | str = 1.0,  # "per-token" for one value per token
    on_policy: bool = False,
    spread: float = 2.0,  # log-ratio of sequences outside the window, as a multiple of clip_low or clip_high
    logit_std: float = 3.0,
    objective: Objective | None = None,
    kept: str | None = None,  # kept sets: None, "error" or "vocabulary" (some are empty)
    **head: Any,  # logit_scale, logit_softcap
) -> Sample:
    """Make a batch of sequences below, inside and above the clip window, with advantages of both signs.

    The old log-probs put each sequence (with ratio="token", each token) on a chosen side of the window. For off-policy
    batches of at least 12 sequences with surrogate "clip", assert that every clip case occurs. Masked positions hold
    garbage: ids outside the vocabulary, NaN and -inf log-probs.
    """
    objective = objective or Objective()
    rng = torch.Generator().manual_seed(seed)
    sequences = len(lengths)
    longest = max(lengths, default=0)
    shape = (sequences, longest)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]
    if holes:  # mask tokens inside sequences, like the output of tools; every sequence keeps at least one token
        keep = torch.rand(shape, generator=rng) > 0.25
        if longest:
            keep[:, 0] = True
        mask &= keep

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64)

    leaves = {
        "hidden": randn(*shape, hidden_size),
        "weight": randn(vocab + padded_vocab, hidden_size) * (logit_std / hidden_size**0.5),
    }
    if bias:
        leaves["bias"] = randn(vocab + padded_vocab)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}
    options: dict[str, Any] = dict(head)
    if padded_vocab:
        options["vocab_size"] = vocab
    if temperature == "per-token":
        options["temperature"] = (0.5 + torch.rand(shape, generator=rng)).to(torch.float32)
    elif temperature != 1.0:
        options["temperature"] = temperature
    target_ids = torch.randint(0, vocab, shape, generator=rng)
    target_ids[~mask] = torch.tensor([-100, vocab + 7, -(2**40)]).repeat(mask.numel())[: int((~mask).sum())]

    sign = torch.tensor([1.0, -1.0]).repeat(sequences)[:sequences]
    advantages = sign * (0.5 + torch.rand(sequences, generator=rng))
    advantages[-1:] = 0 if sequences > 6 else advantages[-1:]
    if per_token_advantages:
        flip = torch.where(torch.rand(shape, generator=rng) < 0.3, -1.0, 1.0)
        advantages = advantages[:, None] * flip * (0.5 + torch.rand(shape, generator=rng))

    if kept:
        options["kept_sets"] = random_sets(target_ids, mask, vocab, kept, rng)
    options["mask"] = mask
    draft = Sample(leaves, target_ids, advantages, objective, options)
    with torch.no_grad():
        true_lp = run_oracle_forward(draft)
    if not on_policy:
        # Two consecutive sequences get the same side of the window, so that each side has both advantage signs.
        side = (torch.arange(sequences) // 2) % 3 - 1
        u = torch.where(side < 0, -objective.clip_low * spread, objective.clip_high * spread) * side.abs()
        u = u + 0.1 * min(objective.clip_low, objective.clip_high) * randn(sequences)
        per_token = u[:, None].expand(shape)
        if objective.surrogate in DIVERGENCES:
            per_token = 1.5 * randn(*shape)
        elif objective.surrogate == "gmpo":  # it clips tokens: of a sequence below or above the window, a few
            per_token = per_token * 1.5 * torch.rand(shape, generator=rng)
        elif objective.ratio == "token":
            per_token = per_token[:, torch.randperm(longest, generator=rng)] * (torch.rand(shape, generator=rng) + 0.5)
        else:
            noise = randn(*shape).masked_fill(~mask, 0) * 0.02
            per_token = per_token + noise - noise.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        old = (true_lp - per_token).clamp(max=ROUNDING).float()
        options["old_log_probs"] = _garbage_where_masked(old, mask)
    ref = (true_lp + 0.3 * randn(*shape)).clamp(max=ROUNDING).float()
    options["ref_log_probs"] = _garbage_where_masked(ref, mask)
    if token_weights:
        options["token_weights"] = 0.5 + torch.rand(shape, generator=rng)
    sample = Sample(leaves, target_ids, advantages, objective, options)
    if not on_policy and len(lengths) >= 12 and objective.surrogate == "clip":
        assert_every_clip_case_occurs(sample, true_lp)
    return _pack(sample, lengths) if packed else sample


def random_sets(target_ids: Tensor, mask: Tensor, vocab: int, empty: str, rng: torch.Generator) -> KeptSets:
    """Return random sets in random order. A quarter has one id, masked tokens have bad ids, and some sets are empty."""
    share = torch.rand(mask.shape, generator=rng)[..., None]
    kept = torch.rand(*mask.shape, vocab, generator=rng) < torch.where(share < 0.25, 0, share)
    kept |= (target_ids[..., None] == torch.arange(vocab)) & mask[..., None]
    if empty == "vocabulary":
        kept &= torch.rand(mask.shape, generator=rng)[..., None] < 0.8
    sets = KeptSets.from_mask(kept, empty=empty)
    token = torch.repeat_interleave(torch.arange(mask.numel()), sets.sizes)
    order = (token + torch.rand(len(token), generator=rng)).argsort()
    ids = torch.where(mask.reshape(-1)[token], sets.ids[order], -7)
    return sets._replace(ids=ids.int())


def run_oracle_forward(sample: Sample) -> Tensor:
    """Return the log-probs [B, T] of the oracle in float64."""
    plain = replace(sample, objective=Objective())
    plain = replace(
        plain, options={k: v for k, v in plain.options.items() if k not in ("old_log_probs", "ref_log_probs")}
    )
    return run_oracle(plain)[0].log_probs.detach()


def assert_every_clip_case_occurs(sample: Sample, true_lp: Tensor) -> None:
    mask = sample.options["mask"]
    objective = sample.objective
    r = torch.where(mask, true_lp - sample.options["old_log_probs"].double(), 0)
    if objective.ratio != "token":
        r = (r.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand_as(r)
    advantages = sample.advantages if sample.advantages.ndim == 2 else sample.advantages[:, None].expand_as(r)
    ratio = r.exp()
    sides = {
        "below": ratio < 1 - objective.clip_low,
        "inside": (ratio >= 1 - objective.clip_low) & (ratio <= 1 + objective.clip_high),
        "above": ratio > 1 + objective.clip_high,
    }
    for name, on_side in sides.items():
        for sign in (1, -1):
            assert (mask & on_side & (advantages * sign > 0)).any(), f"no token {name} with advantage {sign:+d}"


def _garbage_where_masked(x: Tensor, mask: Tensor) -> Tensor:
    garbage = torch.tensor([float("nan"), float("-inf"), 1e30]).repeat(mask.numel())[: int((~mask).sum())]
    out = x.clone()
    out[~mask] = garbage.to(x.dtype)
    return out


def _pack(sample: Sample, lengths: tuple[int, ...]) -> Sample:
    """Return the batch in packed form. Positions after the end of a sequence are removed; masked holes stay."""
    longest = sample.target_ids.shape[1]
    inside = torch.arange(longest)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]

    def cut(x: Any) -> Any:
        per_token = isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == inside.shape
        return x.detach()[inside] if per_token else x

    leaves = {name: cut(x).detach().requires_grad_() for name, x in sample.leaves.items()}
    options = {name: cut(x) for name, x in sample.options.items()}
    if "kept_sets" in options:
        options["kept_sets"] = options["kept_sets"].select(inside)
    options["cu_seqlens"] = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Sample(leaves, cut(sample.target_ids), cut(sample.advantages), sample.objective, options)
