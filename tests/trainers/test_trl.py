"""TRL's trainer on a CPU with our log-probs: heads, models, the documented lines.

Losses, gradients and metrics: test_trl_zero_advantage.py.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.trl_trainer import SEQUENCE, SHAPE, checkpoint, make_trainer

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import datasets
import transformers
from helpers.pages import TRL_EXISTING_LINES, TRL_LINES
from tolerance import (
    FP16_NORM_RELATIVE,
    LOG_PROB_RMS_BF16X3,
    RELATIVE_RMS,
    TRAINER_ABSOLUTE,
    TRAINER_LOG_ABSOLUTE,
)
from trl import GRPOTrainer

from gspo_kernels.integrations.huggingface import HeadError, base_model, is_fused
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer, accelerate_trainer
from gspo_kernels.integrations.trl.trainer import log_probs_of


class OverridesLogProbs(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_precision", [None, "bf16x3"])
def test_an_fp32_head_equals_trls(dtype: str, head_precision: str | None, tmp_path: Path) -> None:
    """TRL makes the tied weight fp32, and computes logits outside autocast. Here, the body runs in bf16."""
    options: dict[str, Any] = {**SEQUENCE, "bf16": True, "beta": 0.1}
    options |= {"model_init_kwargs": {"dtype": dtype}, "cast_lm_head_to_fp32": True}
    trainers: list[Any] = []
    for kind in (GRPOTrainer, GSPOTrainer, GSPOTrainer):
        ours = {"config": GSPOConfig, "skip_zero_advantage": False, "head_precision": head_precision}
        more = {} if kind is GRPOTrainer else ours | ({"cast_lm_head_to_fp32": False} if len(trainers) == 2 else {})
        folder = tmp_path / str(len(trainers))
        trainers.append(make_trainer(kind, checkpoint(folder / "model"), folder, **{**options, **more}))
    ids = torch.randint(2, 10, (4, 9), generator=torch.Generator().manual_seed(0))
    expected, computed, rounded = (
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 6)[0]
        for trainer in trainers
    )
    assert (computed - expected).abs().max() < LOG_PROB_RMS_BF16X3
    # Autocast rounds an fp32 weight, unless an option of ours keeps it. A bf16 weight is not rounded.
    is_rounded = dtype == "float32" and head_precision is None
    assert ((rounded - expected).abs().max() > LOG_PROB_RMS_BF16X3) == is_rounded
    for log_probs in (expected, computed):
        (log_probs * torch.linspace(-1, 1, 6)).sum().backward()
    for a, b in zip(trainers[1].model.parameters(), trainers[0].model.parameters(), strict=True):
        assert a.dtype == b.dtype and (a.grad - b.grad).norm() <= RELATIVE_RMS[torch.bfloat16] * b.grad.norm()


@pytest.mark.gpu
def test_fp16_training_is_close_to_fp32_training(tmp_path: Path) -> None:
    """With `fp16=True`, the model runs in autocast, and a gradient scaler multiplies the loss by 65,536 at first."""
    options = {**SEQUENCE, "epsilon": 0.2, "epsilon_high": 0.2, "use_cpu": False, "num_iterations": 2}
    logs, moved = [], []
    for number, (kind, fp16) in enumerate([(GSPOTrainer, False), (GSPOTrainer, True), (GRPOTrainer, True)]):
        folder = tmp_path / str(number)
        fixed: Any = partial(kind, rollout_func=fixed_answers)  # sampled answers can differ after rounding
        trainer = make_trainer(fixed, checkpoint(folder / "model"), folder, fp16=fp16, **options)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert (trainer.accelerator.scaler is not None) == fp16
        logs.append([log for log in trainer.state.log_history if "loss" in log])
        moved.append(torch.cat([(p - before[name]).flatten() for name, p in trainer.model.named_parameters()]))
    single, ours, stock = moved
    assert single.norm() > 1e-3 and all(log["grad_norm"] > 0 for log in logs[1])
    for log, expected in zip(logs[1], logs[0], strict=True):
        assert log["grad_norm"] == pytest.approx(expected["grad_norm"], rel=FP16_NORM_RELATIVE)
    assert (ours - single).norm() <= 2 * (stock - single).norm() + FP16_NORM_RELATIVE * single.norm()


def fixed_answers(prompts: list[str], *_: Any) -> dict[str, Any]:
    answers = torch.randint(2, SHAPE["vocab_size"], (len(prompts), 6), generator=torch.manual_seed(1))
    ids = [[2, 3] for _ in prompts]
    return {"prompt_ids": ids, "completion_ids": answers.tolist(), "logprobs": None}


def test_a_soft_cap_unknown_to_trl_is_applied(tmp_path: Path) -> None:
    """TRL 1.16 does not know the name of RecurrentGemma's soft-cap."""
    torch.manual_seed(0)
    sizes = {**SHAPE, "lru_width": 16, "block_types": ["recurrent", "attention"]}
    config = transformers.RecurrentGemmaConfig(**sizes, logits_soft_cap=2.0)
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    trainer = make_trainer(GRPOTrainer, model, tmp_path, **SEQUENCE)
    ids = torch.randint(2, 10, (2, 7))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    stock = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    assert (stock - expected).abs().max() > 0.1
    accelerate_trainer(trainer)
    with log_probs_of(trainer):
        out = model(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, expected, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    torch.testing.assert_close(out.loss, -expected.mean(), rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    with log_probs_of(trainer), pytest.raises(ValueError, match="labels or shift_labels must be given"):
        model(input_ids=ids, fused_lm_head=True)


def test_the_documented_lines_run(tmp_path: Path) -> None:
    existing = make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path)
    exec(TRL_EXISTING_LINES, {"trainer": existing})
    assert is_fused(existing.model)
    scope: dict[str, Any] = {
        "model": checkpoint(tmp_path / "other"),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "prompts": datasets.Dataset.from_list([{"prompt": "ab"}] * 8),
    }
    first, *statements = TRL_LINES.strip().splitlines()
    exec(first, scope)
    # Train on a CPU, and write to tmp_path.
    scope["GSPOConfig"] = lambda output_dir: GSPOConfig(str(tmp_path / output_dir), use_cpu=True, bf16=False)
    exec("\n".join(statements), scope)
    assert isinstance(scope["trainer"], GSPOTrainer) and scope["trainer"].epsilon_high == 4e-4


def test_an_adapter_on_the_head_is_trained_with_our_trainer_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    trainer = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, lora, **SEQUENCE)
    assert isinstance(trainer.model.get_output_embeddings(), peft.tuners.tuners_utils.BaseTunerLayer)
    assert "; head 10 x 16 float32, LoRA, soft-cap 4; gradient_budget=0, " in capsys.readouterr().out
    ids = torch.randint(2, 10, (2, 7))
    weight = torch.randn(2, 6)
    adapters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    dense = trainer.model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    expected = torch.autograd.grad((dense[..., 0] * weight).sum(), list(adapters.values()))
    with log_probs_of(trainer):
        out = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, dense[..., 0], rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    computed = torch.autograd.grad((out.log_probs * weight).sum(), list(adapters.values()))
    for name, a, b in zip(adapters, computed, expected, strict=True):
        assert b.norm() > 0 and (a - b).norm() <= TRAINER_ABSOLUTE * b.norm(), name
    before = {name: p.detach().clone() for name, p in adapters.items()}
    trainer.train()
    assert all(not torch.equal(p, before[name]) for name, p in adapters.items())
    # TRL's own trainer still refuses the adapter, and ours does with TRL's fp32 head, which would ignore it.
    with_fp32_head: dict[str, Any] = {**SEQUENCE, "cast_lm_head_to_fp32": True}
    for kind, options in ((GRPOTrainer, SEQUENCE), (GSPOTrainer, with_fp32_head)):
        with pytest.raises(ValueError, match="lm_head"):
            make_trainer(kind, checkpoint(tmp_path / "model"), tmp_path, lora, **options)


