"""The tables that `pages.py` writes into the documentation, by the name of their block.

A table that uses several suites takes all committed results, by the stem of their JSON file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..studies import scores

Results = dict[str, Any]
Cell = Callable[[Results], str]
Values = dict[str, float]
NAIVE, OURS, BUDGET = "naive GSPO", "ours", "ours, budget 1e-3"
CAST = "TRL cast_lm_head_to_fp32"
DEFAULT_CACHE = "ours, default cache"
FULL_LOGITS = {NAIVE: "full logits", "naive GSPO, compiled": "full logits, compiled"}
H200 = "nvidia-h200"
# Groups of measurements on a GPU that compare implementations: tokens, hidden size and vocabulary by group.
GPU_GROUPS = {
    "rl-4k": "rl-like, 4,096 tokens",
    "rl-32k": "rl-like, 32,768 tokens",
    "D": "dense, 8,192 tokens",
    "A": "dense, 4,096 tokens, V = 131,072",
    "C": "dense, 4,096 tokens, H = 896",
}
EARLIER = ", earlier run"  # ends the name of a group that was measured again, without some of the packages
GPU_ROWS = {
    NAIVE: "full logits",
    "naive GSPO, compiled": "full logits, `torch.compile`",
    "TRL fused head": "TRL 1.16 (its fused head)",
    CAST: "TRL 1.16, `cast_lm_head_to_fp32`",
    "Liger fused CE": "Liger's fused cross-entropy",
    "Liger scaled CE": "Liger's scaled cross-entropy",
    "Liger GRPO loss": "Liger's GRPO loss",
    "cut-cross-entropy": "cut-cross-entropy",
    "cut-cross-entropy, no filter": "cut-cross-entropy, `filter_eps=None`",
    "verl Triton head": "verl 0.9.1's Triton head",
    OURS: "**gspo_kernels**, cache off",
    DEFAULT_CACHE: "**gspo_kernels** (default)",
    BUDGET: "**gspo_kernels**, `gradient_budget=1e-3`, cache off",
}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
PRODUCTS = ("vendor h W'", "vendor d_logits W", "vendor d_logits' h")
HEADLINE_RATE, LENGTH = 1e-6, 1024  # learning rate and tokens of an answer, for clip decisions
FP32_HEAD = "ours, fp32 head"
HEADS = {
    NAIVE: "full logits",
    "fp32 logits": "fp32 logits, stored",
    OURS: "**gspo_kernels**",
    FP32_HEAD: "**gspo_kernels**, fp32 head",
}
OPERAND_COLUMNS = {
    "TRL fused head": "full logits, TRL",
    CAST: "`cast_lm_head_to_fp32`, `head_dtype`",
    OURS: "**gspo_kernels**",
    FP32_HEAD: '`head_precision="fp32"`',
    "ours, bf16x3 (emulated)": '`"bf16x3"`, emulated',
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def shown(name: str) -> str:
    return FULL_LOGITS.get(name) or re.sub("^ours", "**gspo_kernels**", name)


def by_name(records: Iterable[Results]) -> dict[str, Results]:
    return {record["name"]: record for record in records}


def mib(record: Results) -> str:
    return f"{record['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in record else record.get("does_not_fit", "-")


def over_naive(record: Results) -> str:
    return f"{record['over_naive']['ratio']:.2f}" if "over_naive" in record else "-"


def error_of(record: Results) -> str:
    """Format the error of the worse gradient, or "-" if it was not measured or is NaN."""
    worst = record["error"]["worst"] if "error" in record else None
    return "-" if worst is None else f"{worst:.1e}"


def compared(gpu: Results, name: str) -> dict[str, Results]:
    """The records of the implementations that a group has measured, by name.

    A package that was measured only in the group's earlier run keeps that record.
    """
    runs = [gpu[group]["results"] for group in (f"{name}{EARLIER}", name) if group in gpu]
    return {r["name"]: r for run in runs for r in run if "name" in r and not r.keys() & {"absent", "failed"}}


def heads_on_a_gpu(every: Results) -> str:
    columns = {label: compared(every[f"gpu-{H200}"], group) for group, label in GPU_GROUPS.items()}
    rows = []
    for name, label in GPU_ROWS.items():
        records = [x.get(name, {}) for x in columns.values()]
        cells = [f"{1e3 * r['seconds']:.1f} ms, {mib(r)} MiB" if r else "-" for r in records]
        rows.append((label, *cells, error_of(next(filter(None, records)))))
    return table(("", *columns, "error"), rows)


def kernels_on_a_gpu(every: Results) -> str:
    """Times of our passes, and TFLOP/s of our kernels with matrix products and of cuBLAS's products of their size."""
    gpu = every[f"gpu-{H200}"]
    rows = []
    for shape in ("D", "A", "C"):
        ours = {r["what"]: r for r in gpu[shape]["results"] if r["batch"] == "dense"}
        vendor = {r["what"]: r for r in gpu["ceilings"]["results"] if r.get("shape") == shape}
        times = (f"{1e3 * ours[f'ours {part}']['seconds']:.1f} ms" for part in ("forward", "backward"))
        rates = (ours["kernel forward_tile"], ours["kernel gradient_tile"], *(vendor[name] for name in PRODUCTS))
        rows.append((GPU_GROUPS[shape], *times, *(f"{r['TFLOP/s']:.0f}" for r in rates)))
    header = ("", "forward", "backward", "forward tile", "gradient tile")
    return table((*header, "cuBLAS, h W^T", "cuBLAS, d_logits W", "cuBLAS, d_logits^T h"), rows)


