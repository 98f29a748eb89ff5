"""The wheel of OpenRLHF with the lines of docs/trainers/others.md: our loss in its actor, compared with its own `gspo`.

`make test-trainers` runs this in the environment with Megatron Core, where OpenRLHF is installed without its
dependencies.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.other_trainers import assert_agree, rollout
from helpers.pages import INTEGRATIONS, code_blocks
from tolerance import SHARE_ABSOLUTE

from gspo_kernels import Objective
from gspo_kernels.integrations.trainers import openrlhf

(LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_openrlhf.py")
(COMMAND,) = code_blocks(INTEGRATIONS, "bash", "gspo_openrlhf.py")


def test_the_documented_module_replaces_the_loss_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = type("PolicyModelActor", (), {"init_model_from_pretrained": lambda self, path: path})
    package: Any = ModuleType("openrlhf.trainer.ray")
    package.ppo_actor = SimpleNamespace(PolicyModelActor=SimpleNamespace(__ray_actor_class__=actor))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "ray", mock.MagicMock())
    scope: dict[str, Any] = {"__name__": "gspo_openrlhf"}
    exec(LINES, scope)
    assert scope["GSPOActor"]().init_model_from_pretrained("model") == "model"
    assert package.ppo_actor.PolicyLoss is openrlhf.PolicyLoss


@pytest.mark.parametrize("level", ["off", "seq", "token"])
@pytest.mark.parametrize("dual_clip", [None, 1.0005])
@pytest.mark.parametrize("of_batch", [{}, {"dp_size": 2, "batch_num_tokens": 30, "global_batch_size": 7.5}])
def test_loss_gradient_and_metrics_equal_openrlhfs_gspo(
    level: str, dual_clip: float | None, of_batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = find_spec("openrlhf")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("OpenRLHF is not installed")
    package = ModuleType("openrlhf.models")  # imported without running its __init__.py
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "models")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "deepspeed", mock.MagicMock())
    theirs = importlib.import_module("openrlhf.models.loss").PolicyLoss
    *_, kind, _, low, high = COMMAND.split()  # --actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4
    settings = {"clip_eps_low": float(low), "clip_eps_high": float(high), "policy_loss_type": kind}
    settings |= {"dual_clip": dual_clip, "is_correction_level": level}
    objective = Objective(dual_clip=dual_clip)
    batch = rollout(Objective())
    engine = batch.old + 1e-4 * torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for loss in (openrlhf.PolicyLoss(**settings, objective=objective), theirs(**settings)):
        log_probs = batch.log_probs.clone().requires_grad_()
        advantages = batch.advantages[:, None].expand_as(log_probs)
        value, clip_ratio, ppo_kl, *_ = loss(log_probs, batch.old, advantages, batch.mask.long(), engine, **of_batch)
        value.backward()
        found.append((value.detach(), log_probs.grad, {"clip_ratio": clip_ratio.item(), "ppo_kl": ppo_kl.item()}))
    (value, gradient, metrics), (truth, true_gradient, true_metrics) = found
    assert_agree(batch, (SimpleNamespace(loss=value), gradient), truth, true_gradient)
    assert metrics == pytest.approx(true_metrics, abs=SHARE_ABSOLUTE)
