"""The report's sections on exactness, training and the paper's claims."""

from __future__ import annotations

from typing import Any

from .markdown import conditions, figure, table

Suites = dict[str, dict[str, Any]]
LENGTHS = (64, 256, 1024, 4096, 16_384)
CAPTIONS = {
    "6.1": "Coefficients of GSPO and GSPO-token",
    "6.2": "Clip fractions of the same samples against length",
    "6.3": "Range of the ratio with and without length normalisation",
    "6.4": "Wrong clip decisions and coefficient errors by precision",
    "6.7": "Weights of tokens by ratio",
}


def blocks(suites: Suites) -> dict[str, str]:
    """Of the README."""
    return {"fidelity": _short_fidelity(suites["fidelity"]), "budgets": _verdict(suites["budgets"])}


def sections(suites: Suites) -> list[str]:
    """Of docs/benchmarks.md."""
    return [
        _fidelity(suites["fidelity"]), _policy(suites["policy"]), _budgets(suites["budgets"]),
        _claims(suites["paper-checks"]),
    ]  # fmt: skip


def _wrong(found: dict[str, Any], name: str, length: int) -> str:
    row = next(r for r in found["decisions"] if (r["implementation"], r["length"]) == (name, length))
    return _share(row["wrong"])


def _share(wrong: float) -> str:
    return f"{100 * wrong:.2g} %" if wrong else "0"


def _short_fidelity(fidelity: dict[str, Any]) -> str:
    found = fidelity["results"]["sets"]["synthetic"]
    names = sorted(found["log-probs"], key=lambda name: -found["log-probs"][name]["std"])
    rows = [
        (name, f"{found['log-probs'][name]['std']:.0e}", *(_wrong(found, name, length) for length in (256, 1024, 4096)))
        for name in names
    ]
    return table(("bf16 inputs", "error of a log-prob, nats", "wrong at 256 tokens", "1,024", "4,096"), rows)


def _fidelity(fidelity: dict[str, Any]) -> str:
    results = fidelity["results"]
    parts = [
        "## Log-probs and clip decisions",
        conditions(fidelity, "python -m benchmarks.fidelity"),
        "Hidden states and head are bf16, the truth is float64 on exactly these values; everyone computes old and new "
        "log-probs. Sequences are put together from measured tokens, their true log-ratios are normal with a standard "
        f"deviation of {results['spread of log-ratios']:g}, so that about 15 % are clipped at every length; a decision "
        "is wrong where it is not float64's. The last line takes its old log-probs from another engine, as with a "
        "sampler's log-probs. fp16 and fp32 logits: products in fp32 of the same bf16 values.",
        figure("fidelity", "Wrong clip decisions against length, and errors of log-ratios"),
    ]
    for name, found in results["sets"].items():
        rows = []
        for implementation, ratio in found["log-ratios"].items():
            one = found["log-probs"].get(implementation)
            error = (f"{one['std']:.1e}", f"{one['bias']:.0e}", f"{one['largest']:.0e}") if one else ("-",) * 3
            wrong = (_wrong(found, implementation, length) for length in LENGTHS)
            rows.append((implementation, *error, f"{ratio['std']:.1e}", *wrong))
        header = ("", "log-prob: std", "bias", "largest", "log-ratio: std", *(f"L = {length:,}" for length in LENGTHS))
        sizes = f"{found['tokens']:,} tokens, H = {found['width']}, V = {found['vocab']:,}"
        parts += [f"**{name} policy**, {sizes}; errors in nats, then wrong decisions by length:", table(header, rows)]
    left = ", ".join(f"{name} ({why})" for name, why in results["not measured"].items())
    return "\n\n".join([*parts, *([f"Not measured: {left}."] if left else [])])


def _policy(policy: dict[str, Any]) -> str:
    results = policy["results"]
    entropy, budgets = [], []
    for kind in ("trained", "formula"):
        e = results[kind]["entropy"]
        quantiles = (f"{e[f'quantile {at}']:.2g}" for at in (0.1, 0.25, 0.5, 0.75, 0.9))
        entropy.append((kind, f"{e['mean']:.3f}", *quantiles, f"{e['share under 0.01 nats']:.0%}"))
        budgets += [
            (kind, f"{r['budget']:g}", f"{r['live_tile_share']:.2f}", f"{r['passes']:.2f}",
             f"{r['dropped_gradient_mass']:.1e}", f"{r['d_hidden error']:.1e}", f"{r['d_weight error']:.1e}")
            for r in results[kind]["budgets"]
        ]  # fmt: skip
    model, last = results["model"], results["training"]["curve"][-1]
    return "\n\n".join([
        "## A trained policy",
        conditions(policy, "python -m benchmarks.policy"),
        f"A Qwen3 of {model['layers']} layers, H = {model['H']}, V = {model['V']:,} (a BPE of {model['merges']:,} "
        f"merges, "
        f"{results['vocabulary']['used by the corpus']:.0%} of it used by its text), trained for {last['step']:,} "
        f"steps on "
        f"step-by-step arithmetic to a loss of {last['loss']:.2f} nats; "
        f"{results['accuracy of sampled answers']:.0%} of its sampled answers are right. Beside it the formula of the "
        f"other "
        f"sections at the same sizes, {results['sampled']['tokens']:,} tokens in {results['sampled']['sequences']} "
        f"sequences. "
        "Entropies in nats:",
        table(("", "mean", *(f"{at:.0%}" for at in (0.1, 0.25, 0.5, 0.75, 0.9)), "under 0.01"), entropy),
        "What a gradient budget saves and costs on both (rl-like):",
        table(("", "budget", "live cells", "passes", "dropped", "error of d_hidden", "error of d_weight"), budgets),
    ])  # fmt: skip


