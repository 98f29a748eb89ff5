"""The shape of the library: who imports whom, what an import and the logits cost, which rows are computed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import make_sample, run_fused
from tolerance import METRIC_ABSOLUTE, METRIC_RELATIVE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_kernels import validation
from gspo_kernels.backends import torch as portable
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.torch import tiles as portable_tiles

PACKAGE = Path(validation.__file__).parent
ROOT = PACKAGE.parent


def test_source_files_tell_one_story_each() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "integrations").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    too_long = {str(f): n for f in files if (n := len(f.read_text().splitlines())) > 300}
    assert not too_long


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_works_without_triton_and_computes() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it now fails
import torch, gspo_kernels
out = gspo_kernels.linear_log_probs(torch.randn(1, 2, 4), torch.zeros(5, 4), torch.zeros(1, 2, dtype=torch.long))
print(out.log_probs.exp().round(decimals=4).tolist())
"""
    assert run_python(code).startswith("[[0.2")


def test_import_adds_little_to_torch() -> None:
    code = """
import time, torch
start = time.process_time()  # of this process: other ones may keep the cores busy
from gspo_kernels import gspo_fused_loss, linear_log_probs, policy_loss
print(time.process_time() - start)
"""
    # A busy neighbour slows a core's caches too: the best of ten is the import's own time.
    assert any(float(run_python(code)) < 0.05 for _ in range(10))


def test_help_needs_neither_torch_nor_half_a_second() -> None:
    code = """
import sys, time
start = time.process_time()
from gspo_kernels.tools.cli import app
try:
    app(["--help"])
except SystemExit:
    pass
print(time.process_time() - start, "torch" in sys.modules)
"""
    for _ in range(10):
        *text, last = run_python(code).splitlines()
        seconds, has_torch = last.split()
        assert "train" in " ".join(text) and has_torch == "False"
        if float(seconds) < 0.5:
            return
    raise AssertionError(f"gspo --help takes {seconds} s of processor time")


def test_importing_a_module_hides_no_public_function() -> None:
    code = """
import gspo_kernels.policy_loss, gspo_kernels.fused_loss
from gspo_kernels import *
print(*(type(f).__name__ for f in (gspo_kernels.policy_loss, policy_loss, linear_log_probs, gspo_fused_loss)))
"""
    assert run_python(code).split() == ["function"] * 4


def test_integrations_are_part_of_the_package() -> None:
    assert "integrations" in run_python("import gspo_kernels.integrations as i; print(i.__name__)")


@pytest.mark.slow
def test_a_wheel_holds_the_integrations_and_the_type_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gspo_kernels", "integrations", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    assert (site / "gspo_kernels" / "py.typed").exists()
    code = "import gspo_kernels.integrations.reference_trainer as r, gspo_kernels.benchmarks.bench; print(r.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert str(site) in run.stdout, run.stderr


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under this mode occupied at once.

    A storage is known by its identity: that of a meta tensor has no address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size and key not in given and key not in self.known:
                    self.known.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        if key in self.known:
            self.known.remove(key)
            self.now -= size


def head_rows(n: int, h: int, v: int, entropy: bool = False, **more: Any) -> HeadRows:
    rng = torch.Generator().manual_seed(0)
    given: dict[str, Any] = dict(
        hidden=torch.randn(n, h, generator=rng), weight=torch.randn(v, h, generator=rng), bias=None,
        adapter_hidden=None, adapter_weight=None, target_ids=torch.randint(0, v, (n,), generator=rng),
        mask=torch.ones(n, dtype=torch.bool), temperature=None, logit_scale=1.0, logit_softcap=None, vocab_size=v,
        entropy=entropy,
    )  # fmt: skip
    return HeadRows(**{**given, **more})


