"""The `gspo` command. Whatever imports torch does so inside its command, so that `gspo --help` answers at once."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

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
    """One line for the user, no traceback."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "0,1,2" -> (0, 1, 2)."""
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
    expected one. Metrics, curves and the model go to runs/<name>.
    """
    options = {**locals(), "seeds": None if seeds is None else parse_seeds(seeds)}
    from transformers.utils.logging import disable_progress_bar

    # setuptools maps this package to integrations/, which pyright cannot know.
    from gspo_kernels.integrations import reference_trainer as trainer  # pyright: ignore[reportMissingImports]

    disable_progress_bar()  # it would write across ours
    try:
        report = trainer.train(trainer.train_config(**options))
    except (trainer.InputError, trainer.TrainingError) as error:
        fail(error)
    console = Console()
    console.print(report.table())
    console.print(f"metrics: {report.folder / 'metrics.jsonl'}", soft_wrap=True)
    console.print(f"curves:  {report.curves}" if report.curves else report.note, markup=False, soft_wrap=True)
