"""The `gspo` command. Modules that import torch are imported inside the commands, so that `gspo --help` is fast."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ..extras import MissingExtraError
from .doctor.report import diagnose, memory_of, sizes_of_batch, sizes_of_model

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
    """Print the error on one line and exit with status 1, without a traceback."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options, such as steps=100 or preset=moe.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with options.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to continue, such as runs/demo.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load prompts and rewards, print them and all options, and train nothing.",
        ),
    ] = False,
) -> None:
    """Train a model with GSPO and report metrics.

    Without options, this runs the demo: a tiny random model learns to sort letters from rewards alone, once per seed.
    The results replace the previous demo's.

    With model=FOLDER data=FILE, this trains your checkpoint on your prompts. The reward is 1 if the answer equals the
    expected answer or ends with it, else 0. reward=file.py:function uses your own reward. --dry-run prints all
    options. Metrics, curves and the model are written to runs/<name>. Ctrl-C and SIGTERM stop the training and save
    its state. `gspo eval` and `gspo export` continue from there.

    Presets: demo, paper, under-1b, 1b-10b, moe. For several processes, start it with torchrun.
    """
    try:
        from gspo_kernels.integrations import reference_trainer as trainer
    except MissingExtraError as error:
        fail(error)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # transformers' progress bar would overwrite ours
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    if not console.is_terminal:
        console.width = 120  # fixed, so that tables in a log do not wrap
    try:
        settings = trainer.read_config(config, options or (), resume)
        if dry_run:
            for spec in settings.reward:
                source = f"config.json of {resume}" if resume is not None else "reward="
                said = f"# importing the reward {spec}, named by {source}: this runs its Python code"
                console.print(said, markup=False, highlight=False, soft_wrap=True)
            console.print(trainer.forecast(settings), markup=False, highlight=False, soft_wrap=True)
            return
        report = trainer.train(settings)
    except (trainer.InputError, trainer.TrainingError, MissingExtraError) as error:
        fail(error)
    console.print(report.table())
    for line in report.summary():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"metrics: {report.folder / 'metrics.jsonl'}", soft_wrap=True)
    console.print(f"curves:  {report.curves}" if report.curves else report.note, markup=False, soft_wrap=True)