def test_training_under_bf16_autocast_with_a_reference_model(tmp_path: Path) -> None:
    options = {**SEQUENCE, "bf16": True, "beta": 0.1}
    trainer = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4 and all(log["grad_norm"] > 0 for log in logs)
    # The same kernel computes the log-probs of policy and reference model, so their KL begins at 0.
    assert logs[0]["kl"] < TRAINER_LOG_ABSOLUTE < max(log["kl"] for log in logs)


def test_other_objects_raise_and_overridden_log_probs_are_warned_of(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="trainer must be a GRPOTrainer"):
        accelerate_trainer(checkpoint(tmp_path / "model"))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="is an override in OverridesLogProbs"):
        accelerate_trainer(make_trainer(OverridesLogProbs, checkpoint(tmp_path / "model"), tmp_path))


def test_policy_and_reference_model_return_a_mean_loss_over_labels(tmp_path: Path) -> None:
    """Log-probs and entropies equal the ones computed from logits divided by the trainer's temperature."""
    trainer = make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path, beta=0.1, temperature=0.7)
    accelerate_trainer(trainer)
    ids = torch.randint(2, 10, (2, 7))
    labels = ids.clone()
    labels[:, :3], labels[1, -2:] = -100, -100
    for model, items in ((trainer.model, None), (trainer.ref_model, 5)):
        base = base_model(trainer.accelerator.unwrap_model(model))
        dense = (base(input_ids=ids, use_cache=False).logits[:, :-1] / 0.7).log_softmax(-1)
        mask = labels[:, 1:] != -100
        log_probs = dense.gather(-1, ids[:, 1:, None])[..., 0] * mask
        expected = -log_probs.sum() / (items or mask.sum()), log_probs, -(dense.exp() * dense).sum(-1) * mask
        with log_probs_of(trainer):
            out = base(input_ids=ids, labels=labels, fused_lm_head=True, num_items_in_batch=items)
        for x, y in zip((out.loss, out.log_probs, out.entropy), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)


