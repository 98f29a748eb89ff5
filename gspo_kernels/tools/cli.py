"""The `gspo` command. Whatever imports torch does so inside its command, so that `gspo --help` answers at once."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..extras import MissingExtraError

app = typer.Typer(
    help="GSPO: losses from hidden states, and a trainer to try them with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"gspo-kernels {version('gspo-kernels')}")
        raise typer.Exit


@app.callback()
def gspo(
    _: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """GSPO: losses from hidden states, and a trainer to try them with."""


def fail(error: Exception) -> NoReturn:
    """Print one line and exit with status 1, without a traceback."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse "0,1,2" as (0, 1, 2)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected numbers with commas between, such as 0,1,2, got {text!r}") from error


@app.command()
def train(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint: a folder, or a hub id org/name. Without it: the demo, a tiny random Qwen3."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help='Jsonl file, each line {"prompt": text, "answer": text or number}. Goes with --model.'),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder. (default: demo, or the model's)")] = None,
    output: Annotated[Path | None, typer.Option(help="Where run folders go. (default: runs)")] = None,
    seeds: Annotated[str | None, typer.Option(help="One training per seed. (default: 0,1,2; with --model 0)")] = None,
    steps: Annotated[int | None, typer.Option(help="Rollouts. (default: 200)")] = None,
    prompts_per_step: Annotated[
        int | None, typer.Option(help="Prompts per rollout. (default: 32; with --model 16)")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Answers per prompt, at least 2. (default: 8)")] = None,
    updates_per_rollout: Annotated[
        int | None, typer.Option(help="Mini-batch updates per rollout; with 1 nothing is ever clipped. (default: 4)")
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Answers per forward and backward; 0: a whole update at once. (default: 0)")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="AdamW's, constant. (default: 5e-4; with --model 1e-6)")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's. (default: 0)")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Gradients are clipped to it. (default: 1)")] = None,
    clip_low: Annotated[float | None, typer.Option(help="Ratios clip at 1 - this. (default: 3e-4)")] = None,
    clip_high: Annotated[float | None, typer.Option(help="Ratios clip at 1 + this. (default: 4e-4)")] = None,
    gradient_budget: Annotated[
        float | None,
        typer.Option(help="What the backward may drop, as a share of the gradient's mass. (default: 0, exact)"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling and of the loss; evaluation is greedy. (default: 1)")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens. (default: 7; with --model 512)")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations; also first and last. (default: 25)")
    ] = None,
    eval_prompts: Annotated[
        int | None, typer.Option(help="Held-out prompts; of --data at most a fifth. (default: 128)")
    ] = None,
    warn_after: Annotated[
        int | None, typer.Option(help="Steps in a row without differing rewards before a warning. (default: 10)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="(default: a GPU if there is one, else the CPU)")] = None,
    bf16: Annotated[bool | None, typer.Option(help="bf16 autocast; weights stay fp32. (default: no)")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; 0: torch's choice. (default: 1; with --model 0)")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Of the loss: triton, torch or auto. (default: auto)")] = None,
    save: Annotated[bool | None, typer.Option(help="Keep the trained model. (default: yes)")] = None,
    overwrite: Annotated[bool | None, typer.Option("--overwrite", help="Replace an earlier run of this name.")] = None,
) -> None:
    """Train with GSPO and watch it work.

    Without options this is the demo: a tiny random model learns to sort letters from rewards alone, once per seed.
    It replaces the demo's earlier run.

    With --model and --data it trains your checkpoint on your prompts; an answer earns 1 if it is, or ends in, the
    expected one. Metrics, curves and the model go to runs/<name>; Ctrl-C and SIGTERM save the model as it is.
    """
    options = {**locals(), "seeds": None if seeds is None else parse_seeds(seeds)}
    try:
        from gspo_kernels.integrations import reference_trainer as trainer
    except MissingExtraError as error:
        fail(error)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would write across ours
    try:
        report = trainer.train(trainer.train_config(**options))
    except (trainer.InputError, trainer.TrainingError) as error:
        fail(error)
    console = Console()
    console.print(report.table())
    for warning in report.warnings():
        console.print(warning, style="bold red", markup=False, highlight=False, soft_wrap=True)
    console.print(f"metrics: {report.folder / 'metrics.jsonl'}", soft_wrap=True)
    console.print(f"curves:  {report.curves}" if report.curves else report.note, markup=False, soft_wrap=True)


@app.command()
def doctor(
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Check the Triton kernels on the CPU too, interpreted.")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Instead compile every Triton kernel, for GPUs that need not be here.")
    ] = False,
    architecture: Annotated[
        list[str] | None, typer.Option(help="With --compile: only for this one, such as sm_90. May be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Report what is installed, which backend runs where and whether its results are right.

    On every device, forward and backward of the fused loss are compared with the oracle in float64. The exit status is
    1 if a result is wrong or a computation crashes. A missing Triton or GPU is reported, but is not a fault.
    """
    if compile_ and interpret:
        raise typer.BadParameter("kernels are compiled or interpreted, not both", param_hint="--interpret")
    if architecture and not compile_:
        raise typer.BadParameter("goes with --compile", param_hint="--architecture")
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # a log need not wrap
    verdict, ok, details = compile_kernels(architecture, console) if compile_ else diagnose(interpret, console)
    console.print(verdict, style="bold green" if ok else "bold red", markup=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "verdict": verdict, **details}, allow_nan=False))
    raise typer.Exit(0 if ok else 1)


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="qwen2.5-0.5b, qwen3-8b, gemma-2-2b, llama-3-8b or H,V. (default: qwen2.5-0.5b; on a GPU qwen3-8b)"
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the batch, such as 4096 or 4k. (default: 1k; on a GPU 16k)")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Of naive, compile, trl, liger, cce, verl, torch; commas between. (default: those installed)"
        ),
    ] = None,
    scenario: Annotated[str, typer.Option(help="dense, rl-like, on-policy, kl or long.")] = "rl-like",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. (default: bfloat16 on a GPU, else float32)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="(default: a GPU if there is one, else the CPU)")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each, in turns.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure time and memory of loss and gradients against other implementations, on this machine.

    All candidates compute the same loss and gradients of the same batch. First their gradients are compared with
    float64; candidates whose gradients are wrong are not timed. Timed runs alternate between candidates. Peak memory is
    measured in a separate process.
    """
    from gspo_kernels.benchmarks import table
    from gspo_kernels.benchmarks.suites import bench as benchmark

    try:
        chosen, spec = benchmark.asked(model, tokens, against, scenario, dtype, device)
    except ValueError as error:
        fail(error)
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # a log need not wrap
    to_stderr = redirect_stdout(sys.stderr) if as_json else nullcontext()  # a candidate may print when imported
    try:
        with to_stderr, table.progress(console, benchmark.steps(chosen, spec, rounds)) as tick:
            results = benchmark.run(spec, chosen, rounds, tick)
    except MemoryError as error:
        fail(error)
    table.show(results, console)
    if as_json:
        typer.echo(benchmark.as_json(results, spec))


def diagnose(interpret: bool, console: Console) -> tuple[str, bool, dict[str, Any]]:
    """Run `gspo doctor` and print it. Return the verdict, whether it is good, and the details for JSON."""
    from . import doctor

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    with console.status("looking around") as status:
        diagnosis = doctor.diagnose(interpret, status.update)
    say(", ".join(f"{name} {release}" for name, release in diagnosis.versions.items() if release))
    for device in diagnosis.devices:
        shapes = f", block shapes of {device.block_shapes}" if device.block_shapes else ""
        auto = f"backend='auto' takes {device.auto or 'nothing'}: {device.why}"
        say(f"{device.name}: {device.description}{shapes}; {auto}")
    for remark in diagnosis.remarks:
        say(remark)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption="Our error over the allowed error: at most 1 is right.")
    for column in ("", "verdict", "log\nprobs", "loss", "d\nhidden", "d\nweight", "wrong\nclips"):
        table.add_column(column, no_wrap=True)
    for check in diagnosis.checks:
        numbers = [*(check.ratios or dict.fromkeys(range(4))).values(), check.wrong_decisions]
        table.add_row(check.place, check.verdict, *("-" if x is None else f"{x:.2g}" for x in numbers))
    console.print(table)
    for check in diagnosis.checks:
        if check.message:
            say(f"{check.place}: {check.message}")
    return diagnosis.verdict, not diagnosis.faults, asdict(diagnosis)


def compile_kernels(architectures: list[str] | None, console: Console) -> tuple[str, bool, dict[str, Any]]:
    """Compile every Triton kernel and print what it needs. Return what `diagnose` returns."""
    try:
        from triton import knobs

        from ..backends.triton.tuning import ARCHITECTURES
        from .compile_gate import survey
    except Exception as error:  # a broken Triton may raise any exception
        return f"Nothing can be compiled: {type(error).__name__}: {error}", False, {"rows": []}
    if knobs.runtime.interpret:
        raise typer.BadParameter("TRITON_INTERPRET is set, and interpreted kernels do not compile: unset it")
    if unknown := ", ".join(sorted(set(architectures or ()) - set(ARCHITECTURES))):
        raise typer.BadParameter(f"{unknown}: choose from {', '.join(ARCHITECTURES)}", param_hint="--architecture")
    with console.status("compiling") as status:
        rows = survey(
            architectures or ARCHITECTURES, lambda done, total: status.update(f"compiling: {done} of {total} kernels")
        )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "case", "cut", "regis-\nters", "spilled\nbytes", "shared\nbytes", "blocks\nper SM"):
        table.add_column(column, no_wrap=True)
    table.add_column("instructions")
    for row in rows:
        cells = ("-",) * 5
        if row.report:
            report = row.report
            counts = ", ".join(f"{name} {count}" for name, count in report.instructions.items() if count)
            sizes = (report.registers, report.spilled_bytes, report.shared_bytes)
            cells = (*sizes, report.blocks_per_multiprocessor, counts)
        table.add_row(f"{row.architecture} {row.kernel}", row.case, row.config, *map(str, cells))
    console.print(table)
    failed = [row for row in rows if row.faults]
    for row in failed:
        line = f"{row.architecture} {row.kernel}, {row.case}: {'; '.join(row.faults)}"
        console.print(line, markup=False, soft_wrap=True)
    verdict = (
        f"{len(failed)} of {len(rows)} kernels fail."
        if failed
        else f"Good: all {len(rows)} kernels compile, and none with a matrix product spills."
    )
    details = [{**row._asdict(), "report": asdict(row.report) if row.report else None} for row in rows]
    return verdict, not failed, {"rows": details}
