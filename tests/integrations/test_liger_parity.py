"""Our fused loss against Liger's chunked loss, uncompiled, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.marks import triton_is_slow
from helpers.other_trainers import Rollout, rollout
from tolerance import LIGER_GRADIENT_RELATIVE, check_loss

from gspo_kernels import Objective, gspo_fused_loss
from gspo_kernels.reference import token_log_probs

liger = pytest.importorskip("liger_kernel.chunked_loss")

LONGEST, HIDDEN, VOCAB = 32, 24, 61
CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "gspo": (Objective(), {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "gspo delta, k3": (
        Objective(delta=1.0006, kl_coef=0.1, kl_ratio_factor=True),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.0006, "beta": 0.1}
        | {"use_bias_correction_kl": True},
    ),
    "grpo k3": (Objective.preset("grpo", kl_coef=0.04), {"loss_type": "grpo", "beta": 0.04}),
    "dapo": (Objective.preset("dapo"), {"loss_type": "dapo"}),
    "bnpo": (Objective.preset("bnpo"), {"loss_type": "bnpo"}),
    "dr_grpo": (Objective.preset("dr_grpo", length_norm=LONGEST), {"loss_type": "dr_grpo"}),
    # Token ratios are not compared with luspo: Liger's mean then includes padding.
    "luspo": (Objective.preset("luspo"), {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    "cispo": (Objective.preset("cispo", clip_high=0.5), {"loss_type": "cispo", "epsilon_high": 1.5}),
    "sapo": (Objective.preset("sapo"), {"loss_type": "sapo"}),
    "vespo": (Objective.preset("vespo"), {"loss_type": "vespo"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@triton_is_slow
def test_loss_and_gradients_equal_ligers(name: str, temperature: float, backend: str) -> None:
    objective, config = CASES[name]
    batch: Rollout = rollout(objective)
    rng = torch.Generator().manual_seed(0)
    size = batch.mask.shape
    hidden = torch.randn(*size, HIDDEN, generator=rng)
    weight = torch.randn(VOCAB, HIDDEN, generator=rng) / 5
    ids = torch.randint(0, VOCAB, size, generator=rng)
    lp, _ = token_log_probs(hidden.flatten(0, 1).double(), weight.double(), ids.flatten(), temperature=temperature)
    # Choose old and reference log-probs so that the log-ratios to the log-probs of these hidden states are the batch's.
    old = (lp.view(size) - (batch.log_probs - batch.old)).clamp(max=0).float()
    ref = (lp.view(size) - (batch.log_probs - batch.ref)).float()
    liger_hidden, liger_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    module = liger.LigerFusedLinearGRPOLoss(
        **{
            "beta": 0.0,
            "compiled": False,
            "use_ref_model": True,
            "temperature": temperature,
            "epsilon_low": objective.clip_low,
            "epsilon_high": objective.clip_high,
            "max_completion_length": LONGEST,
            "chunk_size": len(batch.advantages),
            **config,
        }
    )
    liger_loss, _ = module(
        liger_hidden,
        liger_weight,
        ids,
        batch.mask.float(),
        batch.advantages.float(),
        old_per_token_logps=old,
        ref_per_token_logps=ref,
    )
    liger_loss.backward()
    our_hidden, our_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = gspo_fused_loss(
        our_hidden,
        our_weight,
        ids,
        batch.advantages.float(),
        mask=batch.mask,
        old_log_probs=old,
        ref_log_probs=ref,
        temperature=temperature,
        objective=objective,
        backend=backend,
    )
    out.loss.backward()
    check_loss(out.loss, liger_loss, batch.advantages.abs().mean().item())
    for a, b in ((our_hidden.grad, liger_hidden.grad), (our_weight.grad, liger_weight.grad)):
        assert a is not None and b is not None
        assert (a - b).norm() <= LIGER_GRADIENT_RELATIVE * b.norm(), f"{(a - b).norm() / b.norm():.2e}"
