"""The tables that use several suites: where the library helps, where it loses, and the README's results.

In every function, `first` maps the name of a suite to the results in its first JSON file, which is a CPU's.
"precision on a gpu" are those of a larger model.
"""

from __future__ import annotations

from pathlib import Path

from .tables import (
    BUDGET,
    CACHED,
    DEFAULT_CACHE,
    GPU_GROUPS,
    NAIVE,
    OURS,
    Results,
    by_name,
    candidates_table,
    compared,
    error_of,
    headline_run,
    mib,
    milliseconds,
    over_naive,
    shown,
    skip,
    table,
)

README_ROWS = {
    NAIVE: "full logits (TRL before 1.15)",
    "TRL fused head": "TRL 1.16 (its fused head)",
    "TRL cast_lm_head_to_fp32": "TRL 1.16, `cast_lm_head_to_fp32`",
    OURS: "**TRL 1.16 with gspo_kernels**, cache off",
    CACHED: "**TRL 1.16 with gspo_kernels**, cache on",
}
GPU_ROWS = {
    NAIVE: "full logits",
    "naive GSPO, compiled": "full logits, `torch.compile`",
    "TRL fused head": "TRL 1.16 (its fused head)",
    "TRL cast_lm_head_to_fp32": "TRL 1.16, `cast_lm_head_to_fp32`",
    "Liger fused CE": "Liger's fused cross-entropy, as log-probs",
    "Liger scaled CE": "Liger's scaled cross-entropy (CuTe kernels)",
    "Liger GRPO loss": "Liger's GRPO loss",
    "cut-cross-entropy": "cut-cross-entropy",
    "verl Triton head": "verl 0.9.1's Triton head",
    OURS: "**gspo_kernels**, cache off",
    DEFAULT_CACHE: "**gspo_kernels** (default)",
    BUDGET: "**gspo_kernels**, `gradient_budget=1e-3`, cache off",
}
SAME_LOG_PROBS = {BUDGET: OURS, CACHED: OURS, "TRL cast_lm_head_to_fp32": "fp32 logits"}  # name -> its equal
SAME_IN_FLOAT32 = {"TRL cast_lm_head_to_fp32": "TRL fused head"}  # in float32 it casts nothing
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}  # in the order of the README's columns
OTHER_LOSS = "naive GRPO"  # not compared, because it computes a different loss
LENGTH = 1024  # tokens per sequence, for wrong clip decisions
LIMIT = 0.01  # upper end of the 95 % interval of wrong decisions, for an implementation that counts as precise
HALF = "bf16 autocast"  # the body whose wrong clip decisions the README shows
Values = dict[str, float]


def run_of(first: Results, scenario: str, dtype: str = "float32") -> Results:
    """Find the timed run of the scenario; of several, the run with the most tokens."""
    runs = first["step"]["time"]["runs"]
    kind = (scenario, dtype)
    return max((r for r in runs if (r["on"]["scenario"], r["on"]["dtype"]) == kind), key=lambda r: r["on"]["tokens"])


def times(records: list[Results]) -> Values:
    return {r["name"]: r["over_naive"]["ratio"] for r in records if "over_naive" in r}


def peaks(records: list[Results]) -> Values:
    return {r["name"]: r["peak_bytes"] / 2**20 for r in records if "peak_bytes" in r}


def wrong_decisions(fidelity: Results) -> Values:
    """Percentage of wrong clip decisions of the head alone by implementation, for the synthetic policy."""
    study = fidelity["sets"]["synthetic"]
    at = study["lengths"].index(LENGTH)
    wrong = {record["name"]: 100 * record["wrong"][at] for record in study["implementations"]}
    return wrong | {name: wrong[same] for name, same in SAME_LOG_PROBS.items() if name not in wrong}


def wrong_in_models(precision: Results, body: str = HALF) -> Values:
    """Percentage of wrong clip decisions of the whole model by head, for a body."""
    records = headline_run(precision)["bodies"][body]
    wrong = {r["name"]: 100 * r["wrong"][r["lengths"].index(LENGTH)] for r in records}
    return wrong | {name: wrong[same] for name, same in SAME_LOG_PROBS.items() if name not in wrong}


def best_other(values: Values, *without: str) -> str:
    names = (name for name in values if not name.startswith(OURS) and name not in (OTHER_LOSS, *without))
    return min(names, key=values.__getitem__)


