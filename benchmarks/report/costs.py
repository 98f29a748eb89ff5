"""The report's sections on the time and memory of loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..suites.bench import OUT
from .markdown import conditions, figure, fill, mib, table

Suite = dict[str, Any]
WE_LOSE = "**Where we lose** (to whom)."


def _largest(step: Suite, scenario: str, dtype: str | None = None) -> dict[str, Any]:
    """The run of most tokens, in that dtype or the one that the file is about."""
    runs = step["results"]["time"]["runs"]
    dtype = dtype or runs[0]["on"]["dtype"]
    those = [run for run in runs if (run["on"]["scenario"], run["on"]["dtype"]) == (scenario, dtype)]
    return max(those, key=lambda run: run["on"]["tokens"])


def _head(on: dict[str, Any]) -> str:
    return f"H = {on['head']['width']}, V = {on['head']['vocab']:,}"


SHORT = (
    "naive GSPO", "naive GSPO, compiled", "naive GRPO", "TRL fused head", "Liger GRPO loss", "verl torch head",
    "torch linear_cross_entropy", "ours", "ours, budget 1e-3",
)  # fmt: skip  # lines by subject


def _short_step(step: Suite) -> str:
    runs = [_largest(step, scenario) for scenario in ("rl-like", "dense", "long")]
    runs.append(_largest(step, "rl-like", "bfloat16"))
    rl = {r["name"]: r for r in runs[0]["candidates"]}
    rows = []
    for name in (known for known in SHORT if known in rl):
        ratios = (over_naive(next(r for r in run["candidates"] if r["name"] == name)) for run in runs)
        r = rl[name]
        rows.append((name, *ratios, _mib(r), _number(r, "passes"), error_of(r, ".0e")))
    on, machine = runs[0]["on"], step["results"]["time"]["measured"]["machine"]
    where = (
        f"{on['tokens']:,} tokens, {_head(on)}, {on['dtype']}, {machine['threads']} CPU cores: time over naive GSPO's"
    )
    few = fill(
        f"rl-like: {on['zero'] + on['clipped']} of {on['sequences']} sequences have no gradient; dense: all have one; "
        f"long: {runs[2]['on']['sequences']} sequences. Peak, passes (of 2 N H V) and error (of the worse gradient, "
        f"against float64) are of rl-like in {on['dtype']}. naive GRPO is another loss."
    )
    header = (where, "rl-like", "dense", "long", "rl-like, bf16", "peak MiB", "passes", "error")
    return f"{table(header, rows)}\n\n{few}"


def over_naive(record: dict[str, Any]) -> str:
    return f"{record['over_naive']['ratio']:.2f}" if "over_naive" in record else "-"


def between(over: dict[str, float]) -> str:
    return f"{over['p20']:.2f} - {over['p80']:.2f}"


def _mib(record: dict[str, Any]) -> str:
    return mib(record["peak_bytes"]) if "peak_bytes" in record else record.get("does_not_fit", "-")


def _number(record: dict[str, Any], name: str) -> str:
    return f"{record[name]:.2f}" if name in record else "-"


def error_of(record: dict[str, Any], form: str = ".1e") -> str:
    worst = record["error"]["worst"] if "error" in record else None  # None: not a number
    return "-" if worst is None else format(worst, form)


def left_out(records: list[dict[str, Any]]) -> str:
    """Who has no time, and why."""
    out = [f"{r['name']} ({r[reason]})" for r in records for reason in OUT if reason in r]
    return f"No time of: {', '.join(out)}." if out else ""


def _comparison(run: dict[str, Any]) -> str:
    header = ("", "time, ms", "p20 - p80", "over naive", "p20 - p80", "peak MiB", "passes", "error", "over naive's")
    rows = []
    for r in run["candidates"]:
        if "seconds" in r:
            times = (f"{1e3 * r['seconds']:,.0f}", f"{1e3 * r['p20']:,.0f} - {1e3 * r['p80']:,.0f}", over_naive(r))
            spread = between(r["over_naive"]) if "over_naive" in r else "-"
            rows.append(
                (r["name"], *times, spread, _mib(r), _number(r, "passes"), error_of(r), _number(r, "error_over_naive"))
            )
    on, runs = run["on"], max((r.get("runs", 0) for r in run["candidates"]), default=0)
    sizes = f"{on['tokens']:,} tokens in {on['sequences']} sequences ({on['zero']} of zero advantage, {on['clipped']} "
    sizes += f"clipped), {_head(on)}, {on['dtype']}, {runs} runs"
    parts = [f"**{on['scenario']}**, {sizes}:", table(header, rows), left_out(run["candidates"])]
    return "\n\n".join(part for part in parts if part)


def _losses(runs: list[dict[str, Any]]) -> str:
    """Where somebody's exact gradients cost less than ours, and whose."""
    slow, large = [], []
    for run in runs:
        on, timed = run["on"], {r["name"]: r for r in run["candidates"] if "over_naive" in r}
        where = f"{on['scenario']}, {on['dtype']}, {on['tokens']:,} tokens, V = {on['head']['vocab']:,}"
        ours = timed["ours"]
        others = [r for r in timed.values() if r["against"] != "ours" and r["name"] != "naive GRPO"]
        faster = [r for r in others if r["over_naive"]["ratio"] < ours["over_naive"]["ratio"]]
        if faster:
            faster.sort(key=lambda r: r["over_naive"]["ratio"])
            slow.append(f"{where}: {over_naive(ours)} ({_named(faster, over_naive)})")
        if less := [r for r in others if r["peak_bytes"] < ours["peak_bytes"]]:
            large.append(f"{where}: {_mib(ours)} MiB ({_named(less, _mib)})")
    said = f"{WE_LOSE} Time over naive GSPO's: {'; '.join(slow) or 'nowhere'}."
    return f"{said} Memory: {'; '.join(large) or 'nowhere'}."


