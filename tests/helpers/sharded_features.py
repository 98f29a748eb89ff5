"""Cases of tests/distributed: options of the head, compilation, errors, and ranks without tokens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.samples import Sample, make_sample, run_fused
from helpers.sharded_cases import Context, assert_equals_one_process, case, relative
from helpers.sharded_runs import Groups, contiguous, of_every_rank, rank_in, run_sharded, shard_rows
from tolerance import EQUAL_TOKENS_RELATIVE, FUNCTION_RELATIVE, SHARDED_EQUAL_TOKENS_RELATIVE, SHARDED_GRADIENT_RELATIVE
from torch import Tensor, nn

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.sampler_mismatch import RolloutCorrection

N, H = 20, 8


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Make the torch backend's tiles 504 columns wide in fp32 and 240 in fp64, so that small shards begin at tiles."""
    with mock.patch.dict(os.environ, GSPO_WORKSPACE_MIB="1"):
        yield


def rows(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(N, H, generator=rng).to(dtype)
    weight = torch.randn(vocab, H, generator=rng).to(dtype)
    return hidden, weight, torch.randint(0, vocab, (N,), generator=rng)


# -- options of the head


def _on(context: Context, ranks: int) -> Callable[..., Any]:
    groups = Groups(tp=context.group(ranks))
    return lambda sample, backend, **options: run_sharded(sample, backend, groups, **options)


def peaked(vocab: int) -> Sample:
    """Return a batch in which the policy is certain of most tokens, so that a budget leaves out cells."""
    sample = make_sample(
        2,
        dtype=torch.float64,
        lengths=(32,) * 16,
        hidden_size=64,
        vocab=vocab,
        logit_std=12.0,
        holes=False,
        on_policy=True,
    )
    likeliest = (sample.leaves["hidden"] @ sample.leaves["weight"].t()).argmax(-1)
    certain = torch.rand(likeliest.shape, generator=torch.Generator().manual_seed(0)) < 0.9
    return replace(sample, target_ids=torch.where(certain, likeliest, sample.target_ids))


for _backend in ("torch", "triton"):
    kinds: tuple[dict[str, Any], ...] = (
        {"gradient_budget": 0.2},
        {"cache_mib": 8.0},
        {"cache_mib": 1.0, "gradient_budget": 0.2},
    )
    for _options in kinds:

        @case(f"tp 2 {_backend} {' '.join(_options)}", 2)
        def _memory(context: Context, backend: str = _backend, options: dict[str, Any] = _options) -> None:
            # Shards begin at tiles. A rank keeps as many rows as one process with twice the memory.
            sample = peaked(960) if backend == "torch" else peaked(512)
            own = {name: x / 2 if name == "cache_mib" else x for name, x in options.items()}
            with small_tiles():
                out, _ = run_fused(sample, backend, **options)
                if "gradient_budget" in options:
                    assert out.metrics["dropped_gradient_mass"] > 0
                assert_equals_one_process(sample, backend, _on(context, 2), own, **options)


@case("tp 4 budget of unaligned shards", 4)
def _unaligned_budget(context: Context) -> None:
    sample = peaked(1200)
    sample = sample.with_options(vocab_size=1000)  # the last rank has fewer columns than the others
    sample = replace(sample, target_ids=sample.target_ids.clamp(max=999))
    run = _on(context, 4)
    with small_tiles():
        dropping, grads = run(sample, "torch", gradient_budget=0.2)
        partly_kept, _ = run(sample, "torch", gradient_budget=0.2, cache_mib=0.5)
        exact, exact_grads = run(sample, "torch", gradient_budget=1e-12)  # leaves out nothing
    for out in (dropping, partly_kept, exact):
        metrics = of_every_rank({name: x.item() for name, x in out.metrics.items()}, context.group(4))
        assert all(x == metrics[0] for x in metrics)
    assert 0 < dropping.metrics["dropped_gradient_mass"] <= 0.2
    assert dropping.metrics["live_tile_share"] < dropping.metrics["live_row_share"]
    torch.testing.assert_close(exact.metrics["live_tile_share"], exact.metrics["live_row_share"])
    for ours, theirs in zip(grads["weight"][:1000].split(100), exact_grads["weight"][:1000].split(100), strict=True):
        assert relative(ours, theirs) < 0.9  # every tile has heavy cells, which are computed


for _reduce in ("all", "none"):

    @case(f"tp 2 lora {_reduce}", 2)
    def _lora(context: Context, reduce_hidden: str = _reduce) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import Linear

        group = context.group(2)
        hidden, weight, ids = rows(64, torch.float64)
        rng = torch.Generator().manual_seed(1)
        a, b = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((4, H), (64, 4)))

        def run(base: Tensor, right: Tensor, **options: Any) -> tuple[Tensor, ...]:
            linear = nn.Linear(H, base.shape[0], bias=False, dtype=torch.float64)
            linear.weight.data = base.clone()
            head = Linear(linear, "default", LoraConfig(r=4), r=4, lora_alpha=8)
            head.lora_A["default"].weight.data, head.lora_B["default"].weight.data = a.clone(), right.clone()
            h = hidden.clone().requires_grad_()
            out = linear_log_probs(h, head, ids, **options)
            (out.log_probs * torch.linspace(-1, 1, N)).sum().backward()
            d_a, d_b = head.lora_A["default"].weight.grad, head.lora_B["default"].weight.grad
            assert isinstance(h.grad, Tensor) and isinstance(d_a, Tensor) and isinstance(d_b, Tensor)
            return out.log_probs.detach(), h.grad, d_a, d_b

        one = run(weight, b)
        lp, d_h, d_a, d_b = run(
            shard_rows(weight, group), shard_rows(b, group), tp_group=group, reduce_hidden=reduce_hidden
        )
        if reduce_hidden == "none":
            dist.all_reduce(d_h, group=group)
        for ours, theirs in zip((lp, d_h, d_a, d_b), (*one[:3], shard_rows(one[3], group)), strict=True):
            assert relative(ours, theirs) <= SHARDED_GRADIENT_RELATIVE


