"""A rank of test_verl_megatron.py: our log-probs in verl's Megatron engine, against those of complete logits."""

from __future__ import annotations

import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.megatron_cases import (
    WithProcessor,
    assert_close,
    gradients,
    of_logits,
    passed_to_head,
    refused,
    weighted,
)
from helpers.megatron_models import PADDED, VOCAB, batch, make, run_without_gpu
from helpers.megatron_seam_cases import assert_equal, operands, shard_of, summed
from helpers.pages import VERL_MEGATRON_LINES
from megatron.core import parallel_state
from tolerance import SHARDED_GRADIENT_RELATIVE
from verl.models.mcore import model_forward_fused

from gspo_kernels.integrations.verl.megatron import (
    fused_output_processor,
    linear_cross_entropy,
    linear_topk_log_probs,
)

DEADLINE = 100.0  # seconds


def main(rank: int, folder: Path) -> None:
    run_without_gpu()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    check_linear_cross_entropy()
    for sequence_parallel in (False, True):
        check_fused_output_processor(sequence_parallel)
    check_verls_forward()


def check_linear_cross_entropy() -> None:
    hidden, weight, ids = operands()
    shard, (first, end) = shard_of(weight)
    group = parallel_state.get_tensor_model_parallel_group()
    labels = ids.t().contiguous()
    own = hidden.detach().clone().requires_grad_()
    log_probs, entropy = linear_cross_entropy(own, shard, labels, 0.7, "none", group)
    everything = torch.ones_like(log_probs, dtype=torch.bool)
    weighted(log_probs, entropy, everything).backward()
    true_log_probs, true_entropy = (x.flatten() for x in of_logits(hidden @ weight.t(), labels, 0.7, PADDED))
    weighted(true_log_probs, true_entropy, everything).backward()
    assert weight.grad is not None and shard.grad is not None
    assert_equal(log_probs=(log_probs, true_log_probs), entropy=(entropy, true_entropy))
    assert_equal(hidden=(summed(own.grad, group), hidden.grad), weight=(shard.grad, weight.grad[first:end]))
    top = linear_topk_log_probs(own, shard, labels[..., None], 0.7, group)[..., 0]
    true_top, _ = of_logits(hidden @ weight.t(), labels, 0.7, PADDED)
    computed = torch.autograd.grad(top.square().sum(), (own, shard))
    of_hidden, of_weight = torch.autograd.grad(true_top.square().sum(), (hidden, weight))
    assert_equal(top=(top, true_top))
    assert_equal(hidden=(summed(computed[0], group), of_hidden), weight=(computed[1], of_weight[first:end]))
    run = partial(linear_cross_entropy, own, shard, labels, 0.7)
    refused("reduction must be 'none', got 'mean'", ValueError, lambda: run("mean", group))


def check_fused_output_processor(sequence_parallel: bool) -> None:
    model = make(True, sequence_parallel, kind=WithProcessor)
    inputs, targets, mask = batch()
    one = {name: x[:1] for name, x in inputs.items()}
    context = SimpleNamespace(temperature=0.7, vocab_size=VOCAB)
    processor: dict[str, Any] = {"output_processor": fused_output_processor}
    out = model(**one, labels=targets[:1], **processor, output_processor_context=context)
    weighted(out.log_probs, out.entropy, mask[0]).backward()
    ours = gradients(model)
    log_probs, entropy = of_logits(model(**one, runtime_gather_output=True), targets[:1], 0.7, VOCAB)
    weighted(log_probs[0], entropy[0], mask[0]).backward()
    assert_close(ours, gradients(model), SHARDED_GRADIENT_RELATIVE)
    assert_equal(log_probs=(out.log_probs, log_probs[0]), entropy=(out.entropy, entropy[0]))
    options = {"gradient_budget": 1e-3, "cache_mib": 2.0, "backend": "torch"}
    processor["output_processor_context"] = SimpleNamespace(temperature=0.7, **options)
    assert options.items() <= passed_to_head(lambda: model(**one, labels=targets[:1], **processor)).items()


def check_verls_forward() -> None:
    """verl's forward of a GPTModel, with the documented lines."""
    exec(VERL_MEGATRON_LINES, {})
    model = make(sequence_parallel=True)
    inputs, targets, mask = batch()
    inputs = {name: x[:1] for name, x in inputs.items()}  # verl packs all sequences into one
    model_forward_fused.patch_fused_forward(model)
    out = model(**inputs, labels=targets[:1], temperature=0.7)
    weighted(out.log_probs, out.entropy, mask[0]).backward()
    ours = {"log_probs": out.log_probs.detach(), "entropy": out.entropy.detach(), **gradients(model)}
    model_forward_fused.unpatch_fused_forward(model)
    log_probs, entropy = of_logits(model(**inputs, runtime_gather_output=True), targets[:1], 0.7, PADDED)
    weighted(log_probs[0], entropy[0], mask[0]).backward()
    truth = {"log_probs": log_probs[0].detach(), "entropy": entropy[0].detach(), **gradients(model)}
    assert_close(ours, truth, SHARDED_GRADIENT_RELATIVE)