def kept_sets(every: Results, kind: str) -> str:
    """`kind`: "sets", or "extra" for extra ids."""
    batches = [batch for batch in every[f"kept_sets-{H200}"]["batches"] if batch["kind"] == kind]
    names = [way["name"] for way in batches[0]["ways"]]
    rows = []
    for batch in batches:
        label = f"{batch['mean']:.3g} (at most {batch['largest']:,})" if kind == "sets" else str(batch["count"])
        ways = by_name(batch["ways"])
        cells = []
        for name in names:
            way = ways[name]
            error = f", {way['error']:.1e}" if way.get("error") else ""
            time = f"{1e3 * way['seconds']:.1f} ms" if "seconds" in way else ""
            cells.append(way.get("does_not_fit") or f"{time}, {way['peak_bytes'] / 2**30:.1f} GiB{error}")
        rows.append((label, *cells))
    return table(("ids in a set" if kind == "sets" else "extra ids", *map(shown, names)), rows)


def teachers(every: Results) -> str:
    """Cost of a teacher on a CPU, relative to the log-probs alone."""
    batches = every["kept_sets-cpu"]["batches"]
    middle = next(batch for batch in batches if batch["count"] == 64)
    shown_as = {
        "ours, full vocabulary": "log-probs alone",
        "ours, ids of a local teacher": "64 ids, with `linear_top_k`",
        "masked full logits": "64 ids, from full logits",
        "TRL's ChunkedDivergenceFunction": "TRL's, without log-probs",
    }
    ways = {f"{b['count']} ids": by_name(b["ways"])["ours"] for b in batches}
    ways |= {label: by_name(middle["ways"])[name] for name, label in shown_as.items()}
    cells = lambda way: (f"{way['over_vocabulary']['ratio']:.2f}x", mib(way), f"{way['passes']:.2f}")  # noqa: E731
    return table(("", "time", "MiB", "passes"), [(label, *cells(way)) for label, way in ways.items()])


