"""Fidelity, decisions and the paper's claims: the studies run, verdicts follow from numbers, figures draw."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_kernels.benchmarks import candidates
from gspo_kernels.benchmarks.candidates import LogProbs
from gspo_kernels.benchmarks.report import figures_fidelity, figures_paper, looks
from gspo_kernels.benchmarks.studies import decisions, fidelity, paper_checks, paper_samples
from gspo_kernels.benchmarks.workloads import Head

HEAD = Head(128, 4096)
CPU = torch.device("cpu")
SIGNS = torch.tensor([[True], [False]])  # of advantages
NAIVE, OURS, MIXED = fidelity.NAIVE, fidelity.OURS, fidelity.OTHER_ENGINE


@pytest.fixture(scope="module")
def runs() -> dict[str, LogProbs]:
    """Those that need no other package."""
    found, _ = fidelity.implementations(HEAD, CPU)
    return {name: found[name] for name in (NAIVE, OURS, "fp16 logits", "fp32 logits")}


@pytest.fixture(scope="module")
def tokens() -> fidelity.Tokens:
    return fidelity.synthetic(256, HEAD, CPU)[0]


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("claims") / "paper.json"
    paper_checks.main(["--tiny", "--output", str(path)])
    return json.loads(path.read_text())["results"]


# Fidelity


def wrong(errors: dict[str, Tensor], length: int, sequences: int = 4000) -> dict[str, float]:
    return {d["implementation"]: d["wrong"] for d in decisions.decisions(errors, (length,), sequences)}


def test_the_order_of_precisions(tokens: fidelity.Tokens, runs: dict[str, LogProbs]) -> None:
    errors = fidelity.measured(tokens, runs).ratio_errors()
    std = {name: one.std().item() for name, one in errors.items()}
    assert std[NAIVE] > 3 * std["fp16 logits"] > 100 * std["fp32 logits"]
    assert std[OURS] < 5e-6 and std[MIXED] > 1e-3
    found = wrong(errors, 64)
    assert found[NAIVE] > 0.2 and found[MIXED] > 0.2 and 0.02 < found["fp16 logits"] < found[NAIVE]
    assert found[OURS] < 2e-3


def test_rounding_log_probs_to_bf16_is_seen(tokens: fidelity.Tokens, runs: dict[str, LogProbs]) -> None:
    both = {OURS: runs[OURS], "rounded": lambda *given: runs[OURS](*given).bfloat16()}
    found = fidelity.measured(tokens, both)
    assert found.dtypes == {OURS: "float32", "rounded": "bfloat16"}
    shares = wrong(found.ratio_errors(), 256)
    assert shares["rounded"] > 0.02 > 10 * shares[OURS]


def test_the_head_says_who_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        candidates.Candidate,
        "absent",
        lambda self, *given: asked.append(given) or ("odd width" if self.name == NAIVE else None),
    )
    runs, absent = fidelity.implementations(HEAD, CPU)
    assert absent == {NAIVE: "odd width"} and NAIVE not in runs and OURS in runs
    assert set(asked) == {(HEAD, torch.bfloat16, CPU)}


def test_the_chance_that_an_error_turns_a_decision_over() -> None:
    rng = torch.Generator().manual_seed(0)
    u = decisions.SPREAD * torch.randn(200_000, generator=rng, dtype=torch.float64)
    for error in (-2e-4, 3e-4, 1e-3):
        sides = [(decisions.passes_clip(u + error, s) != decisions.passes_clip(u, s)).double() for s in SIGNS]
        found = decisions._turned(torch.tensor([error], dtype=torch.float64)).item()
        assert found == pytest.approx(torch.stack(sides).mean().item(), abs=0.003)
    small = decisions._turned(torch.tensor([0.0, 1e-13, 1e-12], dtype=torch.float64)).tolist()
    assert small[0] == 0 and small[2] == pytest.approx(10 * small[1], rel=0.01)


def test_which_side_clips() -> None:
    u = torch.tensor([-1.0, -3.1e-4, -2.9e-4, 0.0, 3.9e-4, 4.1e-4, 1.0])
    for positive, kept in ((True, [1, 1, 1, 1, 1, 0, 0]), (False, [0, 0, 1, 1, 1, 1, 1])):
        assert decisions.passes_clip(u, torch.tensor(positive)).tolist() == [bool(k) for k in kept]


def test_decisions_of_an_error_that_is_known() -> None:
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(4096, generator=rng, dtype=torch.float64)
    noise -= noise.mean()
    errors = {"none": torch.zeros_like(noise), "shift": torch.full_like(noise, 1.0), "noise": 1e-3 * noise}
    found = {(d["implementation"], d["length"]): d for d in decisions.decisions(errors, (64, 4096), 20_000)}
    assert found["none", 64]["wrong"] == found["none", 64]["wrong with the bias"] == 0
    assert found["shift", 64]["wrong"] == 0 and found["shift", 64]["wrong with the bias"] > 0.4
    # u beyond a bound by noise or by itself, but not both: by the same formula on a grid
    grid = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid**2) / torch.exp(-0.5 * grid**2).sum()
    for length in (64, 4096):
        expected = 0.0
        for positive in (True, False):
            sign = torch.tensor([positive])
            true = decisions.passes_clip(decisions.SPREAD * grid, sign)
            seen = decisions.passes_clip(decisions.SPREAD * grid[:, None] + 1e-3 / length**0.5 * grid, sign)
            expected += 0.5 * ((seen != true[:, None]) * density[:, None] * density).sum().item()
        low, high = found["noise", length]["wrong, 95 %"]
        margin = high - low
        assert low - margin < expected < high + margin
    assert 0.14 < found["none", 64]["clipped"] < 0.17


def test_tokens_drawn_anew_are_covered() -> None:
    """Of few tokens the error's spread is itself uncertain: only the wider interval has what many tokens give."""
    rng = torch.Generator().manual_seed(0)
    grid, lengths = torch.linspace(-6, 6, 2001, dtype=torch.float64), (1024,)
    density = torch.exp(-0.5 * grid**2) / torch.exp(-0.5 * grid**2).sum()
    expected = (decisions._turned(1e-2 / 32 * grid) * density).sum().item()
    errors = {str(k): 1e-2 * torch.randn(64, generator=rng, dtype=torch.float64) for k in range(60)}
    found = decisions.decisions(errors, lengths, 20_000)
    covered = {
        kind: sum(low <= expected <= high for low, high in (one[f"wrong, {kind}"] for one in found)) / len(found)
        for kind in ("95 %", decisions.ANEW)
    }
    assert covered["95 %"] < 0.6 and covered[decisions.ANEW] > 0.8
    for one in found:
        (low, high), (lower, higher) = one["wrong, 95 %"], one[f"wrong, {decisions.ANEW}"]
        assert lower <= low <= high <= higher