@app.command("eval", context_settings={"ignore_unknown_options": True})
def evaluate(
    source: Annotated[str, typer.Argument(help="Folder of a run, or folder or hub id of a model or adapter.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options, such as data=FILE reward=file.py:function n=16 k=1,8."),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Write all answers with their rewards to this jsonl file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Reward the answers of a trained model: one greedy answer per prompt, and n sampled ones with pass@k.

    A run is evaluated on its held-out prompts, with its rewards and its options; data=FILE takes all prompts of another
    file. Another model needs data=FILE or task=NAME. n=0 samples nothing. An answer passes if its reward is at least
    passing=1. Intervals are 95% bootstrap intervals over the prompts.
    """
    try:
        from gspo_kernels.integrations import reference_trainer as trainer
    except MissingExtraError as error:
        fail(error)
    from rich.progress import Progress
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # fixed, so that tables in a log do not wrap
    try:
        if answers is not None and (answers.exists() or not answers.parent.is_dir()):
            raise trainer.InputError(f"--answers: expected a new file in a folder that exists, got {answers}")
        evaluation = trainer.read_evaluation(source, options or ())
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            shown = bar.add_task("answers")
            report = trainer.evaluate(
                evaluation,
                lambda line: bar.console.print(line, markup=False, highlight=False, soft_wrap=True),
                lambda done, total: bar.update(shown, completed=done, total=total),
            )
        if answers is not None:
            report.write_answers(answers)
    except (trainer.InputError, trainer.TrainingError, MissingExtraError) as error:
        fail(error)
    console.print(report.table())
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/demo.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, which does not exist yet or is empty.")],
    seed: Annotated[int | None, typer.Option(help="Seed whose model is written. (default: the run's first)")] = None,
    base: Annotated[
        str | None, typer.Option(help="Folder or hub id of an adapter's base model, if it is no longer where it was.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. (default: float32 for a merged adapter, otherwise as saved)"),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter itself, for PEFT and vLLM's --lora-modules.")
    ] = False,
) -> None:
    """Write a run's model as a folder that transformers and vLLM load.

    The folder has weights, tokenizer and generation config. A LoRA adapter is merged into its base in fp32.
    """
    try:
        from gspo_kernels.integrations import reference_trainer as trainer
    except MissingExtraError as error:
        fail(error)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        trainer.export(run, out, seed, base, dtype, adapter, typer.echo)
    except (trainer.InputError, trainer.TrainingError, MissingExtraError) as error:
        fail(error)


def _only_with(required: str, present: bool, options: dict[str, object]) -> None:
    """Reject options that need the option `required` unless it is present."""
    for option, value in options.items():
        if value is not None and not present:
            raise typer.BadParameter(f"requires {required}", param_hint=option)


@app.command()
def doctor(
    memory: Annotated[
        str | None,
        typer.Option(
            help="N,H,V of your batch, such as 8192,4096,151936: print the memory of stock TRL and of the loss, for "
            "several values of cache_mib, and check nothing. N: unmasked tokens of a micro-batch."
        ),
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="With --memory: the GPU's architecture, such as sm_90. (default: this machine's)")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model's folder: with --tokens, as --memory with the sizes of its head.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="With --model: unmasked tokens of a micro-batch, such as 16384.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="With --memory: fp32, bf16 (also under autocast) or fp16. (default: bf16 with Triton, else fp32)"
        ),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="With --memory: the head is frozen, as with LoRA on other layers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Report what is installed, which backend runs on each device, and whether its results are correct.

    On each device, loss and gradients are compared with a float64 reference. The exit status is 1 if a result is wrong
    or a computation crashes. If Triton or a GPU is missing, that is reported, but it is not an error.
    """
    _only_with("--tokens", tokens is not None, {"--model": model})
    _only_with("--model", model is not None, {"--tokens": tokens})
    if model is not None and memory is not None:
        raise typer.BadParameter("cannot be combined with --memory", param_hint="--model")
    plans = model is not None or memory is not None
    of_plans = {"--architecture": architecture, "--dtype": dtype, "--lora": lora or None}
    _only_with("--memory or --model", plans, of_plans)
    batch: tuple[int, ...] | None = None
    if model is not None and tokens is not None:
        batch = sizes_of_model(model, tokens)
    elif memory is not None:
        batch = sizes_of_batch(memory)
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # fixed, so that tables in a log do not wrap
    if batch is not None:
        verdict, ok, details = memory_of(batch, dtype, architecture, lora, console)
    else:
        verdict, ok, details = diagnose(console)
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
    scenario: Annotated[str | None, typer.Option(help="dense, rl-like or long. (default: rl-like)")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. (default: bfloat16 on a GPU, else float32)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu or cuda:1. (default: a GPU if there is one, else the CPU)")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs per candidate.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure time and memory of loss and gradients, and compare with other implementations.

    All candidates compute the same loss and gradients from the same batch.
    Gradients are first compared with float64, and candidates whose gradients are wrong are not timed. Timed runs
    alternate between candidates. Peak memory is measured in a separate process.
    """
    from gspo_kernels.benchmarks import bench_table
    from gspo_kernels.benchmarks.suites import bench_command

    batch = dict(model=model, tokens=tokens, against=against, scenario=scenario)
    console = Console(quiet=as_json)
    if not console.is_terminal:
        console.width = 120  # fixed, so that tables in a log do not wrap
    to_stderr = redirect_stdout(sys.stderr) if as_json else nullcontext()  # a candidate may print when imported
    try:
        planned = bench_command.of_loss(batch, dtype, device, rounds)
        typer.echo(planned.forecast, err=True)
        with to_stderr, bench_table.progress(console, planned.steps) as tick:
            results = planned.run(tick)
    except (ValueError, MemoryError, MissingExtraError) as error:
        fail(error)
    bench_table.show(results, console, planned.scenario)
    if as_json:
        typer.echo(json.dumps(results))


@app.command()
def compare(
    objectives: Annotated[
        str | None,
        typer.Option(
            help="Presets of gspo_kernels.Objective, separated by commas; the first is the baseline. (default: "
            "gspo,grpo; with --study long also luspo; with --study teachers gspo)"
        ),
    ] = None,
    study: Annotated[
        str,
        typer.Option(
            help="dense; rounding: bodies in half precision, with our head and with full logits, and a sampler with "
            "weights in bf16, without and with corrections; long: answers of 64 to 80 letters, with several clip "
            "windows; teachers: the objective, the divergence from a teacher, and both."
        ),
    ] = "dense",
    seeds: Annotated[str, typer.Option(help="Seeds; each is one training per objective and setting.")] = "0,1,2,3,4",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Rollouts per training. (default: 40; with --study long 14)")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file. (default: in runs/compare/)")] = None,
) -> None:
    """Train tiny models with several objectives, from the same weights, prompts and seeds, and compare them.

    Each objective is trained at every setting of a grid (learning rates by updates), and compared at its own best
    setting and over the grid. Prints rewards, their differences with 95 % intervals, clip fractions and collapses, and
    writes the results. The studies "dense" and "teachers" have 60 trainings.
    """
    try:
        from gspo_kernels.benchmarks.studies.compare import run
    except MissingExtraError as error:
        fail(error)
    console = Console()
    if not console.is_terminal:
        console.width = 220  # fixed, so that tables in a log do not wrap
    try:
        run(objectives, study, seeds, steps, output, console)
    except ValueError as error:  # InputError: an option cannot be used
        fail(error)


if __name__ == "__main__":
    app(prog_name="gspo")
