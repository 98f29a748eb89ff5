"""Print the reports of `gspo doctor`. Modules that import torch are imported inside the functions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

SIZES_OF_HEAD = {"H": (1, 2**16), "V": (2, 2**22)}  # (smallest, largest)
MOST_TOKENS = 2**31


def diagnose(console: Console) -> tuple[str, bool, dict[str, Any]]:
    """Run `gspo doctor` and print its report. Return the verdict, whether it is good, and the details for JSON."""
    from . import diagnosis

    def print_line(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    with console.status("checking") as status:
        result = diagnosis.diagnose(status.update)
    print_line(", ".join(f"{name} {release}" for name, release in result.versions.items() if release))
    if result.packages:
        versions = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
        for column in ("", "installed", "tested", "supported"):
            versions.add_column(column, no_wrap=True)
        for package in result.packages:
            versions.add_row(package.name, package.installed or "-", package.tested, package.supported)
        console.print(versions)
    for device in result.devices:
        print_line(f"{device.name}: {device.text}")
    for remark in result.remarks:
        print_line(remark)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption="Error divided by allowed error; above 1 is wrong.")
    for column in ("", "verdict", "log\nprobs", "loss", "d\nhidden", "d\nweight", "wrong\nclips"):
        table.add_column(column, no_wrap=True)
    for check in result.checks:
        numbers = [*(check.ratios or dict.fromkeys(range(4))).values(), check.wrong_decisions]
        table.add_row(check.place, check.verdict, *("-" if x is None else f"{x:.2g}" for x in numbers))
    console.print(table)
    for check in result.checks:
        if check.message:
            print_line(f"{check.place}: {check.message}")
    print_line(result.versions_verdict)
    return result.verdict, not result.faults, asdict(result) | {"versions_verdict": result.versions_verdict}


def memory_of(
    batch: tuple[int, ...], dtype: str | None, architecture: str | None, frozen: bool, console: Console
) -> tuple[str, bool, dict[str, Any]]:
    """Print the memory of the loss for a batch (N, H, V), and what `cache_mib` saves. Return the same as `diagnose`."""
    from .checks import DTYPES

    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    name = None if dtype is None else short.get(dtype, dtype)
    if name is not None and name not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join([*short, *DTYPES])}, got {dtype!r}", param_hint="--dtype")
    if architecture is not None:
        _check_architecture(architecture)
    from ... import memory

    planned = memory.plan(memory.Batch(*batch), None if name is None else DTYPES[name], architecture, frozen)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("cache_mib", "rows\nkept", "passes", "peak, MiB,\nat most"):
        table.add_column(column, justify="right", no_wrap=True)
    for x in planned.sizes:
        table.add_row(f"{x.cache_mib:,}", f"{x.kept_rows:.0%}", f"{x.passes:.2f}", f"{x.peak_mib:,.0f}")
    console.print(table)
    for line in _lines_of(planned):
        console.print(line, markup=False, soft_wrap=True)
    verdict = f"{planned.where}: cache_mib={planned.sizes[-1].cache_mib} keeps all rows."
    details = {
        "sizes": [asdict(x) for x in planned.sizes],
        "defaults": {where: asdict(x) for where, x in planned.defaults.items()},
        "stock_mib": planned.stock / 2**20,
        "bound_mib": _mib(asdict(planned.bound)),
        "inputs_mib": _mib(planned.inputs),
    }
    return verdict, True, details


def sizes_of_batch(batch: str) -> tuple[int, ...]:
    """Parse "N,H,V"."""
    limits = {"N": (1, MOST_TOKENS), **SIZES_OF_HEAD}
    return _sizes(batch, "--memory", "N,H,V such as 8192,4096,151936", limits)


def sizes_of_model(folder: str, tokens: int) -> tuple[int, ...]:
    """Return (N, H, V) for a micro-batch of `tokens` tokens of the model in a folder, from its config.json."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise typer.BadParameter(f"expected 1 to {MOST_TOKENS:,} tokens, got {tokens}", param_hint="--tokens")
    file = Path(folder) / "config.json"
    if not file.is_file():
        expected = "expected a local folder with config.json (hub ids are not downloaded)"
        raise typer.BadParameter(f"{expected}, got {folder}", param_hint="--model")
    try:
        config = json.loads(file.read_text())
        encodes = config.get("is_encoder_decoder", False)
        config = config.get("text_config", config)
        width = next(config[name] for name in ("hidden_size", "n_embd", "d_model") if name in config)
        sizes = f"{width},{config['vocab_size']}"
    except (OSError, ValueError, KeyError, AttributeError, StopIteration) as error:
        expected = "expected a config.json with vocab_size and hidden_size, n_embd or d_model"
        raise typer.BadParameter(f"{expected}, got {file} ({error!r})", param_hint="--model") from error
    if encodes:
        expected = "expected a decoder-only model (for others, pass the decoder's tokens and head to --memory)"
        raise typer.BadParameter(f"{expected}, got the encoder-decoder {folder}", param_hint="--model")
    return tokens, *_sizes(sizes, "--model", f"the hidden and vocabulary sizes in {file}", SIZES_OF_HEAD)


