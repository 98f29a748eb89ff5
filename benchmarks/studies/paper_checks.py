"""What GSPO's paper (arXiv 2507.18071) claims and can be checked without a large run, checked with this library.

    python -m gspo_kernels.benchmarks paper_checks          about 3 minutes on two cores

Each claim's verdict follows from the numbers beside it. Claims about training (efficiency, stability, mixtures of
experts) are not among them. The samples are of laws of the log-ratio and not of a trained policy.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import torch

from gspo_kernels import Objective

from .. import measure
from ..measure import Record
from ..workloads import Head
from . import decisions, fidelity
from . import paper_samples as samples
from .paper_samples import BF16, GRPO, GSPO, LAWS, NORMALISED, OBJECTIVES, PRODUCT, coefficients, in_parts, signs

CPU = torch.device("cpu")
PAIR = {"gspo": 0.15, "grpo": 0.0013}  # clip fractions of the paper's figure
APART = "gradient of hidden states, largest difference over largest entry"
WRONG = "wrong decisions"
CROSSING = "length at which gspo clips 0.15"
FACTOR = 2  # a fraction that is off by less counts as met


def claim(where: str, says: str, measured: str, verdict: str, numbers: Record) -> Record:
    return {"where": where, "claim": says, "measured": measured, "verdict": verdict, "numbers": numbers}


# 6.1 GSPO and GSPO-token


def equality(tiny: bool) -> Record:
    numbers: Record = {APART: []}
    for weighted, dtype in itertools.product((False, True), (torch.float64, torch.float32)):
        apart = samples.presets_apart(weighted, dtype)
        numbers[APART].append({"token weights": weighted, "dtype": str(dtype).removeprefix("torch."), **apart})
    rng = torch.Generator().manual_seed(1)
    advantages = signs(32) * torch.linspace(0.5, 1.5, 32)
    log_ratio = 0.02 * torch.randn(32, 16, generator=rng, dtype=torch.float64)
    log_ratio += 1e-4 * torch.randn(32, 1, generator=rng, dtype=torch.float64) - log_ratio.mean(1, keepdim=True)
    weights = 0.5 + torch.rand(32, 16, generator=rng, dtype=torch.float64)
    token = Objective.preset("gspo-token")
    numbers["coefficients"] = {
        name: [coefficients(log_ratio, advantages, o, token_weights=w).flatten().tolist() for o in (GSPO, token)]
        for name, w in (("one weight", None), ("token weights", weights))
    }
    return claim(
        "section 4.3", "GSPO-token with the same advantage for all tokens of a sequence is GSPO",
        "gradients of the hidden states by this library and by autograd of the readable reference, ragged lengths",
        equality_verdict(numbers), numbers,
    )  # fmt: skip  # lines by subject


def equality_verdict(numbers: Record) -> str:
    rounding = {"float64": 1e-12, "float32": 1e-4}
    rows = numbers[APART]
    equal = all(max(r["ours"], r["reference"]) < rounding[r["dtype"]] for r in rows if not r["token weights"])
    weighted = min(min(r["ours"], r["reference"]) for r in rows if r["token weights"])
    if not equal:
        return "does not hold as stated: the gradients differ by more than rounding"
    if weighted < 1e-2:
        return "holds"
    return f"holds; with weights per token besides (say, against a sampler's log-probs) they differ, by {weighted:.0%}"


# 6.2 clip fractions


def clip_fractions(tiny: bool) -> Record:
    lengths = (64, 256) if tiny else (64, 256, 1024, 4096, 16_384, 32_768, 65_536)
    laws = {}
    for name, law in LAWS.items():
        rng = torch.Generator().manual_seed(2)
        points = []
        for length in lengths:
            sequences = 128 if tiny else max(512, 2**22 // length)
            shares = dict.fromkeys(("gspo", "grpo", "grpo, sequences with a clipped token"), 0.0)
            for chunk in in_parts(sequences, length):
                advantages = signs(chunk)
                log_ratio = samples.draw(law, advantages, length, rng)
                ours, tokens = samples.judged(log_ratio, advantages, GSPO), samples.judged(log_ratio, advantages, GRPO)
                shares["gspo"] += ours["clip_fraction"].item() * chunk / sequences
                shares["grpo"] += tokens["token_clip_fraction"].item() * chunk / sequences
                shares["grpo, sequences with a clipped token"] += tokens["clip_fraction"].item() * chunk / sequences
            hits = round(shares["gspo"] * sequences)
            bounds = decisions.interval(hits, sequences)
            points.append({"length": length, "sequences": sequences, **shares, "gspo, 95 %": bounds})
            print(f"  {name}, {length} tokens: {shares['gspo']:.3f} and {shares['grpo']:.5f}", flush=True)
        laws[name] = {
            "law": law.what, "std": law.std, "drift": law.drift, "points": points,
            CROSSING: samples.crossing(points, PAIR["gspo"]),
            f"{CROSSING}, 95 %": [samples.crossing(points, PAIR["gspo"], end) for end in (0, 1)],
        }  # fmt: skip  # lines by subject
    numbers = {"pair": PAIR, "clip": {"gspo": [3e-4, 4e-4], "grpo": [0.2, 0.27]}, "laws": laws}
    return claim(
        "section 5.2, figure 2", "GSPO clips two orders of magnitude more tokens than GRPO: 0.15 against 0.0013",
        "the library's clip fractions (of tokens) of the same log-ratios, by their law and the length of all sequences",
        clip_verdict(numbers), numbers,
    )  # fmt: skip  # lines by subject


def clip_verdict(numbers: Record) -> str:
    """A falling share crosses any value below its first, and the laws' widths are fitted: no more is said than that."""
    pair, laws = numbers["pair"], numbers["laws"]
    met = [
        name
        for name, law in laws.items()
        if law[CROSSING] and all(1 / FACTOR < p["grpo"] / pair["grpo"] < FACTOR for p in law["points"])
    ]
    ratios = [p["gspo"] / p["grpo"] for law in laws.values() for p in law["points"] if p["grpo"] > 0]
    none = ", ".join(name for name, law in laws.items() if any(p["grpo"] == 0 for p in law["points"]))
    most = f"the ratio of the two is {min(ratios):.0f} to {max(ratios):.0f}" if ratios else "no ratio of the two"
    most += f" (left out: lengths of {none} at which GRPO clips nothing)" if none else ""
    if not met:
        return f"not reproduced: no law met the pair; {most}"
    where = []
    for name in met:
        longest = laws[name]["points"][-1]["length"]
        ends = laws[name][f"{CROSSING}, 95 %"]
        low, high = (f"{length:,.0f}" if length else f"over {longest:,}" for length in ends)
        where.append(f"{laws[name][CROSSING]:,.0f} ({name}, {low} to {high})")
    never = ", ".join(name + " (not fitted)" * (law["drift"] != 0) for name, law in laws.items() if name not in met)
    return (
        f"reproduced with a standard deviation fitted to the paper's pair, at L = {', '.join(where)}"
        f"{f'; not by {never}' if never else ''}. The width is fitted to GRPO's fraction and L to GSPO's, which falls "
        f"with L: two numbers by two, and no test of the claim; {most}"
    )


