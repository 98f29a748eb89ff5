"""The tables of docs/benchmarks.md. `SECTIONS` has a function per suite that makes texts for `page.md` from results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from ..studies import compare_report
from ..workloads import BUDGETS

Results = dict[str, Any]
Texts = dict[str, str]
Cell = Callable[[Results], str]
NAIVE, OURS, BUDGET, CACHED = "naive GSPO", "ours", "ours, budget 1e-3", "ours, all in the cache"
DEFAULT_CACHE = "ours, default cache"
ROLLOUTS = 40  # the default of `gspo compare`
NOT_TIMED = ("absent", "does_not_fit", "failed", "wrong")
LENGTHS = (64, 256, 1024, 4096, 16_384)  # tokens per sequence
# Measurements on a GPU: groups that compare implementations, shapes, kernels, and products.
GPU_GROUPS = {
    "rl-like, 4,096 tokens": "rl-4k", "rl-like, 8,192 tokens": "rl-8k", "rl-like, 32,768 tokens": "rl-32k",
    "dense, 8,192 tokens": "D",
}  # fmt: skip  # by heading
GPU_SHAPES = ("D", "A", "C")
EARLIER = ", earlier run"  # ends the name of a group that was measured again, without some of the packages
KERNELS = ("kernel forward_tile", "kernel gradient_tile")
PRODUCTS = ("vendor h W'", "vendor d_logits W", "vendor d_logits' h")


def shown(name: str) -> str:
    return re.sub("^ours", "**gspo_kernels**", name)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def conditions(measured: Results) -> str:
    """Format date, commit, machine and versions of a measurement."""
    machine = measured["machine"]
    versions = measured["versions"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "gspo-kernels")
    changed = " with uncommitted changes" if measured["uncommitted changes"] else ""
    where = f"{machine.get('gpu') or machine['cpu']}, {threads}, {machine['memory GiB']} GiB"
    return f"{measured['date']}, commit {measured['commit'][:7]}{changed}; {where}; {packages}."


def mib(record: Results) -> str:
    return f"{record['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in record else record.get("does_not_fit", "-")


def percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share else "0"


def interval(ends: Sequence[float], form: str = ".2f") -> str:
    return f"{ends[0]:{form}} to {ends[1]:{form}}"


def over_naive(record: Results) -> str:
    return f"{record['over_naive']['ratio']:.2f}" if "over_naive" in record else "-"


def over_naive_with_spread(record: Results) -> str:
    """Format the ratios to naive GSPO's time: median (20th to 80th percentile)."""
    ratio = record.get("over_naive")
    return f"{ratio['ratio']:.2f} ({interval([ratio['p20'], ratio['p80']])})" if ratio else "-"


def error_of(record: Results) -> str:
    """Format the error of the worse gradient, or "-" if it was not measured or is NaN."""
    worst = record["error"]["worst"] if "error" in record else None
    return "-" if worst is None else f"{worst:.1e}"


def passes_of(record: Results) -> str:
    return f"{record['passes']:.2f}" if "passes" in record else "-"


def worse(record: Results) -> float:
    """The error of the worse gradient, from a record of `sparsity.by_budget`."""
    return max(record["d_hidden error"], record["d_weight error"])


def passes_and_error(record: Results) -> str:
    """Format passes and, if cells were left out, the error of the worse gradient in brackets."""
    return passes_of(record) + (f" ({worse(record):.0e})" if worse(record) else "")


def by_name(records: Iterable[Results]) -> dict[str, Results]:
    return {record["name"]: record for record in records}


def candidates_table(columns: dict[str, tuple[list[Results], Cell]]) -> str:
    """Make a table with a row per measured candidate. `columns`: header -> (records, function that formats one)."""
    every = [r for records, _ in columns.values() for r in records]
    names = dict.fromkeys(r["name"] for r in every if not r.keys() & {"absent", "failed", "wrong"})
    groups = [(by_name(records), cell) for records, cell in columns.values()]
    return table(["", *columns], [(shown(n), *(cell(group.get(n, {})) for group, cell in groups)) for n in names])


