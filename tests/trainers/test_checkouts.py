"""Our functions in the source code of slime, prime-rl, NeMo RL and SkyRL, compared with the trainers' own functions.

SkyRL's wheel is in the environment `build/megatron`. The others have no wheels, so name checkouts of their
repositories. A trainer without its variable is skipped.

    make build/megatron/ready
    SLIME_CHECKOUT=/path/to/slime PRIME_RL_CHECKOUT=/path/to/prime-rl NEMO_RL_CHECKOUT=/path/to/RL \
        build/megatron/bin/python -m pytest tests/trainers/test_checkouts.py

Dependencies that the called functions do not use are stubs. Each test runs on gloo processes, in fp32.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.pages import INTEGRATIONS, code_blocks
from helpers.ranks import run_ranks
from tolerance import CHECKOUT_METRIC_ABSOLUTE, CHECKOUT_RELATIVE, METRIC_RELATIVE
from torch import Tensor, nn

from gspo_kernels import Objective, policy_loss
from gspo_kernels.integrations.trainers import prime_rl, slime

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


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and theirs
    for name, truth in theirs.items():
        error = (ours[name].double() - truth.double()).norm() / truth.double().norm()
        assert error <= CHECKOUT_RELATIVE, f"{name}: {error:.1e}"


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
    pydantic_config: Any = importlib.import_module("pydantic_config")
    pydantic_config.BaseConfig = importlib.import_module("pydantic").BaseModel
    loss = importlib.import_module("prime_rl.trainer.rl.loss")
    heads = importlib.import_module("prime_rl.trainer.models.layers.lm_head")
    gemma = importlib.import_module("prime_rl.trainer.models.layers.lm_head_gemma")
    torch.manual_seed(0)
    for layer in (heads.FusedOutputLinear(H, V, 8), gemma.GemmaFusedOutputLinear(H, V, 8, softcap=3.0)):
        hidden = torch.randn(1, 30, H, requires_grad=True)
        labels = torch.randint(V, (1, 30))
        temperature = 0.5 + torch.rand(1, 30)
        found = []
        for forward in (prime_rl.head, type(layer).forward):
            out = forward(layer, hidden, labels, temperature=temperature)
            weights = torch.linspace(-1, 1, 30)
            gradients = torch.autograd.grad((out["logprobs"] * weights).sum(), [hidden, layer.weight])
            found.append({**out, "hidden": gradients[0], "weight": gradients[1]})
        assert_equal(*found)

    settings = tomllib.loads(code_blocks(INTEGRATIONS, "toml")[0])["trainer"]["loss"]
    settings["import_path"] = "gspo_kernels.integrations.trainers.prime_rl.loss"
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
    nemo_rl = importlib.import_module("gspo_kernels.integrations.trainers.nemo_rl")
    setattr(torch.cuda, "current_device", lambda: "cpu")  # noqa: B010
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden, head, target = torch.randn(12, 3, H), torch.randn(V, H), torch.randint(V, (3, 12))
    rows = (rank * V // 2, (rank + 1) * V // 2)
    found = []
    for function in (nemo_rl.log_probs, model_utils.from_parallel_hidden_states_to_logprobs):
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


# SkyRL


def of_skyrl(rank: int, folder: Path, site_packages: Path) -> None:
    stubs = ["ray", "jaxtyping", "loguru", "omegaconf", "skyrl_gym", "skyrl.train.entrypoints"]
    use(site_packages, ["."], ["skyrl.backends", "skyrl.backends.skyrl_train.utils"], stubs)
    ray: Any = importlib.import_module("ray")
    ray.is_initialized = lambda: False  # the registry is of this process only
    ppo_utils = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    exec(code_blocks(INTEGRATIONS, "python", "PolicyLossRegistry")[0], {"__name__": "gspo_skyrl"})
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
    found = []
    for name in ("gspo_kernels", "gspo"):
        loss, metrics = ppo_utils.PolicyLossRegistry.get(name)(log_probs, old, advantages, config, mask, None)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        found.append({"loss": loss, "gradient": gradient, "clip_ratio": torch.tensor(metrics["clip_ratio"])})
    assert_equal(*found)


def test_skyrl(tmp_path: Path) -> None:
    """Register our loss in SkyRL's registry by the documented lines, and compare it with SkyRL's gspo."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("SkyRL is not installed")
    run_ranks(of_skyrl, 1, tmp_path, Path(spec.submodule_search_locations[0]).parent)


# slime


