"""The tables that compare across suites: where the library helps, where it loses, and the README's results."""

from __future__ import annotations

import textwrap

from .tables import BUDGET, NAIVE, OURS, Results, by_name, error_of, mib, over_naive, percent, shown, table

README_ROWS = {
    NAIVE: "PyTorch, full logits",
    "TRL fused head": "TRL, fused head",
    "TRL cast_lm_head_to_fp32": "TRL, `cast_lm_head_to_fp32`",
    "Liger GRPO loss": "Liger, GRPO loss",
    "verl torch head": "verl, torch head",
    "torch linear_cross_entropy": "PyTorch, `linear_cross_entropy`",
    OURS: "**gspo_kernels**",
    BUDGET: "**gspo_kernels**, `gradient_budget=1e-3`",
}
SAME_LOG_PROBS = {BUDGET: OURS, "TRL cast_lm_head_to_fp32": "fp32 logits"}  # measured under the other name
OTHER_LOSS = "naive GRPO"  # a ratio per token: not compared
LENGTH = 1024  # tokens of a sequence, for clip decisions
LIMIT = 0.01  # share of wrong decisions
NOT_MEASURED = "not measured"


def run_of(step: Results, scenario: str, dtype: str = "float32") -> Results:
    """Return the timed run with the most tokens."""
    runs = [run for run in step["time"]["runs"] if (run["on"]["scenario"], run["on"]["dtype"]) == (scenario, dtype)]
    return max(runs, key=lambda run: run["on"]["tokens"])


def wrong_decisions(fidelity: Results, length: int = LENGTH) -> dict[str, float]:
    """Return the share of wrong clip decisions by implementation, for the synthetic policy."""
    study = fidelity["sets"]["synthetic"]
    at = study["lengths"].index(length)
    wrong = {record["name"]: record["wrong"][at] for record in study["implementations"]}
    return wrong | {name: wrong[same] for name, same in SAME_LOG_PROBS.items() if name not in wrong and same in wrong}


def best_other(values: dict[str, float]) -> str:
    return min((name for name in values if not name.startswith(OURS) and name != OTHER_LOSS), key=values.__getitem__)


def helps(step: Results, trainer: Results, fidelity: Results) -> str:
    """Return the table of situations in which the library is ahead, with the best of all other candidates beside it."""
    rl_like, dense = run_of(step, "rl-like"), run_of(step, "dense")
    timed = [[r for r in run["candidates"] if "over_naive" in r] for run in (rl_like, dense)]
    longest = max(step["memory"]["points"], key=lambda point: point["tokens"])
    rows = []

    def row(what: str, values: dict[str, float], form: str, unit: str = "") -> None:
        texts = {name: f"{value:{form}}{unit}" for name, value in values.items()}
        best = best_other({name: value for name, value in values.items() if name != NAIVE})
        known = (texts.get(name, "-") for name in (OURS, BUDGET))
        rows.append((what, texts.get(NAIVE, "out of memory"), f"{texts[best]} ({best})", *known))

    for run, records in zip(("RL-like", "every token has a gradient"), timed, strict=True):
        row(f"time over naive GSPO, {run}", {r["name"]: r["over_naive"]["ratio"] for r in records}, ".2f")
    for tokens, records in (
        (rl_like["on"]["tokens"], rl_like["candidates"]),
        (longest["tokens"], longest["candidates"]),
    ):
        peaks = {r["name"]: r["peak_bytes"] / 2**20 for r in records if "peak_bytes" in r}
        row(f"peak memory, {tokens:,} tokens, MiB", peaks, ",.0f")
    steps = {r["name"]: r["over_naive"]["ratio"] for r in trainer["steps"] if "over_naive" in r}
    row("time of an optimizer step over naive GSPO's", steps, ".2f")
    wrong = {name: 100 * share for name, share in wrong_decisions(fidelity).items()}
    row(f"wrong clip decisions, {LENGTH:,} tokens, bf16 weights", wrong, ".2g", "%")
    return table(("", "naive GSPO", "best other", shown(OURS), shown(BUDGET)), rows)


def tolerance(fidelity: Results) -> str:
    """Say with which implementations fewer than 1 % of decisions are wrong at every length, by 95 % intervals."""
    exact: dict[bool, list[str]] = {True: [], False: []}
    for record in fidelity["sets"]["synthetic"]["implementations"]:
        exact[max(high for _, high in record["95 %"]) < LIMIT].append(shown(record["name"]))
    holds, fails = (", ".join(names) or "none" for names in exact.values())
    return f"fewer than {LIMIT:.0%} of clip decisions are wrong at every length with {holds}; not with {fails}"


def loses(step: Results, vocab: Results, trainer: Results) -> str:
    """Return the table of situations in which another candidate's exact gradients take less time or memory."""
    rows = []

    def compare(situation: str, values: dict[str, float], form: str) -> None:
        best = best_other(values)
        if values[best] < values[OURS]:
            cells = (f"{values[OURS]:{form}}", f"{values[best]:{form}} ({best})", f"{values[OURS] / values[best]:.2f}")
            rows.append((situation, *cells))

    for run in step["time"]["runs"] + vocab["runs"]:
        on, timed = run["on"], [r for r in run["candidates"] if "over_naive" in r]
        where = f"{on['scenario']}, {on['dtype']}, {on['tokens']:,} tokens, V = {on['head']['vocab']:,}"
        compare(f"time over naive GSPO: {where}", {r["name"]: r["over_naive"]["ratio"] for r in timed}, ".2f")
        compare(f"peak MiB: {where}", {r["name"]: r["peak_bytes"] / 2**20 for r in timed}, ",.0f")
    parts = {r["name"]: r["parts"]["loss"]["seconds"] for r in trainer["steps"] if "seconds" in r}
    compare("seconds of the loss inside an optimizer step", parts, ".1f")
    return table(("situation", "gspo_kernels", "best other", "ratio"), rows)


def readme(step: Results, fidelity: Results) -> str:
    """Return the README's table with its conditions."""
    runs, wrong = [run_of(step, scenario) for scenario in ("rl-like", "dense")], wrong_decisions(fidelity)
    rl_like, dense = (by_name(run["candidates"]) for run in runs)
    rows = [
        (label, *(over_naive(group[name]) if name in group else NOT_MEASURED for group in (rl_like, dense)),
         mib(rl_like[name]) if name in rl_like else NOT_MEASURED,
         percent(wrong[name]) if name in wrong else NOT_MEASURED)
        for name, label in README_ROWS.items()
    ]  # fmt: skip  # a cell each
    header = (
        "",
        "time, RL-like batch",
        "time, every token has a gradient",
        "peak MiB",
        "wrong clip decisions",
    )
    on, machine = runs[0]["on"], step["time"]["measured"]["machine"]
    head = f"H = {on['head']['width']}, V = {on['head']['vocab']:,}, {on['dtype']}"
    idle = f"{on['zero'] + on['clipped']} of {on['sequences']}"
    text = (
        f"Loss and both gradients of {on['tokens']:,} tokens ({head}), {machine['threads']} CPU cores. Times are "
        f"relative to full logits. In the RL-like batch {idle} sequences have no gradient. Wrong clip decisions: the "
        f"share that float64 decides otherwise, {LENGTH:,} tokens per sequence, bf16 weights. The budget changes the "
        f"gradients by a relative {error_of(rl_like[BUDGET])}."
    )
    return f"{table(header, rows)}\n\n{textwrap.fill(text, 126)}"