def left_out(records: Iterable[Results]) -> str:
    """Name the candidates without a time, each with the reason, or "none"."""
    return "; ".join(f"{r['name']} ({r[why]})" for r in records for why in NOT_TIMED if why in r) or "none"


def step(results: Results) -> Texts:
    time, memory, exact = {}, {}, {}
    first = results["time"]["runs"][0]["on"]
    for run in results["time"]["runs"]:
        on = run["on"]
        records = run["candidates"]
        time[f"{on['scenario']}, {on['tokens']:,} tokens, {on['dtype']}"] = (records, over_naive_with_spread)
        if on["scenario"] == first["scenario"]:
            exact |= {f"passes, {on['dtype']}": (records, passes_of), f"error, {on['dtype']}": (records, error_of)}
            if on["dtype"] == first["dtype"]:
                memory[f"{on['tokens']:,} tokens, MiB"] = (records, mib)
    memory |= {f"{x['tokens']:,} tokens, MiB": (x["candidates"], mib) for x in results["memory"]["points"]}
    tables = {"time_table": candidates_table(time), "memory_table": candidates_table(memory | exact)}
    return {**tables, "left_out": left_out(results["time"]["runs"][0]["candidates"])}


def vocab(results: Results) -> Texts:
    sizes = {f"V = {run['on']['head']['vocab']:,}": run["candidates"] for run in results["runs"]}
    time = {size: (records, over_naive) for size, records in sizes.items()}
    memory = {f"{size}, MiB": (records, mib) for size, records in sizes.items()}
    return {"table": candidates_table(time | memory)}


def trainer(results: Results) -> Texts:
    columns: dict[str, tuple[list[Results], Cell]] = {}
    for dtype, part in results.items():
        timed = [r for r in part["steps"] if "wrong" not in r]
        cells: dict[str, Cell] = {
            "peak MiB": mib, "step, s": lambda r: f"{r['seconds']:.1f}" if r else "-", "step / naive's": over_naive,
            "norm": lambda r: f"{r['norm_over_full']:.4f}" if r else "-",
        }  # fmt: skip  # a column each
        columns |= {f"{dtype}: {label}": (timed, cell) for label, cell in cells.items()}
    measured = "; ".join(f"{dtype}: {conditions(part['measured'])}" for dtype, part in results.items())
    part = next(iter(results.values()))
    return {"table": candidates_table(columns), "measured": measured, "on": part, "runs": part["steps"][0]["runs"]}


def skip(results: Results) -> Texts:
    shares = results["shares"]
    on_gpu = "TRL peak_bytes" in shares[0]  # there, answers are random tokens, and generation is not timed
    times = {"update": "time of the updates" if on_gpu else "updates"}
    times |= {} if on_gpu else {"with generation": "updates and generation"}
    rows = [(label, *(f"{record[key]:.2f}x" for record in shares)) for key, label in times.items()]
    for name in ("TRL", "GSPOTrainer") if on_gpu else ():
        peaks = (f"{record[f'{name} peak_bytes'] / 2**30:.1f} GiB" for record in shares)
        rows.append((f"peak memory with {name}", *peaks))
    header = ("answers with advantage 0", *(f"{1 - record['rows_run']:.0%}" for record in shares))
    return {"table": table(header, rows)}


def kept_sets(results: Results) -> dict[str, Any]:
    tables, ours_least = {}, math.inf
    for kind in ("sets", "extra"):
        batches = [batch for batch in results["batches"] if batch["kind"] == kind]
        names = [way["name"] for way in batches[0]["ways"]]
        rows = []
        for batch in batches:
            ways = by_name(batch["ways"])
            label = f"{batch['mean']:.3g} (at most {batch['largest']:,})" if kind == "sets" else str(batch["count"])
            cells = []
            for name in names:
                way = ways[name]
                size = f"{way['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in way else ""
                error = f", {way['error']:.1e}" if way.get("error") else ""
                cells.append(way.get("does_not_fit") or f"{1e3 * way['seconds']:.1f} ms, {size}{error}")
            rows.append((label, *cells))
            if kind == "sets":
                ours_least = min(ours_least, ways["ours"]["seconds"])
        first = "ids in a set" if kind == "sets" else "extra ids"
        header = (first, *map(shown, names))
        tables[kind] = table([x.removeprefix("masked ") if kind == "extra" else x for x in header], rows)
    return {**tables, "least": f"{1e3 * ours_least:.0f} ms"}