def helps(first: Results) -> str:
    """The table "Where it helps"."""
    rl_like = run_of(first, "rl-like")
    large = max(first["step"]["memory"]["points"], key=lambda point: point["tokens"])
    comparisons: list[tuple[str, Values, str]] = [
        ("time / naive GSPO's, some tokens without a gradient", times(rl_like["candidates"]), ".2f"),
        ("time / naive GSPO's, every token has a gradient", times(run_of(first, "dense")["candidates"]), ".2f"),
        (f"peak MiB, {rl_like['on']['tokens']:,} tokens", peaks(rl_like["candidates"]), ",.0f"),
        (f"peak MiB, {large['tokens']:,} tokens", peaks(large["candidates"]), ",.0f"),
        ("peak MiB of a step of TRL's trainer", peaks(first["trainer"]["float32"]["steps"]), ",.0f"),
        (
            f"wrong clip decisions in %, whole model, {HALF}, {LENGTH:,} tokens",
            wrong_in_models(first["precision"]),
            ".2g",
        ),
        ("the same of the head alone, for the same bf16 hidden states", wrong_decisions(first["fidelity"]), ".2g"),
    ]
    rows = []
    for what, values, form in comparisons:
        best = best_other(values, NAIVE)
        known = (f"{values[name]:{form}}" if name in values else "-" for name in (OURS, BUDGET))
        naive = f"{values[NAIVE]:{form}}" if NAIVE in values else "out of memory"
        rows.append((what, naive, f"{values[best]:{form}} ({best})", *known))
    return table(("", "naive GSPO", "best other", shown(OURS), shown(BUDGET)), rows)


def loses(first: Results) -> str:
    """The table "Where we lose": measurements in which another candidate takes less time or memory than ours."""
    comparisons: list[tuple[str, Values, str]] = []
    for run in first["step"]["time"]["runs"] + first["vocab"]["runs"]:
        on = run["on"]
        where = f"{on['scenario']}, {on['dtype']}, {on['tokens']:,} tokens, V = {on['head']['vocab']:,}"
        comparisons.append((f"time / naive GSPO's: {where}", times(run["candidates"]), ".2f"))
        comparisons.append((f"peak MiB: {where}", peaks(run["candidates"]), ",.0f"))
    for dtype, part in first["trainer"].items():
        comparisons.append((f"time of a step of TRL's trainer / naive GSPO's, {dtype}", times(part["steps"]), ".2f"))
        comparisons.append((f"peak MiB of a step of TRL's trainer, {dtype}", peaks(part["steps"]), ",.0f"))
    rows = []
    for situation, values, form in comparisons:
        best = best_other(values)
        ours = values[OURS]
        if values[best] < ours:
            rows.append((situation, f"{ours:{form}}", f"{values[best]:{form}} ({best})", f"{ours / values[best]:.2f}"))
    return table(("situation", "gspo_kernels", "best other", "ratio"), rows)


def tolerance(fidelity: Results) -> str:
    """Say which implementations support the paper's claim that sequence likelihoods tolerate imprecise log-probs."""
    exact: dict[bool, list[str]] = {True: [], False: []}
    for record in fidelity["sets"]["synthetic"]["implementations"]:
        exact[max(high for _, high in record["95 %"]) < LIMIT].append(shown(record["name"]))
    holds, fails = ("; ".join(names) or "none" for names in exact.values())
    return f"holds (fewer than {LIMIT:.0%} of decisions wrong at every length) for {holds}. Does not hold for {fails}"


def windows(fidelity: Results) -> str:
    """Say how large the errors of log-ratios with bf16 logits are, in nats and relative to the lower clip bounds."""
    token = by_name(fidelity["sets"]["synthetic"]["implementations"])[NAIVE]["log-ratio"]["std"]
    sequence = token / LENGTH**0.5
    return (
        f"With bf16 logits, a token's log-ratio is off by {token:.1e} nats, and a sequence's ({LENGTH:,} tokens) by "
        f"{sequence:.1e}, so in nats the claim holds. But that is {token / 0.2:.0%} of GRPO's window and "
        f"{sequence / 3e-4:.0%} of GSPO's"
    )


