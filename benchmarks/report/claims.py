"""The report's sections on exactness, training and the paper's claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .markdown import conditions, figure, fill, table

Suite = dict[str, Any]
LENGTHS = (64, 256, 1024, 4096, 16_384)
CAPTIONS = {
    "6.1": "Coefficients of GSPO and GSPO-token",
    "6.2": "Clip fractions of the same samples against length",
    "6.3": "Range of the ratio with and without length normalisation",
    "6.4": "Wrong clip decisions and coefficient errors by precision",
    "6.7": "Weights of tokens by ratio",
}


def _wrong(measured: dict[str, Any], name: str, length: int, kind: str = "wrong") -> str:
    row = next(r for r in measured["decisions"] if (r["implementation"], r["length"]) == (name, length))
    return _share(row[kind])


def _share(wrong: float) -> str:
    return f"{100 * wrong:.2g} %" if wrong else "0"


def _short_fidelity(fidelity: Suite) -> str:
    synthetic, trained = (fidelity["results"]["sets"].get(kind) for kind in ("synthetic", "trained"))
    count = synthetic["decisions"][0]["sequences"]

    def said(name: str, of: Suite = synthetic) -> str:
        return ", ".join(_wrong(of, name, length) for length in (256, 1024, 4096))

    std = {name: errors["std"] for name, errors in synthetic["log-ratios"].items()}
    alike = [name for name in synthetic["log-probs"] if abs(std[name] / std["naive GSPO"] - 1) < 0.02]
    text = fill(
        f"Wrong clip decisions of {count:,} (mean error of the tokens taken out), bf16 hidden states and head, at 256, "
        "1,024 and 4,096 tokens, where 15 % are clipped: "
        f"logits rounded to bf16 ({', '.join(alike)}) {said('naive GSPO')}; to fp16 {said('fp16 logits')}; full fp32 "
        f"logits {said('fp32 logits')}; ours {said('ours')}. Error of a log-prob: "
        f"{synthetic['log-probs']['naive GSPO']['std']:.0e} nats with bf16 logits, "
        f"{synthetic['log-probs']['ours']['std']:.0e} ours. Synthetic policy"
        + (f"; a small trained one, bf16 logits: {said('naive GSPO', trained)}." if trained else ".")
    )
    return f"{text}\n\n![Wrong clip decisions against length](docs/figures/fidelity-cpu.png)"


def _fidelity(fidelity: Suite, name: str) -> str:
    results = fidelity["results"]
    parts = [
        "## Log-probs and clip decisions",
        conditions(fidelity, "python -m gspo_kernels.benchmarks fidelity"),
        "Hidden states and head are bf16, the truth is float64 on exactly these values; everyone computes old and "
        "new log-probs. Sequences are put together from measured tokens, their true log-ratios are normal with a "
        f"standard deviation of {results['spread of log-ratios']:g}, so that about 15 % are clipped at every length; "
        "a decision is wrong where it is not float64's. The last line takes its old log-probs from another engine, "
        "as with a sampler's log-probs. fp16 and fp32 logits: products in fp32 of the same bf16 values. The mean "
        "error of the tokens, of which chance has a large part, is taken out in the first table of decisions and "
        "left in in the second. The trained policy is that of the section above, if `python -m "
        "gspo_kernels.benchmarks policy` has made it.",
        figure(name, "Wrong clip decisions against length, and errors of log-ratios"),
    ]
    for kind, measured in results["sets"].items():
        rows, biased = [], []
        for implementation, ratio in measured["log-ratios"].items():
            errors = measured["log-probs"].get(implementation)
            error = (
                (f"{errors['std']:.1e}", f"{errors['bias']:.0e}", f"{errors['largest']:.0e}") if errors else ("-",) * 3
            )
            wrong = (_wrong(measured, implementation, length) for length in LENGTHS)
            rows.append((implementation, *error, f"{ratio['std']:.1e}", *wrong))
            left_in = (_wrong(measured, implementation, length, "wrong with the bias") for length in LENGTHS)
            biased.append((implementation, f"{ratio['bias']:.0e}", *left_in))
        header = ("", "log-prob: std", "bias", "largest", "log-ratio: std", *(f"L = {length:,}" for length in LENGTHS))
        sizes = f"{measured['tokens']:,} tokens, H = {measured['width']}, V = {measured['vocab']:,}"
        parts += [f"**{kind} policy**, {sizes}; errors in nats, then wrong decisions by length:", table(header, rows)]
        parts += ["The same with the mean error left in:", table(("", "log-ratio: bias", *header[5:]), biased)]
    left = ", ".join(f"{name} ({why})" for name, why in results["not measured"].items())
    return "\n\n".join([*parts, *([f"Not measured: {left}."] if left else [])])


def _policy(policy: Suite, name: str) -> str:
    results = policy["results"]
    entropy, budgets = [], []
    for kind in ("trained", "formula"):
        e = results[kind]["entropy"]
        quantiles = (f"{value:.2g}" for value in e["quantiles"].values())
        entropy.append((kind, f"{e['mean entropy']:.3f}", *quantiles, f"{e['share under 0.01 nats']:.0%}"))
        budgets += [
            (kind, f"{r['budget']:g}", f"{r['live_tile_share']:.2f}", f"{r['passes']:.2f}",
             f"{r['dropped_gradient_mass']:.1e}", f"{r['d_hidden error']:.1e}", f"{r['d_weight error']:.1e}")
            for r in results[kind]["budgets"]
        ]  # fmt: skip  # lines by subject
    model, last = results["model"], results["training"]["curve"][-1]
    return "\n\n".join([
        "## A trained policy",
        conditions(policy, "python -m gspo_kernels.benchmarks policy"),
        f"A Qwen3 of {model['layers']} layers, H = {model['H']}, V = {model['V']:,} (a BPE of {model['merges']:,} "
        f"merges, {results['vocabulary']['used by the corpus']:.0%} of it used by its text), trained for "
        f"{last['step']:,} steps on step-by-step arithmetic to a loss of {last['loss']:.2f} nats; "
        f"{results['accuracy of sampled answers']:.0%} of its sampled answers are right. Beside it the formula of the "
        f"other sections at the same sizes, {results['sampled']['tokens']:,} tokens in "
        f"{results['sampled']['sequences']} sequences. Entropies in nats:",
        table(("", "mean", *(f"{float(at):.0%}" for at in e["quantiles"]), "under 0.01"), entropy),
        "What a gradient budget saves and costs on both (rl-like):",
        table(("", "budget", "live cells", "passes", "dropped", "error of d_hidden", "error of d_weight"), budgets),
    ])  # fmt: skip  # the page, line by line


def drifts(budgets: Suite, budget: str, control: str) -> bool:
    """Whether a curve's end leaves that of budget 0: the 95 % interval of the difference holds neither 0 nor what the
    control makes of it."""
    low, high = budgets[budget]["at the end"]["95 %"]
    return not any(low <= x <= high for x in (0.0, budgets[control]["at the end"]["mean"]))


def _verdict(budgets: Suite) -> str:
    """What entropies and rewards say, and how much they could not."""
    results, compared = budgets["results"], budgets["results"]["compared"]
    control, said = results["control"], []
    for arm, budget in results["budgets"].items():
        if budget:
            parts = []
            for key, unit in (("entropy", " nats"), ("reward", "")):
                end = compared[key][arm]["at the end"]
                sees = "drifts" if drifts(compared[key], arm, control) else "no drift seen"
                parts.append(f"{key} {_interval(end)}{unit}, {sees}")
            said.append(f"{budget:g}: {'; '.join(parts)}")
    apart = "; ".join(
        f"at {budget:g} {_range(results['distance'][arm])}" for arm, budget in results["budgets"].items() if budget
    )
    return fill(
        f"Trained for {results['updates']} updates with a budget, against the same seed without (last fifth, mean and "
        f"95 % interval of {len(results['settings']['seeds'])} seeds): {'. '.join(said)}. Final parameters do differ, "
        f"by shares of the way gone: {apart}; weights moved by a millionth at the start "
        f"{_range(results['distance'][control])}. Of entropy less than {_unseen(results):.3f} nats would not be seen."
    )


def _unseen(results: Suite) -> float:
    """Half of the widest 95 % interval of an entropy."""
    arms = [arm for arm, budget in results["budgets"].items() if budget]
    intervals = (results["compared"]["entropy"][arm]["at the end"]["95 %"] for arm in arms)
    return max((high - low) / 2 for low, high in intervals)


def _range(values: list[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def _interval(end: Suite) -> str:
    return f"{end['mean']:+.3f} [{end['95 %'][0]:+.3f}, {end['95 %'][1]:+.3f}]"


def _budgets(budgets: Suite, name: str) -> str:
    results, compared = budgets["results"], budgets["results"]["compared"]
    size, control = results["settings"], results["control"]
    rows = []
    for arm in results["budgets"]:
        work, held = compared["work"][arm], compared["held-out reward"][arm]
        apart = results["distance"].get(arm)
        rows.append((
            arm, f"{work['passes']:.2f}", f"{work['dropped gradient mass']:.1e}", f"{work['clip fraction']:.2f}",
            *(_interval(compared[key][arm]["at the end"]) if arm in compared[key] else "-"
              for key in ("entropy", "reward")),
            f"{held['mean']:.3f}", " ".join(f"{x:.2g}" for x in apart) if apart else "-",
        ))  # fmt: skip  # lines by subject
    header = (
        "", "passes", "dropped", "clip fraction", "entropy against budget 0", "reward against budget 0",
        "held-out reward", "distance of parameters, by seed",
    )  # fmt: skip  # lines by subject
    seeds = {key: compared[key]["other seeds"]["at the end"] for key in ("entropy", "reward")}
    others = " ".join(f"{x:.2f}" for x in results["distance"].get("other seeds", ()))
    seen = [
        f"{key} at {arm}" for key in ("entropy", "reward") for arm, budget in results["budgets"].items()
        if budget and drifts(compared[key], arm, control)
    ]  # fmt: skip  # lines by subject
    starts = [run["held-out reward"][0][1] for run in results["runs"]["budget 0"]]
    held_at_start = sum(starts) / len(starts)
    verdict = f"Drift is seen of {', '.join(seen)}." if seen else "No drift is seen."
    return "\n\n".join([
        "## Does a budget train?",
        conditions(budgets, "python -m gspo_kernels.benchmarks budgets"),
        f"The reference trainer from the policy above, {results['updates']} updates ({size['steps']} rollouts of "
        f"{size['prompts']} x {size['group']} answers, {size['updates']} updates each), learning rate "
        f"{size['learning_rate']:g}, {len(size['seeds'])} seeds. Differences to budget 0 are taken seed by seed over "
        "the last fifth: mean and 95 % interval by Student's t. What a budget drops falls on likely tokens, a bias: "
        "the question is whether entropy drifts. The control trains at budget 0 from weights that differ by "
        f"{results['noise']:g} of themselves. Distances of final parameters are over how far budget 0 went from the "
        "start.",
        figure(name, "Reward, entropy and passes against updates"),
        table(header, rows),
        f"{verdict} Drift means that the interval holds neither 0 nor the control's mean; of an entropy less than "
        f"{_unseen(results):.3f} nats would not be seen. Held-out reward begins at {held_at_start:.3f}.",
        "At budget 0 the seeds differ among themselves by a standard deviation of "
        f"{seeds['entropy']['standard deviation']:.3f} nats and {seeds['reward']['standard deviation']:.3f} of "
        f"reward; their final parameters are {others} apart.",
    ])  # fmt: skip  # the page, line by line


def _claims(paper: Suite, name: str) -> str:
    parts = [
        "## The paper's claims",
        conditions(paper, "python -m gspo_kernels.benchmarks paper_checks"),
        "Relative errors of coefficients are of few sequences: one wrong decision moves a point by decades.",
    ]
    for number, claim in paper["results"].items():
        outcome = f"Measured: {claim['measured']}. Verdict: {claim['verdict']}."
        parts += [
            f"**{number}: {claim['claim']}** ({claim['where']}). {outcome}",
            figure(f"{name}-{number}", CAPTIONS[number]),
        ]
    return "\n\n".join(parts)


BLOCKS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "fidelity": (("fidelity",), _short_fidelity),
    "budgets": (("budgets",), _verdict),
}
SECTIONS: dict[str, Callable[[Suite, str], str]] = {
    "policy": _policy, "fidelity": _fidelity, "budgets": _budgets, "paper-checks": _claims,
}  # fmt: skip  # lines by subject
