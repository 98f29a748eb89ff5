"""`clip_noise` counts the decisions that a float64 model would change, and leaves model and training unchanged."""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import DOCS, blocks_in_order

pytest.importorskip("transformers")
from tolerance import CLIP_NOISE_ERROR_RELATIVE, LOG_PROB_STD
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gspo_kernels import Objective
from gspo_kernels.integrations.huggingface import clip_noise, log_probs_by_precision
from gspo_kernels.sampler_mismatch import RolloutCorrection

ANSWERS = 32
WIDTH = 40  # tokens of prompt and answer
PROMPT = 8  # tokens
BODIES = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, None),
}


def models(dtype: torch.dtype, lora: bool) -> tuple[Any, Any]:
    """A policy before and after an update."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2}
    before: Any = Qwen3ForCausalLM(Qwen3Config(**sizes))
    if lora:
        peft = pytest.importorskip("peft")
        before = peft.get_peft_model(before, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    after = copy.deepcopy(before)
    with torch.no_grad():
        for p in after.parameters():
            p += 3e-5 * torch.randn_like(p)
    return before.eval().to(dtype), after.eval().to(dtype)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(97, (ANSWERS, WIDTH))
    mask = torch.ones_like(ids)
    mask[:, :PROMPT] = 0
    mask[::3, -5:] = 0
    return ids, mask, torch.randn(ANSWERS).masked_fill(torch.arange(ANSWERS) < 4, 0)


def exact_log_probs(model: Any, ids: Tensor, temperature: float = 1.0) -> Tensor:
    logits = copy.deepcopy(model).double()(ids).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def test_all_log_probs_are_those_at_the_temperature() -> None:
    model, _ = models(torch.float32, lora=False)
    ids, mask, _ = batch()
    for ours in log_probs_by_precision(model, ids, answer_mask=mask, temperature=0.7):
        error = (ours - exact_log_probs(model, ids, 0.7))[mask[:, 1:] > 0]
        assert error.abs().max() < 10 * LOG_PROB_STD
    positions = 2 * torch.arange(WIDTH).expand_as(ids)
    ones = torch.ones_like(ids)  # without a mask, transformers takes them for packed sequences
    at_positions = log_probs_by_precision(model, ids, ones, mask, position_ids=positions).fp32
    logits = model.double()(ids, ones, positions).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert ((at_positions - expected)[mask[:, 1:] > 0]).abs().max() < 10 * LOG_PROB_STD


@pytest.mark.parametrize("ratio", ["sequence", "sequence-token", "token"])
@pytest.mark.parametrize("lora", [False, True], ids=["", "LoRA"])
@pytest.mark.parametrize("body", BODIES)
def test_changed_decisions_are_those_of_float64(body: str, lora: bool, ratio: str) -> None:
    dtype, autocast = BODIES[body]
    old, new = models(dtype, lora)
    ids, mask, advantages = batch()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        before, after = (log_probs_by_precision(model, ids, answer_mask=mask) for model in (old, new))
    answers = mask[:, 1:] > 0
    for model, ours in ((old, before), (new, after)):
        error = (ours.fp32 - exact_log_probs(model, ids))[answers]
        assert error.std() < LOG_PROB_STD
        assert all(p.dtype == dtype for p in model.parameters()) and not hasattr(model, "_gspo_fused_head")
    objective = Objective(ratio, clip_low=1e-3, clip_high=1e-3, kl_coef=0.1)
    noise = clip_noise(before, after, advantages, answers, objective)
    without = {"kl_coef": 0.1, "entropy_coef": 0.1, "rollout_correction": RolloutCorrection(high=1.1)}
    assert noise == clip_noise(before, after, advantages, answers, replace(objective, **without))

    low, high = objective.log_window
    sign = advantages.sign()[:, None]

    def passes(new_log_probs: Tensor, old_log_probs: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.where(answers, new_log_probs.double() - old_log_probs.double(), 0)
        if ratio != "token":
            u = u.sum(1, keepdim=True) / answers.sum(1, keepdim=True)
        if ratio == "sequence-token":
            u = u.expand_as(answers)
        decided = (sign != 0) & (torch.ones_like(sign, dtype=torch.bool) if ratio == "sequence" else answers)
        return torch.where(sign > 0, u <= high, u >= low)[decided], u[decided]

    (exact, u), (used, v) = (
        passes(exact_log_probs(new, ids), exact_log_probs(old, ids)),
        passes(after.used, before.used),
    )
    assert noise.decisions == len(exact) == (ANSWERS - 4 if ratio == "sequence" else answers[4:].sum())
    near = sum(int(((u - edge).abs() < 4 * LOG_PROB_STD).sum()) for edge in (low, high))
    assert abs(noise.changed - (used != exact).sum()) <= near
    assert noise.error == pytest.approx(
        (u - v).square().mean().sqrt().item(), rel=CLIP_NOISE_ERROR_RELATIVE, abs=LOG_PROB_STD
    )
    assert (
        noise.share == noise.changed / noise.decisions <= (noise.changed_by_body + noise.changed_by_head) / len(exact)
    )
    if body == "fp32":
        assert noise.changed == 0
    elif "bf16" in body:
        assert noise.changed_by_body > 0 and noise.error > 100 * LOG_PROB_STD


def test_the_block_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, code),) = blocks_in_order((DOCS / "guides" / "precision.md").read_text())
    model, _ = models(torch.bfloat16, lora=False)
    ids, mask, advantages = batch()
    names = {"model": model, "input_ids": ids, "attention_mask": None, "answer_mask": mask, "advantages": advantages}
    exec(code, names)
    assert capsys.readouterr().out == "0 of 28 decisions differ, 0 because of the body\n"


@pytest.mark.parametrize(("softcap", "replacement"), [(None, "sdpa"), (50.0, "eager")])
def test_flash_attention_is_replaced_in_fp32(
    softcap: float | None, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, implementations = [], []

    def flash(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(query.dtype)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_test", flash)
    model, _ = models(torch.bfloat16, lora=False)
    model.config._attn_implementation = "flash_test"
    model.config.attn_logit_softcapping = softcap
    model.model.register_forward_pre_hook(lambda *_: implementations.append(model.config._attn_implementation))
    log_probs_by_precision(model, batch()[0])
    assert (
        set(seen) == {torch.bfloat16}
        and implementations[-1] == replacement
        and model.config._attn_implementation == "flash_test"
    )


def test_bad_input_is_named() -> None:
    model, _ = models(torch.float32, lora=False)
    ids, mask, advantages = batch()
    scored = log_probs_by_precision(model, ids)
    with pytest.raises(ValueError, match=r"objective must be an Objective whose surrogate is one of clip, .*'sapo'"):
        clip_noise(scored, scored, advantages, mask[:, 1:], Objective.preset("sapo"))
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"neither sharded nor quantized, got lm_head\.weight as a Parameter"):
        log_probs_by_precision(model, ids)


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_generators_are_those_of_before(fails: bool) -> None:
    model, _ = models(torch.float32, lora=False)
    ids, mask, _ = batch()
    expected = log_probs_by_precision(model, ids, answer_mask=mask)
    model.train()
    model.model.layers[0].eval()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5

    def draw(*_: Any) -> None:
        drawn()
        if fails:
            raise KeyboardInterrupt

    model.model.norm.register_forward_hook(draw)
    modes = [module.training for module in model.modules()]
    set_seed(0)
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        assert all(map(torch.equal, log_probs_by_precision(model, ids, answer_mask=mask), expected))
    assert modes == [module.training for module in model.modules()]
    numbers = drawn()
    set_seed(0)
    assert numbers == drawn()
