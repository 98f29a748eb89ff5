"""TRL's real trainer on a CPU, with its own log-probs and with ours: the same losses, metrics and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import datasets
import transformers
from test_readme import WITH_TRL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tolerance import TRAINER_ABSOLUTE, TRAINER_LOG_ABSOLUTE, TRAINER_LOG_RELATIVE
from trl import GRPOConfig, GRPOTrainer

from gspo_kernels.integrations import trl as adapter
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer, accelerate_trainer

LETTERS = "abcdefgh"
SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gspo": SEQUENCE,
    "gspo, four updates of a rollout": {**SEQUENCE, "num_iterations": 2, "gradient_accumulation_steps": 1},
    "gspo, delta, kl": {**SEQUENCE, "delta": 1.0006, "beta": 0.1},
    "gspo, kl of a LoRA": {**SEQUENCE, "beta": 0.1, "lora": ["q_proj"]},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo, entropy bonus": {"loss_type": "dr_grpo", "entropy_coef": 0.02},
    "luspo": {**SEQUENCE, "loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo, high entropy": {"loss_type": "sapo", "top_entropy_quantile": 0.5},
    "temperature, off-policy mask": {**SEQUENCE, "temperature": 0.7, "off_policy_mask_threshold": 1e-4},
    "truncated answers masked": {**SEQUENCE, "mask_truncated_completions": True},
}


def tokenizer() -> Any:
    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", "<eos>", *LETTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    made.decoder = decoders.Fuse()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def checkpoint(folder: Path) -> str:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=10, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=1, final_logit_softcapping=4.0,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def make_trainer(trainer: type[GRPOTrainer], model: Any, folder: Path, peft_config: Any = None, **options: Any) -> Any:
    config = GRPOConfig(**{
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_generations": 4, "max_completion_length": 6,
        "max_steps": 4, "logging_steps": 1, "report_to": [], "save_strategy": "no", "gradient_checkpointing": False,
        "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant", "seed": 3, "disable_tqdm": True,
        **({"model_init_kwargs": {"dtype": "float32"}} if isinstance(model, str) else {}), **options,
    })  # fmt: skip
    return trainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(text.count("a") - text.count("b")) for text in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": a + b} for a in LETTERS for b in LETTERS]),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def train(name: str, ours: bool, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """(what was logged, the trained parameters) of four steps of plain SGD."""
    options = dict(CONFIGS[name])
    lora = options.pop("lora", None)
    peft_config = None
    if lora:
        peft_config = pytest.importorskip("peft").LoraConfig(r=2, target_modules=lora, init_lora_weights=False)
    trainer = make_trainer(
        GSPOTrainer if ours else GRPOTrainer, checkpoint(folder / "model"), folder, peft_config, **options
    )
    trainer.train()
    parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer.state.log_history, parameters


@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_what_it_is_with_trls_own_log_probs(name: str, tmp_path: Path) -> None:
    logs, parameters = train(name, False, tmp_path / "stock")
    ours, our_parameters = train(name, True, tmp_path / "ours")
    assert len(ours) == len(logs) > 4
    moved = 0.0
    for a, b in zip(ours, logs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if "time" not in key and "per_second" not in key and "runtime" not in key:
                close = pytest.approx(b[key], rel=TRAINER_LOG_RELATIVE, abs=TRAINER_LOG_ABSOLUTE, nan_ok=True)
                assert a[key] == close, key
        moved = max(moved, b.get("grad_norm", 0.0))
    assert moved > 1e-3
    for key, p in parameters.items():
        torch.testing.assert_close(our_parameters[key], p, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)


def test_the_config_is_the_papers() -> None:
    config = GSPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    assert (config.importance_sampling_level, config.loss_type) == ("sequence", "grpo")
    assert (config.epsilon, config.epsilon_high, config.beta) == (3e-4, 4e-4, 0.0)


def test_an_existing_trainer_takes_one_line_and_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = adapter.linear_log_probs
    monkeypatch.setattr(
        adapter, "linear_log_probs", lambda *args, **kwargs: (calls.append(1), fused(*args, **kwargs))[1]
    )
    trainer = make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path, **SEQUENCE, max_steps=1, beta=0.1)
    accelerate_trainer(trainer)
    forwards = trainer.model.forward, trainer.ref_model.forward
    accelerate_trainer(trainer)
    assert (trainer.model.forward, trainer.ref_model.forward) == forwards
    trainer.train()
    # One step: old and reference log-probs of the rollout, then two micro-batches.
    assert len(calls) >= 4


def test_a_head_that_trl_reads_wrongly_is_read_rightly(tmp_path: Path) -> None:
    """RecurrentGemma's soft-cap has a name of its own, which TRL 1.16 does not know."""
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(
        vocab_size=10, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, lru_width=16,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=1, logits_soft_cap=2.0,
        block_types=["recurrent", "attention"],
    )  # fmt: skip
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    trainer = make_trainer(GRPOTrainer, model, tmp_path, **SEQUENCE)
    ids = torch.randint(2, 10, (2, 7))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    own = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    stock = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    assert (stock - own).abs().max() > 0.1
    accelerate_trainer(trainer)
    out = model(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, own, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    torch.testing.assert_close(out.loss, -own.mean(), rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    again = model(input_ids=ids, shift_labels=shifted, fused_lm_head=True, num_items_in_batch=5)
    torch.testing.assert_close(again.log_probs[:, :-1], own, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    torch.testing.assert_close(again.loss, -own.sum() / 5, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    assert not again.log_probs[:, -1].any() and not again.label_mask[:, -1].any()
    with pytest.raises(ValueError, match="labels must be given"):
        model(input_ids=ids, fused_lm_head=True)


def test_the_lines_of_the_readme(tmp_path: Path) -> None:
    scope: dict[str, Any] = {
        "trainer": make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path),
        "model": checkpoint(tmp_path / "other"),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "prompts": datasets.Dataset.from_list([{"prompt": "ab"}] * 8),
    }
    first, *rest = WITH_TRL.strip().splitlines()
    exec(first, scope)
    # On this machine, and not into the user's folder.
    scope["GSPOConfig"] = lambda output_dir: GSPOConfig(str(tmp_path / output_dir), use_cpu=True, bf16=False)
    exec("\n".join(rest), scope)
    assert isinstance(scope["trainer"], GSPOTrainer) and scope["trainer"].epsilon_high == 4e-4


def test_a_head_cast_to_fp32_is_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    trainer = make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path)
    trainer.args.cast_lm_head_to_fp32 = True
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32 must be False"):
        accelerate_trainer(trainer)
