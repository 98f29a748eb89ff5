"""Compare our loss with TRL's `_compute_loss`, called with the same log-probs on a stand-in for TRL's trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.marks import triton_is_slow
from helpers.other_trainers import assert_agree, ours, rollout
from helpers.trl_losses import GRADIENT_STEPS, LONGEST, SEQUENCE, trl_loss

from gspo_kernels import Objective
from gspo_kernels.distillation import topk_divergence

pytest.importorskip("trl", minversion="1.16")  # earlier releases normalize dapo differently


# An objective, and the settings of GRPOConfig that give it.
CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "gspo": (Objective(), {"loss_type": "grpo", "level": SEQUENCE}),
    "gspo delta": (Objective(delta=1.0006), {"loss_type": "grpo", "level": SEQUENCE, "delta": 1.0006}),
    "gspo k3, bias-corrected": (
        Objective(kl_coef=0.1, kl_ratio_factor=True),
        {"loss_type": "grpo", "level": SEQUENCE, "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "gspo with loss_type dapo": (
        Objective.preset("luspo", clip_low=3e-4, clip_high=4e-4, aggregation="token-mean"),
        {"loss_type": "dapo", "level": SEQUENCE},
    ),
    "grpo": (Objective.preset("grpo"), {"loss_type": "grpo"}),
    "grpo unbiased k3": (
        Objective.preset("grpo", kl_coef=0.1, kl_estimator="unbiased"),
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "bnpo": (Objective.preset("bnpo"), {"loss_type": "bnpo"}),
    "dapo": (Objective.preset("dapo"), {"loss_type": "dapo"}),
    "dr_grpo": (Objective.preset("dr_grpo", length_norm=LONGEST), {"loss_type": "dr_grpo"}),
    "luspo": (Objective.preset("luspo"), {"loss_type": "luspo", "level": SEQUENCE}),
    "cispo": (Objective.preset("cispo", clip_high=0.5), {"loss_type": "cispo", "epsilon_high": 1.5}),
    "sapo": (Objective.preset("sapo"), {"loss_type": "sapo"}),
    "vespo": (Objective.preset("vespo"), {"loss_type": "vespo"}),
    "gmpo": (Objective.preset("gmpo"), {"loss_type": "gmpo"}),
}


@pytest.mark.parametrize(
    ("name", "weights"), [(name, x) for name in CASES for x in (False, True) if not (x and name in ("gmpo", "vespo"))]
)
@triton_is_slow
def test_loss_gradient_and_clip_fractions_equal_trls(name: str, weights: bool, backend: str) -> None:
    """With `weights`, TRL's importance_sampling_ratio is our token_weights.

    TRL divides by tokens or rows of all micro-batches of an optimizer step, per process. With this number as
    `normalizer`, the gradients of our micro-batches add up to TRL's.
    """
    objective, config = CASES[name]
    batch = rollout(objective, weights=weights)
    loss, gradient, metrics = trl_loss(batch, objective, config)
    computed = ours(batch, objective, backend)
    assert_agree(batch, computed, loss, gradient)
    count = batch.mask.sum() if objective.aggregation == "token-mean" else len(batch.mask)
    of_micro_batch = ours(batch, objective, backend, normalizer=count * GRADIENT_STEPS)
    assert_agree(batch, of_micro_batch, loss / GRADIENT_STEPS, gradient / GRADIENT_STEPS)
    if config["loss_type"] not in ("gmpo", "cispo", "sapo", "vespo") and "delta" not in config:
        # TRL counts sequences at sequence level, tokens otherwise.
        share = "clip_fraction" if config.get("level") == SEQUENCE else "token_clip_fraction"
        for trl_name, suffix in {"low_mean": "_low", "high_mean": "_high", "region_mean": ""}.items():
            expected = metrics[f"clip_ratio/{trl_name}"][0]
            assert expected == pytest.approx(computed[0].metrics[share + suffix].item(), abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_divergences_at_k_ids_equal_trls(alpha: float, tail: str) -> None:
    """TRL's SDPO takes the k ids of the student; here they are given to both."""
    loss_utils = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    rng = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 9, generator=rng, dtype=torch.float64) for _ in range(2))
    log_p, ids = student.requires_grad_().log_softmax(-1).topk(4)
    kind = {0.0: "forward", 1.0: "reverse"}.get(alpha, "jensen-shannon")
    ours = topk_divergence(log_p, teacher.log_softmax(-1).gather(-1, ids), kind=kind, tail=tail, beta=0.3)
    trls = loss_utils.compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=4, distillation_alpha=alpha, distillation_add_tail=tail == "bucket"
    )
    torch.testing.assert_close(ours, trls)
    gradients = (torch.autograd.grad(x.sum(), student, retain_graph=True) for x in (ours, trls))
    torch.testing.assert_close(*gradients)
