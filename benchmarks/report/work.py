"""The report's sections on work: of an optimizer step, of a call, and what zero coefficients and a budget save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..workloads import BUDGETS
from .costs import WE_LOSE, between, error_of, left_out, over_naive
from .markdown import conditions, figure, fill, mib, table

Suite = dict[str, Any]
CASES = ("rl-like", "no zero rows", "KL on", "heavier tail", "flat policy")


def _trainer(trainer: Suite, name: str) -> str:
    results = trainer["results"]
    rows = [
        (r["name"], f"{r['seconds']:.1f}", f"{r['p20']:.1f} - {r['p80']:.1f}", over_naive(r), between(r["over_naive"]),
         f"{r['parts']['loss']['seconds']:.1f}", f"{r['loss share']:.0%}", error_of(r))
        for r in results["steps"] if "seconds" in r
    ]  # fmt: skip  # lines by subject
    header = ("", "step, s", "p20 - p80", "over naive", "p20 - p80", "loss, s", "loss share", "error to float64")
    parts = [
        "## A whole optimizer step",
        conditions(trainer, "python -m gspo_kernels.benchmarks trainer"),
        f"{results['model']} of random weights ({results['parameters'] / 1e6:.0f} M parameters), "
        f"{results['tokens']:,} tokens, {results['dtype']}, AdamW: what the loss can change of a step is its share. "
        "Intervals that hold 1 are a tie. Error: of the worse of the gradients of the last hidden states and the head, "
        "against float64. Random weights make a flat policy, of which a budget could drop nothing: none is tried, nor "
        "is the compiled loss, and memory is that of the sections above. Bars are medians of parts.",
        _quicker_loss(results["steps"]),
        figure(name, "Seconds of an optimizer step by part"),
        table(header, rows),
        left_out(results["steps"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _quicker_loss(steps: list[dict[str, Any]]) -> str:
    """Whose loss alone takes less than ours."""
    seconds = {r["name"]: r["parts"]["loss"]["seconds"] for r in steps if "seconds" in r}
    less = ", ".join(f"{name} {x:.1f} s" for name, x in seconds.items() if x < seconds["ours"])
    ours = f"{seconds['ours']:.1f} s ({less})" if less else "nowhere"
    return f"{WE_LOSE} The loss alone: {ours}."


def _cheaper_calls(calls: list[dict[str, Any]]) -> str:
    """Who costs the host less than ours, of everything that is called."""
    said = []
    for ours in (r for r in calls if r["candidate"] == "ours"):
        those = [r for r in calls if r["what"] == ours["what"] and not r["candidate"].startswith("ours")]
        less = ", ".join(f"{r['candidate']} {r['ratio']:.1f}" for r in those if r["ratio"] < ours["ratio"])
        said += [f"{ours['what']} {ours['ratio']:.1f} ({less})"] if less else []
    return f"{WE_LOSE} Over plain PyTorch: {'; '.join(said) or 'nowhere'}."


def _overhead(overhead: Suite, name: str) -> str:
    results = overhead["results"]
    rows = [
        (r["what"], r["candidate"], f"{1e6 * r['seconds']:,.0f}", f"{1e6 * r['p20']:,.0f} - {1e6 * r['p80']:,.0f}",
         f"{r['ratio']:.1f}")
        for r in results["calls"]
    ]  # fmt: skip  # lines by subject
    parts = table(
        ("part of a call of ours", "us"),
        ((name, f"{1e6 * seconds['seconds']:,.0f}") for name, seconds in results["parts of a call"].items()),
    )
    imports = table(
        ("import, after torch", "ms of processor time"),
        (
            (n, f"{1e3 * seconds['seconds']:,.0f}")
            for n, seconds in results["import after torch, processor time"].items()
        ),
    )
    return "\n\n".join([
        "## Overhead of a call",
        conditions(overhead, "python -m gspo_kernels.benchmarks overhead"),
        "Forward and backward at a shape so small that arithmetic is nothing: what a call costs the host, a fixed "
        "sum per call that plain PyTorch does not have.",
        _cheaper_calls(results["calls"]),
        table(("", "", "us", "p20 - p80", "over plain PyTorch"), rows), parts, imports,
    ])  # fmt: skip  # the page, line by line


def _worse(record: dict[str, Any]) -> float:
    """The error of the worse gradient."""
    return max(record["d_hidden error"], record["d_weight error"])


def _short_sparsity(sparsity: Suite, policy: Suite) -> str:
    passes = sparsity["results"]["passes"]
    records = {(r["case"], r["budget"]): r for r in passes["cases"]}
    saved = ", ".join(
        f"{case} {records[case, 0.0]['passes']:.2f} to {records[case, 1e-3]['passes']:.2f}" for case in CASES
    )
    errors = " and ".join(f"{_worse(records['rl-like', b]):.1e} at budget {b:g}" for b in (1e-3, 1e-2))
    trained = {r["budget"]: r for r in policy["results"]["trained"]["budgets"]}
    return fill(
        f"Passes (of 2 N H V) from budget 0 to 1e-3, synthetic policy of V = {passes['vocab']:,} with half of its "
        f"tokens under 0.01 nats: {saved}. The budget does not bound the error of a gradient: {errors} (rl-like). A "
        f"small policy trained on arithmetic: {trained[0.0]['passes']:.2f} to {trained[1e-3]['passes']:.2f}, error "
        f"{_worse(trained[1e-3]):.1e}."
    )


def _sparsity(sparsity: Suite, name: str) -> str:
    passes, time = sparsity["results"]["passes"], sparsity["results"]["time"]
    records = {(r["case"], r["budget"]): r for r in passes["cases"]}
    cases = list(dict.fromkeys(case for case, _ in records))
    work = [(case, *(f"{records[case, b]['passes']:.2f}" for b in BUDGETS)) for case in cases]
    errors = [(case, *(f"{_worse(records[case, b]):.1e}" for b in BUDGETS[1:])) for case in cases]
    seconds = [
        (budget, f"{r['over_naive']['ratio']:.2f}", between(r["over_naive"]), mib(time["peak bytes"][budget]))
        for budget, r in time["by budget"].items()
    ]
    shares = _two(passes["zero share"], time["by zero share"], "zero share")
    mass = _two(passes["entropy"], time["by entropy"], "mean entropy")
    return "\n\n".join([
        "## Zero coefficients and a gradient budget",
        conditions(passes["measured"], "python -m gspo_kernels.benchmarks sparsity --passes"),
        f"Synthetic policy (`benchmarks/peaked.py`), H = {passes['width']}, V = {passes['vocab']:,}, "
        f"{passes['rows']:,} tokens in 64 sequences; rl-like: 19 of zero advantage, 7 beyond the clip. Errors are "
        "relative to the exact gradients.",
        figure(name, "Passes, errors and time against budget, zero share and entropy"),
        "Matrix passes by budget (dense: 4):", table(("", *(f"{b:g}" for b in BUDGETS)), work),
        "Relative error of the worse gradient by budget:", table(("", *(f"{b:g}" for b in BUDGETS[1:])), errors),
        f"Time over naive GSPO's and peak memory, {time['rows']:,} tokens in 8 sequences, {time['sequences']['zero']} "
        f"of zero advantage, {time['sequences']['clipped']} clipped: "
        + conditions(time["measured"], "python -m gspo_kernels.benchmarks sparsity --time"),
        table(("", "time / naive", "p20 - p80", "peak MiB"), seconds),
        "By the share of sequences of zero advantage (nothing clipped): passes and the worse gradient's error, then "
        "time over naive GSPO's of the 8 sequences:",
        shares,
        "By the mean entropy of a token in nats, rl-like: the same:", mass,
        f"Choosing the cells takes {time['choosing cells over budget 1e-3']:.1%} of the loss.",
    ])  # fmt: skip  # the page, line by line


def _two(work: list[dict[str, Any]], times: list[dict[str, Any]], key: str) -> str:
    """Passes, errors and times, exact and at 1e-3."""
    rows = []
    for exact, r in zip(work[::2], work[1::2], strict=True):
        at = float(r["case"].removeprefix(key)) if r["case"].startswith(key) else r[key]
        rows.append((f"{at:.2f}", f"{exact['passes']:.2f}", f"{r['passes']:.2f}", f"{_worse(r):.1e}"))
    timed = [
        (f"{r[key]:.2f}", *(f"{r[budget]['over_naive']['ratio']:.2f}" for budget in ("exact", "budget 0.001")))
        for r in times
    ]
    passes = table((key, "passes, exact", "passes, 1e-3", "error, 1e-3"), rows)
    return f"{passes}\n\n{table((key, 'time, exact', 'time, 1e-3'), timed)}"


BLOCKS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "sparsity": (("sparsity", "policy"), _short_sparsity),
}
SECTIONS: dict[str, Callable[[Suite, str], str]] = {
    "trainer": _trainer, "overhead": _overhead, "sparsity": _sparsity,
}  # fmt: skip  # lines by subject