def step_on_a_gpu(results: Results) -> str:
    """Time and memory by the share of answers with advantage 0, all of the same length."""
    shares = results["shares"]
    rows = [("time of the updates", *(f"{record['update']:.2f}x" for record in shares))]
    for name in ("TRL", "GSPOTrainer"):
        peaks = (f"{record[f'{name} peak_bytes'] / 2**30:.1f} GiB" for record in shares)
        rows.append((f"peak memory with {name}", *peaks))
    return table(("answers with advantage 0", *(f"{1 - record['rows_run']:.0%}" for record in shares)), rows)


def updates(results: Results) -> str:
    """What updates cost, by the lengths of the answers and the share with advantage 0."""
    names = ("TRL", "GSPOTrainer")
    has_memory = "TRL peak_bytes" in results["cases"][0]
    rows = []
    for case in results["cases"]:
        padded = (f"{case[f'{name} tokens'] / case['real tokens']:.2f}" for name in names)
        memory = (f"{case[f'{name} peak_bytes'] / 2**30:.1f} GiB" for name in (names if has_memory else ()))
        clipped = ", ".join(f"{share:.0%}" for share in case["clipped"])
        cells = (f"{1 - case['rows_run']:.0%}", clipped, *padded, *memory, f"{case['update']:.2f}x")
        rows.append((case["lengths"], *cells))
    memory = ("TRL's memory", "our memory") if has_memory else ()
    return table(("lengths", "advantage 0", "clipped, by update", "TRL's tokens", "our tokens", *memory, "time"), rows)


def run_of(every: Results, scenario: str, dtype: str = "float32") -> Results:
    """Find the timed run of the scenario; of several, the run with the most tokens."""
    runs = every["step-cpu"]["time"]["runs"]
    kind = (scenario, dtype)
    return max((r for r in runs if (r["on"]["scenario"], r["on"]["dtype"]) == kind), key=lambda r: r["on"]["tokens"])


def heads_on_a_cpu(every: Results) -> str:
    exact = run_of(every, "rl-like")
    dense = run_of(every, "dense")
    half = run_of(every, "rl-like", "bfloat16")
    large = max(every["step-cpu"]["memory"]["points"], key=lambda point: point["tokens"])
    columns: dict[str, tuple[list[Results], Cell]] = {
        f"peak MiB, {exact['on']['tokens']:,} tokens": (exact["candidates"], mib),
        f"peak MiB, {large['tokens']:,} tokens": (large["candidates"], mib),
        "time, every token has a gradient": (dense["candidates"], over_naive),
        "time, some tokens without one": (exact["candidates"], over_naive),
        "time, the same in bf16": (half["candidates"], over_naive),
        "error of gradients, bf16": (half["candidates"], error_of),
    }
    names = [r["name"] for r in exact["candidates"] if "seconds" in r]
    groups = [(by_name(records), cell) for records, cell in columns.values()]
    return table(("", *columns), [(shown(n), *(cell(group.get(n, {})) for group, cell in groups)) for n in names])


def passes_with_a_budget(every: Results) -> str:
    rows = []
    for scenario, dtype in (("rl-like", "float32"), ("dense", "float32"), ("rl-like", "bfloat16")):
        records = by_name(run_of(every, scenario, dtype)["candidates"])
        cells = (f"{records[name]['passes']:.2f} ({error_of(records[name])})" for name in (OURS, BUDGET))
        rows.append((f"{scenario}, {DTYPES[dtype]}", *cells))
    return table(("", "budget 0", "budget 1e-3"), rows)


def times(records: Iterable[Results]) -> Values:
    return {r["name"]: r["over_naive"]["ratio"] for r in records if "over_naive" in r}


def peaks(records: Iterable[Results]) -> Values:
    return {r["name"]: r["peak_bytes"] / 2**20 for r in records if "peak_bytes" in r}