def _named(records: list[dict[str, Any]], said: Callable[[dict[str, Any]], str]) -> str:
    return ", ".join(f"{r['name']} {said(r)}" for r in records)


def _step(step: Suite, name: str) -> str:
    time, memory = step["results"]["time"], step["results"]["memory"]
    entropy = _largest(step, "rl-like")["on"]["entropy"]["quantiles"]
    quantiles = ", ".join(f"{float(at):.0%} {value:.2g}" for at, value in entropy.items())
    points = memory["points"]
    names = list(dict.fromkeys(r["name"] for point in points for r in point["candidates"] if "absent" not in r))
    rows = []
    for candidate in names:
        records = [next(r for r in point["candidates"] if r["name"] == candidate) for point in points]
        rows.append((candidate, *map(_mib, records)))
    return "\n\n".join([
        "## Loss and gradients: time and memory",
        conditions(time["measured"], "python -m gspo_kernels.benchmarks step --time"),
        "Forward, loss and both gradients (hidden states, head); the same batch for everyone, gradients checked "
        "against float64 before anything is timed. Sequences are equally long and nothing is padded. Runs take "
        "turns, ratios are taken round by round; memory is the peak beyond the inputs, gradients included, in a "
        "process of its own. Passes are matrix products in units of 2 N H V; ours leave rows without a gradient out in "
        "blocks of 128, so that few tokens save nothing. naive GRPO is the other named baseline, "
        "with a ratio per token: another loss, held against its own float64. Liger's loss goes sequence by sequence, "
        f"and so pays for short ones. Entropies of the synthetic policy, quantiles in nats: {quantiles}.",
        figure(name, "Time and peak memory against tokens"),
        _losses(time["runs"]),
        *(_comparison(run) for run in time["runs"]),
        "More tokens, rl-like, peak MiB: "
        + conditions(memory["measured"], "python -m gspo_kernels.benchmarks step --memory"),
        table(("", *(f"{point['tokens']:,} tokens" for point in points)), rows),
    ])  # fmt: skip  # the page, line by line


def _vocab(vocab: Suite, name: str) -> str:
    runs = vocab["results"]["runs"]
    names = [r["name"] for r in runs[0]["candidates"] if "seconds" in r]
    rows = []
    for candidate in names:
        records = [next(r for r in run["candidates"] if r["name"] == candidate) for run in runs]
        rows.append((candidate, *(f"{over_naive(r)}, {_mib(r)}, {error_of(r, '.0e')}" for r in records)))
    on = runs[0]["on"]
    return "\n\n".join([
        "## Vocabulary",
        conditions(vocab, "python -m gspo_kernels.benchmarks vocab"),
        f"{on['scenario']}, {on['tokens']:,} tokens, H = {on['head']['width']}, {on['dtype']}: time over naive "
        "GSPO's, peak MiB, error to float64. Small vocabularies are where full logits are cheap.",
        figure(name, "Time over naive and peak memory against the vocabulary"),
        _losses(runs),
        table(("", *(f"V = {run['on']['head']['vocab']:,}" for run in runs)), rows),
    ])  # fmt: skip  # the page, line by line


# Of the README: name -> (suites, text of them); of the page: suite -> text of it and of its file's name.
def _busy(busy: Suite, name: str) -> str:
    alone, beside = (record["candidates"] for record in busy["results"]["records"])
    rows = [
        (name, *(f"{1e3 * timed[name]['seconds']:,.0f}" for timed in (alone, beside)),
         *(over_naive(timed[name]) for timed in (alone, beside)))
        for name in alone
    ]  # fmt: skip  # lines by subject
    header = ("", "alone, ms", "beside, ms", "alone, over naive", "beside, over naive")
    on = busy["results"]["on"]
    return "\n\n".join([
        "## Beside a busy process",
        conditions(busy, "python -m gspo_kernels.benchmarks busy"),
        f"The same batch ({on['tokens']:,} tokens, {on['scenario']}, {_head(on)}, {on['dtype']}) alone, and while "
        "another process keeps one core busy.",
        table(header, rows),
    ])  # fmt: skip  # the page, line by line


BLOCKS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "step": (("step",), _short_step),
}
SECTIONS: dict[str, Callable[[Suite, str], str]] = {"step": _step, "vocab": _vocab, "busy": _busy}
