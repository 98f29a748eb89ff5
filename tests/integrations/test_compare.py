"""`gspo compare`, and the recording and replay of routing that it uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.reference_runs import hidden_states
from tolerance import PARAMETER_ABSOLUTE
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from gspo_kernels import linear_log_probs
from gspo_kernels.benchmarks.studies import compare, compare_report
from gspo_kernels.integrations.reference_trainer.measures import router_sums
from gspo_kernels.integrations.reference_trainer.policy import Policy, demo_policy, make_policy
from gspo_kernels.integrations.reference_trainer.routing import routing, stacked
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, sample
from gspo_kernels.integrations.tasks import Example
from gspo_kernels.tools.cli import app

CONFIG = replace(compare.config_of("sorting", 2), prompts_per_step=8, group_size=4, eval_prompts=8, eval_every=1)
MIXTRAL: dict[str, Any] = dict(vocab_size=15, hidden_size=16, intermediate_size=16, num_local_experts=4)
MIXTRAL |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, router_aux_loss_coef=0.0)


def mixture(name: str) -> Policy:
    torch.manual_seed(0)
    if name == "qwen":
        return compare.mixture_policy()
    return make_policy(MixtralForCausalLM(MixtralConfig(**MIXTRAL)), demo_policy().tokenizer)


def rollout_of(policy: Policy) -> Rollout:
    examples = [Example("sort ba:", ""), Example("sort fedcb:", "")]
    return sample(policy, examples, group_size=4, max_new_tokens=7, temperature=1.0)


@torch.no_grad()
def log_probs(policy: Policy, rollout: Rollout, replayed: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
    with routing(policy.model, replayed) as chosen:
        hidden = hidden_states(policy, rollout)
    out = linear_log_probs(
        hidden, policy.head, rollout.answer_ids, mask=rollout.answer_mask, **policy.fused.options.kwargs()
    )
    return out.log_probs, stacked(chosen, len(rollout.texts))


@pytest.mark.parametrize("name", ["qwen", "mixtral"])
def test_replayed_routing_computes_with_the_recorded_experts(name: str) -> None:
    policy = mixture(name)
    rollout = rollout_of(policy)
    before, experts = log_probs(policy, rollout)
    assert experts.shape == (*rollout.input_ids.shape, 2, 2)
    again, _ = log_probs(policy, rollout, experts)
    torch.testing.assert_close(again, before, rtol=0, atol=PARAMETER_ABSOLUTE)

    routers = [x for x in policy.model.modules() if type(x).__name__.endswith("TopKRouter")]
    for router in routers:
        router.weight.data = router.weight.flip(0)  # expert 0 gets the logits of the last expert, and so on
    free, chosen = log_probs(policy, rollout)
    replayed, own_choice = log_probs(policy, rollout, experts)
    count = routers[0].num_experts
    # The first layer sees unchanged hidden states.
    mirrored = count - 1 - experts[:, :, 0]
    mask = rollout.attention_mask.bool()
    assert torch.equal(chosen[:, :, 0][mask].sort(-1).values, mirrored[mask].sort(-1).values)
    kept = (experts[..., :, None] == chosen[..., None, :]).any(-1)[mask]
    assert kept.double().mean() < 0.7
    assert not torch.equal(own_choice, experts)  # the list has the choices that were replaced
    assert (free - before).abs().max() > 1e-3 < (replayed - free).abs().max()


def test_the_share_of_changed_experts_ignores_order_and_padding() -> None:
    before = torch.tensor([[[[0, 1]], [[2, 3]], [[0, 1]]]])  # [1, 3, 1, 2]
    after = torch.tensor([[[[1, 0]], [[2, 0]], [[2, 3]]]])
    logits = torch.zeros(1, 3, 4)
    for mask, now, changed in (([[1, 1, 0]], after, 1), ([[1, 1, 1]], before, 0)):
        sums = router_sums(logits, torch.tensor(mask).bool(), 2, before, now)
        assert (sums["changed"], sums["chosen"]) == (changed, 2 * sum(mask[0]))


def test_all_arms_begin_alike_and_gspo_token_trains_as_gspo() -> None:
    results = compare.compare(
        compare.arms_of(["gspo", "gspo-token", "grpo"], "dense", CONFIG), [3], CONFIG, "dense", str
    )
    (gspo,), (token,), (grpo,) = results["runs"].values()
    assert gspo["reward"][0] == token["reward"][0] == grpo["reward"][0]  # the same first rollout
    assert gspo["held-out reward"] == token["held-out reward"] and gspo["reward"] == token["reward"]
    assert gspo["held-out reward"][0] == grpo["held-out reward"][0]
    for run in (gspo, token, grpo):
        first = {name: values[0] for name, values in run["by update"].items() if name != "entropy"}
        assert first == dict.fromkeys(first, 0.0) | {"ratio_min": 1.0, "ratio_max": 1.0}
        assert run["by update"]["token_log_ratio_std"][-1] > run["by update"]["sequence_log_ratio_std"][-1] > 0
    assert max(gspo["by update"]["token_clip_fraction"]) > 2 * max(grpo["by update"]["token_clip_fraction"])


def test_a_mixture_is_trained_with_and_without_replay() -> None:
    results = compare.compare(compare.arms_of(["gspo"], "moe", CONFIG), [0], CONFIG, "moe", str)
    assert list(results["runs"]) == ["gspo", "gspo + replay"]
    plain, replay = (runs[0]["by update"] for runs in results["runs"].values())
    assert plain["router_changed"][0] == 0 < plain["router_changed"][-1] < 1
    assert plain["token_log_ratio_std"] != replay["token_log_ratio_std"]
    header, rows = compare_report.rows(results)
    assert [row[0] for row in rows] == ["GSPO", "GSPO + replay"] and len(header) == len(rows[0])


def test_a_sampler_in_bf16_is_compared_with_its_corrections() -> None:
    """Old log-probs from the sampler clip in the first update, recomputed ones do not. GRPO's window is wider."""
    results = compare.compare(
        compare.arms_of(["gspo", "grpo"], "mismatch", CONFIG), [0], replace(CONFIG, learning_rate=5e-3), "mismatch", str
    )
    _, rows = compare_report.rows(results)
    assert [row[0] for row in rows[:4]] == ["GSPO", "GSPO + sampler's log-probs", "GSPO + TIS", "GSPO + MIS"]
    by_update = {arm: runs[0]["by update"] for arm, runs in results["runs"].items()}
    first = {arm: x["clip_fraction"][0] for arm, x in by_update.items()}
    assert first.pop("gspo + sampler's log-probs") > 0.05 and set(first.values()) == {0}
    for arm, x in by_update.items():
        assert ("rollout_weight_mean" in x) == arm.endswith(("TIS", "MIS"))
    assert by_update["gspo + TIS"]["rollout_weight_mean"][0] != 1


