"""Arithmetic in steps, told in many ways, and a byte-level BPE of it: text with which a small model becomes a policy.

Problems of one or two steps have small numbers, so that a model learns to solve them within minutes. Around them stands
what a vocabulary of 33,000 entries needs: thousands of names, places, goods and brands, composed of parts and drawn
with unequal frequency, and numbers up to 9999. Everything is made here, from a seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<end>", "<pad>"
SPECIAL = (PAD, END)
LEAST, MOST = 2, 24  # the first number of a problem
LARGEST = 48  # of any result


class Problem(NamedTuple):
    prompt: str
    solution: str  # steps and answer, to be continued from the prompt
    answer: str


def _joined(*parts: str) -> list[str]:
    """Every combination of one word of each, capitalised, in an order of its own."""
    words = ["".join(choice).capitalize() for choice in itertools.product(*(part.split() for part in parts))]
    words = list(dict.fromkeys(words))
    random.Random(len(words)).shuffle(words)
    return words


# Every list below comes in the order of its frequency.
FIRST = _joined(
    "a be ca da el fi ga ha i jo ka le ma ni o pa ro sa ta vi", "la li mo na ra ri sha to vi ze", "n ne s ra"
)
FAMILY = _joined(
    "ash bar birch brom cald cor dun ed fair farn glen gren hal hart hol ken lang lin mar mil nor oak pem quil rad rav "
    "rose sel stan thorn tre val wal west whit win yar",
    "bank beck berg bourne by croft dale field ford gate ham hurst land ley lock man mere more ridge sen shaw son "
    "stead stone strom ton vale wick wood worth",
)
TOWNS = _joined(
    "amber apple beacon black blue bright castle cedar clear cold copper crystal deep east elder ever fal fern flint "
    "fox frost gold granite green grey haven hazel high iron lake little long maple marsh mill moon north oaken old "
    "pine quiet raven red river rock salt silver south star still stony summer sun sweet",
    "bay bridge brook burgh bury cliff cove cross dell den dorf fall fell fort garth glade grove harbour haven heath "
    "hill holm holt kirk marsh mead mill minster moor mount mouth pass point pool port quay reach rest rise run sea "
    "spring stow thorpe town valley view ville wall water way weir well",
)
GOODS = _joined(
    "bead bell boat book bottle bowl box brick brush bulb button candle card chair clock coin comb cup disc doll drum "
    "flag flower fork frame game glass glove hat hook jar key kite knife lamp leaf lid lock map mask mat mirror nail "
    "needle net paint pan pearl pen plate pot puzzle ribbon ring rope shell shoe spoon stamp stick stone string tent "
    "thread ticket tile tool toy tray tube vase wheel whistle wire",
    "bag band bar base board cap case clip cover guard head holder kit line loop maker mark pack pad part piece pin "
    "rack set sheet stand strap tag top tray",
)
BRANDS = _joined(
    "aero bel cro dex evo flu gra hyd ino jux kor lum mir nex opti plex qua rix syn tek",
    "ba co da fo ga lo ma no pa ri so ta va xo zi",
    "corp dyne fix lab line mark tron ware works zon",
)
SMALL = "apples beads books boxes buttons cards coins cups eggs keys marbles nuts pears pens plums shells stamps stones"
SMALL_GOODS = SMALL.split()
GAINS = "buys finds gets wins makes picks".split()
LOSSES = "loses sells eats breaks lends drops".split()
CHORES = "sorted packed carried painted counted cleaned delivered repaired weighed labelled shipped stored".split()


def common(words: Sequence[str], rng: random.Random) -> str:
    """One of the words, the later the rarer; the last is half as likely as they are on average."""
    return words[int(len(words) * rng.random() ** 1.5)]


def number(rng: random.Random) -> str:
    return str(rng.randrange(10_000))


def problem(rng: random.Random) -> Problem:
    """One or two steps; every way to ask and to solve is as likely as the others."""
    name, good = FIRST[rng.randrange(60)], rng.choice(SMALL_GOODS)
    first = value = rng.randint(LEAST, MOST)
    steps: list[tuple[str, int, int]] = []
    for _ in range(rng.choice((1, 2, 2))):
        up = value < 6 or (value < LARGEST - 1 and rng.random() < 0.5)
        by = rng.randint(1, min(12, LARGEST - value)) if up else rng.randint(1, min(12, value - 1))
        value = value + by if up else value - by
        steps.append(("+" if up else "-", by, value))
    return Problem(_question(rng, name, good, first, steps), _solution(rng, first, steps), str(value))


def _question(rng: random.Random, name: str, good: str, first: int, steps: list[tuple[str, int, int]]) -> str:
    if rng.random() < 0.3:
        term = " ".join([str(first), *(f"{sign} {by}" for sign, by, _ in steps)])
        return rng.choice(("What is {} ?", "Compute {} .", "Work out {} .", "How much is {} ?")).format(term)
    happened = [f"{rng.choice(GAINS if sign == '+' else LOSSES)} {by}" for sign, by, _ in steps]
    start = rng.choice(("{} has {} {}", "{} starts with {} {}", "{} owns {} {}", "{} counts {} {}"))
    told = f"{start.format(name, first, good)} and {', then '.join(happened)}."
    return f"{told} {rng.choice(('How many are there now?', 'How many are left?', f'How many {good}?'))}"


def _solution(rng: random.Random, first: int, steps: list[tuple[str, int, int]]) -> str:
    befores = [first, *(value for *_, value in steps)]
    sums = [f"{at} {sign} {by} = {value}" for at, (sign, by, value) in zip(befores, steps, strict=False)]
    way = rng.random()
    if way < 0.4:
        return f" {', '.join(sums)}."
    if way < 0.7:
        return f" First {'. Then '.join(sums)}." if len(sums) > 1 else f" Now {sums[0]}."
    return f" {', '.join(sums)}. {rng.choice(('The answer is', 'That leaves', 'So it is'))} {befores[-1]}."


def story(rng: random.Random) -> str:
    """A sentence about nothing much, with the names and numbers of a larger world."""
    who = f"{common(FIRST, rng)} {common(FAMILY, rng)}"
    things = common(GOODS, rng).lower() + ("s" if rng.random() < 0.5 else "")
    return rng.choice(
        (
            "{who} of {town} {chore} {n} {things} for {brand} in {year}.",
            "{brand} sent {n} {things} from {town} to {who}, order #{m}.",
            "In {town} a {things} of {brand} costs ${m}, and {who} {chore} {n} of them.",
            "Invoice {n}/{m}: {who}, {town}, {things} by {brand}.",
            "{town} has {n} houses and {m} trees, says {who}; {brand} {chore} its {things}.",
            "{who} {chore} the {things} at {n} {other} Street, {town}, for ${m}.",
        )
    ).format(
        who=who,
        town=common(TOWNS, rng),
        brand=common(BRANDS, rng),
        other=common(TOWNS, rng),
        things=things,
        chore=rng.choice(CHORES),
        n=number(rng),
        m=number(rng),
        year=rng.randint(1900, 2099),
    )


def problems(count: int, seed: int, without: frozenset[str] = frozenset()) -> list[Problem]:
    """Problems of different prompts, none of them among `without`."""
    rng, by_prompt = random.Random(seed), {}
    while len(by_prompt) < count:
        candidate = problem(rng)
        if candidate.prompt not in without:
            by_prompt.setdefault(candidate.prompt, candidate)
    return list(by_prompt.values())


def stories(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    return (story(rng) for _ in range(count))


def bpe(texts: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab` entries, all of them merges that the texts gave but bytes and two marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"the text gives a vocabulary of {tokenizer.get_vocab_size()}, not {vocab}: more of it is needed"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