@pytest.mark.parametrize("mebibytes", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"logit_softcap": 5.0, "temperature": torch.ones(3000)}], ids=["plain", "tail"]
)
@pytest.mark.parametrize("entropy", [False, True])
def test_logits_stay_inside_the_workspace(
    mebibytes: int, options: dict[str, Any], entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_WORKSPACE_MIB", str(mebibytes))
    n, h, v = 3000, 8, 20_000
    head = head_rows(n, h, v, entropy, **options)
    slabs = -(-v // portable_tiles.tile_shape(torch.device("cpu"), torch.float32)[1])
    workspace = mebibytes * 2**20
    rows, columns = 4 * (n + 256), 4 * v
    with LiveBytes() as forward:
        result = portable.head_forward(head)
    # Beside the logits: three partial results per row and slab, the gathered rows, a dozen vectors over rows.
    assert forward.peak <= workspace + rows * (3 * 3 * slabs + 2 * h + 24)
    with LiveBytes() as backward:
        d_entropy = torch.ones(n) if entropy else None
        portable.head_backward(head, result, torch.ones(n), d_entropy, (True, True, False, False, False))
    # d_hidden (twice: gathered and scattered), d_weight and one slab of it.
    assert backward.peak <= workspace + rows * (5 * h + 24) + columns * 2 * h
    assert forward.peak < 4 * n * v / 8  # far from the full logits either way


class ProductFlops(TorchDispatchMode):
    """Counts 2 m n k of every matrix product, in place or not."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.total += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        assert name not in ("bmm", "baddbmm", "einsum"), "a product this counter does not know"
        return func(*args, **(kwargs or {}))


def product_flops(fn: Any) -> int:
    with ProductFlops() as counter:
        fn()
    return counter.total


def test_masked_rows_are_never_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_tiles, "tile_shape", lambda device, dtype: (4, 24))
    head = head_rows(40, 8, 48)
    for kept in (0, 4, 12, 40):
        mask = torch.zeros(40, dtype=torch.bool)
        mask[torch.randperm(40)[:kept]] = True
        flops = product_flops(lambda mask=mask: portable.head_forward(head._replace(mask=mask)))
        assert flops == 2 * kept * 8 * 48


def test_rows_without_gradient_cost_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_tiles, "tile_shape", lambda device, dtype: (4, 24))
    head = head_rows(40, 8, 48)
    result = portable.head_forward(head)
    for live in (0, 4, 12, 40):
        d = torch.zeros(40)
        d[torch.randperm(40)[:live]] = 1.0
        for needs, passes in (((True, True), 3), ((True, False), 2), ((False, True), 2)):
            flops = product_flops(
                lambda d=d, needs=needs: portable.head_backward(head, result, d, None, (*needs, False, False, False))
            )
            assert flops == passes * 2 * live * 8 * 48


def test_clipped_and_zero_advantage_sequences_are_rows_without_gradient() -> None:
    sample = make_sample(0, holes=False)
    out, grads = run_fused(sample)
    live = grads["hidden"].flatten(1).any(1)
    mask = sample.options["mask"]
    share = (mask & ~live[:, None]).sum() / mask.sum()
    assert 0.2 < share < 0.8  # the sample has both kinds
    assert not live[sample.advantages == 0].any()
    torch.testing.assert_close(out.metrics["zero_coefficient_share"], share)


def test_metrics_are_what_they_say() -> None:
    sample = make_sample(1)
    out, _ = run_fused(sample, entropy=True)
    mask, s = sample.options["mask"], out.log_ratio.exp().double()
    lengths = mask.sum(1)
    low = (sample.advantages < 0) & (s < 1 - sample.objective.clip_low)
    high = (sample.advantages > 0) & (s > 1 + sample.objective.clip_high)
    lp, old, ref = out.log_probs.double(), sample.options["old_log_probs"], sample.options["ref_log_probs"]
    d = (lp - ref)[mask]
    assert low.any() and high.any() and out.entropy is not None
    expected = {
        "clip_fraction": (low | high).double().mean(),
        "clip_fraction_low": low.double().mean(),
        "clip_fraction_high": high.double().mean(),
        "token_clip_fraction": ((low | high) * lengths).sum() / lengths.sum(),
        "token_clip_fraction_low": (low * lengths).sum() / lengths.sum(),
        "token_clip_fraction_high": (high * lengths).sum() / lengths.sum(),
        "ratio_mean": s.mean(),
        "ratio_min": s.min(),
        "ratio_max": s.max(),
        "kl_to_old": (old - lp)[mask].mean(),
        "kl": (torch.exp(-d) + d - 1).mean(),
        "entropy": out.entropy[mask].mean(),
        "zero_coefficient_share": ((low | high | (sample.advantages == 0)) * lengths).sum() / lengths.sum(),
        "invalid": torch.tensor(0),
        "dropped_gradient_mass": torch.tensor(0.0),
    }
    live = 1 - expected["zero_coefficient_share"]
    expected |= {"live_row_share": live, "live_tile_share": live, "passes": 1 + 3 * live}
    assert set(expected) == set(out.metrics)
    for name, value in expected.items():
        torch.testing.assert_close(
            out.metrics[name].double(), value.double(), rtol=METRIC_RELATIVE, atol=METRIC_ABSOLUTE, msg=name
        )
        assert out.metrics[name].ndim == 0 and not out.metrics[name].requires_grad