@case("tp 2 of a split head", 2)
def _split(context: Context) -> None:
    """Shards begin at tiles, so log-probs and the local d_logits have the same bits as in one process."""
    group = context.group(2)
    hidden, weight, ids = rows(512)
    results = []
    for options in ({}, {"tp_group": group}):
        w = (shard_rows(weight, group) if options else weight).clone().requires_grad_()
        h = hidden.clone().requires_grad_()
        out = linear_log_probs(h, w, ids, head_precision="bf16x3", backend="triton", **options).log_probs
        grads = torch.autograd.grad(out.square().sum(), (h, w))
        results.append((out, grads[0], grads[1] if options else shard_rows(grads[1], group)))
    (one, *grads), (lp, *shard_grads) = results
    assert torch.equal(lp, one)
    for ours, theirs in zip(shard_grads, grads, strict=True):
        assert relative(ours, theirs) <= FUNCTION_RELATIVE


@case("tp 2 compiled", 2)
def _compiled(context: Context) -> None:
    group = context.group(2)
    hidden, weight, ids = rows(64, torch.float64)
    local = shard_rows(weight, group)

    def log_probs(h: Tensor, w: Tensor) -> Tensor:
        return linear_log_probs(h, w, ids, tp_group=group).log_probs.square().mean()

    def fused(h: Tensor, w: Tensor) -> Tensor:
        advantages = torch.linspace(-1, 1, N // 4)
        out = gspo_fused_loss(
            h.view(N // 4, 4, H), w, ids.view(N // 4, 4), advantages, tp_group=group, cp_group=context.group(2)
        )
        return out.loss + out.metrics["ratio_mean"]

    for loss in (log_probs, fused):
        grads = []
        for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            h, w = hidden.clone().requires_grad_(), local.clone().requires_grad_()
            function(h, w).backward()
            grads.append((h.grad, w.grad))
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)  # pyright: ignore[reportArgumentType]


@case("cp 2 equal tokens", 2)
def _equal_tokens(context: Context) -> None:
    """In fp32, all additions of equal terms would round in the same direction: by 2e-5 of the sum for these tokens."""
    u = torch.tensor(3.1e-4)
    tokens = 65_536
    for objective in (Objective(), Objective(ratio="token", aggregation="token-mean")):
        log_probs = u.repeat(1, tokens).requires_grad_()
        out = policy_loss(
            log_probs,
            torch.ones(1),
            old_log_probs=torch.zeros(1, tokens),
            objective=objective,
            cp_group=context.group(2),
        )
        (gradient,) = torch.autograd.grad(out.loss, log_probs)
        ratio = u.double().exp()
        assert (out.log_ratio == u).all()
        torch.testing.assert_close(out.loss.double(), -ratio, rtol=EQUAL_TOKENS_RELATIVE, atol=0)
        torch.testing.assert_close(out.metrics["kl_to_old"], -u.double(), rtol=SHARDED_EQUAL_TOKENS_RELATIVE, atol=0)
        expected = (-ratio / (2 * tokens)).expand_as(gradient)
        torch.testing.assert_close(gradient.double(), expected, rtol=SHARDED_EQUAL_TOKENS_RELATIVE, atol=0)


# -- errors


@contextlib.contextmanager
def raises(*texts: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"no error with {texts}")


@case("errors on every rank", 2)
def _errors(context: Context) -> None:
    """sharded_agreement.py has the arguments whose values differ."""
    group = context.group(2)
    hidden, weight, ids = rows(64)
    first = rank_in(group) == 0
    local = shard_rows(weight, group)

    def run(*args: Any) -> Any:
        return linear_log_probs(*args, tp_group=group)

    cut = slice(None) if first else slice(0, -1)
    with raises("the shape of hidden must be equal on all ranks of tp_group, got [[20, 8], [19, 8]]"):
        run(hidden[cut], local, ids[cut])
    with raises("the number of rows of lm_head"):
        run(hidden, local if first else local[:-1], ids.clamp(max=60))
    with raises("target_ids must be between 0 and 63"):  # the other rank names the rank and its error
        run(hidden, local, torch.where(first & (ids == ids[0]), 64, ids))
    with raises("tp_group must be a ProcessGroup"):
        linear_log_probs(hidden, local, ids, tp_group="tp")
    with raises("hidden must be"):
        run(hidden if first else None, local, ids)
    log_probs = torch.zeros(3, 2) if first else torch.zeros(2, 2)
    with raises("the number of sequences must be equal on all ranks of cp_group"):
        policy_loss(log_probs, torch.ones(len(log_probs)), cp_group=group)
    with raises("rollout_correction"):
        objective = Objective(rollout_correction=RolloutCorrection())
        policy_loss(log_probs, torch.ones(len(log_probs)), cp_group=group, objective=objective)
    run(hidden, local, ids)  # the ranks are still in step


# -- ranks without work


@case("cp with masked and empty ranks", 4)
def _empty(context: Context) -> None:
    groups = Groups(cp=context.group(4))
    sample = make_sample(4, dtype=torch.float64, objective=Objective(kl_coef=0.1))
    shape = sample.target_ids.shape
    last = torch.where(contiguous(shape, 2) == 0, 0, 2)  # ranks 1 and 3 hold no tokens
    uneven = torch.where(torch.arange(shape[0])[:, None] % 2 == 0, 1, contiguous(shape, 4))  # sequences on one rank
    masked = sample.with_options(mask=sample.options["mask"] & (contiguous(shape, 4) != 1))
    for backend in ("torch", "triton"):
        for batch, owner in ((sample, last), (sample, uneven), (masked, contiguous(shape, 4))):
            for options in ({}, {"cache_mib": 1.0}):

                def run(sample: Sample, backend: str, owner: Tensor = owner, options: dict[str, Any] = options) -> Any:
                    return run_sharded(sample, backend, groups, owner, packed=True, **options)

                (out, grads), (one, one_grads) = run(batch, backend), run_fused(batch, backend, **options)
                assert relative(out.loss, one.loss) <= SHARDED_GRADIENT_RELATIVE
                for name, grad in one_grads.items():
                    assert relative(grads[name], grad) <= SHARDED_GRADIENT_RELATIVE, name
                for name in ("clip_fraction", "kl", "zero_coefficient_share", "passes", "live_row_share"):
                    assert abs(out.metrics[name] - one.metrics[name]) <= 1e-10, name
