"""A small language model, trained here, and what a gradient budget finds in its logits.

    python -m gspo_kernels.benchmarks policy    train, sample, save to runs/policy, report (10 minutes on one CPU core)

A formula for peaked logits (`peaked.py`) is only as good as who wrote it. So a Qwen3 learns arithmetic in steps from
text made here (`arithmetic.py`), until about half of its sampled answers are right; its hidden states, its head and the
tokens it sampled are saved for other benchmarks, and are put beside the formula's in the same situation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from gspo_kernels import gspo_fused_loss, linear_log_probs
from gspo_kernels.integrations.reference_trainer.policy import Policy, make_policy
from gspo_kernels.integrations.reference_trainer.sampling import sample
from gspo_kernels.integrations.reference_trainer.tasks import answer_found

from .. import measure, peaked, workloads
from ..measure import Record
from ..suites import sparsity
from ..suites.step import positive
from ..workloads import BUDGETS
from . import arithmetic
from .arithmetic import END, PAD, Problem

FOLDER = Path("runs") / "policy"
ZERO, CLIPPED = 19 / 64, 7 / 64  # shares of sequences, as in `sparsity.py`
ANSWER = 24  # tokens


class Size(NamedTuple):
    vocab: int
    stories: int  # of the corpus
    problems: int  # to learn from
    layers: int
    width: int
    steps: int  # at most
    batch: int  # texts per step, a quarter of them stories
    learning_rate: float
    enough: float  # accuracy at which training ends: a policy that RL can still teach something
    probe: int  # problems per measurement of the accuracy
    sequences: int  # sampled and saved
    for_rl: int  # prompts written


SIZES = {
    "cpu": Size(33_280, 150_000, 40_000, 4, 256, 2000, 32, 2e-3, 0.5, 128, 160, 2048),
    "cuda": Size(33_280, 150_000, 100_000, 12, 1024, 4000, 128, 3e-4, 0.5, 512, 512, 4096),
    "tiny": Size(600, 400, 400, 1, 64, 12, 8, 3e-3, 0.5, 8, 16, 16),
}
PROBE_EVERY = 50  # steps


class States(NamedTuple):
    """What a policy predicted its own answers from: S sequences, padded to L tokens."""

    hidden: Tensor  # [S, L, H] fp32
    weight: Tensor  # [V, H] fp32
    target_ids: Tensor  # [S, L]
    mask: Tensor  # [S, L] bool

    def rows(self) -> tuple[Tensor, Tensor]:
        """Without padding: [N, H] and [N]."""
        return self.hidden[self.mask], self.target_ids[self.mask]


def load(folder: Path = FOLDER) -> States:
    """What was saved by the last run."""
    if not (folder / "states.pt").is_file():
        raise FileNotFoundError(f"{folder} holds no policy: run `python -m gspo_kernels.benchmarks policy` first")
    return States(**torch.load(folder / "states.pt", weights_only=True))


def digest(folder: Path = FOLDER) -> str:
    """Of its weights: what else was measured on the same policy has the same."""
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]


# Training


class Text(NamedTuple):
    ids: list[int]
    silent: int  # tokens at its start that are given and not learned


def random_policy(size: Size, tokenizer: PreTrainedTokenizerFast) -> Policy:
    heads = max(size.width // 64, 2)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=size.width // heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return make_policy(Qwen3ForCausalLM(config), tokenizer)


def tokenized(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], stories: Sequence[str]) -> list[Text]:
    """Solutions are learned, prompts are not; stories are learned from their second token on."""
    asked = tokenizer([p.prompt for p in problems])["input_ids"]
    solved = tokenizer([p.solution + END for p in problems])["input_ids"]
    told = tokenizer([story + END for story in stories])["input_ids"]
    return [Text(a + b, len(a)) for a, b in zip(asked, solved, strict=True)] + [Text(ids, 1) for ids in told]


def batches(texts: Sequence[Text], size: int, seed: int) -> Iterator[list[Text]]:
    """Without end, in a new order each time round."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(texts, len(texts))
        yield from (order[at : at + size] for at in range(0, len(order) - size + 1, size))


