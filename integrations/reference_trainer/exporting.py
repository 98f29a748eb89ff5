"""`gspo export`: write a run's model as a folder that `from_pretrained` and vLLM load, with a model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from gspo_kernels.extras import needs

from .checkpoints import check_form, replacing
from .config import InputError
from .held_out import held_out_results, sentence
from .loading import load_merged, located
from .report import MODEL_STATE, model_of_run, read_rows
from .resuming import read_run, versions

# Options that the card leaves out: what it says elsewhere, and what concerns one machine or the printed output.
UNSAID = "name output seeds model task data eval_data reward device threads save samples report_to warn_after"
UNSAID += " wandb_project wandb_entity wandb_tags checkpoint_every"


def export(run: str | Path, out: str | Path, seed: int | None = None, base: str | None = None) -> Path:
    """Write the model of a run to the folder `out`: weights, tokenizer, generation config and README.md, a model card.

    A LoRA adapter is merged into its base in fp32; the weights get the dtype of the base. Another model is copied. The
    folder `out` appears only when it is complete.

    Args:
        run: the folder of the run.
        out: a folder that does not exist yet, or is empty.
        seed: whose model; None: the run's first seed.
        base: folder or hub id of the adapter's base, if it is no longer where it was trained.

    Raises:
        InputError: there is no such run, seed, model or base, or `out` has files.
        WriteError: the system refuses to write.
    """
    run, out = Path(run), Path(out).expanduser()
    if not (run / "metrics.jsonl").is_file():
        raise InputError(f"RUN: expected the folder of a run, with a metrics.jsonl, got {run}")
    options, record = read_run(run)
    model = model_of_run(run, options["seeds"], seed)
    check_free(out)
    if run.resolve() in out.resolve().parents and model.name in out.resolve().parts:
        raise InputError(f"OUT: expected a folder outside {model}, got {out}")
    is_adapter = (model / "adapter_config.json").is_file()
    if base is not None and not is_adapter:
        raise InputError(f"--base: expected none, because {model} is not an adapter, got {base}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as partial:
        if is_adapter:
            save_merged(model, tokenizer, base, partial)
        else:
            shutil.copytree(model, partial, ignore=shutil.ignore_patterns(MODEL_STATE))
        save_generation_config(partial, tokenizer)
        card(run, options, record, model, out.name).save(partial / "README.md")
    return out


def check_free(out: Path) -> None:
    """Raise an InputError unless a folder can be written to `out` without replacing a file."""
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        pass
    elif out.exists() or out.is_symlink():
        raise InputError(f"OUT: expected a folder that does not exist or is empty, got {out}")
    for suffix in ("partial", "replaced"):  # of `replacing`
        if (left := out.with_name(f"{out.name}.{suffix}")).exists():
            raise InputError(f"OUT: expected no {left}, which an interrupted export may have left: remove it")


def save_merged(adapter: Path, tokenizer: Any, base: str | None, folder: Path) -> None:
    """Merge an adapter into its base, and save model and tokenizer."""
    with needs(f"model {adapter}, a LoRA adapter,", "lora", "peft"):
        from peft import PeftConfig
    model = load_merged(str(adapter), tokenizer, {"dtype": torch.float32}, base)
    named = base or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    dtype = AutoConfig.from_pretrained(located(str(named))[0]).dtype or torch.float32
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_generation_config(folder: Path, tokenizer: Any) -> None:
    """Make the generation config end answers where they ended in training: also at the tokenizer's end of sequence."""
    if (folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(folder)
    else:
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({tokenizer.eos_token_id, *ends} - {None})
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    config.save_pretrained(folder)


def card(run: Path, options: dict[str, Any], record: dict[str, Any], model: Path, folder: str) -> ModelCard:
    """Make the model card: data, rewards, held-out result, settings and versions. It names files, not their folders."""
    try:
        state = json.loads((model / MODEL_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{model}: expected a model that `gspo train` has written, got none: {error}") from error
    check_form(f"{model / MODEL_STATE}", state, {"seed": int, "step": int})
    seed, step = state["seed"], state["step"]
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["seed"] == seed and row["step"] <= step]
    base = record.get("model")
    is_hub = base is not None and not Path(base).is_absolute()
    started = "Random weights"
    if base:
        started = f"[{base}](https://huggingface.co/{base})" if is_hub else f"`{Path(base).name}`"
    metadata = ModelCardData(
        base_model=base if is_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gspo", "reinforcement-learning"],
    )
    weights = "".join(f"- `{name}`, weight {weight:g}\n" for name, weight in record.get("rewards", {}).items())
    sources = ", ".join(f"`{spec.rpartition('/')[2]}`" for spec in options.get("reward", ())) or "the task's own"
    rule = record.get("held_out", "")
    if options.get("eval_data"):
        rule = rule.replace(str(options["eval_data"]), Path(options["eval_data"]).name)
    prompts = f"the task `{options.get('task') or 'sorting'}`"
    if options.get("data"):
        prompts = f"`{Path(options['data']).name}`"
    if "task" in record.get("from_python", ()):
        prompts = "a task from Python"
    settings = "".join(
        f"{name}: {json.dumps(x)}\n" for name, x in options.items() if name not in UNSAID.split() and x is not None
    )
    return ModelCard(f"""---
{metadata.to_yaml()}
---

# {options.get("name") or run.name}

{started}, trained with reinforcement learning by `gspo train`: {step} of {options["steps"]} rollouts, seed {seed}. The
objective is [GSPO](https://arxiv.org/abs/2507.18071) unless the settings below say otherwise.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

With vLLM: `vllm serve {folder}`.

## Held-out result

{result(rows)}

Held out: {rule}.

## Data and rewards

Prompts: {prompts} (digest of prompts and answers: `{record.get("prompts", "")}`). Rewards, from {sources}:

{weights}
## Settings

```yaml
{settings}```

## Versions

{", ".join(f"{name} {number}" for name, number in record.get("versions", {}).items())} for training;
{", ".join(f"{name} {number}" for name, number in versions().items())} for this export.
""")


def result(rows: list[dict[str, Any]]) -> str:
    """A table of held-out rewards before training and in the last evaluation of `rows`, and what it says."""
    results = held_out_results(rows)
    last = [row["step"] for row in rows if "eval_reward" in row][-1]
    lines = [
        "Greedy answers to held-out prompts, with 95% bootstrap intervals over the prompts.",
        "",
        f"| reward | before training | after {last} rollouts | change, prompt by prompt | prompts | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for x in results:
        change, prompts = ("-", "-") if x.change is None else (x.change.signed(), x.change.prompts)
        said = x.verdict if last else "-"
        lines.append(f"| {x.name} | {x.start or '-'} | {x.end or '-'} | {change} | {prompts} | {said} |")
    said = sentence(results) if last else "not decided: the model was saved before the second evaluation"
    return "\n".join([*lines, "", f"{said[0].upper()}{said[1:]}."])