def comparison(first: Results) -> str:
    """The table of docs/comparison.md."""
    exact = run_of(first, "rl-like")
    dense = run_of(first, "dense")
    half = run_of(first, "rl-like", "bfloat16")
    large = max(first["step"]["memory"]["points"], key=lambda point: point["tokens"])
    names = [*by_name(exact["candidates"]), "TRL cast_lm_head_to_fp32"]
    shares = wrong_in_models(first["precision"]), wrong_decisions(first["fidelity"])
    whole, alone = ([{"name": name, "percent": x[name]} for name in names if name in x] for x in shares)
    tokens = f"{exact['on']['tokens']:,} tokens"
    return candidates_table(
        {
            f"peak MiB, {tokens}": (exact["candidates"], mib),
            f"peak MiB, {large['tokens']:,} tokens": (large["candidates"], mib),
            "time, every token has a gradient": (dense["candidates"], over_naive),
            "time, some tokens without one": (exact["candidates"], over_naive),
            "time, the same in bf16": (half["candidates"], over_naive),
            "error of gradients, bf16": (half["candidates"], error_of),
            "wrong clip decisions, whole model": (whole, percentage),
            "wrong clip decisions, head alone": (alone, percentage),
        }
    )


def readme(first: Results) -> str:
    """The README's table and the text below it, from `readme.md`."""
    wrong = wrong_in_models(first["precision"])
    parts = first["trainer"]
    rows = []
    for name, label in README_ROWS.items():
        cells = [f"{wrong[name]:.2g}%"]
        for dtype in DTYPES:
            records = by_name(parts[dtype]["steps"])
            record = records.get(name) or records[SAME_IN_FLOAT32[name]]
            cells += [f"{mib(record)} MiB", f"{over_naive(record)}x"]
        rows.append((label, *cells))
    columns = (f"{what}, {short}" for short in DTYPES.values() for what in ("peak memory", "step time"))
    header = ("", f"wrong clip decisions, {HALF}", *columns)
    part = parts["float32"]
    text = Path(__file__).with_name("readme.md").read_text().strip()
    caches = [f"{part['steps'][-1]['cache_mib']:,}" for part in parts.values()]
    return text.format(
        table=table(header, rows), on=part, caches=caches, skip=skip(first["skip"])["table"], **rounding(first)
    )


def gpu(results: Results) -> str:
    """Make the README's table of time and memory on a GPU, for a head of H = 4,096 and V = 151,936."""
    columns = {label: compared(results, group) for label, group in GPU_GROUPS.items() if group != "rl-8k"}
    rows = []
    for name, label in GPU_ROWS.items():
        records = [records.get(name, {}) for records in columns.values()]
        cells = [f"{milliseconds(r)} ms, {mib(r)} MiB" if r else "-" for r in records]
        rows.append((label, *cells, error_of(next(filter(None, records)))))
    return table(("", *columns, "relative error of the gradients"), rows)


def rounding(first: Results) -> dict[str, str]:
    """Sentences about the clip decisions that rounding changes, and a table for docs/guides/precision.md."""
    whole = {body: wrong_in_models(first["precision"], body) for body in headline_run(first["precision"])["bodies"]}
    alone = wrong_decisions(first["fidelity"])
    half, best = whole[HALF], whole["fp16 autocast"]
    names = {NAIVE: "full logits", "fp32 logits": "fp32 logits, stored in full", OURS: "`gspo_kernels`"}
    rows = [(body, *(percentage({"percent": x[name]}) for name in names)) for body, x in whole.items()]
    of = first["precision"]["model"]
    larger = first["precision on a gpu"]["model"]
    there = {body: wrong_in_models(first["precision on a gpu"], body) for body in (HALF, "fp16 autocast")}
    return {
        "bodies": table(("body of the model", *names.values()), rows),
        "for_bf16": f"In bf16 (autocast), full logits get {half[NAIVE]:.2g}% of the clip decisions wrong, gspo_kernels "
        f"{half[OURS]:.2g}%. Most of the rest is rounding in the body",
        "for_fp16": f"In fp16 (autocast), it is {best[NAIVE]:.2g}% and {best[OURS]:.2g}%",
        "alone": f"For the same bf16 hidden states, the head alone gets {alone[NAIVE]:.2g}% wrong with full logits and "
        f"{alone[OURS]:.1g}% with gspo_kernels",
        "larger": f"A larger model on an H200 ({larger['layers']} layers, H = {larger['H']:,}), after updates that "
        + "were too large: "
        + ", ".join(f"{x[NAIVE]:.2g}% and {x[OURS]:.2g}% in {body[:4]}" for body, x in there.items()),
        "of_model": f"a Qwen3 with {of['layers']} layers, H = {of['H']:,} and V = {of['V']:,}, trained on source code",
    }


def percentage(record: Results) -> str:
    return f"{record['percent']:.2g}%" if record else "-"
