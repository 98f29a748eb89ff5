"""Our functions called by the source code of slime, prime-rl and NeMo RL, which have no wheels.

Name checkouts of their repositories. A trainer without its variable is skipped.

    SLIME_CHECKOUT=/path/to/slime PRIME_RL_CHECKOUT=/path/to/prime-rl NEMO_RL_CHECKOUT=/path/to/RL \
        build/megatron/bin/python -m pytest tests/trainers/test_checkouts.py

`make build/megatron/ready` makes this environment. Dependencies that the called functions do not use are stubs. Each
test runs on gloo processes, in fp32, and compares with the trainer's own functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.pages import INTEGRATIONS, code_blocks
from helpers.ranks import run_ranks
from tolerance import CHECKOUT_RELATIVE, PARITY_GRADIENT_RELATIVE
from torch import Tensor

from gspo_kernels import Objective, policy_loss
from gspo_kernels.integrations.trainers import prime_rl_head

V, H = 48, 16


def run(main: Callable[..., None], ranks: int, variable: str, folder: Path) -> None:
    """Run main(rank, folder, checkout) on new processes, or skip the test if the variable is not set."""
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name a checkout")
    run_ranks(main, ranks, folder, Path(os.environ[variable]))


class Stub(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class Stubs(MetaPathFinder, Loader):
    """Import a stub for each of these modules and their submodules."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_stub = any(fullname == name or fullname.startswith(f"{name}.") for name in self.names)
        return ModuleSpec(fullname, self, is_package=True) if is_stub else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def use(checkout: Path, folders: list[str], packages: list[str], stubs: list[str]) -> None:
    """Prepare this process for imports from a checkout.

    Args:
        folders: for sys.path.
        packages: are imported without running their __init__.py.
        stubs: modules to replace.
    """
    assert checkout.is_dir(), checkout
    sys.meta_path.insert(0, Stubs(*stubs))
    sys.path[:0] = [str(checkout / folder) for folder in folders]
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(checkout / folders[0] / name.replace(".", "/"))]
        sys.modules[name] = package
    torch._dynamo.config.disable = True  # some functions are compiled, which takes minutes on a CPU


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float = CHECKOUT_RELATIVE) -> None:
    assert ours.keys() == theirs.keys() and theirs
    for name, truth in theirs.items():
        error = (ours[name].double() - truth.double()).norm() / truth.double().norm()
        print(f"{name}: {error:.1e}", flush=True)
        assert error <= limit, f"{name}: {error:.1e}"


def clipped_gspo(log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Return GSPO's loss of each sequence [B] of [B, T], with a window of 3e-4 and 4e-4."""
    ratio = (((log_probs - old) * mask).sum(1) / mask.sum(1)).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)


# prime-rl


def of_prime_rl(rank: int, folder: Path, checkout: Path) -> None:
    tomllib = importlib.import_module("tomllib")
    use(
        checkout,
        ["src", "packages/prime-rl-configs/src"],
        ["prime_rl.trainer.models"],
        ["beartype", "jaxtyping", "wandb", "pydantic_config"],
    )
    importlib.import_module("pydantic_config").BaseConfig = importlib.import_module("pydantic").BaseModel
    loss = importlib.import_module("prime_rl.trainer.rl.loss")
    heads = importlib.import_module("prime_rl.trainer.models.layers.lm_head")
    gemma = importlib.import_module("prime_rl.trainer.models.layers.lm_head_gemma")
    torch.manual_seed(0)
    for layer in (heads.FusedOutputLinear(H, V, 8), gemma.GemmaFusedOutputLinear(H, V, 8, softcap=3.0)):
        hidden = torch.randn(1, 30, H, requires_grad=True)
        labels = torch.randint(V, (1, 30))
        temperature = 0.5 + torch.rand(1, 30)
        found = []
        for forward in (prime_rl_head, type(layer).forward):
            out = forward(layer, hidden, labels, temperature=temperature)
            weights = torch.linspace(-1, 1, 30)
            gradients = torch.autograd.grad((out["logprobs"] * weights).sum(), [hidden, layer.weight])
            found.append({**out, "hidden": gradients[0], "weight": gradients[1]})
        assert_equal(*found)

    settings = tomllib.loads(code_blocks(INTEGRATIONS, "toml")[0])["trainer"]["loss"]
    settings["import_path"] = "gspo_kernels.integrations.trainers.prime_rl"
    rl_loss_fn = loss.setup_rl_loss_fn(loss.CustomLossConfig(**settings))
    lengths = [7, 9, 11, 9]
    old = -torch.rand(4, 11) - 1
    log_probs = (old + 1e-3 * torch.randn(4, 11)).requires_grad_()
    mask = (torch.arange(11) > 0) & (torch.arange(11) < torch.tensor(lengths)[:, None])
    advantages = torch.tensor([2.0, -1.0, 0.5, -0.5])
    parts = lambda x: [row[:length] for row, length in zip(x, lengths, strict=True)]  # noqa: E731
    tokens = int(mask.sum())
    ours, metrics = loss.compute_loss(
        parts(log_probs),
        parts(old),
        None,
        parts(advantages[:, None].expand(4, 11)),
        parts(mask),
        *[None] * 3,
        rl_loss_fn,
        tokens,
        1,
        1,
    )
    exact = log_probs.detach().double().requires_grad_()
    theirs = clipped_gspo(exact, old.double(), mask, advantages).sum() * settings["kwargs"]["mean_length"] / tokens
    (gradient,) = torch.autograd.grad(ours, log_probs)
    (truth,) = torch.autograd.grad(theirs, exact)
    assert_equal({"loss": ours, "gradient": gradient}, {"loss": theirs, "gradient": truth})
    assert 0 < metrics["is_clipped"].mean() < 1


