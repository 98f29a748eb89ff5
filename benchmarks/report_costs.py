"""The report's sections on time, memory and work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bench import OUT
from .markdown import conditions, figure, fill, mib, table
from .workloads import BUDGETS

Suite = dict[str, Any]
CASES = ("rl-like", "no zero rows", "KL on", "heavier tail", "flat policy")


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
)  # fmt: skip


def _short_step(step: Suite) -> str:
    runs = [_largest(step, scenario) for scenario in ("rl-like", "dense", "long")]
    runs.append(_largest(step, "rl-like", "bfloat16"))
    rl = {r["name"]: r for r in runs[0]["candidates"]}
    rows = []
    for name in SHORT:
        ratios = (_over(next(r for r in run["candidates"] if r["name"] == name)) for run in runs)
        r = rl[name]
        rows.append((name, *ratios, _mib(r), _number(r, "passes"), _error(r, ".0e")))
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


def _over(record: dict[str, Any]) -> str:
    return f"{record['over_naive']['ratio']:.2f}" if "over_naive" in record else "-"


def _spread(over: dict[str, float]) -> str:
    return f"{over['p20']:.2f} - {over['p80']:.2f}"


def _mib(record: dict[str, Any]) -> str:
    return mib(record["peak_bytes"]) if "peak_bytes" in record else record.get("does_not_fit", "-")


def _number(record: dict[str, Any], name: str) -> str:
    return f"{record[name]:.2f}" if name in record else "-"


def _error(record: dict[str, Any], form: str = ".1e") -> str:
    return format(record["error"]["worst"], form) if "error" in record else "-"


def _left(records: list[dict[str, Any]]) -> str:
    """Who has no time, and why."""
    out = [f"{r['name']} ({r[reason]})" for r in records for reason in OUT if reason in r]
    return f"No time of: {', '.join(out)}." if out else ""


def _comparison(run: dict[str, Any]) -> str:
    header = ("", "time, ms", "p20 - p80", "over naive", "p20 - p80", "peak MiB", "passes", "error", "over naive's")
    rows = []
    for r in run["candidates"]:
        if "seconds" in r:
            times = (f"{1e3 * r['seconds']:,.0f}", f"{1e3 * r['p20']:,.0f} - {1e3 * r['p80']:,.0f}", _over(r))
            spread = _spread(r["over_naive"]) if "over_naive" in r else "-"
            rows.append(
                (r["name"], *times, spread, _mib(r), _number(r, "passes"), _error(r), _number(r, "error_over_naive"))
            )
    on, runs = run["on"], max((r.get("runs", 0) for r in run["candidates"]), default=0)
    sizes = f"{on['tokens']:,} tokens in {on['sequences']} sequences ({on['zero']} of zero advantage, {on['clipped']} "
    sizes += f"clipped), {_head(on)}, {on['dtype']}, {runs} runs"
    parts = [f"**{on['scenario']}**, {sizes}:", table(header, rows), _left(run["candidates"])]
    return "\n\n".join(part for part in parts if part)


def _losses(runs: list[dict[str, Any]]) -> str:
    """Where exact gradients cost more than full logits do, and who is the fastest there."""
    slow, large = [], []
    for run in runs:
        on, timed = run["on"], {r["name"]: r for r in run["candidates"] if "over_naive" in r}
        where = f"{on['scenario']}, {on['dtype']}, {on['tokens']:,} tokens, V = {on['head']['vocab']:,}"
        ours, naive = timed["ours"], timed["naive GSPO"]
        if ours["over_naive"]["ratio"] > 1:
            others = (r for r in timed.values() if r["against"] != "ours" and r["name"] != "naive GRPO")
            fastest = min(others, key=lambda r: r["over_naive"]["ratio"])
            slow.append(f"{where}: {_over(ours)} (fastest: {fastest['name']}, {_over(fastest)})")
        if ours["peak_bytes"] > naive["peak_bytes"]:
            large.append(f"{where}: {_mib(ours)} MiB against {_mib(naive)}")
    said = f"**Where we lose.** Slower than naive GSPO: {'; '.join(slow) or 'nowhere'}."
    return f"{said} More memory: {'; '.join(large)}." if large else said


def _step(step: Suite, name: str) -> str:
    time, memory = step["results"]["time"], step["results"]["memory"]
    entropy = _largest(step, "rl-like")["on"]["entropy"]["quantiles"]
    quantiles = ", ".join(f"{float(at):.0%} {value:.2g}" for at, value in entropy.items())
    points = memory["points"]
    names = list(dict.fromkeys(r["name"] for point in points for r in point["candidates"] if "absent" not in r))
    rows = []
    for one in names:
        found = [next(r for r in point["candidates"] if r["name"] == one) for point in points]
        rows.append((one, *map(_mib, found)))
    return "\n\n".join([
        "## Loss and gradients: time and memory",
        conditions(time["measured"], "python -m benchmarks.step --time"),
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
        "More tokens, rl-like, peak MiB: " + conditions(memory["measured"], "python -m benchmarks.step --memory"),
        table(("", *(f"{point['tokens']:,} tokens" for point in points)), rows),
    ])  # fmt: skip


def _vocab(vocab: Suite, name: str) -> str:
    runs = vocab["results"]["runs"]
    names = [r["name"] for r in runs[0]["candidates"] if "seconds" in r]
    rows = []
    for one in names:
        found = [next(r for r in run["candidates"] if r["name"] == one) for run in runs]
        rows.append((one, *(f"{_over(r)}, {_mib(r)}, {_error(r, '.0e')}" for r in found)))
    on = runs[0]["on"]
    return "\n\n".join([
        "## Vocabulary",
        conditions(vocab, "python -m benchmarks.vocab"),
        f"{on['scenario']}, {on['tokens']:,} tokens, H = {on['head']['width']}, {on['dtype']}: time over naive "
        "GSPO's, peak MiB, error to float64. Small vocabularies are where full logits are cheap.",
        figure(name, "Time over naive and peak memory against the vocabulary"),
        _losses(runs),
        table(("", *(f"V = {run['on']['head']['vocab']:,}" for run in runs)), rows),
    ])  # fmt: skip


def _trainer(trainer: Suite, name: str) -> str:
    results = trainer["results"]
    rows = [
        (r["name"], f"{r['seconds']:.1f}", f"{r['p20']:.1f} - {r['p80']:.1f}", _over(r), _spread(r["over_naive"]),
         f"{r['parts']['loss']['seconds']:.1f}", f"{r['loss share']:.0%}", _error(r))
        for r in results["steps"] if "seconds" in r
    ]  # fmt: skip
    header = ("", "step, s", "p20 - p80", "over naive", "p20 - p80", "loss, s", "loss share", "error to float64")
    parts = [
        "## A whole optimizer step",
        conditions(trainer, "python -m benchmarks.trainer"),
        f"{results['model']} of random weights ({results['parameters'] / 1e6:.0f} M parameters), "
        f"{results['tokens']:,} tokens, {results['dtype']}, AdamW: what the loss can change of a step is its share. "
        "Intervals that hold 1 are a tie. Error: of the worse of the gradients of the last hidden states and the head, "
        "against float64. Random weights make a flat policy, of which a budget could drop nothing: none is tried, nor "
        "is the compiled loss, and memory is that of the sections above. Bars are medians of parts.",
        figure(name, "Seconds of an optimizer step by part"),
        table(header, rows),
        _left(results["steps"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _overhead(overhead: Suite, name: str) -> str:
    results = overhead["results"]
    rows = [
        (r["what"], r["candidate"], f"{1e6 * r['seconds']:,.0f}", f"{1e6 * r['p20']:,.0f} - {1e6 * r['p80']:,.0f}",
         f"{r['ratio']:.1f}")
        for r in results["calls"]
    ]  # fmt: skip
    parts = table(
        ("part of a call of ours", "us"),
        ((name, f"{1e6 * one['seconds']:,.0f}") for name, one in results["parts of a call"].items()),
    )
    imports = table(
        ("import, after torch", "ms of processor time"),
        ((n, f"{1e3 * one['seconds']:,.0f}") for n, one in results["import after torch, processor time"].items()),
    )
    return "\n\n".join([
        "## Overhead of a call",
        conditions(overhead, "python -m benchmarks.overhead"),
        "Forward and backward at a shape so small that arithmetic is nothing: what a call costs the host, a fixed "
        "sum per call that plain PyTorch does not have.",
        table(("", "", "us", "p20 - p80", "over plain PyTorch"), rows), parts, imports,
    ])  # fmt: skip


def _short_sparsity(sparsity: Suite, policy: Suite) -> str:
    passes = sparsity["results"]["passes"]
    found = {(r["case"], r["budget"]): r for r in passes["cases"]}
    saved = ", ".join(f"{case} {found[case, 0.0]['passes']:.2f} to {found[case, 1e-3]['passes']:.2f}" for case in CASES)
    errors = " and ".join(
        f"{max(found['rl-like', b]['d_hidden error'], found['rl-like', b]['d_weight error']):.1e} at budget {b:g}"
        for b in (1e-3, 1e-2)
    )
    trained = {r["budget"]: r for r in policy["results"]["trained"]["budgets"]}
    worst = max(trained[1e-3]["d_hidden error"], trained[1e-3]["d_weight error"])
    return fill(
        f"Passes (of 2 N H V) from budget 0 to 1e-3, synthetic policy of V = {passes['vocab']:,} with half of its "
        f"tokens under 0.01 nats: {saved}. The budget does not bound the error of a gradient: {errors} (rl-like). A "
        f"small policy trained on arithmetic: {trained[0.0]['passes']:.2f} to {trained[1e-3]['passes']:.2f}, error "
        f"{worst:.1e}."
    )


def _sparsity(sparsity: Suite, name: str) -> str:
    passes, time = sparsity["results"]["passes"], sparsity["results"]["time"]
    found = {(r["case"], r["budget"]): r for r in passes["cases"]}
    cases = list(dict.fromkeys(case for case, _ in found))
    work = [(case, *(f"{found[case, b]['passes']:.2f}" for b in BUDGETS)) for case in cases]
    errors = [
        (case, *(f"{max(found[case, b]['d_hidden error'], found[case, b]['d_weight error']):.1e}" for b in BUDGETS[1:]))
        for case in cases
    ]
    seconds = [
        (one, f"{r['over_naive']['ratio']:.2f}", _spread(r["over_naive"]), mib(time["peak bytes"][one]))
        for one, r in time["by budget"].items()
    ]
    shares = _two(passes["zero share"], time["by zero share"], "zero share")
    mass = _two(passes["entropy"], time["by entropy"], "mean entropy")
    return "\n\n".join([
        "## Zero coefficients and a gradient budget",
        conditions(passes["measured"], "python -m benchmarks.sparsity --passes"),
        f"Synthetic policy (`benchmarks/peaked.py`), H = {passes['width']}, V = {passes['vocab']:,}, "
        f"{passes['rows']:,} tokens in 64 sequences; rl-like: 19 of zero advantage, 7 beyond the clip. Errors are "
        "relative to the exact gradients.",
        figure(name, "Passes, errors and time against budget, zero share and entropy"),
        "Matrix passes by budget (dense: 4):", table(("", *(f"{b:g}" for b in BUDGETS)), work),
        "Relative error of the worse gradient by budget:", table(("", *(f"{b:g}" for b in BUDGETS[1:])), errors),
        f"Time over naive GSPO's and peak memory, {time['rows']:,} tokens in 8 sequences, {time['sequences']['zero']} "
        f"of zero advantage, {time['sequences']['clipped']} clipped: "
        + conditions(time["measured"], "python -m benchmarks.sparsity --time"),
        table(("", "time / naive", "p20 - p80", "peak MiB"), seconds),
        "By the share of sequences of zero advantage (nothing clipped): passes and the worse gradient's error, then "
        "time over naive GSPO's of the 8 sequences:",
        shares,
        "By the mean entropy of a token in nats, rl-like: the same:", mass,
        f"Choosing the cells takes {time['choosing cells over budget 1e-3']:.1%} of the loss.",
    ])  # fmt: skip


def _two(work: list[dict[str, Any]], times: list[dict[str, Any]], key: str) -> str:
    """Passes, errors and times, exact and at 1e-3."""
    rows = []
    for exact, r in zip(work[::2], work[1::2], strict=True):
        at = float(r["case"].removeprefix(key)) if r["case"].startswith(key) else r[key]
        error = max(r["d_hidden error"], r["d_weight error"])
        rows.append((f"{at:.2f}", f"{exact['passes']:.2f}", f"{r['passes']:.2f}", f"{error:.1e}"))
    timed = [
        (f"{r[key]:.2f}", *(f"{r[budget]['over_naive']['ratio']:.2f}" for budget in ("exact", "budget 0.001")))
        for r in times
    ]
    passes = table((key, "passes, exact", "passes, 1e-3", "error, 1e-3"), rows)
    return f"{passes}\n\n{table((key, 'time, exact', 'time, 1e-3'), timed)}"


# Of the README: name -> (suites, text of them); of the page: suite -> text of it and of its file's name.
BLOCKS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "step": (("step",), _short_step),
    "sparsity": (("sparsity", "policy"), _short_sparsity),
}
SECTIONS: dict[str, Callable[[Suite, str], str]] = {
    "step": _step, "vocab": _vocab, "trainer": _trainer, "overhead": _overhead, "sparsity": _sparsity,
}  # fmt: skip