def test_whole_sequences_are_drawn_anew() -> None:
    """Tokens of a sequence that all err alike are as good as one token: the interval is wider by the root of 16."""
    rng = torch.Generator().manual_seed(0)
    errors = {"alike": 1e-2 * torch.randn(64, generator=rng, dtype=torch.float64).repeat_interleave(16)}
    widths = []
    for sequence in (torch.arange(1024), torch.arange(64).repeat_interleave(16)):
        (one,) = decisions.decisions(errors, (1024,), 20_000, sequence)
        low, high = one[f"wrong with the bias, {decisions.ANEW}"]
        widths.append(high - low)
    assert 2 < widths[1] / widths[0] < 7


def test_the_spread_of_sequence_means() -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.arange(400) % 7 + 10
    sequence = torch.arange(400).repeat_interleave(lengths)
    free = torch.randn(len(sequence), generator=rng, dtype=torch.float64)
    common = torch.randn(400, generator=rng, dtype=torch.float64).repeat_interleave(lengths)
    found = {
        share: decisions.spread_of_means((1 - share) ** 0.5 * free + share**0.5 * common, sequence)
        for share in (0.0, 0.2)
    }
    mean = (lengths.double().square().sum() / lengths.sum()).item()
    for share, one in found.items():
        low, high = one[f"{decisions.MEANS}, 95 %"]
        assert low < (1 + share * (mean - 1)) ** 0.5 < high and low < one[decisions.MEANS] < high < 1.3 * low
    assert decisions.spread_of_means(free, torch.arange(len(free))) == {}
    bias = decisions.about_errors(common, sequence)["standard error of the bias"]
    assert bias == pytest.approx((mean / len(sequence)) ** 0.5, rel=0.15)


