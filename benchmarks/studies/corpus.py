"""Filler text and a byte-level BPE tokenizer, to pretrain the small model of `policy.py`.

A vocabulary of 33,000 entries needs thousands of different words, so the text has names, places, goods and brands
composed of the parts in the reference trainer's `words.json`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gspo_kernels.integrations.reference_trainer.tasks.arithmetic import FIRST, WORDS, joined

END, PAD = "<end>", "<pad>"
FAMILY, TOWNS, GOODS, BRANDS = map(joined, ("family", "towns", "goods", "brands"))


def common(words: Sequence[str], rng: random.Random) -> str:
    """Draw a word. Words early in the list are more frequent."""
    return words[int(len(words) * rng.random() ** 1.5)]


def story(rng: random.Random) -> str:
    """Make a sentence of names and numbers."""
    who = f"{common(FIRST, rng)} {common(FAMILY, rng)}"
    things = common(GOODS, rng).lower() + ("s" if rng.random() < 0.5 else "")
    template = rng.choice(WORDS["stories"])
    town, brand, other = (common(names, rng) for names in (TOWNS, BRANDS, TOWNS))
    chore, n, m = rng.choice(WORDS["chores"]), rng.randrange(10_000), rng.randrange(10_000)
    names = {"who": who, "things": things, "town": town, "brand": brand, "other": other, "chore": chore}
    return template.format(**names, n=n, m=m, year=rng.randint(1900, 2099))


def stories(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    return (story(rng) for _ in range(count))


def bpe(texts: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `vocab` entries. Raise a ValueError if the texts are too few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = dict(min_frequency=2, special_tokens=[PAD, END], initial_alphabet=alphabet)
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    if (size := tokenizer.get_vocab_size()) != vocab:
        raise ValueError(f"texts: expected enough for a vocabulary of {vocab}, got one of {size}")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
