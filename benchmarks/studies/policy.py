"""Train a small language model on a CPU, and measure what a gradient budget saves on it.

    python -m gspo_kernels.benchmarks policy    10 minutes on one core; saves the policy in runs/policy

Other benchmarks use a synthetic policy, made by the formula in `peaked.py`. This one checks the formula: a Qwen3 learns
the problems of `integrations/tasks/arithmetic.py` until about half of its sampled answers are right, and is
compared with a synthetic policy of the same sizes. `fidelity` loads what it saves.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from gspo_kernels import linear_log_probs
from gspo_kernels.integrations.reference_trainer.policy import Policy, make_policy
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, sample
from gspo_kernels.integrations.tasks import Example, answer_found, batches
from gspo_kernels.integrations.tasks.arithmetic import FIRST, WORDS, Problem, joined, problems

from .. import measure, peaked, workloads
from ..measure import Record
from ..suites import sparsity
from ..suites.options import parser_of

FOLDER = Path("runs") / "policy"
ZERO, CLIPPED = 19 / 64, 7 / 64  # shares of the sequences that have advantage 0, and that are clipped
END, PAD = "<end>", "<pad>"
FAMILY, TOWNS, GOODS, BRANDS = map(joined, ("family", "towns", "goods", "brands"))  # words of filler text
ANSWER = 24  # most tokens of a sampled answer


class Size(NamedTuple):
    vocab: int
    stories: int  # sentences of filler text
    problems: int  # problems for training
    layers: int
    width: int
    steps: int  # most training steps
    batch: int  # texts per step, about a quarter of them stories
    learning_rate: float
    probe: int  # problems per measurement of the accuracy
    sequences: int  # number of answers that are sampled and saved
    for_rl: int  # number of problems that are saved for RL


FULL = Size(33_280, 150_000, 40_000, 4, 256, 2000, 32, 2e-3, probe=128, sequences=160, for_rl=2048)
TINY = Size(600, 400, 400, 1, 64, 12, 8, 3e-3, probe=8, sequences=16, for_rl=16)
ENOUGH = 0.5  # training ends at this accuracy, so that RL can still improve the policy
PROBE_EVERY = 50  # steps
Text = tuple[list[int], int]  # token ids, and how many of them, at the start, are not learned


class States(NamedTuple):
    """Hidden states from which a policy predicts its own answers: S sequences, padded to L tokens."""

    hidden: Tensor  # [S, L, H] fp32
    weight: Tensor  # [V, H] fp32
    target_ids: Tensor  # [S, L]
    mask: Tensor  # [S, L] bool

    def rows(self) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H] and target ids [N] without padding."""
        return self.hidden[self.mask], self.target_ids[self.mask]


def load(folder: Path) -> States:
    """Load the states that the last run saved. If there are none, the FileNotFoundError names the command to run."""
    if not (folder / "states.pt").is_file():
        raise FileNotFoundError(f"{folder} holds no policy: run `python -m gspo_kernels.benchmarks policy` first")
    return States(**torch.load(folder / "states.pt", weights_only=True))


def digest(folder: Path) -> str:
    """Hash the policy's weights, to identify the policy in JSON files."""
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]


def common(words: Sequence[str], rng: random.Random) -> str:
    """Draw a word. Words early in the list are more frequent."""
    return words[int(len(words) * rng.random() ** 1.5)]


def story(rng: random.Random) -> str:
    """Make a sentence of names and numbers."""
    who = f"{common(FIRST, rng)} {common(FAMILY, rng)}"
    things = common(GOODS, rng).lower() + ("s" if rng.random() < 0.5 else "")
    template = rng.choice(WORDS["stories"])
    town, brand, other = (common(names, rng) for names in (TOWNS, BRANDS, TOWNS))
    chore = rng.choice(WORDS["chores"])
    n = rng.randrange(10_000)
    m = rng.randrange(10_000)
    names = {"who": who, "things": things, "town": town, "brand": brand, "other": other, "chore": chore}
    return template.format(**names, n=n, m=m, year=rng.randint(1900, 2099))


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