def where_we_lose(every: Results) -> str:
    """Measured batches on which another implementation takes less time or memory than our default."""
    comparisons: list[tuple[str, Values, str, str]] = []
    for group, label in GPU_GROUPS.items():
        records = compared(every[f"gpu-{H200}"], group)
        milliseconds = {name: 1e3 * r["seconds"] for name, r in records.items() if "seconds" in r}
        comparisons.append((f"H200, {label}: ms", milliseconds, ".1f", DEFAULT_CACHE))
        comparisons.append((f"H200, {label}: MiB", peaks(records.values()), ",.0f", DEFAULT_CACHE))
    for r in every[f"skip-{H200}"]["shares"]:
        memory = {"TRL": r["TRL peak_bytes"] / 2**20, OURS: r["GSPOTrainer peak_bytes"] / 2**20}
        where = f"H200, step of TRL, {1 - r['rows_run']:.0%} with advantage 0"
        comparisons.append((f"{where}: time", {"TRL": 1.0, OURS: r["update"]}, ".2f", OURS))
        comparisons.append((f"{where}: MiB", memory, ",.0f", OURS))
    for batch in every[f"kept_sets-{H200}"]["batches"]:
        ids = f"kept sets of {batch['mean']:.3g}" if batch["kind"] == "sets" else f"{batch['count']} extra ids"
        milliseconds = {way["name"]: 1e3 * way["seconds"] for way in batch["ways"] if "seconds" in way}
        comparisons.append((f"H200, {ids}: ms", milliseconds, ".1f", OURS))
        comparisons.append((f"H200, {ids}: MiB", peaks(batch["ways"]), ",.0f", OURS))
    for run in every["step-cpu"]["time"]["runs"] + every["vocab-cpu"]["runs"]:
        on = run["on"]
        where = f"CPU, {on['scenario']}, {on['dtype']}, {on['tokens']:,} tokens, V = {on['head']['vocab']:,}"
        comparisons.append((f"{where}: time", times(run["candidates"]), ".2f", OURS))
        comparisons.append((f"{where}: MiB", peaks(run["candidates"]), ",.0f", OURS))
    rows = []
    for situation, values, form, default in comparisons:
        others = {name: x for name, x in values.items() if not name.startswith(OURS)}
        best = min(others, key=others.__getitem__)
        if others[best] < values[default]:
            ratio = f"{values[default] / others[best]:.2f}"
            rows.append((situation, f"{values[default]:{form}}", f"{others[best]:{form}} ({shown(best)})", ratio))
    return table(("", "gspo_kernels", "best other", "ratio"), rows)


def bodies(precision: Results) -> dict[str, dict[str, Results]]:
    """Records of the headline run by body of the model, then by head."""
    run = next(run for run in precision["runs"] if run["learning rate"] == HEADLINE_RATE)
    return {body: by_name(records) for body, records in run["bodies"].items()}


def wrong_clip_decisions(every: Results) -> str:
    """Shares for answers of `LENGTH` tokens: a row per body, a column per model and head."""
    models = {f"{x['model']['layers']} layers": bodies(x) for x in (every["precision-cpu"], every[f"precision-{H200}"])}
    columns = [
        (x, head, f"{model}: {HEADS[head]}") for model, x in models.items() for head in HEADS if head in x["fp32"]
    ]
    rows = [(body, *(scores.percent(wrong(x[body][head])) for x, head, _ in columns)) for body in columns[0][0]]
    return table(("body", *(label for _, _, label in columns)), rows)


def wrong(record: Results) -> float:
    """The share of wrong clip decisions for answers of `LENGTH` tokens."""
    return record["wrong"][record["lengths"].index(LENGTH)]


def sampler_heads(results: Results) -> str:
    """Standard deviation of answers' mean log-ratios, in nats: a row per trainer, a column per head of the sampler."""
    cells: dict[str, dict[str, str]] = {}
    for x in results["sampler"]:
        body, head = x["trainer"].values()
        cells.setdefault(f"{body}, {HEADS[head]}", {})[x["sampler"]] = f"{x['std of answers']:.1e}"
    samplers = list(next(iter(cells.values())))
    rows = [(trainer, *(row[name] for name in samplers)) for trainer, row in cells.items()]
    return table(("trainer", *(f"sampler: {name}" for name in samplers)), rows)