def train(policy: Policy, texts: Sequence[Text], size: Size, accuracy: Callable[[], float]) -> Record:
    """Until the accuracy of sampled answers is enough, or the steps are over."""
    model, device = policy.model, policy.model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    losses, curve, started, step = [], [], time.perf_counter(), 0
    for step, batch in enumerate(batches(texts, size.batch, seed=0), start=1):
        loss = cross_entropy(policy, batch, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
        if step % PROBE_EVERY == 0 or step == size.steps:
            loss_since = sum(losses[-PROBE_EVERY:]) / len(losses[-PROBE_EVERY:])
            curve.append({"step": step, "loss": loss_since, "accuracy": accuracy()})
            print(f"step {step}: loss {loss_since:.3f}, accuracy {curve[-1]['accuracy']:.3f}", flush=True)
            if curve[-1]["accuracy"] >= size.enough or step == size.steps:
                break
    return {"steps": step, "texts per step": size.batch, "seconds": time.perf_counter() - started, "curve": curve}


def cross_entropy(policy: Policy, batch: Sequence[Text], device: torch.device) -> Tensor:
    length = max(len(text.ids) for text in batch)
    ids = torch.tensor([text.ids + [0] * (length - len(text.ids)) for text in batch], device=device)
    learned = [[text.silent <= at < len(text.ids) for at in range(1, length)] for text in batch]
    learned = torch.tensor(learned, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = policy.head(hidden[learned])
    return F.cross_entropy(logits.float(), ids[:, 1:][learned])


def accuracy_of(policy: Policy, problems: Sequence[Problem]) -> float:
    """The share of answers, sampled at temperature 1, that are right."""
    texts = sample(policy, [p.prompt for p in problems], max_new_tokens=ANSWER, temperature=1.0).texts
    return sum(answer_found(text, p.answer) for text, p in zip(texts, problems, strict=True)) / len(problems)


@torch.no_grad()
def states_of(policy: Policy, problems: Sequence[Problem]) -> States:
    """One answer to each, sampled at temperature 1."""
    rollout = sample(policy, [p.prompt for p in problems], max_new_tokens=ANSWER, temperature=1.0)
    hidden = policy.hidden_states(rollout.input_ids, rollout.attention_mask, rollout.prompt_width)
    return States(hidden, policy.head.get_parameter("weight").detach(), rollout.answer_ids, rollout.answer_mask)


# The policy beside the formula


class Situation(NamedTuple):
    """Sequences of which some have zero advantage and some lie beyond the clip."""

    hidden: Tensor  # [N, H]
    weight: Tensor
    target_ids: Tensor
    cu_seqlens: Tensor  # [S + 1]
    advantages: Tensor  # [S]
    old_log_probs: Tensor  # [N]
    entropy: Tensor  # [N]


@torch.no_grad()
def situation(hidden: Tensor, weight: Tensor, target_ids: Tensor, lengths: Tensor) -> Situation:
    count = lengths.shape[0]
    roles = workloads.roles(count, round(ZERO * count), round(CLIPPED * count))
    advantages, log_ratio = (x.to(hidden.device) for x in roles)
    out = linear_log_probs(hidden, weight, target_ids, entropy=True)
    assert out.entropy is not None
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    old = out.log_probs - log_ratio.repeat_interleave(lengths)
    return Situation(hidden, weight, target_ids, cu_seqlens, advantages, old, out.entropy)


def by_budget(s: Situation, name: str) -> list[Record]:
    """What each budget leaves to compute, and how far its gradients are from the exact ones."""

    def run(budget: float) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        hidden, weight = (x.detach().requires_grad_() for x in (s.hidden, s.weight))
        out = gspo_fused_loss(
            hidden,
            weight,
            s.target_ids,
            s.advantages,
            cu_seqlens=s.cu_seqlens,
            old_log_probs=s.old_log_probs,
            gradient_budget=budget,
        )
        d_hidden, d_weight = torch.autograd.grad(out.loss, (hidden, weight))
        return out.metrics, d_hidden, d_weight

    return sparsity.by_budget(run, BUDGETS, name)


def beside_the_formula(states: States) -> Record:
    """The trained policy and `peaked.make` at the same N, H, V, in sequences of the same lengths."""
    hidden, ids = states.rows()
    device, lengths = hidden.device, states.mask.sum(1)
    formula = peaked.make(hidden.shape[0], hidden.shape[1], states.weight.shape[0])
    both = {
        "trained": (hidden, states.weight, ids),
        "formula": (formula.hidden.to(device), formula.weight.to(device), formula.target_ids.to(device)),
    }
    results: Record = {}
    for name, head in both.items():
        s = situation(*head, lengths)
        results[name] = {"entropy": peaked.entropy_quantiles(s.entropy), "budgets": by_budget(s, name)}
    return results


# The whole run


def make(size: Size, device: torch.device, folder: Path) -> Record:
    torch.manual_seed(0)
    held_out = arithmetic.problems(size.for_rl, seed=1)  # for RL and for every accuracy: never among what is learned
    learned = arithmetic.problems(size.problems, seed=0, without=frozenset(p.prompt for p in held_out))
    stories = list(arithmetic.stories(size.stories, seed=2))
    corpus = [*stories, *(p.prompt + p.solution + END for p in learned)]
    tokenizer = arithmetic.bpe(corpus, size.vocab)
    used = {token for ids in tokenizer(corpus)["input_ids"] for token in ids}
    print(f"a vocabulary of {len(tokenizer)} from {len(corpus)} texts, of which they use {len(used)}", flush=True)
    policy = random_policy(size, tokenizer)
    policy.model.to(device)
    probe = held_out[: size.probe]
    texts = tokenized(tokenizer, learned, stories[: len(learned) // 3])
    training = train(policy, texts, size, lambda: accuracy_of(policy, probe))
    states = states_of(policy, held_out[-size.sequences :])
    policy.save(folder / "model")
    lines = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in held_out]
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n")
    torch.save({name: x.cpu() for name, x in states._asdict().items()}, folder / "states.pt")
    merges = size.vocab - len(arithmetic.SPECIAL) - 256
    return {
        "model": {"layers": size.layers, "H": size.width, "V": size.vocab, "merges": merges},
        "digest": digest(folder),
        "vocabulary": {"entries": len(tokenizer), "used by the corpus": len(used) / len(tokenizer)},
        "training": training,
        "accuracy of sampled answers": accuracy_of(policy, held_out[size.probe : 3 * size.probe]),
        "sampled": {"sequences": states.mask.shape[0], "tokens": int(states.mask.sum())},
        **beside_the_formula(states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks policy", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds; its numbers mean nothing")
    parser.add_argument("--folder", type=Path, help="for checkpoint and states (default runs/policy, runs/tiny-policy)")
    parser.add_argument("--threads", type=positive, default=1, help="of a CPU (default 1)")
    parser.add_argument("--output", type=Path, help=measure.OUTPUT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()  # of saving, which would write between our lines
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES["tiny" if arguments.tiny else device.type]
    folder = arguments.folder or (FOLDER.with_name("tiny-policy") if arguments.tiny else FOLDER)
    output = measure.destination("policy", device, arguments.output, arguments.tiny)
    print(measure.save("policy", device, make(size, device, folder), output))
