"""`gspo doctor --memory`: its passes are those of the metrics, its bound holds, and bad options are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import compile_cases
from helpers.counters import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from gspo_kernels import gspo_fused_loss, memory
from gspo_kernels.backends.rows import NeedsGradient
from gspo_kernels.backends.torch import tiles
from gspo_kernels.backends.triton import tuning
from gspo_kernels.ranks import collectives
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


def fused(advantages: torch.Tensor, dtype: torch.dtype, mib: int, old: torch.Tensor | None = None) -> Any:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, H, generator=rng).to(dtype).requires_grad_() for shape in ((8, N // 8), (V,)))
    ids = torch.randint(V, (8, N // 8), generator=rng)
    return gspo_fused_loss(hidden, weight, ids, advantages, old_log_probs=old, cache_mib=mib, backend="torch")


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
            assert out.metrics["passes"].item() == pytest.approx(row["passes"])
            assert live.peak - before <= row["peak_mib"] * MIB
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("n", [1, 100, 129, 5000])
def test_the_largest_size_is_the_least_that_keeps_all_rows(n: int, backend: str) -> None:
    with FakeTensorMode():
        head = memory.Batch(n, 64, 151_936).head(torch.bfloat16)
        found = memory.sizes(head, backend)
        rows = memory.dispatch.implementation(backend).cache_rows
        assert rows(head, found[-1].cache_mib * MIB) >= n > rows(head, (found[-1].cache_mib - 1) * MIB)
        rows_of_tiles = n if backend == "triton" else -(-n // tiles.tiling(head).rows) * tiles.tiling(head).rows
        columns = tuning.tile_config(head, "forward").block_v if backend == "triton" else tiles.tiling(head).columns
        for entropy, numbers in ((False, 1), (True, 2)):
            table = memory.bound(head._replace(entropy=entropy), backend, 0).tile_table
            assert table == 4 * numbers * rows_of_tiles * -(-151_936 // columns)
    assert (found[0].passes, found[-1].passes) == (4, 3)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_head_saves_a_pass_with_every_cache(frozen: bool) -> None:
    batch = memory.Batch(8192, 4096, 151_936)
    plan = memory.plan(batch, torch.bfloat16, "sm_90", frozen=frozen)
    for size in (*plan.sizes, *plan.defaults.values()):
        assert size.passes == 1 + (1 if frozen else 2) + 1 - size.kept_rows
    needs = NeedsGradient(True, not frozen, False, False, False)
    with FakeTensorMode(), tuning.assume("sm_90"):
        largest = memory.largest_default_cache(batch.head(torch.bfloat16), needs, "triton")
    for gib, size in zip(memory.MEMORY_GIB, plan.defaults.values(), strict=True):
        assert size.cache_mib == min(gib * 1024 // 64, largest // MIB)


def test_a_small_batch_has_no_cache_by_default() -> None:
    """Even a cache of one MiB would take more memory than the loss saves."""
    plan = memory.plan(memory.Batch(64, 64, 1000), torch.bfloat16, "sm_90")
    assert [size.cache_mib for size in plan.defaults.values()] == [0] * len(memory.MEMORY_GIB)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_report_of_a_head(frozen: bool) -> None:
    arguments = ("--memory", BATCH, "--architecture", "sm_90", *(["--lora"] if frozen else []))
    report = json.loads(run("--json", *arguments)[1])
    assert report["sizes"][-1]["passes"] == (2 if frozen else 3)
    assert report["stock_mib"] == memory.trl_head_bytes(N, H, V, 2, frozen) / MIB
    assert report["inputs_mib"] == {"hidden": 2 * N * H / MIB, "weight": 2 * V * H / MIB}
    with FakeTensorMode(), tuning.assume("sm_90"):
        bound = memory.bound(memory.Batch(N, H, V).head(torch.bfloat16), "triton", 0, frozen=frozen)
    assert report["bound_mib"]["gradients"] == bound.gradients / MIB
    out = run(*arguments)[1]
    passes = 3 if frozen else 4
    assert f"a GPU: {report['stock_mib']:,.0f} MiB, {passes}.00 passes" in out
    assert f"without a cache: at most {bound.peak / MIB:,.0f} MiB, {passes}.00 passes" in out


LLAMA = ("--memory", "32768,4096,128256", "--architecture", "sm_90")


def test_the_cache_of_the_variable_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for mib, share in ((2001, 25), (0, 0)):
        monkeypatch.setenv("GSPO_CACHE_MIB", str(mib))
        assert f"with cache_mib={mib} (GSPO_CACHE_MIB). It keeps {share}% of the rows" in run(*LLAMA)[1]
    monkeypatch.setenv("GSPO_CACHE_MIB", "2000")  # more than all rows of the batch need
    plan = memory.plan(memory.Batch(N, H, V), torch.bfloat16, "sm_90")
    assert {size.peak_mib for size in plan.defaults.values()} == {plan.sizes[-1].peak_mib}


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tp", [2, 16])
def test_the_bound_of_a_rank_holds(tp: int, entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "gather", lambda x, group: x.new_empty(tp, *x.shape))
    head = memory.Batch(32_768, 4096, 128_256, tp=tp).head(torch.bfloat16, "meta", entropy)
    with tuning.assume("sm_90"), LiveBytes() as live:
        compile_cases.forward_and_backward(head)
        bound = memory.bound(head, "triton", 0)
    assert bound.gradients < live.peak <= bound.total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "0,64,100"], "N of 1 to 2,147,483,648, H of 1 to 65,536, V of 2 to 4,194,304, got '0,64,100'"),
        (["--memory", BATCH, "--architecture", "sm_86"], "--architecture: expected one of sm_80"),
        (["--architecture", "sm_90"], "--architecture: requires --memory or --model"),
        (["--dtype", "fp32"], "--dtype: requires --memory or --model"),
        (["--lora"], "--lora: requires --memory or --model"),
        (["--memory", BATCH, "--dtype", "int8"], "--dtype: expected one of fp32, bf16, fp16, float32"),
        (["--model", "a/b", "--tokens", "0"], "--tokens: expected 1 to 2,147,483,648 tokens, got 0"),
        (["--model", "a/b"], "--model: requires --tokens"),
        (["--model", "a/b", "--tokens", "9"], "--model: expected a local folder with config.json (hub ids are not"),
        (["--model", "a/b", "--tokens", "9", "--memory", BATCH], "--model: cannot be combined with --memory"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str) -> None:
    code, out = run(*arguments)
    assert code == 2 and message in out, out


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"hidden_size": H, "vocab_size": V}},
        transformers.GPT2Config(n_embd=H, vocab_size=V).to_dict(),
    ],
    ids=["text_config", "GPT-2"],
)
def test_the_sizes_of_a_models_head_come_from_its_folder(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sizes("--model", str(tmp_path), "--tokens", str(N)) == sizes("--memory", BATCH, "--dtype", "fp32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(d_model=H, vocab_size=V).to_dict(), "--model: expected a decoder-only model"),
        ({"vocab_size": V}, "--model: expected a config.json with vocab_size and hidden_size"),
    ],
    ids=["T5", "no width"],
)
def test_models_without_such_a_head_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out = run("--model", str(tmp_path), "--tokens", "9")
    assert code == 2 and message in out, out