CHANCE = 4.3  # of t with three seeds: beyond it one chance in twenty


def _verdict(budgets: dict[str, Any]) -> str:
    """What the entropies say, and nothing that they do not."""
    results, found = budgets["results"], budgets["results"]["compared"]
    seeds, said = len(results["settings"]["seeds"]), []
    for arm, budget in results["budgets"].items():
        if not budget:
            continue
        ends = {key: found[key][arm]["at the end"] for key in ("entropy", "reward")}
        said.append(
            f"{budget:g}: entropy {ends['entropy']['mean']:+.3f} +- {ends['entropy']['standard deviation']:.3f} nats, "
            f"reward {ends['reward']['mean']:+.3f} +- {ends['reward']['standard deviation']:.3f}"
        )
    control = next(arm for arm in results["budgets"] if "rounded" in arm)
    c = {key: found[key][control]["at the end"] for key in ("entropy", "reward")}
    return (
        f"Training for {results['updates']} updates with a budget, against without, {seeds} seeds, last fifth "
        f"(`python -m benchmarks.budgets`): {'; '.join(said)}. Weights that differ by rounding alone: entropy "
        f"{c['entropy']['mean']:+.3f} +- {c['entropy']['standard deviation']:.3f}, reward {c['reward']['mean']:+.3f} "
        f"+- "
        f"{c['reward']['standard deviation']:.3f}."
    )


def _budgets(budgets: dict[str, Any]) -> str:
    results, found = budgets["results"], budgets["results"]["compared"]
    size = results["settings"]
    rows = []
    for arm in results["budgets"]:
        work, held = found["work"][arm], found["held-out reward"][arm]
        drifts = [_drift(found[key].get(arm)) for key in ("entropy", "reward")]
        apart = results["distance"].get(arm)
        rows.append((
            arm, f"{work['passes']:.2f}", f"{work['dropped gradient mass']:.1e}", f"{work['clip fraction']:.2f}",
            *drifts, f"{held['mean']:.3f}", " ".join(f"{x:.2f}" for x in apart) if apart else "-",
        ))  # fmt: skip
    header = (
        "", "passes", "dropped", "clip fraction", "entropy against budget 0: mean +- std, t", "reward: the same",
        "held-out reward", "distance of parameters, by seed",
    )  # fmt: skip
    seeds = {key: found[key]["other seeds"]["at the end"] for key in ("entropy", "reward")}
    others = " ".join(f"{x:.2f}" for x in results["distance"]["other seeds"])
    return "\n\n".join([
        "## Does a budget train?",
        conditions(budgets, "python -m benchmarks.budgets"),
        f"The reference trainer from the policy above, {results['updates']} updates ({size['steps']} rollouts of "
        f"{size['prompts']} x {size['group']} answers, {size['updates']} updates each), learning rate "
        f"{size['learning_rate']:g}, "
        f"{len(size['seeds'])} seeds. Differences are taken seed by seed over the last fifth; t beyond {CHANCE} is "
        f"one chance "
        "in twenty. What a budget drops falls on likely tokens, a bias: the question is whether entropy drifts. The "
        "control "
        f"trains at budget 0 from weights that differ by {results['noise']:g}, which is rounding. Distances of final "
        "parameters are over how far budget 0 went from the start.",
        figure("budgets", "Reward, entropy and passes against updates"),
        table(header, rows),
        f"At budget 0 the seeds differ among themselves by a standard deviation of "
        f"{seeds['entropy']['standard deviation']:.3f} "
        f"nats and {seeds['reward']['standard deviation']:.3f} of reward; their final parameters are {others} apart.",
    ])  # fmt: skip


def _drift(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    end = found["at the end"]
    t = f", {end['t']:+.1f}" if end["t"] is not None else ""
    return f"{end['mean']:+.3f} +- {end['standard deviation']:.3f}{t}"


def _claims(paper: dict[str, Any]) -> str:
    parts = ["## The paper's claims", conditions(paper, "python -m benchmarks.paper_checks")]
    for name, claim in paper["results"].items():
        parts += [
            f"**{claim['claim']}** ({claim['where']}). Measured: {claim['measured']}. Verdict: {claim['verdict']}.",
            figure(f"paper-{name}", CAPTIONS[name]),
        ]
    return "\n\n".join(parts)
