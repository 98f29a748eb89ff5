"""The `gspo` command. Modules that import torch are imported inside the commands, so that `gspo --help` is fast."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ..extras import MissingExtraError
from . import bench_table
from .doctor_report import compile_kernels, diagnose, memory_of

app = typer.Typer(
    help="Fused GSPO losses: train a model, check an installation, measure time and memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def show_version(requested: bool) -> None:
    """Print the version and exit if requested."""
    if requested:
        typer.echo(f"gspo-kernels {version('gspo-kernels')}")
        raise typer.Exit


@app.callback()
def gspo(
    _: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fused GSPO losses: train a model, check an installation, measure time and memory."""


def fail(error: Exception) -> NoReturn:
    """Print one line and exit with status 1, without a traceback."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse "0,1,2" as (0, 1, 2)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected numbers separated by commas, such as 0,1,2, got {text!r}") from error


@app.command()
def train(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint: a folder or a hub id org/name. (default: the demo's tiny random Qwen3)"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help='JSONL file with lines {"prompt": text, "answer": text or number}. Requires --model.'),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder. (default: demo, or the model's name)")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Parent of the run folders. (default: runs)")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds; each is one training run. (default: 0,1,2; with --model 0)")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of rollouts. (default: 200)")] = None,
    prompts_per_step: Annotated[
        int | None, typer.Option(help="Prompts per rollout. (default: 32; with --model 16)")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Answers per prompt, at least 2. (default: 8)")] = None,
    updates_per_rollout: Annotated[
        int | None, typer.Option(help="Mini-batch updates per rollout; with 1 nothing is ever clipped. (default: 4)")
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Answers per forward and backward; 0: all answers of an update. (default: 0)")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Constant learning rate of AdamW. (default: 5e-4; with --model 1e-6)")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of AdamW. (default: 0)")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Gradient clipping norm. (default: 1)")] = None,
    clip_low: Annotated[float | None, typer.Option(help="Ratios are clipped at 1 - clip_low. (default: 3e-4)")] = None,
    clip_high: Annotated[
        float | None, typer.Option(help="Ratios are clipped at 1 + clip_high. (default: 4e-4)")
    ] = None,
    gradient_budget: Annotated[
        float | None,
        typer.Option(help="Share of the gradient's mass that the backward may leave out. (default: 0, exact)"),
    ] = None,
    cache_mib: Annotated[
        float | None,
        typer.Option(help="Memory in MiB that saves the backward a matrix product. (default: GSPO_CACHE_MIB, or 0)"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of sampling and loss; evaluation is greedy. (default: 1)")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens. (default: 7; with --model 512)")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations, besides the first and last step. (default: 25)")
    ] = None,
    eval_prompts: Annotated[
        int | None, typer.Option(help="Held-out prompts, at most a fifth of --data. (default: 128)")
    ] = None,
    warn_after: Annotated[
        int | None, typer.Option(help="Warn after this many steps in which all rewards are equal. (default: 10)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu or cuda:1. (default: a GPU if there is one, else the CPU)")
    ] = None,
    bf16: Annotated[bool | None, typer.Option(help="Use bf16 autocast; weights stay fp32. (default: no)")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; 0: PyTorch's default. (default: 1; with --model 0)")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Backend: triton, torch or auto. (default: auto)")] = None,
    save: Annotated[bool | None, typer.Option(help="Save the trained model. (default: yes)")] = None,
    overwrite: Annotated[bool | None, typer.Option("--overwrite", help="Replace an earlier run of this name.")] = None,
) -> None:
    """Train a model with GSPO and report metrics.

    Without options, this runs the demo: a tiny random model learns to sort letters from rewards alone, once per seed.
    The results replace those of the demo's earlier run.

    With --model and --data, this trains your checkpoint on your prompts. The reward is 1 if the answer equals the
    expected answer or ends in it, else 0. Metrics, curves and the model are written to runs/<name>. Ctrl-C and SIGTERM
    stop the training and save the model as it is.
    """
    options = {**locals(), "seeds": None if seeds is None else parse_seeds(seeds)}
    try:
        from gspo_kernels.integrations import reference_trainer as trainer
    except MissingExtraError as error:
        fail(error)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # transformers' progress bar would overwrite ours
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
        bool, typer.Option("--interpret", help="Also check the Triton kernels on the CPU, with Triton's interpreter.")
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile all Triton kernels, and check nothing else. Needs no GPU.")
    ] = False,
    architecture: Annotated[
        list[str] | None,
        typer.Option(help="With --compile or --memory: an architecture such as sm_90. May be repeated with --compile."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="With --compile: H,V of your head, such as 4096,151936. (default: many shapes)")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="N,H,V of your batch, such as 8192,4096,151936: print what cache_mib saves, and check nothing."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --memory: fp32, bf16 or fp16. (default: bf16 with Triton, else fp32)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Report what is installed, which backend runs on each device, and whether its results are correct.

    On each device, loss and gradients are compared with a float64 reference. The exit status is 1 if a result is wrong
    or a computation crashes. A missing Triton or GPU is reported, but is not an error.
    """
    if compile_ and interpret:
        raise typer.BadParameter("kernels can be compiled or interpreted, but not both", param_hint="--interpret")
    if memory is not None and (compile_ or interpret):
        raise typer.BadParameter("cannot be combined with --compile or --interpret", param_hint="--memory")
    if architecture and not compile_ and memory is None:
        raise typer.BadParameter("requires --compile or --memory", param_hint="--architecture")
    for option, value, required in (("--shape", shape, "--compile"), ("--dtype", dtype, "--memory")):
        if value is not None and not (compile_ if required == "--compile" else memory is not None):
            raise typer.BadParameter(f"requires {required}", param_hint=option)
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # fixed, so that tables in a log do not wrap
    if memory is not None:
        verdict, ok, details = memory_of(memory, dtype, architecture, console)
    else:
        verdict, ok, details = (
            compile_kernels(architecture, shape, console) if compile_ else diagnose(interpret, console)
        )
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
            help="Any of naive, compile, trl, trl-fp32, liger, cce, verl, torch, separated by commas. (default: all "
            "that are installed)"
        ),
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="dense, rl-like, on-policy, kl or long. (default: rl-like)")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. (default: bfloat16 on a GPU, else float32)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu or cuda:1. (default: a GPU if there is one, else the CPU)")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs per candidate.")] = 5,
    trainer: Annotated[
        bool,
        typer.Option(
            "--trainer",
            help="Measure steps of TRL's GRPOTrainer with full logits, with TRL's fused head, and with gspo_kernels. "
            "Takes only --dtype, --device, --rounds and --json.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure time and memory of loss and gradients, and compare with other implementations.

    All candidates compute the same loss and gradients from the same batch, except naive GRPO, whose loss is another.
    Their gradients are first compared with float64. Candidates with wrong gradients are not timed. Timed runs alternate
    between candidates. Peak memory is measured in a separate process.
    """
    from . import bench_command

    batch = dict(model=model, tokens=tokens, against=against, scenario=scenario)
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # fixed, so that tables in a log do not wrap
    to_stderr = redirect_stdout(sys.stderr) if as_json else nullcontext()  # a candidate may print when imported
    try:
        make = bench_command.of_trainer if trainer else bench_command.of_loss
        planned = make(batch, dtype, device, rounds)
        typer.echo(planned.forecast, err=True)
        with to_stderr, bench_table.progress(console, planned.steps) as tick:
            results = planned.run(tick)
    except (ValueError, MemoryError, MissingExtraError) as error:
        fail(error)
    planned.show(results, console)
    if as_json:
        typer.echo(json.dumps(results))


if __name__ == "__main__":
    app(prog_name="gspo")