def operands(results: Results) -> str:
    """The error of log-probs in nats: a row per weight and hidden states, a column per head."""
    shown = lambda error: "refused" if isinstance(error, dict) else f"{error:.1e}"  # noqa: E731
    rows = [(x["name"], *(shown(x["errors"][name]) for name in OPERAND_COLUMNS)) for x in results["setups"]]
    return table(("weight x hidden states", *OPERAND_COLUMNS.values()), rows)


def wrong_clip_decisions_by_length(every: Results) -> str:
    """All heads under bf16 autocast. Heads with equal numbers share a row."""
    records = bodies(every["precision-cpu"])["bf16 autocast"]
    lengths = records[NAIVE]["lengths"]
    heads: dict[tuple[str, ...], list[str]] = {}
    for name, r in records.items():
        ends, counted = r["95 %"][lengths.index(LENGTH)], r["measured answers"]
        cells = (*map(scores.percent, r["wrong"]), " to ".join(f"{100 * x:.1f}" for x in ends) + "%")
        heads.setdefault((*cells, f"{counted['counted']} of {counted['answers']}"), []).append(shown(name))
    header = ("head", *(f"{length:,} tokens" for length in lengths), f"95 %, {LENGTH:,}", "counted")
    return table(header, [(", ".join(names), *cells) for cells, names in heads.items()])


def trainings(every: Results) -> str:
    """The results of `gspo compare`, without the study of rounding."""
    rows = []
    for stem, study in (("compare-cpu", "dense"), ("long-cpu", "long answers")):
        header, of_study = scores.rows(every[stem])
        for row in of_study:
            cells = dict(zip(header, row, strict=True))
            names = ("score", "difference", "tokens clipped")
            rows.append((f"{study}: {cells['']}", *(cells[name] for name in names), cells.get("answer length", "-")))
    return table(("", "score", "difference", "tokens clipped", "tokens of an answer"), rows)


def roundings(every: Results) -> str:
    """Changes of the score by rounding: a row per body or sampler, a column per objective."""
    runs = every["rounding-cpu"]["runs"]
    names = [arm for arm in runs if scores.plain(arm) == arm]
    additions = [arm.removeprefix(names[0]) for arm in runs if scores.plain(arm) == names[0] != arm]
    rows = [
        (
            addition.removeprefix(" + "),
            *(scores.difference(runs, name + addition, scores.best_scores) for name in names),
        )
        for addition in additions
    ]
    return table(("", *map(scores.label, names)), rows)


def distilled(every: Results) -> str:
    """Held-out rewards of the study of teachers: a column per arm."""
    study = every["teachers-cpu"]
    runs, of_teacher = study["runs"], study["settings"]["teacher"]["held-out reward"]
    last = f"last reward (the teacher's: {of_teacher[-1]:.3f})"
    rows = []
    for name, of in (("mean reward", scores.best_scores), (last, scores.last_rewards)):
        rows.append((name, *(scores.estimate(scores.about(of(x))) for x in runs.values())))
        rows.append(("minus GSPO's", *(scores.difference(runs, arm, of) for arm in runs)))
        beside = [scores.difference(runs, arm, of, scores.ALONE) if scores.TEACHER in arm else "-" for arm in runs]
        rows.append(("minus teacher alone's", *beside))
    return table(("", *map(scores.label, runs)), rows)


