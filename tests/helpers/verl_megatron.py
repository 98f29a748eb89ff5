"""A rank of test_verl_megatron.py: verl's forward of a GPTModel with our log-probs, against Megatron's logits."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch.distributed as dist
from helpers.megatron_cases import assert_close, gradients, of_logits, weighted
from helpers.megatron_models import PADDED, batch, make, run_without_gpu
from helpers.pages import VERL_MEGATRON_LINES
from megatron.core import parallel_state
from tolerance import SHARDED_GRADIENT_RELATIVE
from verl.models.mcore import model_forward_fused

DEADLINE = 100.0  # seconds


def main(rank: int, folder: Path) -> None:
    run_without_gpu()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
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