# 6.3 the range of the ratio


def ranges(tiny: bool) -> Record:
    law, rng = LAWS["drift"], torch.Generator().manual_seed(3)
    laws: Record = {"no drift": {"drift": 0.0, "points": []}, "drift": {"drift": law.drift, "points": []}}
    for length in (100, 400, 1600) if tiny else (100, 1000, 10_000, 100_000):
        sequences = 400 if tiny else min(4000, 6 * 10**7 // length)
        u, advantages = samples.means(law._replace(drift=0.0), length, sequences, rng)
        for numbers_of_law in laws.values():  # what all tokens drift, their mean does
            numbers_of_law["points"].append(samples.ranges(u + numbers_of_law["drift"] * advantages, length))
        print(f"  {length} tokens", flush=True)
    for numbers_of_law in laws.values():
        points = numbers_of_law["points"]
        numbers_of_law["powers of the length"] = {
            "normalised": samples.slope(points, NORMALISED), "product": samples.slope(points, PRODUCT),
            "normalised, the two longest": samples.slope(points[-2:], NORMALISED),
        }  # fmt: skip  # lines by subject
    numbers = {"std of a token": law.std, "laws": laws}
    return claim(
        "section 4.1", "length normalisation keeps the ratio in a unified numerical range",
        f"1 % to 99 % of the product of token ratios and of its length-th root; independent tokens, normal, std "
        f"{law.std:g}, without drift and with {law.drift:g} a token towards the advantage (half of them positive)",
        range_verdict(numbers), numbers,
    )  # fmt: skip  # lines by subject


def range_verdict(numbers: Record) -> str:
    free, drifting = (numbers["laws"][name]["powers of the length"] for name in ("no drift", "drift"))
    text = (
        f"for independent tokens without drift the normalised range goes like length to the {free['normalised']:.2f} "
        f"(by theorem -1/2), the product's like length to the {free['product']:.2f}; with drift to the "
        f"{drifting['normalised']:.2f}, {drifting['normalised, the two longest']:.2f} between the two longest"
    )
    if max(abs(powers["normalised"]) for powers in (free, drifting)) < 0.1 <= free["product"]:
        return f"holds: {text}"
    if free["normalised"] >= free["product"]:
        return f"does not hold: {text}"
    if abs(drifting["normalised, the two longest"]) < abs(free["normalised, the two longest"]) / 2:
        text += ", where it flattens at the width of the drift"
    return f"does not hold as stated, though it tames the product: {text}; one window does not fit all lengths"


# 6.4 precision


def precision(tiny: bool) -> Record:
    noise = samples.measured_noise(64, Head(128, 4096)) if tiny else samples.measured_noise(512, fidelity.HEAD)
    lengths, sequences = ((64, 256), 2000) if tiny else ((64, 256, 1024, 4096, 16_384), 100_000)
    rng, points = torch.Generator().manual_seed(4), []
    for length in lengths:
        points += samples.disturbed(noise, length, 128 if tiny else max(128, min(4000, 2**21 // length)), rng)
        print(f"  {length} tokens", flush=True)
    print(f"  decisions of {sequences:,} sequences", flush=True)
    decided = {(d["implementation"], d["length"]): d for d in decisions.decisions(noise.errors, lengths, sequences)}
    for point in points:
        if point["objective"] == "gspo":
            row = decided[point["noise"], point["length"]]
            point |= {WRONG: row["wrong"], f"{WRONG}, 95 %": row[f"wrong, {decisions.ANEW}"], "decided": sequences}
        else:
            point |= {WRONG: point["wrong of these"], "decided": point["sequences"] * point["length"]}
    numbers = {
        "tokens": noise.log_ratio.numel(), "spread of log-ratios": decisions.SPREAD, "mean error": "taken out",
        "std of a token's log-ratio error": {name: errors.std().item() for name, errors in noise.errors.items()},
        "points": points,
    }  # fmt: skip  # lines by subject
    return claim(
        "section 5.4", "GSPO tolerates imprecise likelihoods, so that an inference engine's can be the old ones",
        f"noise that the head's rounding makes, against float64: wrong clip decisions ({sequences:,} sequences of GSPO "
        "per length; tokens of GRPO), cosine and relative error of coefficients (fewer sequences). Independent tokens; "
        "their mean error is taken out, and true log-ratios of sequences are spread alike at all lengths, which 6.3 "
        "says they are not: without drift they narrow as fast as the noise",
        precision_verdict(numbers), numbers,
    )  # fmt: skip  # lines by subject


def precision_verdict(numbers: Record) -> str:
    """From which length on fewer than 1 % of GSPO's decisions are wrong, by the upper ends of the intervals."""
    parts = []
    for name in numbers["std of a token's log-ratio error"]:
        rows = [p for p in numbers["points"] if p["noise"] == name and p["objective"] == "gspo"]
        enough = [r for r in itertools.takewhile(lambda r: r[f"{WRONG}, 95 %"][1] < 0.01, reversed(rows))]
        upper = max((r[f"{WRONG}, 95 %"][1] for r in enough), default=0)
        most = f"intervals end at {math.ceil(100_000 * upper):,} of 100,000 at most"
        first, last = (f"{row[WRONG]:.1%} at {row['length']:,}" for row in (rows[0], rows[-1]))
        if len(enough) == len(rows):
            parts.append(f"holds for {name} at every length ({most})")
        elif enough:
            parts.append(f"holds for {name} from L = {enough[-1]['length']:,} on ({most}; before, {first})")
        else:
            parts.append(f"does not hold for {name} ({first}, {last})")
    at = {p["objective"]: p for p in numbers["points"] if p["noise"] == BF16 and p["length"] == 1024}
    alike = "relative error where decisions agree"
    beside = ", ".join(
        f"{errors['relative error']:.2g} ({errors[alike]:.2g}) for {kind.upper()}" for kind, errors in at.items()
    )
    more = f". Coefficients with {BF16} at 1,024 tokens are off by (where decisions agree) {beside}" if at else ""
    return f"under 1 % of clip decisions wrong: {'; '.join(parts)}{more}"


# 6.7 coefficients


def histogram(tiny: bool) -> Record:
    weights, advantages = samples.weights(LAWS["Student t3"], 64 if tiny else 1024, 64 if tiny else 1024, seed=5)
    up = advantages > 0
    numbers: Record = {"law": LAWS["Student t3"].what, "length": weights["grpo"].shape[1], "sequences": len(advantages)}
    for kind, objective in OBJECTIVES.items():
        kept = {sign: weights[kind][rows][weights[kind][rows] != 0] for sign, rows in (("A > 0", up), ("A < 0", ~up))}
        low, high = (min(x.min().item() for x in kept.values()), max(x.max().item() for x in kept.values()))
        bounds = [1 - objective.clip_low, 1 + objective.clip_high]
        edges = samples.log_edges([low, *(x for x in bounds if low < x < high), high])
        half = weights[kind].numel() / 2
        numbers[kind] = {
            "bounds": bounds, "edges": edges.exp().tolist(),
            **{sign: {"least": x.min().item(), "largest": x.max().item(), "kept": x.numel() / half,
                      "counts": torch.histogram(x.log(), edges).hist.tolist()} for sign, x in kept.items()},
            "at the bounds": samples.at_the_bounds(objective),
            "largest range within a sequence": samples.range_within(weights[kind]),
        }  # fmt: skip  # lines by subject
    return claim(
        "section 4.2",
        "GRPO's token weights lie in (0, 1 + e] for A > 0 and [1 - e, inf) for A < 0; GSPO weights all tokens alike",
        "d loss / d log-prob over the advantage, float64, on the same samples; and on and just beyond every bound",
        histogram_verdict(numbers), numbers,
    )  # fmt: skip  # lines by subject


def histogram_verdict(numbers: Record) -> str:
    exact = 4 * torch.finfo(torch.float64).eps  # exp of a logarithm
    wrong = []
    for kind in OBJECTIVES:
        weights = numbers[kind]
        if weights["A > 0"]["largest"] > weights["bounds"][1] + exact or weights["A > 0"]["least"] <= 0:
            wrong.append(f"{kind} at A > 0")
        if weights["A < 0"]["least"] < weights["bounds"][0] - exact:
            wrong.append(f"{kind} at A < 0")
        wrong += [f"{kind}, {x}" for x, kept in weights["at the bounds"].items() if kept != x.endswith("on it")]
    if numbers["gspo"]["largest range within a sequence"] != 0:
        wrong.append("gspo has more than one weight in a sequence")
    return f"does not hold: {', '.join(wrong)}" if wrong else "holds, exactly; a clipped token's weight is 0"


CHECKS = {"6.1": equality, "6.2": clip_fractions, "6.3": ranges, "6.4": precision, "6.7": histogram}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks paper_checks", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", choices=CHECKS, action="append", help="one claim, as a trial; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds: few and short sequences")
    parser.add_argument("--output", type=Path, help=measure.OUTPUT)
    arguments = parser.parse_args(argv)
    trial = arguments.tiny or bool(arguments.only)  # a file has all claims, or the report could not tell of it
    output, claims = measure.destination("paper-checks", CPU, arguments.output, trial), {}
    for name in arguments.only or CHECKS:
        print(f"{name} {CHECKS[name].__name__.replace('_', ' ')}", flush=True)
        claims[name] = CHECKS[name](arguments.tiny)
        print(f"  {claims[name]['verdict']}", flush=True)
    print(f"wrote {measure.save('paper-checks', CPU, claims, output)}")
