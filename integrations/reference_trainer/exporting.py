"""`gspo export`: write a run's model as a folder that `from_pretrained` and vLLM load, with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .checkpoints import check_form, replacing
from .config import InputError, TrainConfig
from .config_file import read_run
from .held_out import held_out_results, sentence
from .loading import ADAPTER, load_adapter, located, weight_dtype
from .policy import ROUNDED, merged
from .report import MODEL_STATE, model_of_run, read_rows
from .resuming import versions

# Options that the card leaves out: what it says elsewhere, and what concerns one machine or the printed output.
UNSAID = "name output seeds model task data eval_data reward device threads save report_to checkpoint_every"
DTYPES = ("float32", "bfloat16", "float16")


def export(
    run: str | Path,
    out: str | Path,
    seed: int | None = None,
    base: str | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the model of a run to the folder `out`: weights, tokenizer, generation config and README.md, a model card.

    A LoRA adapter is merged in fp32 into its base, which is loaded in the dtype of the training. The folder `out`
    appears only when it is complete.

    Args:
        run: the folder of the run.
        out: a folder that does not exist yet, or is empty.
        seed: whose model; None: the run's first seed.
        base: folder or hub id of the adapter's base, if it is no longer where it was trained.
        dtype: float32, bfloat16 or float16, to which weights are rounded; None: float32 for a merged adapter, otherwise
            the model's own. Rounding a merged adapter to 16 bits may lose most of its change.
        adapter: write the adapter itself, in PEFT's format, instead of merging it.
        say: prints a line with the size, and one if a merged adapter is rounded to 16 bits.

    Raises:
        InputError: there is no such run, seed, model or base, an option does not apply, or `out` has files.
        WriteError: the system refuses to write.
    """
    run, out = Path(run), Path(out).expanduser()
    if not (run / "metrics.jsonl").is_file():
        raise InputError(f"RUN: expected the folder of a run, with a metrics.jsonl, got {run}")
    options, record = read_run(run)
    model = model_of_run(run, options["seeds"], seed)
    if (out.exists() or out.is_symlink()) and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"OUT: expected a folder that does not exist or is empty, got {out}")
    is_adapter = (model / ADAPTER).is_file()
    if base is not None and not is_adapter:
        raise InputError(f"--base: expected none, because {model} is not an adapter, got {base}")
    if dtype not in (None, *DTYPES):
        raise InputError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if adapter and dtype is not None:
        raise InputError(f"--dtype: expected none with --adapter, which copies the adapter, got {dtype!r}")
    if adapter and not is_adapter:
        in_memory = "its base was only in memory, so the run saved the merged model"
        reason = in_memory if options["lora_rank"] else "the run trained all weights (lora_rank=0)"
        raise InputError(f"--adapter: expected the run of an adapter, got {model}, which is not one: {reason}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    trained_in = weight_dtype(TrainConfig(precision=options["precision"], parallel=options["parallel"]))
    target = dtype or ("float32" if is_adapter else "auto")
    rounds = is_adapter and target not in ("float32", "auto")
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as partial:
        if adapter:
            shutil.copytree(model, partial, ignore=shutil.ignore_patterns(MODEL_STATE))
            settings = json.loads((partial / ADAPTER).read_text(encoding="utf-8"))
            settings |= {"base_model_name_or_path": located(base)[0]} if base else {}
            (partial / ADAPTER).write_text(json.dumps(settings, indent=2), encoding="utf-8")
            usage = usage_of_adapter(out.name, settings, trained_in)
        else:
            if is_adapter:
                adapted = load_adapter(str(model), tokenizer, {"dtype": trained_in}, base)
                written = merged(adapted, getattr(torch, target))
            else:
                written = AutoModelForCausalLM.from_pretrained(model, dtype=target)
            set_ends(written.generation_config, tokenizer)
            written.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            usage = usage_of_model(out.name, str(written.dtype).removeprefix("torch."), is_adapter, rounds)
        card(run, options, record, model, usage, "peft" if adapter else "transformers").save(partial / "README.md")
    size = sum(path.stat().st_size for path in out.glob("*.safetensors")) / 1e9
    say(f"{'adapter' if adapter else 'model'}: {out}, {size:.3g} GB; its model card: {out / 'README.md'}")
    if rounds:
        say(f"--dtype {dtype}: {ROUNDED}; --dtype float32 or --adapter keeps it")
    return out


def set_ends(config: GenerationConfig, tokenizer: Any) -> None:
    """Make the generation config end answers where they ended in training: also at the tokenizer's end of sequence."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({tokenizer.eos_token_id, *ends} - {None})
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id


def usage_of_model(name: str, dtype: str, is_merged: bool, rounds: bool) -> str:
    """How to load an exported model.

    Args:
        is_merged: the model is an adapter, merged into its base.
        rounds: the merged weights are rounded to 16 bits.
    """
    origin = "The trained LoRA adapter is merged into its base in fp32" if is_merged else "This is the trained model"
    if rounds:
        origin += f". {ROUNDED.capitalize()}, so answers may differ from those of the result below"
    flag = " --dtype float32" if dtype == "float32" else ""  # vLLM's default would round to 16 bits
    return f"""{origin}. The weights are {dtype}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

With vLLM: `vllm serve {name}{flag}`."""


def usage_of_adapter(name: str, settings: dict[str, Any], dtype: torch.dtype) -> str:
    """How to load an exported adapter on its base, which `settings` names.

    Args:
        dtype: of the base's weights in training.
    """
    base = name_of_base(settings["base_model_name_or_path"])
    number = str(dtype).removeprefix("torch.")
    lora = f"--enable-lora --max-lora-rank {settings['r']} --lora-modules {name}={name}"
    return f"""This is the trained LoRA adapter, without its base `{base}`, which `{ADAPTER}` names.
Load the base in {number}, as in training: in another dtype, log-probs differ.

```python
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{name}", dtype={dtype})
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

With vLLM: `vllm serve {base} --dtype {number} {lora}`."""


def name_of_base(base: str) -> str:
    """Shorten a folder to its name, and the model of a run to run/model. A hub id is returned unchanged."""
    path = Path(base)
    if not path.is_absolute():
        return base
    return f"{path.parent.name}/{path.name}" if path.name.startswith("model-seed") else path.name


def card(
    run: Path, options: dict[str, Any], record: dict[str, Any], model: Path, usage: str, library: str
) -> ModelCard:
    """Make the model card: usage, data, rewards, held-out result, settings, versions. It names files, not folders."""
    try:
        state = json.loads((model / MODEL_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{model}: expected a model that `gspo train` has written, got none: {error}") from error
    check_form(f"{model / MODEL_STATE}", state, {"seed": int, "step": int})
    seed, step = state["seed"], state["step"]
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["seed"] == seed and row["step"] <= step]
    base = record["model"]
    is_hub = base is not None and not Path(base).is_absolute()
    started = "Random weights"
    if base:
        started = f"[{base}](https://huggingface.co/{base})" if is_hub else f"`{name_of_base(base)}`"
    metadata = ModelCardData(
        base_model=base if is_hub else None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["gspo", "reinforcement-learning"],
    )
    weights = "".join(f"- `{name}`, weight {weight:g}\n" for name, weight in record["rewards"].items())
    sources = ", ".join(f"`{spec.rpartition('/')[2]}`" for spec in options["reward"]) or "the task's own"
    rule = record["held_out"]
    if options["eval_data"]:
        rule = rule.replace(str(options["eval_data"]), Path(options["eval_data"]).name)
    prompts = f"the task `{options['task'] or 'sorting'}`"
    if options["data"]:
        prompts = f"`{Path(options['data']).name}`"
    if "task" in record["from_python"]:
        prompts = "a task from Python"
    settings = "".join(
        f"{name}: {json.dumps(x)}\n" for name, x in options.items() if name not in UNSAID.split() and x is not None
    )
    return ModelCard(f"""---
{metadata.to_yaml()}
---

# {options["name"]}

{started}, trained with reinforcement learning by `gspo train`: {step} of {options["steps"]} rollouts, seed {seed}. The
objective is [GSPO](https://arxiv.org/abs/2507.18071) unless the settings below say otherwise.

{usage}

## Held-out result

{result(rows)}

Held out: {rule}.

## Data and rewards

Prompts: {prompts} (digest of prompts and answers: `{record["prompts"]}`). Rewards, from {sources}:

{weights}
## Settings

```yaml
{settings}```

## Versions

{", ".join(f"{name} {number}" for name, number in record["versions"].items())} for training;
{", ".join(f"{name} {number}" for name, number in versions().items())} for this export.
""")


def result(rows: list[dict[str, Any]]) -> str:
    """A table of held-out rewards before training and in the last evaluation of `rows`, and what it says."""
    results = held_out_results(rows)
    last = [row["step"] for row in rows if "eval_reward" in row][-1]
    rows_of_table = "\n".join(f"| {' | '.join([*x.cells()[:5], x.verdict if last else '-'])} |" for x in results)
    said = sentence(results) if last else "not decided: the model was saved before the second evaluation"
    return f"""Greedy answers to held-out prompts, with 95% bootstrap intervals over the prompts.

| reward | before training | after {last} rollouts | change, prompt by prompt | prompts | verdict |
|---|---|---|---|---|---|
{rows_of_table}

{said[0].upper()}{said[1:]}."""
