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
from gspo_kernels.backends.torch import tiles
from gspo_kernels.backends.triton import tuning
from gspo_kernels.benchmarks.measure import RESULTS
from gspo_kernels.benchmarks.workloads import counts
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
            assert out.metrics["passes"].item() == pytest.approx(row["passes_dense"])
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
    assert found[0].passes_dense == 4 and found[-1].passes_dense == 3
    sequences, zero, clipped = counts(8192, "rl-like")
    assert found[0].passes_rl_like == 1 + 3 * (1 - (zero + clipped) / sequences) and found[-1].passes_rl_like == 2.25


LLAMA = ("--memory", "32768,4096,128256", "--architecture", "sm_90")


def test_the_numbers_of_a_rank_are_printed() -> None:
    """16,384 tokens, 63 tiles of 256 columns and the target's logit; 24 and 56 bytes per sequence."""
    code, out = run(*LLAMA, "--tp", "8", "--cp", "2")
    assert code == 0 and "a rank of TP 8 x CP 2: 16,384 tokens, H = 4,096, 16,128 rows of V = 128,256" in out
    table, d_hidden = 4 * 16_384 * (2 * 63 + 1), 4 * 16_384 * 4096 // 2
    assert f"tp_group, 8 ranks: all-gather of the results of tiles, {table:,} bytes" in out
    assert f"tp_group, 8 ranks: all-reduce of d_hidden, {d_hidden:,} bytes" in out
    assert "cp_group, 2 ranks: all-gather of the sums before the clip gate, 24 bytes per sequence" in out
    assert "cp_group, 2 ranks: all-gather of the sums after it, 56 bytes per sequence" in out
    dense_step, received = 4 * 2 * 16_384 * 4096 * 16_128, 7 * table + 2 * 7 / 8 * d_hidden
    assert f"{dense_step / received:,.0f} operations per byte" in out
    assert "Not all shards begin" not in out and "pad V to a multiple of 256 times --tp" in run(*LLAMA, "--tp", "2")[1]
    assert "_group" not in run(*LLAMA)[1]


def test_the_cache_of_the_variable_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_CACHE_MIB", "2001")
    assert "with cache_mib=2001 (GSPO_CACHE_MIB). It keeps 25% of the rows" in run(*LLAMA)[1]


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
        (["--memory", BATCH, "--zero-advantage", "1"], "--zero-advantage: expected a share from 0 to below 1, got 1"),
        (["--memory", BATCH, "--cp", "3"], "--cp: expected a divisor of N = 1,024 tokens, got 3"),
        (["--memory", BATCH, "--dtype", "int8"], "--dtype: expected one of fp32, bf16, fp16, float32"),
        (["--memory", BATCH, "--tp", "0"], "--tp: expected 1 to 4,096 ranks, got 0"),
        (["--model", "a/b", "--tokens", "0"], "--tokens: expected 1 to 2,147,483,648 tokens, got 0"),
        (["--model", "a/b"], "--model: requires --tokens"),
        (["--model", "a/b", "--tokens", "9"], "--model: expected a local folder with config.json (hub ids are not"),
        (["--model", "a/b", "--tokens", "9", "--memory", BATCH], "--model: cannot be combined with --memory"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str) -> None:
    code, out = run(*arguments)
    assert code == 2 and message in out, out


@pytest.mark.parametrize(("batch", "share", "cp", "run_of"), [(N, 0.75, 2, (128, 512)), (8, 0.99, 1, (1, 8))])
def test_passes_are_over_all_tokens_if_only_some_run(
    batch: int, share: float, cp: int, run_of: tuple[int, int]
) -> None:
    """Each token that runs costs 4 passes without a cache, and 3 with a full one."""
    arguments = ("--memory", f"{batch},{H},{V}", "--zero-advantage", str(share), "--cp", str(cp))
    report = json.loads(run("--json", *arguments)[1])
    assert (report["tokens_run"], report["tokens"]) == run_of
    cost = [x["passes_dense"] * report["operations_per_pass"] for x in report["sizes"]]
    assert (cost[0], cost[-1]) == (4 * 2 * run_of[0] * H * V, 3 * 2 * run_of[0] * H * V)
    assert report["operations_per_pass"] == 2 * run_of[1] * H * V
    assert {x["passes_rl_like"] for x in report["sizes"]} == {None}
    assert "{:,} of N = {:,} tokens".format(*run_of) in run(*arguments)[1]


def test_the_peaks_of_others_are_those_that_were_measured() -> None:
    results = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())["results"]
    names = {
        "naive GSPO": "full logits",
        "naive GSPO, compiled": "full logits, torch.compile",
        "TRL fused head": "TRL 1.16's fused head",
        "Liger fused CE": "Liger's fused cross-entropy",
        "cut-cross-entropy": "cut-cross-entropy",
    }
    shapes = {"rl-4k": (4096, 4096, 151_936), "rl-32k": (32_768, 4096, 151_936)}
    shapes |= {"D": (8192, 4096, 151_936), "A": (4096, 4096, 131_072), "C": (4096, 896, 151_936)}
    compared = set()
    for group, shape in shapes.items():
        computed = memory.peaks_of_others(*shape)
        for record in results[group]["results"]:
            if record.get("name") in names and "peak_bytes" in record:
                name = names[record["name"]]
                assert computed[name] == pytest.approx(record["peak_bytes"], rel=0.01), (group, name)
                compared.add(name)
    assert compared == set(names.values())


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
    assert sizes("--model", str(tmp_path), "--tokens", str(N)) == sizes("--memory", BATCH)


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