def _mib(sizes: dict[str, int]) -> dict[str, float]:
    """Convert bytes to MiB. Leave out the cache, which the printed bound excludes."""
    return {part: size / 2**20 for part, size in sizes.items() if part != "cache"}


def _lines_of(planned: Any) -> list[str]:
    """Format the lines that follow the table of a `memory.Plan`."""

    def named(sizes: dict[str, int]) -> str:
        return ", ".join(f"{part.replace('_', ' ')} {mib:,.0f}" for part, mib in _mib(sizes).items())

    passes = 3 if planned.frozen else 4
    lines = [
        "Memory on top of the inputs, and matrix passes over the batch if every token has a gradient:",
        f"TRL 1.16, its fused head on a GPU: {planned.stock / 2**20:,.0f} MiB, {passes:.2f} passes.",
    ]
    by_size: dict[Any, list[str]] = {}  # GPUs with the same default share a line
    for where, x in planned.defaults.items():
        by_size.setdefault(x, []).append(where)
    for x, places in by_size.items():
        lines.append(
            f"gspo_kernels by default: at most {x.peak_mib:,.0f} MiB, {x.passes:.2f} passes, with "
            f"cache_mib={x.cache_mib} ({' or '.join(places)}). It keeps {x.kept_rows:.0%} of the rows."
        )
    none = planned.sizes[0]
    lines += [
        f"gspo_kernels without a cache: at most {none.peak_mib:,.0f} MiB, {none.passes:.2f} passes "
        f"({named(asdict(planned.bound))}).",
        f"Inputs: {named(planned.inputs)} MiB.",
    ]
    if planned.device == "cpu":
        lines.append("These are the numbers of a CPU. For a GPU, add --architecture, such as sm_90 (H100 and H200).")
    return lines


def _check_architecture(name: str) -> None:
    try:
        from ...backends.triton.tuning import ARCHITECTURES
    except Exception as error:  # a broken Triton may raise any exception
        raise typer.BadParameter(f"Triton cannot be imported: {error}", param_hint="--architecture") from error
    if name not in ARCHITECTURES:
        raise typer.BadParameter(
            f"expected one of {', '.join(ARCHITECTURES)} (an H100 or H200 is sm_90, and sm_86 uses the block shapes of "
            f"sm_89), got {name!r}",
            param_hint="--architecture",
        )


def _sizes(text: str, option: str, example: str, limits: dict[str, tuple[int, int]]) -> tuple[int, ...]:
    """Parse comma-separated numbers, one for each name in `limits`, which maps it to (smallest, largest)."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != len(limits) or not all(a <= x <= b for x, (a, b) in zip(numbers, limits.values(), strict=True)):
        ranges = ", ".join(f"{name} of {least} to {most:,}" for name, (least, most) in limits.items())
        raise typer.BadParameter(f"expected {example}, with {ranges}, got {text!r}", param_hint=option)
    return numbers