def random_policy(size: Size, tokenizer: PreTrainedTokenizerFast) -> Policy:
    heads = max(size.width // 64, 2)
    entries = tokenizer.get_vocab()
    options: Record = dict(vocab_size=size.vocab, hidden_size=size.width, intermediate_size=3 * size.width)
    options |= dict(num_hidden_layers=size.layers, head_dim=size.width // heads, max_position_embeddings=256)
    options |= dict(num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=False)
    config = Qwen3Config(**options, eos_token_id=entries[END], pad_token_id=entries[PAD])
    return make_policy(Qwen3ForCausalLM(config), tokenizer)


def tokenized(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], stories: Sequence[str]) -> list[Text]:
    """Tokenize problems and stories. A problem trains only its solution, a story all but its first token."""
    prompts = tokenizer([p.prompt for p in problems])["input_ids"]
    solutions = tokenizer([p.solution + END for p in problems])["input_ids"]
    texts = [(a + b, len(a)) for a, b in zip(prompts, solutions, strict=True)]
    return texts + [(ids, 1) for ids in tokenizer([story + END for story in stories])["input_ids"]]


def train(policy: Policy, texts: Sequence[Text], size: Size, accuracy: Callable[[], float]) -> Record:
    """Train until the accuracy of sampled answers reaches `ENOUGH`, at most for `size.steps` steps."""
    model = policy.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    losses = []
    batch = batches(texts, size.batch, seed=0)
    while True:
        loss = cross_entropy(policy, next(batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
        last = len(losses) == size.steps
        if last or len(losses) % PROBE_EVERY == 0:
            recent = fmean(losses[-PROBE_EVERY:])
            share = accuracy()
            print(f"step {len(losses)}: loss {recent:.3f}, accuracy {share:.3f}", flush=True)
            if last or share >= ENOUGH:
                return {"steps": len(losses), "loss": recent}


def cross_entropy(policy: Policy, batch: Sequence[Text]) -> Tensor:
    length = max(len(ids) for ids, _ in batch)
    learned = torch.tensor([[prompt <= at < len(ids) for at in range(1, length)] for ids, prompt in batch])
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = policy.head(hidden[learned])
    return F.cross_entropy(logits.float(), ids[:, 1:][learned])


def answers_of(policy: Policy, problems: Sequence[Problem]) -> Rollout:
    """Sample one answer to each problem, at temperature 1."""
    return sample(policy, [Example(p.prompt, p.answer) for p in problems], max_new_tokens=ANSWER, temperature=1.0)


def accuracy_of(policy: Policy, problems: Sequence[Problem]) -> float:
    """Share of problems for which one sampled answer is right."""
    texts = answers_of(policy, problems).texts
    return sum(answer_found(text, p.answer) for text, p in zip(texts, problems, strict=True)) / len(problems)


@torch.no_grad()
def states_of(policy: Policy, problems: Sequence[Problem]) -> States:
    rollout = answers_of(policy, problems)
    hidden, _ = policy.run(rollout, lambda hidden, *_, **options: hidden)
    return States(hidden, policy.head.get_parameter("weight").detach(), rollout.answer_ids, rollout.answer_mask)


def budgets_of(hidden: Tensor, weight: Tensor, target_ids: Tensor, lengths: Tensor, name: str) -> Record:
    """Measure entropies, and passes and gradient errors per budget. Some sequences have advantage 0 or are clipped.

    hidden [N, H], weight [V, H], target_ids [N], lengths [S]. `name` is printed with the results.
    """
    count = len(lengths)
    advantages, log_ratio = workloads.roles(count, round(ZERO * count), round(CLIPPED * count))
    with torch.no_grad():
        out = linear_log_probs(hidden, weight, target_ids, entropy=True)
    assert out.entropy is not None
    old = out.log_probs - log_ratio.repeat_interleave(lengths)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    budgets = sparsity.by_budget(name, hidden, weight, target_ids, advantages, cu_seqlens=cu_seqlens, old_log_probs=old)
    return {"entropy": peaked.entropy_quantiles(out.entropy), "budgets": budgets}


def learn(size: Size, folder: Path) -> tuple[Policy, list[Problem], Record]:
    """Train a policy, and save it in `folder` with problems that it has not seen. Return it, them and the training."""
    torch.manual_seed(0)
    held_out = problems(size.for_rl, seed=1)  # for RL and for accuracies, not for training
    learned = problems(size.problems, seed=0, without=frozenset(p.prompt for p in held_out))
    rng = random.Random(2)
    stories = [story(rng) for _ in range(size.stories)]
    tokenizer = bpe([*stories, *(p.prompt + p.solution + END for p in learned)], size.vocab)
    policy = random_policy(size, tokenizer)
    texts = tokenized(tokenizer, learned, stories[: len(learned) // 3])
    training = train(policy, texts, size, lambda: accuracy_of(policy, held_out[: size.probe]))
    policy.save(folder / "model")
    lines = [json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in held_out]
    (folder / "problems.jsonl").write_text("".join(lines))
    return policy, held_out, training


def make(size: Size, folder: Path) -> Record:
    """Train a policy, sample from it, save both in `folder`, and measure them."""
    policy, held_out, training = learn(size, folder)
    states = states_of(policy, held_out[-size.sequences :])
    torch.save({name: x.cpu() for name, x in states._asdict().items()}, folder / "states.pt")
    hidden, ids = states.rows()
    formula = peaked.make(len(hidden), size.width, size.vocab)
    lengths = states.mask.sum(1)
    return {
        "model": {"layers": size.layers, "H": size.width, "V": size.vocab},
        "digest": digest(folder),
        "training": training,
        "accuracy of sampled answers": accuracy_of(policy, held_out[size.probe : 3 * size.probe]),
        "sampled": {"sequences": len(lengths), "tokens": len(ids)},
        "trained": budgets_of(hidden, states.weight, ids, lengths, "trained"),
        "formula": budgets_of(formula.hidden, formula.weight, formula.target_ids, lengths, "formula"),
    }


def main() -> None:
    parser = parser_of("policy", __doc__)
    parser.add_argument("--folder", type=Path, help="where to save (default runs/policy or runs/tiny-policy)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()  # transformers' progress bar would write between our lines
    size, folder = (TINY, FOLDER.with_name("tiny-policy")) if options.tiny else (FULL, FOLDER)
    output = measure.destination("policy", torch.device("cpu"), options.output, options.tiny)
    print(measure.save("policy", torch.device("cpu"), make(size, options.folder or folder), output))