def budget_table(rows: dict[str, list[Results]], cell: Cell) -> str:
    """Make a table with a column per gradient budget. `rows`: label -> records in the order of `BUDGETS`."""
    header = ("", *(f"budget {b:g}" for b in BUDGETS))
    return table(header, [(label, *map(cell, records)) for label, records in rows.items()])


def sparsity(results: Results) -> Texts:
    cases: dict[str, list[Results]] = {}
    for record in results["passes"]["cases"]:
        cases.setdefault(record["case"], []).append(record)
    cached: dict[str, tuple[list[Results], Cell]] = {}
    for run in results["cache"]["runs"]:
        label = f"{run['on']['scenario']}, {run['on']['dtype']}"
        cached |= {label: (run["candidates"], over_naive_with_spread), f"MiB, {label}": (run["candidates"], mib)}
    return {"passes_table": budget_table(cases, passes_and_error), "cache_table": candidates_table(cached)}


def policy(results: Results) -> Texts:
    rows = {kind: results[kind]["budgets"] for kind in ("trained", "formula")}
    return {"table": budget_table(rows, lambda r: f"{r['live_tile_share']:.0%}, {passes_and_error(r)}")}


def fidelity(results: Results) -> Texts:
    texts = {"correlation": "not measured"}
    for kind, study in results["sets"].items():
        at = [study["lengths"].index(length) for length in LENGTHS]
        rows = []
        for r in study["implementations"]:
            errors = (f"{r['log-prob']['std']:.1e}" if "log-prob" in r else "-", f"{r['log-ratio']['std']:.1e}")
            wrong = [*(r["wrong"][i] for i in at), r["wrong with the mean error"][at[-1]]]
            rounded = " (returns bf16)" if r["dtype"] == "bfloat16" else ""
            rows.append((shown(r["name"]) + rounded, *errors, *map(percent, wrong)))
        header = ["", "log-prob error", "log-ratio error", *(f"{length:,} tokens" for length in LENGTHS)]
        texts[kind] = table([*header, f"{LENGTHS[-1]:,} tokens, mean error kept"], rows)
        if measured := [r["correlation"] for r in study["implementations"] if r["correlation"]]:
            texts["correlation"] = interval([min(measured), max(measured)])
    texts["left_out"] = "; ".join(f"{name} ({why})" for name, why in results["not measured"].items()) or "none"
    return {"trained": "Not measured.", **texts}


HEADLINE_RATE = 1e-6  # learning rate of the updates in the tables of whole models


def headline_run(results: Results) -> Results:
    """The run of the precision study whose numbers are shown first."""
    return next(run for run in results["runs"] if run["learning rate"] == HEADLINE_RATE)


