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

from .checkpoints import replacing
from .config import InputError, TrainConfig
from .config_file import read_run
from .held_out import held_out_results, sentence
from .loading import ADAPTER, load_adapter, located, weight_dtype
from .policy import ROUNDED, merged
from .report import MODEL_STATE, model_of_run, read_rows

UNSAID = "name output seeds model device threads save report_to checkpoint_every"  # options that the card leaves out
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
    """
    run, out = Path(run), Path(out).expanduser()
    options, _ = read_run(run)
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
        raise InputError(f"--adapter: expected the run of an adapter, got {model}, which is not one")
    tokenizer = AutoTokenizer.from_pretrained(model)
    trained_in = weight_dtype(TrainConfig(precision=options["precision"], parallel=options["parallel"]))
    target = dtype or ("float32" if is_adapter else "auto")
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
            usage = usage_of_model(out.name, str(written.dtype).removeprefix("torch."))
        card(run, options, model, usage, "peft" if adapter else "transformers").save(partial / "README.md")
    size = sum(path.stat().st_size for path in out.glob("*.safetensors")) / 1e9
    say(f"{'adapter' if adapter else 'model'}: {out}, {size:.3g} GB; its model card: {out / 'README.md'}")
    if is_adapter and dtype not in (None, "float32"):
        say(f"--dtype {dtype}: {ROUNDED}; --dtype float32 or --adapter keeps it")
    return out


def set_ends(config: GenerationConfig, tokenizer: Any) -> None:
    """Make the generation config end answers where they ended in training: also at the tokenizer's end of sequence."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = sorted({tokenizer.eos_token_id, *ends} - {None})
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id


def usage_of_model(name: str, dtype: str) -> str:
    """How to load an exported model, whose weights have this dtype."""
    flag = " --dtype float32" if dtype == "float32" else ""  # vLLM's default would round to 16 bits
    return f"""The weights are {dtype}.

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


def card(run: Path, options: dict[str, Any], model: Path, usage: str, library: str) -> ModelCard:
    """Make the model card: usage, held-out result, settings. It names files, not folders."""
    state = json.loads((model / MODEL_STATE).read_text(encoding="utf-8"))
    seed, step = state["seed"], state["step"]
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["seed"] == seed and row["step"] <= step]
    base = options["model"]
    metadata = ModelCardData(
        base_model=None if base is None or Path(base).expanduser().is_dir() else base,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["gspo", "reinforcement-learning"],
    )
    shown = {name: x for name, x in options.items() if name not in UNSAID.split() and x is not None}
    shown |= {name: Path(shown[name]).name for name in ("data", "eval_data") if name in shown}
    shown["reward"] = [spec.rpartition("/")[2] for spec in options["reward"]]
    settings = "".join(f"{name}: {json.dumps(x)}\n" for name, x in shown.items())
    return ModelCard(f"""---
{metadata.to_yaml()}
---

# {options["name"]}

{f"`{name_of_base(base)}`" if base else "Random weights"}, trained with reinforcement learning by `gspo train`:
{step} of {options["steps"]} rollouts, seed {seed}. The objective is [GSPO](https://arxiv.org/abs/2507.18071) unless the
settings below say otherwise.

{usage}

## Held-out result

{result(rows)}

## Settings

```yaml
{settings}```
""")


def result(rows: list[dict[str, Any]]) -> str:
    """How held-out rewards changed from before training to the last evaluation of `rows`."""
    last = [row["step"] for row in rows if "eval_reward" in row][-1]
    said = sentence(held_out_results(rows)) if last else "not decided: the model was saved before the second evaluation"
    return f"Greedy answers to held-out prompts, after {last} rollouts: {said}."