def test_the_summary_compares_seed_by_seed() -> None:
    by_update = {"token_clip_fraction": [0.0, 0.5], "ratio_min": [1.0, 0.9]}

    def runs(*rewards: float) -> list[dict]:
        shared = {"by update": by_update, "token_clip_fraction": [0.2, 0.3], "ratio_min": [0.9, 0.8]}
        return [{"held-out reward": [0.0, reward], **shared} for reward in rewards]

    summary = compare.summary({"a": runs(0.5, 0.7, 0.6), "b": runs(0.6, 0.8, 0.8)})
    assert summary["a"]["against first"] == {"mean": 0.0, "95 %": [0.0, 0.0]}
    gap = summary["b"]["against first"]  # differences 0.05, 0.05, 0.1
    assert gap["mean"] == pytest.approx(0.2 / 3)
    assert gap["95 %"] == pytest.approx([0.2 / 3 - 4.303 * 0.05 / 3, 0.2 / 3 + 4.303 * 0.05 / 3])
    assert summary["b"]["mean held-out reward"]["mean"] == pytest.approx(1.1 / 3)
    assert summary["a"]["token_clip_fraction"] == 0.25 and summary["a"]["ratio_min"] == 0.8
    assert compare.about([0.5]) == {"mean": 0.5, "95 %": None}


def test_the_command_writes_results_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "compare-cpu.json"
    arguments = ["compare", "--objectives", "gspo,grpo", "--seeds", "0", "--steps", "1", "--output", str(path)]
    arguments += ["--learning-rate", "3e-3", "--updates", "8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "GRPO" in result.output and str(path) in result.output
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    saved = json.loads(path.read_text())
    assert saved["suite"] == "compare" and len(saved["results"]["runs"]["grpo"]) == 1
    assert saved["results"]["settings"]["learning_rate"] == 3e-3
    assert len(saved["results"]["runs"]["grpo"][0]["by update"]["clip_fraction"]) == 8


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--objectives", "gspo,gsop"], "--objectives: "),
        (["--seeds", "1,1"], "got '1,1'"),
        (["--updates", "3"], "updates_per_rollout: expected a divisor of the 256 answers of a rollout"),
    ],
)
def test_bad_options_of_compare_print_one_line(option: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", *option, "--output", str(tmp_path / "x.json")])
    assert result.exit_code == 1 and message in result.stderr
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