def precision(results: Results) -> Texts:
    rows: dict[tuple[str, ...], list[str]] = {}  # heads with equal numbers share a row
    for body, records in headline_run(results)["bodies"].items():
        for r in records:
            at = r["lengths"].index(1024)
            rounded = r.get("against rounded weights")
            counted = r["measured answers"]
            cells = (
                body, *(f"{r['log-ratio'][key]:.1e}" for key in ("std of tokens", "std of answers")),
                *map(percent, r["wrong"]), interval([100 * x for x in r["95 %"][at]], ".1f"),
                percent(rounded["wrong"][at]) if rounded else "-", f"{counted['counted']} of {counted['answers']}",
            )  # fmt: skip  # a cell each
            rows.setdefault(cells, []).append(shown(r["name"]))
    lengths = [f"{length:,} tokens" for length in next(iter(results["runs"][0]["bodies"].values()))[0]["lengths"]]
    errors = ("error of tokens", "of answers")
    header = ("body", "head", *errors, *lengths, "95 %, 1,024 tokens", "rounded weights", "counted")
    by_rate = []
    for body in headline_run(results)["bodies"]:
        cells = []
        for run in results["runs"]:
            by_head = by_name(run["bodies"][body])
            shares = (by_head[name]["wrong"][by_head[name]["lengths"].index(1024)] for name in (NAIVE, OURS))
            cells.append(", ".join(map(percent, shares)))
        by_rate.append((body, *cells))
    spreads = [(run["learning rate"], run["true log-ratio"]) for run in results["runs"]]
    return {
        "table": table(header, [(body, ", ".join(heads), *cells) for (body, *cells), heads in rows.items()]),
        "rates": table(("body", *(f"learning rate {run['learning rate']:g}" for run in results["runs"])), by_rate),
        "spread": f"{headline_run(results)['true log-ratio']['std']:.1e}",
        "spreads": "; ".join(f"{rate:g}: {x['std']:.1e}, {x['clipped']:.0%} clipped" for rate, x in spreads),
        "left_out": "; ".join(f"{name} ({why})" for name, why in results["not measured"].items()) or "none",
    }


def drift(results: Results) -> str:
    """Name the budgets whose entropy or reward drifts."""
    apart = results["differences"]
    drifting = [f"the {key} at {arm}" for key in apart for arm, x in apart[key].items() if compare_report.sign(x)]
    return f"We see drift of {' and '.join(drifting)}" if drifting else "We see no drift of entropy or reward"


def budgets(results: Results) -> dict[str, Any]:
    runs = results["runs"]
    apart = results["differences"]
    rows = []
    for arm, records in runs.items():
        gaps = [apart[key].get(arm) for key in ("entropy", "reward")]
        rows.append((
            arm, *(f"{fmean(r['mean'][key] for r in records):.3g}" for key in ("passes", "dropped_gradient_mass")),
            *(f"{gap['mean']:+.3f} ({interval(gap['95 %'], '+.3f')})" if gap else "-" for gap in gaps),
            f"{fmean(r['held-out reward'][1] for r in records):.3f}",
        ))  # fmt: skip  # a cell each
    header = ("", "passes", "mass dropped", "entropy", "reward", "held-out reward")
    widest = {key: max((high - low) / 2 for low, high in (x["95 %"] for x in apart[key].values())) for key in apart}
    missed = {f"{key}_missed": f"{half:.3f}" for key, half in widest.items()}
    settings = results["settings"]
    updates = settings["steps"] * settings["updates_per_rollout"]
    before = next(iter(runs.values()))[0]["held-out reward"][0]
    return {"table": table(header, rows), "verdict": drift(results), "updates": updates, "before": before, **missed}


def rounding(results: Results) -> dict[str, Any]:
    runs, steps = results["runs"], results["settings"]["steps"]
    plain = [arm for arm in runs if arm == compare_report.plain(arm)]
    command = "gspo compare --study rounding"
    command += f" --objectives {','.join(plain)}" if plain != ["gspo", "grpo"] else ""
    command += f" --steps {steps}" if steps != ROLLOUTS else ""
    changes = len(compare_report.changes(results))
    texts = {"objectives": " and ".join(map(compare_report.label, plain)), "command": command, "changes": changes}
    return {"table": table(*compare_report.rows(results)), **texts}


def long(results: Results) -> dict[str, Any]:
    first = next(iter(results["runs"].values()))[0]
    shown = {"rate": first["learning rate"], "updates": first["updates"], "warm_up": results["settings"]["warm_up"]}
    return {"table": table(*compare_report.rows(results)), **shown}


def compared(results: Results, name: str) -> Results:
    """Map names to the records of the implementations that a group has measured.

    A package that was measured only in the group's earlier run keeps that record.
    """
    runs = [results[group]["results"] for group in (f"{name}{EARLIER}", name) if group in results]
    return {r["name"]: r for run in runs for r in run if "name" in r and not r.keys() & {"absent", "failed"}}


