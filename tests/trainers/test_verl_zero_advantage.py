"""Where `skip_zero_advantage` in verl's TrainingWorker is switched off or refused. Training: test_verl_array.py."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.verl_worker import BASE, ENVIRONMENT, batch, make_worker, run_ranks, step
from torch import nn

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its variables
    pytest.skip("verl is not installed", allow_module_level=True)

NORM = "seq-mean-token-sum-norm"


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


def settings_main(rank: int, folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")
    case = BASE | {"calculate_entropy": False, "advantages": [[1.0, 0.0, 0.0, -1.5]], "micro": 1}

    def made(name: str, loss_mode: str = "gspo", **options: Any) -> Any:
        return make_worker(folder / name, True, case | {"loss_mode": loss_mode}, **options)

    with pytest.raises(TypeError, match=r"fused_kernel_options: skip_zero_advantage must be True or False, got 'yes'"):
        made("text", fused_kernel_options={"skip_zero_advantage": "yes"})
    worker = made("geo_mean", "geo_mean", fused_kernel_options={"skip_zero_advantage": True})
    with pytest.raises(ValueError, match=r"skip_zero_advantage must be None or False with .*geo_mean"):
        step(worker, 0, case, 1)
    worker = made("dropout")
    worker.engine._inexact_model = "dropout=0.1 in layer"
    assert "gspo/rows_run" not in step(worker, 0, case, 1)["metrics"]

    options: dict[str, Any] = {"enable_gradient_checkpointing": False}
    worker = made("no checkpointing", **options)
    with redirect_stdout(io.StringIO()) as printed:
        assert "gspo/rows_differentiated" not in step(worker, 0, case, 1)["metrics"]
    line = "skip_zero_advantage=True, skip_rows_without_gradient=False (model.enable_gradient_checkpointing=False)"
    assert printed.getvalue().count(f"gspo_kernels: {line}\n") == 1
    options["fused_kernel_options"] = {"skip_rows_without_gradient": True}
    with pytest.raises(
        ValueError, match=r"skip_rows_without_gradient must be None or False with model\.enable_gradient"
    ):
        made("True", **options)


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

    assert inexact_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))) is None
    assert inexact_model(nn.Sequential(nn.Dropout(0.1))) == "dropout=0.1 in 0"
    model: Any = nn.Sequential()
    for tower in ("vision_config", "audio_config"):
        model.config = SimpleNamespace(**{tower: {}})
        assert inexact_model(model) == "a model of images or audio"
    rotary: Any = nn.Identity()
    rotary.rope_type = "longrope"
    assert inexact_model(nn.Sequential(rotary)) == "rope_type='longrope'"
