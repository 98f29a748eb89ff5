"""Measure the clip decisions that rounding changes in a whole model: body and head, old and new log-probs.

    python -m gspo_kernels.benchmarks precision         about 40 minutes on two cores without native bf16 matmul

On a GPU, the model and the answers are larger, and the model is trained in bf16 autocast.

The reference is the whole model in float64. A small Qwen3 learns Python source code, and samples answers. GSPO's loss
updates it three times in fp32, at several learning rates. Then the model before and the model after the updates compute
log-probs, with bodies in several dtypes and several heads. Norms and rotary angles are in fp32 even in the reference,
because transformers computes them so; the row "fp32" shows how little that matters.

The error of an answer is the mean error of its tokens' log-ratios against float64 with the fp32 weights ("master
weights"). Three numbers follow:

- "wrong": the probability that the error changes a clip decision, if the true log-ratio is normal with standard
  deviation 3.4e-4, so that about 15 % of the answers are clipped, as in the paper. Answers of 256 tokens are halves of
  the measured answers. Answers of 1,024 and 4,096 tokens are 2 and 8 measured answers, drawn with replacement: their
  errors are taken as independent of each other, while those within a measured answer are not.
- "counted": the share of measured answers whose decision changes, at the log-ratio and advantage that they had.
- Standard deviations of the errors of tokens and of answers, in nats.

"sampler" compares the log-probs of a sampler and a trainer with the same weights, before the updates: by the head of
each, the metrics of `sampler_mismatch`, and the standard deviation of answers' mean log-ratios.

The mean error is not subtracted. The 95 % intervals of "wrong" are a bootstrap over answers, those of "counted" are
Wilson's. Neither covers other models.
"""

from __future__ import annotations

import copy
import itertools
import math
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs
from gspo_kernels.sampler_mismatch import importance_weights

from .. import candidates, measure
from ..candidates import LogProbs
from ..measure import Record
from ..suites.options import device_of, parser_of
from ..workloads import Head

Model = Any  # a transformers model with `base_model` and a head
FP32_LOGITS = "fp32 logits"
OURS, NAIVE = "ours", "naive GSPO"
END, PAD = "<end>", "<pad>"
HEADS = (NAIVE, "TRL fused head", "TRL cast_lm_head_to_fp32", "Liger GRPO loss", OURS)  # of `candidates`, where present
OURS_FP32, OURS_SPLIT = "ours, fp32 head", "ours, bf16x3"  # `head_precision`
EMULATED = f"{OURS_SPLIT} (emulated)"  # on a CPU
KEEP_FP32 = (FP32_LOGITS, "TRL cast_lm_head_to_fp32", OURS_FP32, OURS_SPLIT, EMULATED)  # that autocast does not cast
OTHER_ENGINE = "old by full logits, new by ours"
SAMPLERS = {"bf16 logits": NAIVE, "fp32 head": FP32_LOGITS}  # heads of a sampler with bf16 weights
TRAINERS = ("bf16 autocast", NAIVE), ("bf16 autocast", OURS), ("bf16 autocast", OURS_FP32), ("bf16 weights", OURS)
LENGTHS = 256, 1024, 4096  # tokens of an answer, for "wrong"
UPDATES = 3
REDRAWS, DRAWN = 40, 2000  # bootstrap samples of the answers; long answers put together for each
SPREAD = 3.4e-4  # standard deviation of the true log-ratios of answers, for "wrong"
Z, T = 1.959964, 2.022691  # 97.5 % quantiles: normal, and Student's t with REDRAWS - 1 degrees of freedom
ROWS = 4  # answers per forward


class Size(NamedTuple):
    vocab: int
    layers: int
    width: int
    files: int  # source files of the standard library that the model learns
    steps: int  # training steps
    batch: int  # texts per step
    prompt: int  # tokens
    answer: int  # tokens of each measured answer
    answers: int  # per seed
    learning_rates: tuple[float, ...]
    seeds: int