def claims(every: Results) -> str:
    """The claims of the paper: what an independent run of verl found, and what we found."""
    dense, long = (every[f"{name}-cpu"]["runs"] for name in ("compare", "long"))
    best, grid = scores.best_scores, scores.over_grid
    apart = [scores.difference(runs, "grpo", of) for runs, of in ((dense, best), (dense, grid), (long, best))]
    clipped = [{arm: scores.tokens_clipped(records) for arm, records in runs.items()} for runs in (dense, long)]
    shares = [" and ".join(scores.percent(x[arm]) for arm in ("gspo", "grpo")) for x in clipped]
    close = ("gspo + window x 10", "grpo + window x 0.01")
    ratios = [f"{clipped[1][gspo] / clipped[1][grpo]:.2g}" for gspo, grpo in (("gspo", "grpo"), close)]
    changes = scores.changes(every["rounding-cpu"]["runs"])
    decided = sum(not low <= 0 <= high for low, high in (x["95 %"] for x in changes))
    share_wrong = scores.percent(wrong(bodies(every["precision-cpu"])["bf16 autocast"][NAIVE]))
    rows = [
        (
            "GSPO trains more efficiently than GRPO (5.1)",
            "very similar, GRPO a bit faster",
            f"GRPO's score minus GSPO's: {apart[0]} at the best settings, {apart[1]} over the grid; on long answers "
            f"{apart[2]}",
        ),
        (
            "GSPO clips 15% of the tokens, GRPO 0.13% (5.2)",
            "GSPO 30%, falling to 10%; GRPO 0.03%",
            f"GSPO and GRPO: {shares[0]}; on long answers {shares[1]}",
        ),
        (
            "the gap between these shares hardly depends on the windows (5.2)",
            "-",
            f"GSPO's share over GRPO's, on long answers: {ratios[0]} with the paper's windows, {ratios[1]} with GSPO's "
            "window x 10 and GRPO's x 0.01",
        ),
        (
            "sequence likelihoods tolerate imprecise log-probs (5.4)",
            "-",
            f"with logits in bf16, {share_wrong} of the clip decisions are wrong ({LENGTH:,} tokens). Of "
            f"{len(changes)} changes of a score by rounding, the intervals of {decided} exclude 0; by chance "
            f"{0.05 * len(changes):.1f} would",
        ),
    ]
    return table(("claim of the paper (section)", "verl#2775 on GSM8K", "here"), rows)


def conditions(files: dict[str, Results]) -> str:
    """Where each file was measured: a row per machine and set of versions. `files`: JSON by stem."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for stem, file in files.items():
        parts = [x["measured"] for x in file["results"].values() if isinstance(x, dict) and "measured" in x]
        for head in parts or [file]:
            machine, versions = head["machine"], head["versions"]
            where = (
                f"{machine.get('gpu') or machine['cpu']}, {machine['threads']} thread{'s'[: machine['threads'] > 1]}"
            )
            packages = (versions[name] for name in ("torch", "triton", "transformers", "trl", "liger-kernel"))
            commits = rows.setdefault((where, *packages), {}).setdefault(stem, [])
            commits.extend({head["commit"][:7]} - {*commits})
    lines = [
        (*key, "; ".join(f"{stem} ({', '.join(commits)})" for stem, commits in of_machine.items()))
        for key, of_machine in rows.items()
    ]
    return table(("machine", "torch", "Triton", "transformers", "TRL", "Liger", "results (commits)"), lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "heads on a gpu": heads_on_a_gpu,
    "kernels on a gpu": kernels_on_a_gpu,
    "kept sets": lambda every: kept_sets(every, "sets"),
    "extra ids": lambda every: kept_sets(every, "extra"),
    "teachers": teachers,
    "step on a gpu": lambda every: step_on_a_gpu(every[f"skip-{H200}"]),
    "skip on a cpu": lambda every: updates(every["skip-cpu"]),
    "heads on a cpu": heads_on_a_cpu,
    "passes with a budget": passes_with_a_budget,
    "where we lose": where_we_lose,
    "wrong clip decisions": wrong_clip_decisions,
    "wrong clip decisions by length": wrong_clip_decisions_by_length,
    "operands": lambda every: operands(every["operands-cpu"]),
    "sampler heads": lambda every: sampler_heads(every["precision-cpu"]),
    "trainings": trainings,
    "roundings": roundings,
    "distilled": distilled,
    "claims": claims,
}  # by the name of the block