def test_trainers_of_one_model_compute_log_probs_with_their_own_settings(tmp_path: Path) -> None:
    """The temperature of an accelerated trainer must not reach another trainer, accelerated or not."""
    ours = make_trainer(GRPOTrainer, checkpoint(tmp_path / "model"), tmp_path, temperature=2.0)
    stock = make_trainer(GRPOTrainer, ours.model, tmp_path, temperature=0.5)
    ids, mask = torch.randint(2, 10, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    accelerate_trainer(ours)
    for of in (ours, stock, None, ours):  # None: made after the others have run
        trainer: Any = of or make_trainer(GSPOTrainer, ours.model, tmp_path, temperature=0.7)
        log_probs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 4)[0]
        logits = trainer.model(input_ids=ids, use_cache=False).logits[:, 2:-1]
        expected = (logits / trainer.temperature).log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]
        torch.testing.assert_close(log_probs, expected, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)


@pytest.mark.parametrize("trained", [False, True])
def test_a_pickled_model_of_a_trainer_is_a_model_of_its_own_and_a_deep_copy_is_refused(
    trained: bool, tmp_path: Path
) -> None:
    """TRL's forward is a closure that runs the original, even on a deep copy."""
    options: dict[str, Any] = {**SEQUENCE, "max_steps": 2}
    first = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, **options, bf16=trained)
    if trained:
        first.train()  # with bf16, accelerate wraps the forward
        accelerate_trainer(first)
    before = [p.detach().clone() for p in first.model.parameters()]
    with pytest.raises(HeadError, match="is this a deep copy of a trainer's model"):
        make_trainer(GSPOTrainer, copy.deepcopy(first.model), tmp_path, **options)
    second = make_trainer(GSPOTrainer, pickle.loads(pickle.dumps(first.model)), tmp_path, **options)
    second.train()
    assert "gspo/passes" in second.state.log_history[0]
    assert all(map(torch.equal, first.model.parameters(), before))
    assert not all(map(torch.equal, second.model.parameters(), before))