def test_the_interval_covers() -> None:
    rng = torch.Generator().manual_seed(0)
    for share in (0.003, 0.15, 0.5):
        hits = (torch.rand(400, 1000, generator=rng) < share).sum(1).tolist()
        covered = [low <= share <= high for low, high in (decisions.interval(h, 1000) for h in hits)]
        assert 0.9 < sum(covered) / len(covered) < 0.99
    assert decisions.interval(0, 20_000)[0] == 0 and 1e-4 < decisions.interval(0, 20_000)[1] < 2e-4


def test_the_suite_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fidelity.main(["--tiny", "--policy", str(tmp_path / "none"), "--output", str(tmp_path / "found.json")])
    report = json.loads((tmp_path / "found.json").read_text())
    results = report["results"]
    assert report["suite"] == "fidelity" and list(results["sets"]) == ["synthetic"]
    assert (
        "trained policy" in results["not measured"]
        and "python -m gspo_kernels.benchmarks policy" in capsys.readouterr().out
    )
    found = results["sets"]["synthetic"]
    assert {NAIVE, OURS, MIXED, "fp16 logits", "fp32 logits"} <= found["log-ratios"].keys()
    assert len(found["decisions"]) == len(found["log-ratios"]) * len(fidelity.LENGTHS)
    assert 0.005 < found["std of the true log-ratio"] < 0.1
    assert all(decisions.MEANS not in one for one in found["log-ratios"].values())
    both = {**results, "sets": {"synthetic": found, "trained": found}}
    for name, drawn in (("one", results), ("two", both)):
        figures_fidelity.draw_fidelity(drawn, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000


def test_a_trained_policy_is_measured_by_its_sequences(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    mask = torch.arange(8) < torch.tensor([[3], [8], [5]])
    torch.save(
        {
            "hidden": torch.randn(3, 8, 16, generator=rng),
            "weight": torch.randn(64, 16, generator=rng),
            "target_ids": torch.randint(64, (3, 8), generator=rng),
            "mask": mask,
        },
        tmp_path / "states.pt",
    )
    states = fidelity.trained(tmp_path, 14, CPU)
    assert not isinstance(states, str)
    assert states[0].sequence.tolist() == [0] * 3 + [1] * 8 + [2] * 3
    found = fidelity.suite(*states, sequences=100)
    assert found["sequences"] == 3 and decisions.MEANS in found["log-ratios"][OURS]
    assert f"wrong, {decisions.ANEW}" in found["decisions"][0]


def test_everyone_looks_like_something() -> None:
    named = set(candidates.ALL) | {"bf16 logits", "fp16 logits", "fp32 logits", MIXED}
    assert named <= looks.LOOKS.keys()
    assert (
        looks.LOOKS["exact"] == looks.LOOKS["ours"] and looks.LOOKS["budget 1e-3"] == looks.LOOKS["ours, budget 1e-3"]
    )
    assert len({looks.LOOKS[name] for name in candidates.ALL}) == len(candidates.ALL)


# The paper's claims


def test_every_claim_has_a_verdict_and_a_figure(claims: dict[str, Any], tmp_path: Path) -> None:
    assert list(claims) == list(paper_checks.CHECKS) == list(figures_paper.DRAW)
    for number, one in claims.items():
        assert one.keys() == {"where", "claim", "measured", "verdict", "numbers"}
        figures_paper.DRAW[number](claims, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 10_000


def test_gspo_and_gspo_token(claims: dict[str, Any]) -> None:
    numbers = claims["6.1"]["numbers"]
    for row in numbers[paper_checks.APART]:
        for who in ("ours", "reference"):
            if row["token weights"]:
                assert row[who] > 0.1
            else:
                assert row[who] < (1e-14 if row["dtype"] == "float64" else 1e-5)
    assert claims["6.1"]["verdict"].startswith("holds; with weights")
    faulty = copy.deepcopy(numbers)
    faulty[paper_checks.APART][0]["ours"] = 1e-6
    assert paper_checks.equality_verdict(faulty).startswith("does not hold")


def test_clip_fractions(claims: dict[str, Any]) -> None:
    numbers = claims["6.2"]["numbers"]
    for law in numbers["laws"].values():
        for point in law["points"]:
            assert 0.35 < point["gspo"] < 0.6 and point["grpo"] < 0.004
    points: list[dict[str, Any]] = [{"length": 2**k, "gspo": 0.3 / 2 ** (k - 6), "grpo": 1e-3} for k in (6, 8, 10)]
    assert paper_samples.crossing(points, 0.15) == pytest.approx(64 * 4 ** (0.15 / 0.225))
    assert paper_samples.crossing(points, 0.5) is None
    law: dict[str, Any] = {
        "points": points,
        "drift": 0.0,
        paper_checks.CROSSING: 161.0,
        f"{paper_checks.CROSSING}, 95 %": [150.0, 170.0],
    }
    verdict = paper_checks.clip_verdict({"pair": paper_checks.PAIR, "laws": {"one": law}})
    fitted = "reproduced with a standard deviation fitted to the paper's pair, at L = 161 (one, 150 to 170)"
    assert verdict.startswith(fitted) and "left out" not in verdict and "no test of the claim" in verdict
    none = {**law, "drift": 3e-4, "points": [{**point, "grpo": 0.0} for point in points]}
    verdict = paper_checks.clip_verdict({"pair": paper_checks.PAIR, "laws": {"one": law, "two": none}})
    assert verdict.startswith(fitted) and "not by two (not fitted)." in verdict
    assert "left out: lengths of two at which GRPO clips nothing" in verdict
    for point in points:
        point["grpo"] = 0.01
    assert paper_checks.clip_verdict({"pair": paper_checks.PAIR, "laws": {"one": law}}).startswith("not reproduced")


@pytest.mark.parametrize("name", paper_samples.LAWS)
def test_laws_have_the_spread_they_say(name: str) -> None:
    law = paper_samples.LAWS[name]
    advantages = paper_samples.signs(2000)
    drawn = paper_samples.draw(law, advantages, 1000, torch.Generator().manual_seed(0)).double()
    heavy = name == "Student t3"  # whose fourth moment is infinite
    assert (drawn.std() / law.std).item() == pytest.approx(1, abs=0.05 if heavy else 0.005)
    assert (drawn * advantages[:, None]).mean().item() == pytest.approx(law.drift, abs=4 * law.std / 2e6**0.5)


def test_clip_fractions_are_the_librarys() -> None:
    """Against the definition, on samples with some tokens and some sequences beyond the clip."""
    advantages = paper_samples.signs(64)
    law = paper_samples.LAWS["Laplace"]._replace(std=0.2)
    log_ratio = paper_samples.draw(law, advantages, 512, torch.Generator().manual_seed(1))
    up = advantages[:, None] > 0
    tokens = torch.where(up, log_ratio.exp() > 1.27, log_ratio.exp() < 0.8).double().mean().item()
    s = log_ratio.double().mean(1, keepdim=True).exp()
    sequences = torch.where(up, s > 1 + 4e-4, s < 1 - 3e-4).double().mean().item()
    found = {kind: paper_samples.judged(log_ratio, advantages, o) for kind, o in paper_samples.OBJECTIVES.items()}
    assert found["grpo"]["token_clip_fraction"].item() == pytest.approx(tokens, abs=1e-6) and tokens > 0.05
    assert found["gspo"]["clip_fraction"].item() == pytest.approx(sequences, abs=1e-6) and sequences > 0.2


def test_ranges(claims: dict[str, Any]) -> None:
    laws = claims["6.3"]["numbers"]["laws"]
    free, drifting = (laws[name]["powers of the length"] for name in ("no drift", "drift"))
    assert free["normalised"] == pytest.approx(-0.5, abs=0.15) and free["product"] == pytest.approx(0.5, abs=0.15)
    assert laws["no drift"]["drift"] == 0 < laws["drift"]["drift"]
    for one, other in zip(laws["no drift"]["points"], laws["drift"]["points"], strict=True):
        assert one["std of u"] < other["std of u"]
    assert drifting["normalised"] > free["normalised"]
    verdict = claims["6.3"]["verdict"]
    assert verdict.startswith("does not hold as stated") and "independent tokens" in verdict and "drift" in verdict


def test_the_verdict_on_ranges() -> None:
    def said(free: float, drifting: float, at_the_end: float) -> str:
        ends = {"no drift": (free, free), "drift": (drifting, at_the_end)}
        return paper_checks.range_verdict(
            {
                "laws": {
                    name: {"powers of the length": {"normalised": a, "product": 0.5, "normalised, the two longest": b}}
                    for name, (a, b) in ends.items()
                }
            }
        )

    assert said(0.01, 0.02, 0.0).startswith("holds") and said(0.6, 0.6, 0.6).startswith("does not hold:")
    assert "flattens at the width of the drift" in said(-0.5, -0.3, -0.05)
    assert "flattens" not in said(-0.5, -0.5, -0.5)


def test_the_slope_is_of_all_points() -> None:
    points = [{"length": 10**k, "r": [1.0, math.exp(10.0**power)]} for k, power in ((1, 0.0), (2, -1.0), (3, -1.0))]
    assert paper_samples.slope(points, "r") == pytest.approx(-0.5)
    points.append({"length": 10**4, "r": [1.0, math.exp(10**-1.5)]})
    assert paper_samples.slope(points, "r") == pytest.approx(-0.45)  # -0.5 by its ends


def test_precision(claims: dict[str, Any]) -> None:
    numbers = claims["6.4"]["numbers"]
    found = {(p["noise"], p["objective"], p["length"]): p for p in numbers["points"]}
    for length in (64, 256):
        coarse, fine = found["bf16 logits", "gspo", length], found[OURS, "gspo", length]
        assert coarse["decided"] == fine["decided"] == 2000 > coarse["sequences"]
        assert coarse["wrong decisions, 95 %"][0] < coarse["wrong decisions"] < coarse["wrong decisions, 95 %"][1]
        assert coarse["wrong decisions"] > 0.2 and coarse["cosine"] < 0.9 and coarse["relative error"] > 0.3
        assert fine["wrong decisions"] <= 0.01 and fine["relative error where decisions agree"] < 1e-5
        assert found["bf16 logits", "grpo", length]["cosine"] > 0.999
    assert "does not hold for bf16 logits" in claims["6.4"]["verdict"]
    assert "holds for ours at every length (intervals end at" in claims["6.4"]["verdict"]
    for said in ("mean error is taken out", "spread alike at all lengths", "6.3"):
        assert said in claims["6.4"]["measured"]


def test_the_verdict_on_precision_is_of_the_upper_ends(claims: dict[str, Any]) -> None:
    better = copy.deepcopy(claims["6.4"]["numbers"])
    for point in better["points"]:
        if point["length"] == 256 and point["objective"] == "gspo":
            point |= {"wrong decisions": 0.0, "wrong decisions, 95 %": [0.0, 0.00192]}
    said = paper_checks.precision_verdict(better)
    assert "holds for bf16 logits from L = 256 on (intervals end at 192 of 100,000 at most; before, 4" in said
    for point in better["points"]:
        if point["objective"] == "gspo":
            point["wrong decisions, 95 %"] = [0.0, 0.011]
    assert "holds for" not in paper_checks.precision_verdict(better).replace("does not hold for", "")


def test_coefficients_lie_in_their_exact_ranges(claims: dict[str, Any]) -> None:
    numbers = claims["6.7"]["numbers"]
    for kind in paper_samples.OBJECTIVES:
        low, high = numbers[kind]["bounds"]
        eps = 4 * torch.finfo(torch.float64).eps
        assert 0 < numbers[kind]["A > 0"]["least"] < low and numbers[kind]["A > 0"]["largest"] <= high + eps
        assert low - eps <= numbers[kind]["A < 0"]["least"] and high < numbers[kind]["A < 0"]["largest"]
        assert sum(numbers[kind]["A > 0"]["counts"]) > 0
        assert numbers[kind]["at the bounds"] == {
            "lower, on it": True,
            "lower, beyond it": False,
            "upper, on it": True,
            "upper, beyond it": False,
        }
    assert numbers["gspo"]["largest range within a sequence"] == 0 < numbers["grpo"]["largest range within a sequence"]
    assert claims["6.7"]["verdict"].startswith("holds, exactly")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: n["grpo"]["A > 0"].update(largest=1.2701), "grpo at A > 0"),
        (lambda n: n["gspo"]["A < 0"].update(least=0.9996), "gspo at A < 0"),
        (lambda n: n["gspo"].update({"largest range within a sequence": 1e-9}), "more than one weight"),
        (lambda n: n["grpo"]["at the bounds"].update({"upper, on it": False}), "grpo, upper, on it"),
    ],
)
def test_a_weight_out_of_range_is_said(claims: dict[str, Any], change: Any, said: str) -> None:
    numbers = copy.deepcopy(claims["6.7"]["numbers"])
    change(numbers)
    verdict = paper_checks.histogram_verdict(numbers)
    assert verdict.startswith("does not hold") and said in verdict