class Arguments(Namespace):
    """slime's arguments. Those that no case sets are None, and so switched off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


SLIME_ARGS: dict[str, Any] = {
    "advantage_estimator": "gspo",
    "calculate_per_token_loss": False,
    "check_for_nan_in_loss_and_grad": True,
    "context_parallel_size": 1,
    "custom_loss_function_path": f"{__name__}.slime_loss",
    "custom_model_provider_path": f"{__name__}.small_model",
    "data_pad_size_multiplier": 4,
    "entropy_coef": 0.0,
    "eps_clip": 3e-4,
    "eps_clip_high": 4e-4,
    "get_mismatch_metrics": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    "log_probs_chunk_size": -1,
    "loss_type": "policy_loss",
    "micro_batch_size": 1,
    "rollout_temperature": 0.7,
    "rollout_top_p": 1.0,
    "seq_length": 64,
    "use_opsm": False,
    "use_rollout_entropy": True,
    "use_score_centering": False,
    "use_tis": False,
}
SLIME_STUBS = ["ray", "wandb", "psutil", "httpx", "megatron.training", "slime.utils.http_utils"]
PACKAGE = "slime.backends.megatron_utils"
RESPONSES, PROMPTS = [5, 8, 3, 6], [3, 2, 4, 3]


class Case(NamedTuple):
    """A case of the test of slime. slime calls the functions below with its own arguments."""

    sizes: dict[str, int]  # of Megatron's groups
    changes: dict[str, Any]  # of slime's arguments
    sequence_parallel: bool = False


CP, TP = {"context_parallel_size": 2}, {"tensor_model_parallel_size": 2}
TERMS = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.02}
CASES = [
    Case({}, {}),
    Case({}, TERMS),
    Case({}, {"use_rollout_logprobs": True, "recompute_loss_function": True}),
    Case(TP, {}),
    Case(TP, TERMS, sequence_parallel=True),
    Case(CP, {}),
    Case(CP, {"allgather_cp": True, "entropy_coef": 0.01}),
    Case({}, {"rollout_top_p": 0.9, "entropy_coef": 0.01}),
    Case(TP, {"rollout_top_p": 0.9}),
    Case(CP, {"rollout_top_p": 0.9}),
]
current = CASES[0]


def slime_loss(args: Namespace, *arguments: Any) -> Any:
    """slime's --custom-loss-function-path."""
    objective = Objective(entropy_coef=args.entropy_coef, kl_coef=args.kl_loss_coef)
    return slime.loss(args, *arguments, objective=objective)


def small_model(pre_process: bool = True, post_process: bool = True) -> Any:
    """slime's --custom-model-provider-path."""
    models = importlib.import_module("helpers.megatron_models")

    class WithoutPositions(models.GPTModel):  # slime passes no position ids
        def __init__(self, *arguments: Any, **names: Any) -> None:
            super().__init__(*arguments, **{**names, "position_embedding_type": "none"})

        def zero_grad_buffer(self) -> None:
            """As DistributedDataParallel, which is not here."""

    return models.make(sequence_parallel=current.sequence_parallel, attends=False, kind=WithoutPositions).float()


Step = tuple[dict[str, Tensor], dict[str, float]]  # log-probs, entropies and gradients, and metrics


