"""The wheel of SkyRL with the lines of docs/trainers/others.md: our loss in its registry and its own `gspo`, in fp32.

`make test-trainers` runs this in the environment with Megatron Core, where SkyRL is installed without its dependencies.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.pages import INTEGRATIONS, code_blocks
from tolerance import FUNCTION_RELATIVE

# Dependencies that the called functions do not use, and packages that are imported without running their __init__.py.
STUBS = [
    *("ray", "jaxtyping", "loguru", "omegaconf", "skyrl_gym", "skyrl_gym.envs", "skyrl_gym.envs.search"),
    *("skyrl_gym.envs.search.env", "skyrl_gym.envs.sql", "skyrl_gym.envs.sql.env"),
    *("skyrl.train.entrypoints", "skyrl.train.entrypoints.main_base"),
]
PACKAGES = ["skyrl.backends", "skyrl.backends.skyrl_train.utils"]


def test_the_registered_loss_equals_skyrls_gspo(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("skyrl")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("SkyRL is not installed")
    for name in STUBS:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock(name=name))
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.submodule_search_locations[0]).parent / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)  # the registry is of this process only
    ppo_utils = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    (lines,) = code_blocks(INTEGRATIONS, "python", "PolicyLossRegistry")
    exec(lines, {"__name__": "gspo_skyrl"})
    config = importlib.import_module("skyrl.train.config").AlgorithmConfig(
        eps_clip_low=3e-4, eps_clip_high=4e-4, loss_reduction="sequence_mean", policy_loss_type="gspo"
    )
    torch.manual_seed(0)
    old = -torch.rand(6, 9) - 1
    log_probs = (old + 3e-3 * torch.randn(6, 9)).requires_grad_()
    mask = (torch.arange(9) < torch.tensor([[9], [1], [4], [0], [5], [3]])).float()
    advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        torch.randn(6, 1).expand(6, 9), mask, "sequence_mean", 6, 9
    )
    found: list[dict[str, Any]] = []
    for name in ("gspo_kernels", "gspo"):
        loss, metrics = ppo_utils.PolicyLossRegistry.get(name)(log_probs, old, advantages, config, mask, None)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        found.append({"loss": loss, "gradient": gradient, "clip_ratio": torch.tensor(metrics["clip_ratio"])})
    ours, theirs = found
    for name, truth in theirs.items():
        assert (ours[name] - truth).norm() <= FUNCTION_RELATIVE * truth.norm(), name
