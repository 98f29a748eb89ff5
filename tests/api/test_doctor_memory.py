"""`gspo doctor --memory`: its passes are those of the metrics, its bound holds, and bad options are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from gspo_kernels import gspo_fused_loss
from gspo_kernels.tools import doctor_memory
from gspo_kernels.tools.cli import app

MIB = 2**20
N, H, V = 1024, 64, 8192
BATCH = f"{N},{H},{V}"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def sizes(*arguments: str) -> list[dict[str, Any]]:
    code, out = run("--json", *arguments)
    report = json.loads(out)
    assert code == 0 and report["ok"] is True
    return report["sizes"]


def fused(advantages: torch.Tensor, dtype: torch.dtype, mib: int) -> Any:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, H, generator=rng).to(dtype).requires_grad_() for shape in ((8, N // 8), (V,)))
    ids = torch.randint(V, (8, N // 8), generator=rng)
    return gspo_fused_loss(hidden, weight, ids, advantages, cache_mib=mib, backend="torch")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_passes_and_peak_are_those_of_a_step(dtype: str) -> None:
    of = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    rows = sizes("--memory", BATCH, "--dtype", dtype)
    assert [row["kept_rows"] for row in rows] == [0, 0.25, 0.5, 0.75, 1]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # LiveBytes counts what its own thread allocates
    try:
        for row in rows:
            with LiveBytes() as live:
                out = fused(torch.ones(8), of, row["cache_mib"])
                before = (N + V) * H * of.itemsize + 8 * N  # the inputs
                out.loss.backward()
            assert out.metrics["passes"].item() == pytest.approx(row["passes_dense"])
            assert live.peak - before <= row["peak_mib"] * MIB
    finally:
        torch.set_num_threads(threads)


def test_passes_of_the_rl_like_step_are_those_of_a_step() -> None:
    """Two sequences have advantage 0, and the one in the middle of the others is clipped."""
    for row in sizes("--memory", BATCH, "--dtype", "fp32"):
        out = rl_like(row["cache_mib"])
        assert out.metrics["zero_coefficient_share"].item() == 3 / 8
        # The cache holds whole sequences here, so it may hold the clipped sequence or not.
        assert out.metrics["passes"].item() == pytest.approx(row["passes_rl_like"], abs=1 / 8)


def rl_like(mib: int) -> Any:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, H, generator=rng).requires_grad_() for shape in ((8, N // 8), (V,)))
    ids = torch.randint(V, (8, N // 8), generator=rng)
    advantages = torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])
    old = gspo_fused_loss(hidden, weight, ids, advantages, backend="torch").log_probs.clone()
    old[4] -= 0.01
    return gspo_fused_loss(hidden, weight, ids, advantages, old_log_probs=old, cache_mib=mib, backend="torch")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("n", [1, 100, 129, 5000])
def test_the_largest_size_is_the_least_that_keeps_all_rows(n: int, backend: str) -> None:
    with FakeTensorMode():
        head = doctor_memory.Batch(n, 64, 151_936).head(torch.bfloat16)
        found = doctor_memory.sizes(head, backend)
        rows = doctor_memory.dispatch.implementation(backend).cache_rows
        assert rows(head, found[-1].cache_mib * MIB) >= n > rows(head, (found[-1].cache_mib - 1) * MIB)
    assert found[0].passes_dense == 4 and found[-1].passes_dense == 3
    assert found[0].passes_rl_like == 2.875 and found[-1].passes_rl_like == 2.25


def test_the_block_shapes_of_an_architecture_are_used() -> None:
    code, out = run("--memory", "16384,4096,151936", "--architecture", "sm_90")
    assert code == 0 and "bfloat16, triton backend, sm_90: cache_mib=4752 keeps all rows." in out
    assert "Without a cache the loss needs at most 1,736 MiB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1,2"], "--memory: expected N,H,V such as 8192,4096,151936"),
        (["--memory", "0,64,100"], "N of 1 to 2,147,483,648, H of 1 to 65,536, V of 2 to 4,194,304, got '0,64,100'"),
        (["--memory", "8,8,1"], "got '8,8,1'"),
        (["--memory", "1024,896,99999999999"], "got '1024,896,99999999999'"),
        (["--memory", "a,b,c"], "got 'a,b,c'"),
        (["--memory", BATCH, "--dtype", "int8"], "--dtype: expected one of fp32, bf16, fp16, float32"),
        (["--memory", BATCH, "--architecture", "sm_1"], "--architecture: 'sm_1': choose from sm_80"),
        (["--memory", BATCH, "--architecture", "sm_80", "--architecture", "sm_90"], "expected one architecture"),
        (["--memory", BATCH, "--compile"], "--memory: cannot be combined with --compile or --interpret"),
        (["--dtype", "bf16"], "--dtype: requires --memory"),
        (["--shape", "64,100", "--memory", BATCH], "--shape: requires --compile"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str) -> None:
    code, out = run(*arguments)
    assert code == 2 and message in out, out