def test_prime_rl(tmp_path: Path) -> None:
    """Compare our head with FusedOutputLinear, and our loss in its `compute_loss` with GSPO's formula.

    prime-rl has no GSPO of its own.
    """
    run(of_prime_rl, 1, "PRIME_RL_CHECKOUT", tmp_path)


# NeMo RL


def of_nemo_rl(rank: int, folder: Path, checkout: Path) -> None:
    packages = ["nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"]
    use(checkout, ["."], packages, ["ray", "requests", "nemo_rl.data", "nemo_rl.models", "nemo_rl.utils"])
    model_utils = importlib.import_module("nemo_rl.distributed.model_utils")
    losses = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    seams = importlib.import_module("gspo_kernels.integrations.megatron.trainers")
    setattr(torch.cuda, "current_device", lambda: "cpu")  # noqa: B010
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden, head, target = torch.randn(12, 3, H), torch.randn(V, H), torch.randint(V, (3, 12))
    rows = (rank * V // 2, (rank + 1) * V // 2)
    found = []
    for function in (seams.nemo_rl_logprobs, model_utils.from_parallel_hidden_states_to_logprobs):
        own = hidden.chunk(2)[rank].clone().requires_grad_()
        shard = head[slice(*rows)].clone().requires_grad_()
        out = function(own, shard, False, target.clone(), *rows, dist.group.WORLD, chunk_size=4)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        found.append({"log_probs": out.detach(), "hidden": own.grad, "weight": shard.grad})
    assert_equal(*found)

    old = -torch.rand(6, 9) - 1
    log_probs = (old + 1e-3 * torch.randn(6, 9)).requires_grad_()
    mask = torch.arange(9) < torch.tensor([[9], [1], [4], [7], [5], [3]])
    advantages = torch.randn(6, 1).expand(6, 9)
    later = partial(torch.nn.functional.pad, pad=(1, 0))  # NeMo RL drops the first position
    data = {
        "token_mask": later(mask.float()),
        "sample_mask": torch.ones(6),
        "advantages": later(advantages),
        "prev_logprobs": later(old),
        "generation_logprobs": later(old),
    }
    config = losses.ClippedPGLossConfig(
        sequence_level_importance_ratios=True,
        token_level_loss=False,
        ratio_clip_min=3e-4,
        ratio_clip_max=4e-4,
        reference_policy_kl_penalty=0.0,
    )
    theirs, _ = losses.ClippedPGLossFn(config)(log_probs, data, torch.tensor(6.0), mask.sum())
    (truth,) = torch.autograd.grad(theirs, log_probs)
    out = policy_loss(log_probs, advantages, mask=mask, old_log_probs=old, objective=Objective())
    (gradient,) = torch.autograd.grad(out.loss, log_probs)
    assert_equal({"loss": out.loss, "gradient": gradient}, {"loss": theirs, "gradient": truth})
    assert 0 < out.metrics["clip_fraction"] < 1


def test_nemo_rl(tmp_path: Path) -> None:
    """Compare with `from_parallel_hidden_states_to_logprobs` (TP 2), and with ClippedPGLossFn and sequence ratios."""
    pytest.importorskip("megatron.core")
    run(of_nemo_rl, 2, "NEMO_RL_CHECKOUT", tmp_path)
