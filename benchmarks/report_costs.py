"""The report's sections on time, memory and work."""

from __future__ import annotations

from typing import Any

from .markdown import conditions, figure, mib, table
from .sparsity import BUDGETS

Suites = dict[str, dict[str, Any]]
CASES = ("rl-like", "no zero rows", "KL on", "heavier tail", "flat policy")


def blocks(suites: Suites) -> dict[str, str]:
    """Of the README."""
    return {"step": _short_step(suites["step"]), "sparsity": _short_sparsity(suites["sparsity"])}


def sections(suites: Suites) -> list[str]:
    """Of docs/benchmarks.md."""
    return [
        _step(suites["step"]), _vocab(suites["vocab"]), _trainer(suites["trainer"]), _overhead(suites["overhead"]),
        _sparsity(suites["sparsity"]),
    ]  # fmt: skip


def _largest(step: dict[str, Any], scenario: str) -> dict[str, Any]:
    runs = [run for run in step["results"]["runs"] if run["on"]["scenario"] == scenario]
    return max(runs, key=lambda run: run["on"]["tokens"])


def _head(on: dict[str, Any]) -> str:
    return f"H = {on['head']['width']}, V = {on['head']['vocab']:,}"


def _short_step(step: dict[str, Any]) -> str:
    rl, dense = (_largest(step, scenario) for scenario in ("rl-like", "dense"))
    slow = {r["name"]: r for r in dense["candidates"]}
    rows = [
        (r["name"], f"{r['over_naive']:.2f}", f"{slow[r['name']]['over_naive']:.2f}", mib(r["peak_bytes"]),
         f"{r['passes']:.2f}", f"{max(r['error'].values()):.0e}")
        for r in rl["candidates"] if "seconds" in r
    ]  # fmt: skip
    header = ("", "time / naive", "dense: time / naive", "peak MiB", "passes", "error to float64")
    on = rl["on"]
    sizes = f"{on['tokens']:,} tokens, {_head(on)}, {on['dtype']}"
    return f"{table(header, rows)}\n\nTwo CPU cores, {sizes}."


def _comparison(run: dict[str, Any]) -> str:
    header = ("", "time, ms", "p20 - p80", "over naive", "peak MiB", "passes", "error", "over naive's")
    rows, out = [], []
    for r in run["candidates"]:
        if "seconds" not in r:
            kind = next(k for k in ("absent", "does_not_fit", "failed", "wrong") if k in r)
            out.append(f"{r['name']} ({r[kind]})")
            continue
        rows.append((
            r["name"], f"{1e3 * r['seconds']:,.0f}", f"{1e3 * r['p20']:,.0f} - {1e3 * r['p80']:,.0f}",
            f"{r['over_naive']:.2f}", mib(r["peak_bytes"]), f"{r['passes']:.2f}" if "passes" in r else "-",
            f"{max(r['error'].values()):.1e}", f"{r['error_over_naive']:.2f}",
        ))  # fmt: skip
    on = run["on"]
    sizes = f"{on['tokens']:,} tokens in {on['sequences']} sequences, {_head(on)}"
    left = f"\n\nNot measured: {', '.join(out)}." if out else ""
    return f"**{on['scenario']}**, {sizes}, {on['dtype']}:\n\n{table(header, rows)}{left}"


def _step(step: dict[str, Any]) -> str:
    runs, memory = step["results"]["runs"], step["results"]["memory"]
    quantiles = ", ".join(
        f"{float(at):.0%} {value:.2g}" for at, value in runs[-1]["on"]["entropy"]["quantiles"].items()
    )
    names = list(dict.fromkeys(r["name"] for point in memory for r in point["candidates"] if "absent" not in r))
    rows = []
    for name in names:
        found = [next(r for r in point["candidates"] if r["name"] == name) for point in memory]
        rows.append((name, *(mib(r["peak_bytes"]) if "peak_bytes" in r else "out of memory" for r in found)))
    return "\n\n".join([
        "## Loss and gradients: time and memory",
        conditions(step, "python -m benchmarks.step"),
        "Forward, loss and both gradients (hidden states, head); the same batch for everyone, gradients checked "
        "against float64 before anything is timed. Runs take turns; memory is the peak beyond the inputs, gradients "
        "included, in a process of its own. Passes are matrix products in units of 2 N H V. naive GRPO is the other "
        "named baseline, with a ratio per token: another loss, held against its own float64. Entropies of the "
        f"synthetic policy, quantiles in nats: {quantiles}.",
        figure("step", "Time and peak memory against tokens"),
        *(_comparison(run) for run in reversed(runs)),
        "Peak memory alone, MiB, rl-like:",
        table(("", *(f"{point['tokens']:,} tokens" for point in memory)), rows),
    ])  # fmt: skip


def _vocab(vocab: dict[str, Any]) -> str:
    runs = vocab["results"]["runs"]
    names = [r["name"] for r in runs[0]["candidates"] if "seconds" in r]
    rows = []
    for name in names:
        found = [next(r for r in run["candidates"] if r["name"] == name) for run in runs]
        rows.append((name, *(f"{r['over_naive']:.2f}, {mib(r['peak_bytes'])}" for r in found)))
    on = runs[0]["on"]
    return "\n\n".join([
        "## Vocabulary",
        conditions(vocab, "python -m benchmarks.vocab"),
        f"{on['scenario']}, {on['tokens']} tokens, H = {on['head']['width']}, {on['dtype']}: time over naive GSPO's, "
        "and peak MiB. Small vocabularies are where full logits are cheap, and where we lose.",
        figure("vocab", "Time over naive and peak memory against the vocabulary"),
        table(("", *(f"V = {run['on']['head']['vocab']:,}" for run in runs)), rows),
    ])  # fmt: skip


