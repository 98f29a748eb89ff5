"""The trained policy of the benchmarks: its text, what is saved of it, and what a budget is held against."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from gspo_kernels.benchmarks import workloads
from gspo_kernels.benchmarks.report import figures_training
from gspo_kernels.benchmarks.studies import arithmetic, budgets, policy
from gspo_kernels.integrations.reference_trainer.policy import load_policy
from gspo_kernels.integrations.reference_trainer.tasks import answer_found


def test_every_solution_is_right_step_by_step() -> None:
    for made in arithmetic.problems(500, seed=3):
        sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", made.solution)
        assert sums
        for a, sign, b, c in sums:
            assert int(a) + (int(b) if sign == "+" else -int(b)) == int(c) >= 0
        assert sums[-1][3] == made.answer and answer_found(made.solution, made.answer) == 1
        asked = re.findall(r"\d+", made.prompt)
        assert asked == [sums[0][0], *(b for _, _, b, _ in sums)]


def test_problems_are_different_and_keep_out_what_they_are_told_to() -> None:
    kept = arithmetic.problems(200, seed=1)
    others = arithmetic.problems(2000, seed=0, without=frozenset(p.prompt for p in kept))
    assert len({p.prompt for p in others}) == 2000
    assert not {p.prompt for p in kept} & {p.prompt for p in others}
    assert arithmetic.problems(200, seed=1) == kept


def test_text_that_cannot_fill_the_vocabulary_is_an_error_and_is_not_padded() -> None:
    with pytest.raises(ValueError, match="the text gives a vocabulary of"):
        arithmetic.bpe(list(arithmetic.stories(3, seed=0)), vocab=5000)


def test_the_words_of_the_stories_can_fill_the_vocabulary() -> None:
    words = {word for text in arithmetic.stories(40_000, seed=2) for word in re.findall(r"\w+", text)}
    assert len(words) > 15_000


def test_states_that_are_not_there_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"python -m gspo_kernels\.benchmarks policy"):
        policy.load(tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `python -m gspo_kernels.benchmarks policy --tiny`."""
    folder = tmp_path_factory.mktemp("policy")
    _main(policy, "--folder", folder, "--output", folder / "policy.json")
    return folder


def _main(suite: object, *arguments: object) -> None:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["suite", "--tiny", *map(str, arguments)])
        suite.main()  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    enable_progress_bar()


def test_the_policy_is_saved_and_can_be_loaded(tiny: Path) -> None:
    states, loaded = policy.load(tiny), load_policy(str(tiny / "model"))
    size = policy.SIZES["tiny"]
    weight = loaded.head.weight
    assert isinstance(weight, torch.Tensor) and torch.equal(states.weight, weight)
    assert states.weight.shape == (size.vocab, size.width)
    hidden, ids = states.rows()
    assert hidden.shape[0] == ids.shape[0] == int(states.mask.sum()) > 0
    lines = [json.loads(line) for line in (tiny / "problems.jsonl").read_text().splitlines()]
    assert len(lines) == size.for_rl and set(lines[0]) == {"prompt", "answer"}


def test_the_report_holds_both_policies_at_every_budget(tiny: Path) -> None:
    found = json.loads((tiny / "policy.json").read_text())["results"]
    for name in ("trained", "formula"):
        assert found[name]["entropy"]["mean entropy"] > 0
        assert [record["budget"] for record in found[name]["budgets"]] == list(workloads.BUDGETS)
        exact, *others = found[name]["budgets"]
        assert exact["dropped_gradient_mass"] == exact["d_weight error"] == exact["d_hidden error"] == 0
        for record in others:
            assert record["dropped_gradient_mass"] <= record["budget"]
            assert record["live_tile_share"] <= exact["live_tile_share"] == exact["live_row_share"] < 1
            assert record["passes"] == pytest.approx(1 + 3 * record["live_tile_share"])
    assert 0.5 < found["vocabulary"]["used by the corpus"] <= 1
    assert found["digest"] == policy.digest(tiny)


def test_the_situation_has_zero_advantages_and_clipped_sequences() -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 5, 4] * 20)
    rows = int(lengths.sum())
    hidden, weight = torch.randn(rows, 16, generator=rng), torch.randn(300, 16, generator=rng)
    s = policy.situation(hidden, weight, torch.randint(300, (rows,), generator=rng), lengths)
    zero, clipped = 18, 7  # 19 / 64 and 7 / 64 of 60
    assert (s.advantages == 0).sum() == zero
    (exact, *_) = policy.by_budget(s, "made")
    assert exact["live_row_share"] == pytest.approx(lengths[zero + clipped :].sum().item() / rows)


# Does a budget train?


@pytest.mark.slow
def test_budgets_are_trained_and_compared(tiny: Path, tmp_path: Path) -> None:
    """Processes of their own: most of its time they import torch."""
    _main(budgets, "--policy", tiny, "--folder", tmp_path / "runs", "--output", tmp_path / "budgets.json")
    assert not list((tmp_path / "runs").iterdir())
    found = json.loads((tmp_path / "budgets.json").read_text())["results"]
    size = budgets.TINY
    for arm in budgets.ARMS:
        for seed, run in zip(size.seeds, found["runs"][arm], strict=True):
            assert run["seed"] == seed
            assert all(len(run[key]) == size.steps for key in budgets.CURVES)
            assert [step for step, _ in run["held-out reward"]] == [0, 1, 2]
    figures_training.draw_budgets(found, tmp_path / "budgets.png")
    assert (tmp_path / "budgets.png").read_bytes()[:4] == b"\x89PNG"


def test_budgets_without_a_policy_say_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _main(budgets, "--policy", tmp_path)
    assert "python -m gspo_kernels.benchmarks policy" in capsys.readouterr().err


def test_the_control_differs_from_its_start_by_a_millionth_and_by_its_seed(tiny: Path, tmp_path: Path) -> None:
    start = load_policy(str(tiny / "model"))
    moved = [load_policy(str(budgets.moved(tiny / "model", seed, tmp_path))) for seed in (0, 1)]
    size = sum(weight.detach().double().square().sum().item() for weight in start.model.parameters()) ** 0.5
    for one in moved:
        assert budgets.distance(one, start) == pytest.approx(budgets.NOISE * size, rel=0.1)
    assert budgets.distance(*moved) == pytest.approx(2**0.5 * budgets.NOISE * size, rel=0.1)


def test_drift_is_that_of_the_same_seed() -> None:
    base = [[1.0, 2.0, 3.0, 4.0, 5.0], [11.0, 12.0, 13.0, 14.0, 15.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    moved = {budgets.EXACT: 0.0, "budget 1e-3": 0.5, "budget 4e-3": -1.0, budgets.CONTROL: 0.0}
    runs = {arm: [{"x": [value + by * i for i, value in enumerate(c)]} for c in base] for arm, by in moved.items()}
    found = budgets.drift(runs, "x")
    assert [step["mean"] for step in found["budget 1e-3"]["per step"]] == [0, 0.5, 1, 1.5, 2]
    assert found["budget 1e-3"]["at the end"]["mean"] == 2 and found["budget 4e-3"]["at the end"]["mean"] == -4
    assert found["budget 4e-3"]["over all steps"]["mean"] == -2
    assert found[budgets.CONTROL]["at the end"]["standard deviation"] == 0
    assert found["other seeds"]["at the end"]["most"] == 15 and found["other seeds"]["at the end"]["least"] == 0
    low, high = budgets.about([1.0, 2.0, 3.0])["95 %"]
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
