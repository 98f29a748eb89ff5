"""`clip_noise` counts the decisions that a float64 model would change, and leaves model and training unchanged."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import random
import warnings
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

from gspo_kernels import Objective, validation
from gspo_kernels.integrations.huggingface import LogProbsByPrecision, clip_noise, log_probs_by_precision
from gspo_kernels.objective import AGGREGATIONS, CLIPPING, RATIOS, SURROGATES

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


def exact_log_probs(model: Any, ids: Tensor) -> Tensor:
    logits = copy.deepcopy(model).double()(ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("ratio", ["sequence", "token"])
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
    objective = Objective.preset("gspo" if ratio == "sequence" else "grpo", clip_low=1e-3, clip_high=1e-3, kl_coef=0.1)
    noise = clip_noise(before, after, advantages, answers, objective)

    low, high = objective.log_window
    sign = advantages.sign()[:, None]

    def passes(new_log_probs: Tensor, old_log_probs: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.where(answers, new_log_probs.double() - old_log_probs.double(), 0)
        u = u.sum(1, keepdim=True) / answers.sum(1, keepdim=True) if ratio == "sequence" else u
        decided = (sign != 0) & (answers if ratio == "token" else torch.ones_like(sign, dtype=torch.bool))
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
    with pytest.raises(ValueError, match=r"input_ids must be a tensor of token ids \[B, T\].*, got a tensor \[32\]"):
        log_probs_by_precision(model, ids[:, 0])
    with pytest.raises(ValueError, match=r"answer_mask must be a tensor \[32, 40\].*, got a tensor \[32, 39\]"):
        log_probs_by_precision(model, ids, answer_mask=mask[:, 1:])
    scored = log_probs_by_precision(model, ids)
    with pytest.raises(ValueError, match=r"objective must be an Objective whose surrogate is one of clip, .*'sapo'"):
        clip_noise(scored, scored, advantages, mask[:, 1:], Objective.preset("sapo"))
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(97, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"neither sharded nor quantized, got lm_head\.weight as a Parameter"):
        log_probs_by_precision(model, ids)


def counts_in_float64(before: Any, after: Any, advantages: Tensor, mask: Tensor, objective: Objective) -> list[float]:
    """The fields of `ClipNoise` by the formulas of the objective, for advantages [B, T]."""

    def gates(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a token's gradient passes the clip, and its log-ratio, both [B, T]."""
        old, new = old.double(), new.double()
        u = (new - old) * mask
        u = u if objective.ratio == "token" else (u.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(u)
        rises = advantages > 0
        if objective.surrogate == "clip":
            bound = objective.delta or math.inf
            falls_out = (u < math.log1p(-objective.clip_low)) | (u > math.log(bound))
            return ~torch.where(rises, u > math.log1p(objective.clip_high), falls_out), u
        p, q = new.exp(), old.exp()
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        divergence = {"dppo_tv": (p - q).abs(), "dppo_kl": kl}[objective.surrogate]
        limit = torch.where(rises, objective.clip_high, objective.clip_low)
        return ~(torch.where(rises, p > q, p < q) & (divergence > limit)), u

    (used, u), (head, _), (exact, v) = (gates(*pair) for pair in zip(before, after, strict=True))
    live = mask & (advantages != 0)
    unit = (lambda x: x.any(1)) if objective.ratio == "sequence" else lambda x: x
    error = torch.where(live, (u - v).square(), 0)
    error = error.amax(1) if objective.ratio == "sequence" else error
    changed = [unit((a != b) & live).sum().item() for a, b in ((used, exact), (head, exact), (used, head))]
    return [unit(live).sum().item(), *changed, error.sum().item()]


def test_every_objective_is_counted_as_in_float64_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_warned", set())
    rng = torch.Generator().manual_seed(0)
    # Log-probs are multiples of 1/64. So their sums are exact in fp32, and no mean of up to six is at a bound.
    draw = functools.partial(torch.randint, size=(ANSWERS, 6), generator=rng)
    before = LogProbsByPrecision(*[-draw(10, 100) / 64.0] * 3)
    after = LogProbsByPrecision(*(before.used + draw(-4, 5) / 64.0 for _ in range(3)))
    mask = torch.arange(6) < torch.arange(ANSWERS)[:, None] % 6 + 1
    of_tokens = draw(-1, 2).float()
    window: dict[str, Any] = {"clip_low": 0.02, "clip_high": 0.03}
    objectives, refused = [Objective.preset("luspo", **window)], set()
    for ratio, surrogate, aggregation in itertools.product(RATIOS, SURROGATES, AGGREGATIONS):
        options: dict[str, Any] = {"delta": 1.04} if surrogate == "clip" else {}
        options |= {"clip_low": 1e-4, "clip_high": 2e-4} if surrogate == "dppo_kl" else window
        with contextlib.suppress(ValueError), warnings.catch_warnings():  # Objective refuses some, and warns
            warnings.simplefilter("ignore")
            objectives.append(Objective(ratio, surrogate, aggregation=aggregation, length_norm=6.0, **options))
    for objective in objectives:
        for advantages in (of_tokens, of_tokens[:, 0]):
            scored: Any = before, after, advantages, mask, objective
            if objective.surrogate not in CLIPPING:
                refused.add(objective.surrogate)
                with pytest.raises(ValueError, match="surrogate is one of clip, dppo_tv, dppo_kl, got surrogate="):
                    clip_noise(*scored)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                noise = clip_noise(*scored)
            full = advantages if advantages.ndim == 2 else advantages[:, None].expand_as(mask)
            expected = counts_in_float64(before, after, full, mask, objective)
            assert list(noise[:4]) == expected[:4] and min(noise) > 0, objective
            assert noise.squared_error == pytest.approx(expected[4], rel=1e-5)
    assert refused == {*SURROGATES} - {*CLIPPING}


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
