"""TRL's trainer with a small model on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import datasets
import transformers
from helpers import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

from gspo_kernels.integrations.trl import model_forward

LETTERS = "abcdefgh"
SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4}


def tokenizer() -> Any:
    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", "<eos>", *LETTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    characters.decoder = decoders.Fuse()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")


SHAPE = {**tiny_model.SHAPE, "vocab_size": 10, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


EXPERTS = {
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "output_router_logits": False,  # with padding, transformers cannot sum the routers of tokens that it generates
    "router_aux_loss_coef": 0.5,
}


def checkpoint(folder: Path, experts: bool = False) -> str:
    torch.manual_seed(0)
    if experts:
        model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS))
    else:
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SHAPE, final_logit_softcapping=4.0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def make_trainer(
    trainer: type[GRPOTrainer],
    model: Any,
    folder: Path,
    peft_config: Any = None,
    eval_dataset: datasets.Dataset | None = None,
    config: type[GRPOConfig] = GRPOConfig,
    prompts: int = 64,
    **options: Any,
) -> Any:
    args = config(
        **{
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "learning_rate": 0.05,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "seed": 3,
            "disable_tqdm": True,
            **({"model_init_kwargs": {"dtype": "float32"}} if isinstance(model, str) else {}),
            **options,
        }
    )
    return trainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(text.count("a") - text.count("b")) for text in completions],
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": a + b} for a in LETTERS for b in LETTERS][:prompts]),
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def replace_log_probs(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Make accelerated trainers call `function` in place of `linear_log_probs`."""
    monkeypatch.setattr(model_forward, "linear_log_probs", function)