class Slime:
    """slime's modules, and a rollout of four samples on this rank."""

    def __init__(self) -> None:
        self.loss, self.model, self.data, self.cp = (
            importlib.import_module(f"{PACKAGE}.{name}") for name in ("loss", "model", "data", "cp_utils")
        )
        rng = torch.Generator().manual_seed(0)
        self.totals = [x + y for x, y in zip(RESPONSES, PROMPTS, strict=True)]
        masks = [torch.ones(x, dtype=torch.int) for x in RESPONSES]
        masks[1][3] = 0
        self.noise = [torch.randn(x, generator=rng) for x in RESPONSES]
        advantages = [torch.full((x,), a) for x, a in zip(RESPONSES, [2.0, -1.0, 0.5, -0.7], strict=True)]
        self.rollout = {
            "tokens": [torch.randint(V - 3, (x,), generator=rng) for x in self.totals],
            "loss_masks": masks,
            "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]).float(),
            "total_lengths": self.totals,
            "response_lengths": RESPONSES,
            "advantages": self.local(advantages),
            "micro_batch_indices": [[0, 1], [2, 3]],
        }
        # Some sets are empty, and some lack the sampled token: slime adds it.
        sizes = [torch.randint(0, 6, (x,), generator=rng) for x in RESPONSES]
        self.rollout["rollout_top_p_token_offsets"] = [nn.functional.pad(x.cumsum(0), (1, 0)) for x in sizes]
        self.rollout["rollout_top_p_token_ids"] = [
            torch.cat([torch.randperm(V - 3, generator=rng)[:size] for size in x.tolist()]) for x in sizes
        ]

    def local(self, of_samples: list[Tensor]) -> list[Tensor]:
        """Return this context-parallel rank's part of the values of each response token."""
        sizes = (self.totals, RESPONSES)
        return [self.cp.slice_log_prob_with_cp(x, *size) for x, *size in zip(of_samples, *sizes, strict=True)]

    def step(self, args: Namespace) -> Step:
        """Run slime's `forward_only` and `train_one_step`."""
        model = self.model.get_model_provider_func(args, "actor")(pre_process=True, post_process=True)
        batches = self.data.get_data_iterator(self.rollout)
        replay = {"use_rollout_top_p_replay": True} if args.rollout_top_p != 1 else {}
        scores = self.model.forward_only(self.loss.get_log_probs_and_entropy, args, [model], batches, [2], **replay)
        if "log_probs" not in self.rollout:  # the first call's are the old log-probs of all calls, near the new ones
            noise = self.local(self.noise)
            old = [x + 2e-3 * n for x, n in zip(scores["log_probs"], noise, strict=True)]
            self.rollout["log_probs"] = old
            self.rollout["ref_log_probs"] = [x - 0.1 * n for x, n in zip(old, noise, strict=True)]
            self.rollout["rollout_log_probs"] = [x + 0.1 * n for x, n in zip(old, noise, strict=True)]
        found = {name: torch.cat(scores[name]) for name in ("log_probs", "entropy")}

        def update() -> tuple[bool, float, int]:
            found.update({f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
            return True, 0.0, 0

        optimizer = SimpleNamespace(zero_grad=lambda: None, step=update)
        scheduler = SimpleNamespace(step=lambda increment: None)
        batches = self.data.get_data_iterator(self.rollout)
        with mock.patch.object(self.model, "get_args", lambda: args):
            log, _ = self.model.train_one_step(args, 0, 0, batches, [model], optimizer, scheduler, 2, 4)
        assert 0 < log["pg_clipfrac"] < 1
        return found, {name: x for name, x in log.items() if not name.startswith("gspo/")}


def assert_same_step(ours: Step, theirs: Step) -> None:
    assert_equal(ours[0], theirs[0])
    assert ours[1] == pytest.approx(theirs[1], rel=METRIC_RELATIVE, abs=CHECKOUT_METRIC_ABSOLUTE)


def of_slime(rank: int, folder: Path, checkout: Path) -> None:
    global current
    use(checkout, ["."], [PACKAGE], SLIME_STUBS)
    parallel_state = importlib.import_module("megatron.core").parallel_state
    load_function = importlib.import_module("slime.utils.misc").load_function
    importlib.import_module("helpers.megatron_models").run_without_gpu()
    dist.init_process_group("gloo")
    accelerator: Any = importlib.import_module("slime.utils.accelerator")
    accelerator.current_device = accelerator.device = lambda: "cpu"
    zeros = torch.zeros
    setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))  # noqa: B010 - no "cuda"
    for current in CASES:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**current.sizes)
        args = Arguments(**{**SLIME_ARGS, **current.sizes, **current.changes})
        slime = Slime()
        theirs = slime.step(args)
        custom = Arguments(**{**vars(args), "loss_type": "custom_loss"})
        of_samples = current.sizes != CP  # our loss refuses context parallelism
        if of_samples:
            assert_same_step(slime.step(custom), theirs)
        with (
            mock.patch.object(slime.loss, "get_log_probs_and_entropy", slime.loss.get_log_probs_and_entropy),
            mock.patch.object(slime.model, "get_model_provider_func", slime.model.get_model_provider_func),
        ):
            load_function("gspo_kernels.integrations.trainers.slime.head")(args)
            assert_same_step(slime.step(args), theirs)
            if of_samples:
                assert_same_step(slime.step(custom), theirs)


def test_slime(tmp_path: Path) -> None:
    """Compare our head and our loss with slime's, in slime's `forward_only` and `train_one_step` of a GPTModel.

    Log-probs, entropies, every metric and the gradients of all parameters.
    """
    pytest.importorskip("megatron.core")
    run(of_slime, 2, "SLIME_CHECKOUT", tmp_path)
