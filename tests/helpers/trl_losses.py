"""Call TRL's `_compute_loss` on a stand-in for its trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.other_trainers import Rollout

from gspo_kernels import Objective

pytest.importorskip("trl", minversion="1.16")  # releases before 1.16 normalize dapo differently
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

LONGEST = 32
SEQUENCE, TOKEN = "sequence", "token"
GRADIENT_STEPS, PER_GENERATION, PROCESSES = 2, 4, 3


def trl_loss(b: Rollout, o: Objective, config: dict[str, Any]) -> tuple[Any, ...]:
    """Return the loss of a training micro-batch, its derivative with respect to the log-probs, and TRL's metrics."""
    log_probs = b.log_probs.clone().requires_grad_()
    args = SimpleNamespace(
        use_bias_correction_kl=config.get("use_bias_correction_kl", False),
        delta=config.get("delta"),
        sapo_temperature_pos=o.sapo_temperature_pos,
        sapo_temperature_neg=o.sapo_temperature_neg,
        **{name: value for name, value in vars(o).items() if name.startswith("vespo_")},
        steps_per_generation=PER_GENERATION,
    )
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=args,
        get_gamma_weights=getattr(GRPOTrainer, "get_gamma_weights", None),
        importance_sampling_level=config.get("level", TOKEN),
        loss_type=config["loss_type"],
        beta=config.get("beta", 0.0),
        epsilon_low=o.clip_low,
        epsilon_high=config.get("epsilon_high", o.clip_high),
        use_vllm=b.weights is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=GRADIENT_STEPS,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=PROCESSES, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
        ),
    )
    ids = torch.zeros_like(b.mask, dtype=torch.int64)
    mask = b.mask.long()
    inputs = {
        "prompt_ids": ids[:, :2],
        "prompt_mask": mask[:, :2],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": b.advantages,
        "old_per_token_logps": b.old,
        "ref_per_token_logps": b.ref,
        # Tokens of the generation batch: every process has PER_GENERATION micro-batches like this one.
        "num_items_in_batch": mask.sum() * PER_GENERATION * PROCESSES,
    }
    if b.weights is not None:
        inputs["importance_sampling_ratio"] = b.weights.masked_fill(~b.mask, 1)
    trainer: Any = GMPOTrainer if config["loss_type"] == "gmpo" else GRPOTrainer
    loss = trainer._compute_loss(stub, stub.model, inputs)
    loss.backward()
    assert log_probs.grad is not None
    # TRL divides the loss by the number of micro-batches of an optimizer step. Undo this division.
    return loss.detach() * GRADIENT_STEPS, log_probs.grad * GRADIENT_STEPS, stub._metrics["train"]
