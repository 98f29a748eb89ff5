"""`gspo export`: write a run's model as a folder that `from_pretrained` and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .checkpoints import replacing
from .config import InputError, TrainConfig, convert
from .config_file import read_run
from .loading import ADAPTER, load_adapter, located, weight_dtype
from .policy import ROUNDED, merged
from .report import model_of_run

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
    """Write the model of a run to the folder `out`: weights, tokenizer and generation config.

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
        say: prints a line with size and dtype, and one if a merged adapter is rounded to 16 bits.

    Raises:
        InputError: there is no such run, seed, model or base, an option does not apply, or `out` has files.
    """
    run, out = Path(convert("run", "Path", run)), Path(convert("out", "Path", out)).expanduser()
    seed, adapter = convert("seed", "int | None", seed), convert("adapter", "bool", adapter)
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
            shutil.copytree(model, partial)
            settings = json.loads((partial / ADAPTER).read_text(encoding="utf-8"))
            settings |= {"base_model_name_or_path": located(base)[0]} if base else {}
            (partial / ADAPTER).write_text(json.dumps(settings, indent=2), encoding="utf-8")
            number = str(trained_in).removeprefix("torch.")
            text = f"load its base {settings['base_model_name_or_path']} in {number}, as in training"
        else:
            if is_adapter:
                adapted = load_adapter(str(model), tokenizer, {"dtype": trained_in}, base)
                written = merged(adapted, getattr(torch, target))
            else:
                written = AutoModelForCausalLM.from_pretrained(model, dtype=target)
            set_ends(written.generation_config, tokenizer)
            written.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            text = str(written.dtype).removeprefix("torch.")
    size = sum(path.stat().st_size for path in out.glob("*.safetensors")) / 1e9
    say(f"{'adapter' if adapter else 'model'}: {out}, {size:.3g} GB, {text}")
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