def milliseconds(record: Results) -> str:
    return f"{1e3 * record['seconds']:.1f}" if "seconds" in record else "-"


def all_compared(results: Results) -> str:
    """Make a table of time and memory: a row per implementation, a column per group of measurements."""
    columns = {name: compared(results, name) for name in results if name in (*GPU_GROUPS.values(), *GPU_SHAPES)}
    names = dict.fromkeys(name for records in columns.values() for name in records)
    header = [f"{group}: {next(iter(x.values()))['batch']}" for group, x in columns.items()]
    cell = "{}; {}".format
    rows = [
        (shown(n), *(cell(milliseconds(x[n]), mib(x[n])) if n in x else "-" for x in columns.values())) for n in names
    ]
    return table(("milliseconds; peak MiB", *header), rows)


def rates(results: Results) -> str:
    """Make a table of TFLOP/s: our two kernels with matrix products, and cuBLAS's products of the same size."""
    rows = []
    for shape in GPU_SHAPES:
        ours = {r["what"]: r for r in results[shape]["results"] if r["batch"] == "dense"}
        vendor = {r["what"]: r for r in results["ceilings"]["results"] if r.get("shape") == shape}
        records = [*(ours[kernel] for kernel in KERNELS), *(vendor[product] for product in PRODUCTS)]
        rows.append((shape, *(f"{record['TFLOP/s']:.0f}" for record in records)))
    names = ("forward tile", "gradient tile", "cuBLAS, h W^T", "cuBLAS, d_logits W", "cuBLAS, d_logits^T h")
    return table(("shape", *names), rows)


def passes(results: Results) -> str:
    """Make a table of the times of our forward, backward and both, for dense and RL-like batches."""
    whats = ("ours forward", "ours backward", "ours both", "ours both, default cache")
    rows = []
    for shape in GPU_SHAPES:
        for batch in ("dense", "rl-like"):
            found = {r["what"]: r for r in results[shape]["results"] if r["batch"] == batch}
            rows.append((f"{shape}, {batch}", *(milliseconds(found[what]) for what in whats)))
    return table(("milliseconds", "forward", "backward", "both", "both, default cache"), rows)


def gpu(results: Results) -> dict[str, Any]:
    state = results["rl-8k"]["measured"]["gpu state"]
    errors: dict[bool, list[float]] = {True: [], False: []}  # of ours, and of others
    for name in (*GPU_GROUPS.values(), *GPU_SHAPES):
        for record in compared(results, name).values():
            errors[record["against"] == "ours"].append(record["error"]["worst"])
    dense = compared(results, "D")
    return {
        "scaled": milliseconds(compared(results, "rl-4k")["Liger scaled CE"]),
        "half_of_d": [f"{500 * dense[name]['seconds']:.1f}" for name in (OURS, DEFAULT_CACHE)],
        "compared": all_compared(results),
        "rates": rates(results),
        "passes": passes(results),
        "counters": results["profile"]["results"][0],
        "copy": f"{results['ceilings']['results'][0]['TB/s']:.1f}",
        "clock": f"{state['SM MHz']['least']:.0f} to {state['SM MHz']['most']:.0f} MHz",
        "power": f"{state['W']['most']:.0f} W",
        "our_errors": f"{min(errors[True]):.1e} to {max(errors[True]):.1e}",
        "other_errors": f"{min(errors[False]):.1e} to {max(errors[False]):.1e}",
    }


SECTIONS: dict[str, Callable[[Results], dict[str, Any]]] = {
    "step": step, "vocab": vocab, "trainer": trainer, "skip": skip, "sparsity": sparsity, "policy": policy,
    "kept_sets": kept_sets, "precision": precision, "fidelity": fidelity, "budgets": budgets, "gpu": gpu,
    "rounding": rounding, "long": long,
    **dict.fromkeys(
        ("compare", "moe"),
        lambda results: {"table": table(*compare_report.rows(results))},
    ),
}  # fmt: skip  # by suite
