"""Print hashes of all outputs of a fixed set of calls. Equal hashes before and after a change mean equal bits.

    PYTHONPATH=tests python -m faults.bits > before.json

Bits depend on the processor and the versions of libraries, so compare only files made on the same machine.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"  # see conftest.py

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from helpers.samples import Sample, gradients, make_sample, run_fused
from torch import Tensor, nn

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.sampler_mismatch import RolloutCorrection

WINDOW = {"clip_low": 0.2, "clip_high": 0.28}
OBJECTIVES: list[dict[str, Any]] = [
    {},
    WINDOW,
    {"ratio": "sequence-token"},
    {"ratio": "token", **WINDOW},
    {"dual_clip": 1.0005},
    {"delta": 1.0006},
    {"ratio": "token", **WINDOW, "dual_clip": 1.3, "kl_coef": 0.1, "kl_ratio_factor": True},
    {"surrogate": "none"},
    {"surrogate": "cispo", "ratio": "token", "clip_low": 1.0, "clip_high": 1.5},
    {"surrogate": "cispo", "kl_coef": 0.1, "kl_ratio_factor": True},
    {"surrogate": "sapo", "ratio": "token", **WINDOW},
    {"surrogate": "sapo", **WINDOW, "sapo_temperature_pos": 2.0, "kl_coef": 0.1},
    {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.3},
    {"surrogate": "gmpo", **WINDOW, "kl_coef": 0.1},
    {"surrogate": "reinforce", "ratio": "token", "aggregation": "seq-mean-token-sum"},
    {"aggregation": "token-mean"},
    {"aggregation": "seq-mean-token-sum"},
    {"aggregation": "seq-mean-token-sum-norm", "length_norm": 11},
    *({"kl_coef": 0.1, "kl_estimator": kind} for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+", "unbiased")),
    {"kl_coef": 0.1, "kl_aggregation": "token-mean"},
    {"entropy_coef": 0.02},
    {**WINDOW, "kl_coef": 0.1, "kl_ratio_factor": True, "entropy_coef": -0.02, "aggregation": "token-mean"},
]
HEADS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"logit_scale": 0.6, "logit_softcap": 5.0},
    {"temperature": 0.7},
    {"temperature": "per-token"},
    {"padded_vocab": 11},
    {"hidden_size": 24, "vocab": 331},
    {"bias": True, "logit_scale": 0.6, "logit_softcap": 5.0, "temperature": "per-token", "padded_vocab": 11},
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"packed": True},
    {"holes": False},
    {"per_token_advantages": True},
    {"token_weights": True},
    {"packed": True, "per_token_advantages": True, "token_weights": True},
    {"on_policy": True},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]


def samples() -> Iterator[tuple[str, Sample]]:
    """Yield names and samples: each objective four times, with varying heads, layouts and dtypes."""
    for i in range(4 * len(OBJECTIVES)):
        objective, head = OBJECTIVES[i % len(OBJECTIVES)], HEADS[(i * 3 + i // 28) % len(HEADS)]
        layout, dtype = LAYOUTS[(i * 2 + i // 28) % len(LAYOUTS)], DTYPES[(i + i // 28) % len(DTYPES)]
        sample = make_sample(i, dtype=dtype, objective=Objective(**objective), **{**head, **layout})
        yield f"{i} {objective} {head} {layout} {dtype}", sample


def digest(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return a hash of the names, dtypes, shapes and bits of tensors."""
    state = hashlib.sha256()
    for name, x in tensors:
        state.update(name.encode())
        if x is not None:
            x = x.detach().contiguous()
            state.update(f"{x.dtype} {list(x.shape)}".encode())
            state.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def fused(sample: Sample, backend: str, **changes: Any) -> dict[str, str]:
    """Hash the results of `gspo_fused_loss`."""
    return of_loss(*run_fused(sample.with_options(**changes), backend))


def of_loss(out: Any, grads: dict[str, Tensor]) -> dict[str, str]:
    return {
        "loss": digest([("loss", out.loss)]),
        "log_probs": digest([("log_probs", out.log_probs), ("entropy", out.entropy), ("log_ratio", out.log_ratio)]),
        "metrics": digest(sorted(out.metrics.items())),
        "gradients": digest(sorted(grads.items())),
    }