FULL = Size(4096, 6, 256, 500, 300, 4, 32, 512, 16, (3e-7, 1e-6, 3e-6), 3)
ON_GPU = Size(16_384, 12, 1024, 1500, 400, 16, 32, 1024, 32, (1e-6, 3e-6), 3)
TINY = Size(600, 1, 64, 60, 2, 2, 8, 64, 8, (1e-6,), 1)


class Body(NamedTuple):
    """How a model computes: the dtype of its weights, and the dtype of autocast."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None

    @property
    def operands(self) -> torch.dtype:
        """The dtype of the head's operands."""
        return self.autocast or self.weights


BODIES = {
    "fp32": Body(),
    "bf16 autocast": Body(autocast=torch.bfloat16),
    "bf16 weights": Body(torch.bfloat16),
    "fp16 autocast": Body(autocast=torch.float16),
    "fp16 weights": Body(torch.float16),
}
EXACT = Body(torch.float64)


def bpe(texts: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `vocab` entries. Raise a ValueError if the texts are too few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    options: Record = dict(special_tokens=[PAD, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab, min_frequency=2, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    if (size := tokenizer.get_vocab_size()) != vocab:
        raise ValueError(f"texts: expected enough for a vocabulary of {vocab}, got one of {size}")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def token_ids(size: Size) -> Tensor:
    """Token ids of source files of Python's standard library, [tokens], by a BPE trained on a part of them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    texts = [path.read_text(errors="ignore") for path in files[:: max(1, len(files) // size.files)]]
    tokenizer = bpe(texts[: max(20, size.files // 4)], size.vocab)
    return torch.cat([torch.tensor(tokenizer(text + END)["input_ids"]) for text in texts])


def windows(ids: Tensor, count: int, length: int) -> Tensor:
    """Draw `count` pieces of the text, [count, length]."""
    begins = torch.randint(len(ids) - length, (count,))
    return torch.stack([ids[begin : begin + length] for begin in begins.tolist()])


def trained_model(ids: Tensor, size: Size) -> tuple[Model, float]:
    """Train a Qwen3 on the text, in fp32, on a GPU in bf16 autocast. Return it and its last loss in nats."""
    heads = max(size.width // 64, 1)
    options: Record = dict(vocab_size=size.vocab, hidden_size=size.width, intermediate_size=3 * size.width)
    options |= dict(num_attention_heads=heads, num_key_value_heads=max(heads // 2, 1), head_dim=64)
    options |= dict(num_hidden_layers=size.layers, max_position_embeddings=2048, tie_word_embeddings=True)
    model: Model = Qwen3ForCausalLM(Qwen3Config(**options))
    model.to(ids.device)
    fastest = 2e-3 * 256 / size.width  # learning rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=fastest, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, fastest, total_steps=size.steps + 1, pct_start=0.1)
    loss = math.nan
    for step in range(1, size.steps + 1):
        batch = windows(ids, size.batch, size.prompt + size.answer)
        with torch.autocast(ids.device.type, torch.bfloat16) if ids.is_cuda else nullcontext():
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        cross_entropy = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        cross_entropy.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss = cross_entropy.item() if math.isnan(loss) else 0.95 * loss + 0.05 * cross_entropy.item()
        if step % 50 == 0:
            print(f"  step {step}: loss {loss:.3f}", flush=True)
    return model.eval(), loss


@torch.no_grad()
def sampled(model: Model, prompts: Tensor, length: int) -> Tensor:
    """Continue every prompt by `length` tokens at temperature 1, [answers, prompt + length]."""
    ids, step, past = prompts, prompts, None
    for _ in range(length):
        out = model(input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        step = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
        ids = torch.cat([ids, step], 1)
    return ids


def updated(model: Model, ids: Tensor, advantages: Tensor, prompt: int, learning_rate: float) -> Model:
    """Return a copy of the model after `UPDATES` updates by GSPO's loss, in fp32."""
    new = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(new.parameters(), lr=learning_rate, weight_decay=0.0)
    with torch.no_grad():
        old = torch.cat([_fused(new, part, 0 * part[:, 0].float(), prompt, None)[1] for part in ids.split(ROWS)])
    for _ in range(UPDATES):
        optimizer.zero_grad(set_to_none=True)
        for part, advantage, before in zip(ids.split(ROWS), advantages.split(ROWS), old.split(ROWS), strict=True):
            loss, _ = _fused(new, part, advantage, prompt, before, len(ids))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(new.parameters(), 1.0)
        optimizer.step()
    return new


def _fused(
    model: Model, ids: Tensor, advantages: Tensor, prompt: int, old: Tensor | None, normalizer: int | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and log-probs [answers, L] of answers."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
    weight = model.get_output_embeddings().weight
    out = gspo_fused_loss(hidden, weight, ids[:, prompt:], advantages, old_log_probs=old, normalizer=normalizer)
    assert out.log_probs is not None
    return out.loss, out.log_probs


def heads_of(body: Body, size: Size, device: torch.device) -> tuple[dict[str, LogProbs], dict[str, str]]:
    """The heads that can run with a body, and why others cannot."""
    every = {name: candidates.ALL[name] for name in HEADS}
    absent = {
        name: why
        for name, candidate in every.items()
        if (why := candidate.absent(Head(size.width, size.vocab), body.operands, device))
    }
    heads = {name: candidate.log_probs for name, candidate in every.items() if name not in absent}
    heads[FP32_LOGITS] = lambda h, w, *rest: candidates.full_log_probs(h.float(), w.float(), *rest)
    heads[OURS_FP32] = partial(unrounded, autocast=body.autocast, head_precision="fp32")
    if device.type == "cpu":
        heads[EMULATED] = by_split_operands
    else:
        heads[OURS_SPLIT] = partial(unrounded, autocast=body.autocast, head_precision="bf16x3")
    return heads, absent


def unrounded(
    hidden: Tensor, weight: Tensor, ids: Tensor, _: float | None, autocast: torch.dtype | None, head_precision: str
) -> Tensor:
    """Our log-probs [N] under autocast that does not round the operands."""
    with torch.autocast(hidden.device.type, autocast) if autocast else nullcontext():
        return linear_log_probs(hidden[None], weight, ids[None], head_precision=head_precision).log_probs[0]


def by_split_operands(hidden: Tensor, weight: Tensor, ids: Tensor, _: float | None) -> Tensor:
    """Our log-probs [N] with the bf16 products that `head_precision="bf16x3"` makes of fp32 operands on a GPU."""
    if hidden.dtype == weight.dtype == torch.float32:
        (h, h_low), (w, w_low) = ((high := x.bfloat16(), (x - high).bfloat16()) for x in (hidden, weight))
        hidden, weight = torch.cat([h_low, h, h], 1), torch.cat([w, w_low, w], 1)
    return linear_log_probs(hidden[None], weight, ids[None]).log_probs[0]


@torch.no_grad()
def log_probs(model: Model, ids: Tensor, prompt: int, body: Body, heads: dict[str, LogProbs]) -> dict[str, Tensor]:
    """Log-probs of the answers' tokens in fp64 on the CPU, [answers, L], by head."""
    model = copy.deepcopy(model).to(body.weights)
    weight = model.get_output_embeddings().weight
    parts: dict[str, list[Tensor]] = {name: [] for name in heads}
    for part in ids.split(ROWS):
        with torch.autocast(ids.device.type, body.autocast) if body.autocast else nullcontext():
            hidden = model.base_model(input_ids=part, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
        rows, targets = hidden.flatten(0, 1), part[:, prompt:].flatten()
        for name, head in heads.items():
            kept = name in KEEP_FP32 or body.autocast is None
            operands = (rows, weight) if kept else (rows.to(body.operands), weight.to(body.operands))
            parts[name].append(head(*operands, targets, None).double().view(len(part), -1).cpu())
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def exact(model: Model, ids: Tensor, prompt: int) -> Tensor:
    """Log-probs of the whole model in float64, [answers, L]."""
    full: LogProbs = lambda *arguments: candidates.full_log_probs(*arguments, accumulator=torch.float64)  # noqa: E731
    return log_probs(model, ids, prompt, EXACT, {"exact": full})["exact"]


class Measured(NamedTuple):
    """Of one head with one body at one learning rate, for the answers of all seeds."""

    error: Tensor  # [answers, L] of log-ratios
    log_ratio: Tensor  # [answers] true, of answers
    advantages: Tensor  # [answers]


class Scored(NamedTuple):
    """Log-probs of one model for the same answers, fp64, [answers, L]."""

    exact: Tensor  # of the whole model in float64
    by_body: dict[str, dict[str, Tensor]]  # by body and head


def scored(model: Model, ids: Tensor, size: Size) -> Scored:
    """Compute the log-probs of answers with every body and head."""
    return Scored(
        exact(model, ids, size.prompt),
        {
            name: log_probs(model, ids, size.prompt, body, heads_of(body, size, ids.device)[0])
            for name, body in BODIES.items()
        },
    )


def compared(old: Scored, new: Scored, advantages: Tensor) -> Iterator[tuple[str, str, Measured]]:
    """Yield body, head and the errors of its log-ratios."""
    true_ratio = new.exact - old.exact
    for body, heads in new.by_body.items():
        pairs = {name: (name, name) for name in heads} | {OTHER_ENGINE: (NAIVE, OURS)}
        for name, (before, after) in pairs.items():
            error = heads[after] - old.by_body[body][before] - true_ratio
            yield body, name, Measured(error, true_ratio.mean(1), advantages)


def passes_clip(u: Tensor, positive: Tensor) -> Tensor:
    """True where a sequence with log-ratio u is not clipped. `positive` is True where the advantage is positive."""
    low, high = Objective().log_window
    return torch.where(positive, u <= high, u >= low)


def flip_chance(error: Tensor) -> Tensor:
    """Probability that an error makes a decision wrong, for a random true log-ratio and sign of the advantage."""
    cdf = torch.special.ndtr
    sides = [cdf((end - error) / SPREAD) - cdf(error.new_tensor(end / SPREAD)) for end in Objective().log_window]
    return 0.5 * (sides[0].abs() + sides[1].abs())


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of hits / count."""
    share = hits / count
    scale = 1 + Z * Z / count
    middle = (share + Z * Z / (2 * count)) / scale
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def wrong(errors: Tensor, length: int, rng: torch.Generator) -> Tensor:
    """Probability that the errors [answers, L] of tokens change the decision on an answer of `length` tokens, []."""
    answers, measured_length = errors.shape
    if length <= measured_length:
        pieces = errors[:, : measured_length // length * length].unflatten(1, (-1, length))
        return flip_chance(pieces.mean(2)).mean()
    drawn = torch.randint(answers, (DRAWN, max(1, length // measured_length)), generator=rng)
    return flip_chance(errors.mean(1)[drawn].mean(1)).mean()


def wrong_by_length(errors: Tensor) -> Record:
    """Shares of wrong decisions by length, with bootstrap intervals."""
    rng = torch.Generator().manual_seed(0)
    shares, intervals = [], []
    for length in LENGTHS:
        share = wrong(errors, length, rng).item()
        redrawn = [errors[torch.randint(len(errors), (len(errors),), generator=rng)] for _ in range(REDRAWS)]
        deviation = torch.stack([wrong(x, length, rng) for x in redrawn]).std().item()
        shares.append(share)
        intervals.append((max(0.0, share - T * deviation), share + T * deviation))
    return {"lengths": LENGTHS, "wrong": shares, "95 %": intervals}


def counted(of: Measured) -> Record:
    """The measured answers whose decision changes."""
    positive = of.advantages > 0
    changed = passes_clip(of.log_ratio + of.error.mean(1), positive) != passes_clip(of.log_ratio, positive)
    return {"answers": len(changed), "counted": int(changed.sum()), "95 %": interval(int(changed.sum()), len(changed))}


def summary(of: Measured) -> Record:
    return {
        "log-ratio": {"std of tokens": of.error.std().item(), "std of answers": of.error.mean(1).std().item()},
        **wrong_by_length(of.error),
        "measured answers": counted(of),
    }


def sampler_mismatch(scored: Sequence[Scored]) -> list[Record]:
    """Differences between samplers with bf16 weights and trainers, for the answers of all seeds."""
    records = []
    for sampler, (body, head) in itertools.product(SAMPLERS, TRAINERS):
        rollout = torch.cat([x.by_body["bf16 weights"][SAMPLERS[sampler]] for x in scored])
        old = torch.cat([x.by_body[body][head] for x in scored])
        metrics = importance_weights(old, rollout, torch.ones_like(old, dtype=torch.bool), high=math.inf).metrics
        difference = old - rollout
        records.append(
            {
                "sampler": sampler,
                "trainer": {"body": body, "head": head},
                "std of tokens": difference.std().item(),
                "std of answers": difference.mean(1).std().item(),
                **{name: x.item() for name, x in metrics.items()},
            }
        )
    return records


def joined(parts: list[Measured]) -> Measured:
    return Measured(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def study(size: Size, device: torch.device) -> Record:
    """Train the model, and measure every body and head."""
    torch.manual_seed(0)
    ids = token_ids(size).to(device)
    model, loss = trained_model(ids, size)
    parts: dict[tuple[float, str, str], list[Measured]] = {}
    before: list[Scored] = []
    for seed in range(size.seeds):
        torch.manual_seed(1 + seed)
        answers = sampled(model, windows(ids, size.answers, size.prompt), size.answer)
        advantages = torch.randn(size.answers)
        old = scored(model, answers, size)
        before.append(old)
        for learning_rate in size.learning_rates:
            print(f"  seed {seed}, learning rate {learning_rate:g}", flush=True)
            new = scored(updated(model, answers, advantages.to(device), size.prompt, learning_rate), answers, size)
            for body, head, found in compared(old, new, advantages):
                parts.setdefault((learning_rate, body, head), []).append(found)
    runs = []
    for learning_rate in size.learning_rates:
        bodies: Record = {}
        for (rate, body, head), found in parts.items():
            if rate == learning_rate:
                records = bodies.setdefault(body, [])
                records.append({"name": head} | summary(joined(found)))
        true = joined(parts[learning_rate, "fp32", OURS])
        clipped = ~passes_clip(true.log_ratio, true.advantages > 0)
        runs.append(
            {
                "learning rate": learning_rate,
                "true log-ratio": {"std": true.log_ratio.std().item(), "clipped": clipped.double().mean().item()},
                "bodies": bodies,
            }
        )
    absent = {
        f"{head}, {name}": why for name, body in BODIES.items() for head, why in heads_of(body, size, device)[1].items()
    }
    return {
        "model": {"layers": size.layers, "H": size.width, "V": size.vocab, "steps": size.steps, "loss": loss},
        "measured": {"seeds": size.seeds, "answers": size.answers, "tokens": size.answer, "updates": UPDATES},
        "not measured": absent,
        "sampler": sampler_mismatch(before),
        "runs": runs,
    }


def main() -> None:
    parser = parser_of("precision", __doc__)
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    disable_progress_bar()
    device = options.device
    output = measure.destination("precision", device, options.output, options.tiny)
    size = TINY if options.tiny else FULL if device.type == "cpu" else ON_GPU
    print(measure.save("precision", device, study(size, device), output))
