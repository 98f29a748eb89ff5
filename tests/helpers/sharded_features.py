"""Cases of tests/distributed: a split head, long sequences, and errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from helpers.sharded_cases import Context, case, relative
from helpers.sharded_runs import rank_in, shard_rows
from tolerance import EQUAL_TOKENS_RELATIVE, FUNCTION_RELATIVE, SHARDED_EQUAL_TOKENS_RELATIVE
from torch import Tensor, nn

from gspo_kernels import Objective, linear_log_probs, policy_loss
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
    import peft

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
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "lm_head": nn.Linear(8, len(local), bias=False)})
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["body"], trainable_token_indices={"lm_head": [1]}))
    with raises("a weight, an nn.Linear or LoRA, because it is sharded", "got trainable_token_indices"):
        run(hidden, model["lm_head"], ids)
    run(hidden, local, ids)  # the ranks are still in step