def seams(sample: Sample, backend: str) -> dict[str, str]:
    """Hash the results of `policy_loss` on the log-probs and entropies of `linear_log_probs`."""
    leaves = {name: x.detach().requires_grad_() for name, x in sample.leaves.items()}
    head = ("logit_scale", "logit_softcap", "temperature", "vocab_size", "mask")
    out = linear_log_probs(
        leaves["hidden"],
        leaves["weight"],
        sample.target_ids,
        bias=leaves.get("bias"),
        entropy=True,
        backend=backend,
        **{k: v for k, v in sample.options.items() if k in head},
    )
    policy = {k: v for k, v in sample.options.items() if k not in head[:4]}
    loss = policy_loss(
        out.log_probs, sample.advantages, entropy=out.entropy, objective=sample.objective, backend=backend, **policy
    )
    return of_loss(loss, gradients(loss.loss, leaves))


def adapter(seed: int, dtype: torch.dtype, backend: str) -> dict[str, str]:
    """Hash the results of `gspo_fused_loss` for a head with a LoRA adapter of PEFT."""
    import peft

    sample = make_sample(seed, dtype=dtype)
    torch.manual_seed(seed)
    vocab, width = sample.leaves["weight"].shape
    model = nn.ModuleDict({"lm_head": nn.Linear(width, vocab, bias=False, dtype=dtype)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False), model)
    leaves = {"hidden": sample.leaves["hidden"].detach().requires_grad_()}
    leaves |= {name: x for name, x in model.named_parameters() if x.requires_grad}
    out = gspo_fused_loss(
        leaves["hidden"], model["lm_head"], sample.target_ids, sample.advantages, backend=backend, **sample.options
    )
    return of_loss(out, gradients(out.loss, leaves))


def budgets(seed: int, dtype: torch.dtype, backend: str) -> dict[str, str]:
    """Hash the results with a gradient budget, for a peaked policy and a vocabulary of many tiles."""
    rng = torch.Generator().manual_seed(seed)
    n, width, vocab = 300, 64, 1500
    weight = torch.randn(vocab, width, generator=rng)
    ids = torch.randint(0, 300, (n,), generator=rng)
    hidden = weight[ids] * 1.2 + 0.3 * torch.randn(n, width, generator=rng)
    leaves = {"hidden": hidden.to(dtype).requires_grad_(), "weight": weight.to(dtype).requires_grad_()}
    offsets = torch.tensor([0, 120, 200, 300], dtype=torch.int32)
    out = gspo_fused_loss(
        leaves["hidden"],
        leaves["weight"],
        ids,
        torch.tensor([1.0, -0.5, 0.7]),
        cu_seqlens=offsets,
        gradient_budget=0.02,
        backend=backend,
    )
    print(backend, dtype, {k: round(v.item(), 4) for k, v in out.metrics.items() if "live" in k}, file=sys.stderr)
    return of_loss(out, gradients(out.loss, leaves))


def hashes() -> dict[str, dict[str, str]]:
    torch.set_num_threads(1)
    correction = Objective(rollout_correction=RolloutCorrection("sequence", "mask", 0.0, 3.0))
    result = {}
    for backend in ("torch", "triton"):
        for i, (name, sample) in enumerate(samples()):
            result[f"{backend} fused {name}"] = fused(sample, backend, entropy=i % 3 == 0)
            if i % 4 == 0:
                result[f"{backend} seams {name}"] = seams(sample, backend)
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            result[f"{backend} adapter {dtype}"] = adapter(seed, dtype, backend)
            result[f"{backend} budget {dtype}"] = budgets(seed, dtype, backend)
        sample = make_sample(7, objective=correction)
        rollout = sample.options["old_log_probs"] + 0.1
        result[f"{backend} correction"] = fused(sample, backend, rollout_log_probs=rollout)
    return result


if __name__ == "__main__":
    print(json.dumps(hashes(), indent=1))