def _trainer(trainer: dict[str, Any]) -> str:
    results = trainer["results"]
    rows = [
        (r["name"], f"{r['seconds']:.1f}", f"{r['p20']:.1f} - {r['p80']:.1f}", f"{r['over naive']:.2f}",
         f"{r['parts']['loss']['seconds']:.1f}", f"{r['loss share']:.0%}")
        for r in results["steps"]
    ]  # fmt: skip
    return "\n\n".join([
        "## A whole optimizer step",
        conditions(trainer, "python -m benchmarks.trainer"),
        f"{results['model']} of random weights ({results['parameters'] / 1e6:.0f} M parameters), {results['tokens']:,} "
        f"tokens, {results['dtype']}, AdamW: what the loss can change of a step is its share.",
        figure("trainer", "Seconds of an optimizer step by part"),
        table(("", "step, s", "p20 - p80", "over naive", "loss, s", "loss share"), rows),
    ])  # fmt: skip


def _overhead(overhead: dict[str, Any]) -> str:
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
        "Forward and backward at a shape so small that arithmetic is nothing: what a call costs the host. We lose this "
        "one to plain PyTorch; it is a fixed sum per call.",
        table(("", "", "us", "p20 - p80", "over plain PyTorch"), rows), parts, imports,
    ])  # fmt: skip


def _short_sparsity(sparsity: dict[str, Any]) -> str:
    found = {(r["case"], r["budget"]): r for r in sparsity["results"]["passes"]["cases"]}
    rows = [
        (case, f"{found[case, 0.0]['passes']:.2f}", f"{found[case, 1e-3]['passes']:.2f}",
         f"{found[case, 1e-3]['d_hidden error']:.1e}, {found[case, 1e-3]['d_weight error']:.1e}")
        for case in CASES
    ]  # fmt: skip
    return table(("", "exact", "budget 1e-3", "error of d_hidden, d_weight"), rows)


def _sparsity(sparsity: dict[str, Any]) -> str:
    passes, time = sparsity["results"]["passes"], sparsity["results"]["time"]
    found = {(r["case"], r["budget"]): r for r in passes["cases"]}
    cases = list(dict.fromkeys(case for case, _ in found))
    work = [(case, *(f"{found[case, b]['passes']:.2f}" for b in BUDGETS)) for case in cases]
    errors = [
        (case, *(f"{max(found[case, b]['d_hidden error'], found[case, b]['d_weight error']):.1e}" for b in BUDGETS[1:]))
        for case in cases
    ]
    seconds = [
        (name, f"{r['over naive']:.2f}", f"{r['p20'] / time['by budget']['naive']['seconds']:.2f} - "
         f"{r['p80'] / time['by budget']['naive']['seconds']:.2f}", mib(time["peak bytes"][name]))
        for name, r in time["by budget"].items()
    ]  # fmt: skip
    shares = [
        (f"{r['zero share']:g}", f"{r['exact']['over naive']:.2f}", f"{r['budget 0.001']['over naive']:.2f}")
        for r in time["by zero share"]
    ]
    mass = [
        (
            f"{r['mean entropy']:.2f}",
            f"{r['share under 0.01 nats']:.0%}",
            f"{exact['passes']:.2f}",
            f"{r['passes']:.2f}",
        )
        for exact, r in zip(passes["entropy"][::2], passes["entropy"][1::2], strict=True)
    ]
    return "\n\n".join([
        "## Zero coefficients and a gradient budget",
        conditions(passes["measured"], "python -m benchmarks.sparsity --passes --time"),
        f"Synthetic policy (`benchmarks/peaked.py`), H = {passes['width']}, V = {passes['vocab']:,}, "
        f"{passes['rows']:,} tokens in 64 sequences; rl-like: 19 of zero advantage, 7 beyond the clip. Errors are "
        "relative to the exact gradients.",
        figure("sparsity", "Passes, errors and time against budget, zero share and entropy"),
        "Matrix passes by budget (dense: 4):", table(("", *(f"{b:g}" for b in BUDGETS)), work),
        "Relative error of the worse gradient by budget:", table(("", *(f"{b:g}" for b in BUDGETS[1:])), errors),
        "Passes by entropy of the policy, rl-like:",
        table(("mean entropy, nats", "tokens under 0.01 nats", "exact", "budget 1e-3"), mass),
        f"Time over naive GSPO's and peak memory, {time['rows']:,} tokens in 8 sequences, 2 of zero advantage, 3 "
        "clipped:",
        table(("", "time / naive", "p20 - p80", "peak MiB"), seconds),
        "Time over naive GSPO's by the share of sequences of zero advantage:",
        table(("zero share", "exact", "budget 1e-3"), shares),
        f"Choosing the cells takes {time['choosing cells over budget 1e-3']:.1%} of the loss.",
    ])  # fmt: skip
