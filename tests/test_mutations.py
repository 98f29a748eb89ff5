"""The fast tests kill seeded faults: each fault is one edit of a copy of the library, and the copy must fail.

A fault that survives means that a promise is made but not tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The order decides only how soon a fault is found.
SUITES = ["parity", "edges", "heads", "bad_inputs", "properties", "decisions", "house", "autograd"]

FAULTS: dict[str, tuple[str, str, str]] = {  # what is wrong: (module, text, the text with the fault)
    "gradient x 1.01": (
        "ops",
        "select_times(coefficient, d_loss.to(coefficient.dtype))",
        "select_times(coefficient, 1.01 * d_loss.to(coefficient.dtype))",
    ),
    "upstream gradient ignored": (
        "ops",
        "select_times(coefficient, d_loss.to(coefficient.dtype))",
        "coefficient",
    ),
    "no 1/L in the ratio": (
        "objective",
        "segment_sum(token_log_ratio, offsets) / lengths.clamp(min=1)",
        "segment_sum(token_log_ratio, offsets)",
    ),
    "no 1/L in the gradient": (
        "objective",
        "segment_sum(through_ratio, offsets) / lengths.clamp(min=1)",
        "segment_sum(through_ratio, offsets)",
    ),
    "no 1/L in the weight": (
        "objective",
        "share, default = ones / lengths.clamp(min=1), (lengths > 0).sum()",
        "share, default = ones, (lengths > 0).sum()",
    ),
    "stale clip sign": (
        "objective",
        "low = (advantages < 0)",
        "low = (advantages > 0)",
    ),
    "upper bound from clip_low": (
        "objective",
        "math.log1p(objective.clip_high)",
        "math.log1p(objective.clip_low)",
    ),
    "dual clip ignored": (
        "objective",
        "if math.isfinite(objective.ceiling):",
        "if False:",
    ),
    "empty sequences counted": (
        "objective",
        "share, default = ones / lengths.clamp(min=1), (lengths > 0).sum()",
        "share, default = ones / lengths.clamp(min=1), (lengths >= 0).sum()",
    ),
    "token weights not in the gradient": (
        "objective",
        "select_times(policy.token_weights, value), select_times(policy.token_weights, slope)",
        "select_times(policy.token_weights, value), slope",
    ),
    "token weights on the KL too": (
        "objective",
        "kl_share = objective.kl_coef *",
        "kl_share = (1 if policy.token_weights is None else policy.token_weights) * objective.kl_coef *",
    ),
    "k3 slope of the wrong sign": (
        "objective",
        "return decay + d, -decay",
        "return decay + d, decay",
    ),
    "ratio factor without its gradient": (
        "objective",
        "through_ratio = through_ratio + select_times(kl, kl_share)",
        "pass",
    ),
    "masked old log-probs multiplied": (
        "objective",
        "torch.where(mask, log_probs - old, 0)",
        "mask * (log_probs - old)",
    ),
    "mask off by one": (
        "portable",
        "work = _Tiles(head, head.mask)",
        "work = _Tiles(head, head.mask.roll(1))",
    ),
    "temperature missing in the backward": (
        "portable",
        "slope = slope.div_(t) if isinstance(slope, Tensor) else slope / t",
        "pass",
    ),
    "soft-cap missing in the backward": (
        "portable",
        "if head.logit_softcap is not None:\n            t = 1",
        "if False:\n            t = 1",
    ),
    "last vocabulary slab dropped": (
        "portable",
        "for low in range(0, vocab, width)]",
        "for low in range(0, vocab, width)][: max(1, (vocab - 1) // width)]",
    ),
    "padded vocabulary counted": (
        "portable",
        "self.head.vocab_size, self.tile_columns",
        "self.head.weight.shape[0], self.tile_columns",
    ),
    "logits rounded to bf16": (
        "portable",
        "        head = self.head\n        z = _product(self.hidden_rows(rows), weight.t())",
        "        head = self.head\n        z = _product(self.hidden_rows(rows), weight.t()).bfloat16().to(self.dtype)",
    ),
    "fp64 products in fp32": (
        "layout",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
    ),
    "1 - p by subtraction": (
        "portable",
        "self.d_log_probs * -torch.expm1(self.log_probs)",
        "self.d_log_probs * (1 - self.log_probs.exp())",
    ),
    "entropy gradient dropped": (
        "ops",
        "d_entropy = _times(entropy_coefficient, d_loss) if entropy_coefficient.numel() else None",
        "d_entropy = None",
    ),
    "bias gradient dropped": (
        "portable",
        "d_bias[low:high] += d_z.sum(0)",
        "pass",
    ),
    "last rows of the batch dropped": (
        "portable",
        "for low in range(0, self.padded, self.tile_rows))",
        "for low in range(0, max(self.padded - self.tile_rows, min(self.padded, 1)), self.tile_rows))",
    ),
    "fp16 gradients left to underflow": (
        "portable",
        "_power_of_two(self.d_log_probs, self.d_entropy) if is_fp16 else None",
        "None",
    ),
    "products as the process likes them": (
        "precision",
        'backend.matmul.fp32_precision = "ieee"',
        "pass",
    ),
    "one thread restores what another needs": (
        "precision",
        "if not _inside[kind]:",
        "if True:",
    ),
    "sequence sums in fp32": (
        "layout",
        'torch.segment_reduce(x.double(), "sum"',
        'torch.segment_reduce(x, "sum"',
    ),
    "weight 0 times an exploded ratio": (
        "objective",
        "torch.where(factor == 0, 0, factor * x)",
        "factor * x",
    ),
    "NaN log-probs hidden on-policy": (
        "objective",
        "torch.where(mask, log_probs - old, 0)",
        "torch.zeros_like(lp) if policy.old_log_probs is None else torch.where(mask, log_probs - old, 0)",
    ),
    "LoRA ignored": (
        "head",
        "return Head(module.weight, bias, *_low_rank_term(call, lora, hidden, mask))",
        "return Head(module.weight, bias)",
    ),
    "hooks of an adapter ignored": (
        "head",
        "parts += [lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]]",
        "pass",
    ),
    "products as autocast likes them": (
        "precision",
        "with torch.autocast(device.type, enabled=False):\n            yield",
        "yield",
    ),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        yield workers


@pytest.fixture(scope="module")
def runs(
    pool: ThreadPoolExecutor, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[subprocess.CompletedProcess[str]]]:
    """Every fault that is asked for in this session, started at once, as many at a time as there are cores."""
    chosen = [item.callspec.params["fault"] for item in request.session.items if hasattr(item, "callspec")
              and "fault" in item.callspec.params]  # fmt: skip
    return {fault: pool.submit(run_with_fault, fault, tmp_path_factory.mktemp("fault")) for fault in chosen}


def run_with_fault(fault: str, folder: Path) -> subprocess.CompletedProcess[str]:
    for name in ("gspo_kernels", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    module, old, new = FAULTS[fault]
    source = folder / "gspo_kernels" / f"{module}.py"
    text = source.read_text()
    assert old in text, f"the fault {fault!r} no longer matches {module}.py: rewrite it"
    source.write_text(text.replace(old, new))
    suites = [f"tests/test_{name}.py" for name in SUITES]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *suites]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_killed(fault: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    run = runs[fault].result()
    assert run.returncode == 1, f"{fault}: survived or did not run\n{run.stdout[-2000:]}{run.stderr[-500:]}"
