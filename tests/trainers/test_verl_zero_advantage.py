"""`skip_zero_advantage` in verl's TrainingWorker on CPUs: training and metrics equal a run of all answers."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.verl_worker import BASE, ENVIRONMENT, batch, make_worker, run_ranks
from tolerance import LOSS_PER_ADVANTAGE, TRAINER_ABSOLUTE, TRAINER_GRADIENT_RELATIVE
from torch import nn

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its variables
    pytest.skip("verl is not installed", allow_module_level=True)

OWN, NORM = "gspo_kernels", "seq-mean-token-sum-norm"
# Policy loss, aggregation, and what else differs: `micro` answers in a micro-batch instead of all in one.
CASES: dict[str, dict[str, Any]] = {
    "our loss": {"loss_mode": OWN},
    "verl's gspo, micro-batches of 2": {"micro": 2},
    "weights, some of them 0": {"loss_mode": OWN, "weights": True},
    "vanilla, token-mean": {"loss_mode": "vanilla", "aggregation": "token-mean"},
    "token-mean, micro-batches of 1": {"loss_mode": OWN, "aggregation": "token-mean", "micro": 1},
    "token-sum": {"aggregation": "token-sum"},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "norm": {"aggregation": NORM},
    "norm, our loss": {"aggregation": NORM, "loss_mode": OWN},
    "sapo": {"loss_mode": "sapo"},
    "gpg": {"loss_mode": "gpg", "aggregation": "token-mean"},
}
LIVE = [1.0, 0.0, 0.0, -1.5]
DEAD = [0.0, 0.0, 0.0, 0.0]


def loss_of(loss_mode: str = "gspo", aggregation: str = "seq-mean-token-mean", **options: Any) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        loss_agg_mode=aggregation,
        policy_loss={"loss_mode": loss_mode},
        **({"loss_scale_factor": 8} | options),
    )
    return functools.partial(ppo_loss, config=config)


class Run:
    """A worker that trains several times from the same weights, and counts the answers that run."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.worker = make_worker(folder, True, BASE, **options)
        self.rows = 0
        parameters = self.worker.engine.module.named_parameters()
        self._start = {name: p.detach().clone() for name, p in parameters}
        self._forward_step = self.worker.engine.forward_step
        self.worker.engine.forward_step = self._count

    def _count(self, micro_batch: Any, **options: Any) -> Any:
        self.rows += len(micro_batch)
        return self._forward_step(micro_batch, **options)

    def train(self, data: Any, skip: bool | None, ranks: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
        """Train three epochs on a batch. Return metrics, parameters and the number of answers that ran."""
        from verl.utils import tensordict_utils as tu

        engine = self.worker.engine
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                p.copy_(self._start[name])
        engine._skip = skip
        self.rows = 0
        data = data.copy()
        tu.assign_non_tensor(data, mini_batch_size=4 * ranks, epochs=3, seed=1)
        metrics = tu.get(self.worker.train_mini_batch(data), "metrics")
        parameters = {name: p.full_tensor().detach().clone() for name, p in engine.module.named_parameters()}
        return metrics, parameters, self.rows


def data_of(run: Run, rank: int, advantages: list[float], ranks: int, micro: int = 0, weights: bool = False) -> Any:
    """Return a batch with its old log-probs, without entropies. All answers are one micro-batch if `micro` is 0."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data = batch(rank, BASE | {"weights": weights})
    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False, global_batch_size=4 * ranks)
    data["old_log_probs"] = no_padding_2_padding(run.worker.infer_batch(data.copy())["log_probs"], data)
    data["advantages"] = torch.tensor(advantages)[:, None].expand(4, 6).contiguous()
    if weights:
        data["rollout_is_weights"][0] = 0  # the answer with advantage 1
    if micro:
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro)
    else:
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=64)
    tu.assign_non_tensor(data, compute_loss=True)
    return data


def training_main(rank: int, folder: Path, ranks: int) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    run = Run(folder / str(rank))
    start = {name: p.full_tensor() for name, p in run._start.items()}
    for name, case in CASES.items():
        options = dict(case)
        micro, weights = options.pop("micro", 0), options.pop("weights", False)
        run.worker.set_loss_fn(loss_of(**options))
        for advantages in (LIVE if rank == 0 else DEAD, DEAD):
            data = data_of(run, rank, advantages, ranks, micro, weights)
            metrics, parameters, rows = run.train(data, None, ranks)
            expected, of_all, all_rows = run.train(data, False, ranks)
            live = torch.tensor([sum(x != 0 for x in advantages) - (weights and advantages is LIVE)])
            torch.distributed.all_reduce(live, torch.distributed.ReduceOp.MAX)
            run_per_epoch = max(int(live), micro, 1)
            assert (rows, all_rows) == (3 * run_per_epoch, 12), name
            assert metrics["gspo/rows_run"] == [run_per_epoch / 4] * 3 * ranks and "gspo/rows_run" not in expected
            moved = False
            for key, p in of_all.items():
                torch.testing.assert_close(parameters[key], p, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
                moved |= not torch.equal(p, start[key])
            assert moved == (int(live) > 0), name
            for key in ("loss", "actor/pg_loss"):
                assert metrics[key] == pytest.approx(expected[key], rel=0, abs=LOSS_PER_ADVANTAGE), (name, key)
            limit = TRAINER_GRADIENT_RELATIVE * max(expected["grad_norm"])
            assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0, abs=limit), name
            # verl averages clip fractions over micro-batches, and counts answers whose weight is 0.
            if options.get("loss_mode") != "gpg" and not micro and not weights:
                clipped = metrics["actor/pg_clipfrac"]
                assert clipped == pytest.approx(expected["actor/pg_clipfrac"], rel=TRAINER_ABSOLUTE), name
                assert (max(clipped) > 0) == (int(live) > 0 and options.get("loss_mode") != "sapo"), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_and_metrics_equal_those_of_all_answers(ranks: int, tmp_path: Path) -> None:
    """Of two ranks, the second has no live answer. In a second batch, no rank has one."""
    run_ranks(training_main, ranks, tmp_path, ranks)


def settings_main(rank: int, folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    with pytest.raises(TypeError, match=r"fused_kernel_options: skip_zero_advantage must be True or False, got 'yes'"):
        make_worker(folder / "text", True, BASE, fused_kernel_options={"skip_zero_advantage": "yes"})
    run = Run(folder / "off", fused_kernel_options={"skip_zero_advantage": False})
    assert run.worker.engine._skip is False
    data = data_of(run, 0, LIVE, 1)
    run.worker.set_loss_fn(loss_of("geo_mean"))
    for skip in (None, False):
        metrics, _, ran = run.train(data, skip, 1)
        assert ran == 12 and "gspo/rows_run" not in metrics
    with pytest.raises(ValueError, match=r"skip_zero_advantage must be None or False with .*geo_mean"):
        run.train(data, True, 1)
    run.worker.set_loss_fn(loss_of())
    assert run.train(data, True, 1)[2] == 6
    run.worker.engine._inexact_model = "dropout=0.1 in layer"
    assert run.train(data, None, 1)[2] == 12

    options: dict[str, Any] = {"enable_gradient_checkpointing": False}
    run = Run(folder / "no checkpointing", **options)
    run.worker.set_loss_fn(loss_of())
    assert "gspo/rows_differentiated" not in run.train(data, None, 1)[0]
    line = "skip_zero_advantage=True, skip_rows_without_gradient=False (model.enable_gradient_checkpointing=False)"
    assert run.worker.engine._printed == f"gspo_kernels: {line}"
    options["fused_kernel_options"] = {"skip_rows_without_gradient": True}
    with pytest.raises(
        ValueError, match=r"skip_rows_without_gradient must be None or False with model\.enable_gradient"
    ):
        make_worker(folder / "True", True, BASE, **options)


def test_settings_where_skipping_is_not_exact_switch_it_off_or_raise(tmp_path: Path) -> None:
    run_ranks(settings_main, 1, tmp_path)


def test_every_inexact_setting_is_named() -> None:
    from verl.utils import tensordict_utils as tu

    from gspo_kernels.integrations.verl.zero_advantage import inexact_setting

    def named(loss: Any = None, **flags: Any) -> str | None:
        data = batch(0, BASE)
        tu.assign_non_tensor(data, **({"calculate_entropy": False} | flags))
        return inexact_setting(data, loss or loss_of())

    assert named() is None
    assert named(loss_of(aggregation=NORM)) is None
    for reason in (
        named(loss_of(aggregation=NORM, loss_scale_factor=None)),
        named(loss_of(use_kl_loss=True)),
        named(loss_of(entropy_coeff=0.01)),
        named(loss_of("cispo")),
        named(lambda **_: None),
        named(calculate_entropy=True),
        named(return_model_output=True),
        named(force_group_size=2),
    ):
        assert reason
    names = [named(loss_of(mode)) for mode in ("cispo", "dro", "clip_cov", "kl_cov", "bypass_mode")]
    assert names == [f"policy_loss.loss_mode={m}" for m in ("cispo", "dro", "clip_cov", "kl_cov", "bypass_mode")]


def test_settings_with_which_all_rows_are_differentiated_are_named() -> None:
    from gspo_kernels.integrations.verl.row_checkpoint import reason_against_skipping

    def named(
        *layers: nn.Module, router_logits: bool = False, qat: bool = False, parallel: int = 1, **options: Any
    ) -> str | None:
        model = {"enable_gradient_checkpointing": True, "enable_activation_offload": False} | options
        engine = SimpleNamespace(ulysses_sequence_parallel_size=parallel)
        verl = SimpleNamespace(model_config=SimpleNamespace(**model), engine_config=engine, _qat_enabled=qat)
        module: Any = nn.Sequential(*layers)
        module.config = SimpleNamespace(output_router_logits=router_logits)
        return reason_against_skipping(verl, module)

    assert named() is None
    assert [
        named(enable_gradient_checkpointing=False),
        named(enable_activation_offload=True),
        named(parallel=2),
        named(qat=True),
        named(router_logits=True),
        named(nn.Dropout(0.1)),
    ] == [
        "model.enable_gradient_checkpointing=False",
        "model.enable_activation_offload=True",
        "ulysses_sequence_parallel_size=2",
        "quantization-aware training",
        "output_router_logits=True",
        "dropout=0.1 in 0",
    ]


def test_parts_of_a_model_in_which_answers_interact_are_named() -> None:
    from gspo_kernels.integrations.verl.zero_advantage import inexact_model

    class Attention(nn.Module):
        attention_dropout = 0.1

        def __init__(self, rate: float) -> None:
            super().__init__()
            self.attention_dropout = rate
            self.drops_padding = True

    assert inexact_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), Attention(0.0))) is None
    assert inexact_model(nn.Sequential(nn.Dropout(0.1))) == "dropout=0.1 in 0"
    assert inexact_model(nn.Sequential(Attention(0.2))) == "attention_dropout=0.2 in 0"
    model: Any = nn.Sequential()
    model.config = SimpleNamespace(vision_config={})
    assert inexact_model(model) == "a model of images or audio"
    assert inexact_model(nn.Sequential(nn.BatchNorm1d(2))) == "batch normalization in 0"
