"""`gradient_budget` and `cache_mib` in verl's TrainingWorker on a CPU, and the metrics of its backwards."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import VERL_BUDGET
from helpers.tile_choices import choices, d_logits, live_entries, small_tiles
from helpers.verl_worker import BASE, ENVIRONMENT, batch, make_worker, run_ranks
from tolerance import DROPPED_MASS_RELATIVE

from gspo_kernels.backends.triton.launch import launches

if importlib.util.find_spec("verl") is None:  # only the ranks import verl, after setting its variables
    pytest.skip("verl is not installed", allow_module_level=True)

BUDGET = 1e-2


def peaked_worker(folder: Path, case: dict[str, Any], **options: Any) -> Any:
    """Return a worker whose head gives one id most of the probability."""
    worker = make_worker(folder, True, case, fused_kernel_options={"impl_backend": "torch", **options})
    with torch.no_grad():
        worker.engine.module.lm_head.weight.mul_(40)
    return worker


def update(worker: Any, micro: int = 4, entropy: bool = True) -> tuple[dict[str, Any], torch.Tensor]:
    """Compute old log-probs, then train on one batch. Return the metrics and the old log-probs."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data = batch(0, BASE)
    tu.assign_non_tensor(data, compute_loss=False, global_batch_size=4)
    data["old_log_probs"] = no_padding_2_padding(worker.infer_batch(data.copy())["log_probs"], data)
    tu.assign_non_tensor(
        data, compute_loss=True, mini_batch_size=4, epochs=1, calculate_entropy=entropy, micro_batch_size_per_gpu=micro
    )
    return tu.get(worker.train_mini_batch(data), "metrics"), data["old_log_probs"]


def start() -> None:
    os.environ.update(ENVIRONMENT)
    torch.distributed.init_process_group("gloo")


def budget_main(rank: int, folder: Path) -> None:
    start()
    worker = peaked_worker(folder, {**BASE, "micro": 2}, gradient_budget=BUDGET)
    weight = worker.engine.module.lm_head.weight.full_tensor().detach().clone()
    with small_tiles(rows=4, columns=5), choices() as decisions:
        metrics, _ = update(worker, micro=2)
    assert len(decisions) == 2  # micro-batches
    masses = []
    for chosen in decisions:
        # The weight of the update is a copy that FSDP gathers. Its storage may be reused, so insert the weight.
        chosen = chosen._replace(head=chosen.head._replace(weight=weight))
        d = d_logits(chosen)[0].abs()
        masses.append(torch.stack([d[~live_entries(chosen)].sum(), d.sum()]))
    dropped, mass = torch.stack(masses).sum(0).tolist()
    assert metrics["gspo/dropped_gradient_mass"] == pytest.approx([dropped / mass], rel=DROPPED_MASS_RELATIVE)
    assert 0 < dropped / mass <= BUDGET
    assert all(1 < passes < 3.9 for passes in metrics["gspo/passes"])
    assert all(0 < share <= 1 for share in metrics["gspo/live_row_share"])


def test_the_budget_is_kept_and_reported_although_verl_computes_entropies(tmp_path: Path) -> None:
    run_ranks(budget_main, 1, tmp_path)


def entropy_main(rank: int, folder: Path) -> None:
    start()
    os.environ["GSPO_BACKEND"] = "triton"
    for coefficient in (0.0, 0.01):
        worker = make_worker(folder / str(coefficient), True, {**BASE, "entropy": coefficient})
        with launches() as seen:
            metrics, _ = update(worker)
        variants = {x.arguments["d_entropy"] is not None for x in seen if x.kernel.__name__ == "gradient_tile"}
        assert variants == {coefficient != 0}
        assert min(metrics["actor/entropy_loss"]) > 0


def test_entropies_that_are_only_logged_have_no_backward(tmp_path: Path) -> None:
    """verl adds them to the loss even with a coefficient of 0, so their gradients would be zeros."""
    run_ranks(entropy_main, 1, tmp_path)


def refused_main(rank: int, folder: Path) -> None:
    start()
    place = "^actor_rollout_ref.model.fused_kernel_options: "
    with pytest.raises(TypeError, match=place + "gradient_budget must be .* got '1e-3'"):
        make_worker(folder / "text", True, BASE, fused_kernel_options={"gradient_budget": "1e-3"})
    with pytest.raises(ValueError, match=r"fused_kernel_options must be .* got \['cache_MiB'\]"):
        make_worker(folder / "unknown", True, BASE, fused_kernel_options={"cache_MiB": 3})
    worker = peaked_worker(folder / "bonus", {**BASE, "entropy": 0.01}, gradient_budget=1e-3)
    with pytest.raises(ValueError, match=r"gradient_budget must be 0 with actor.entropy_coeff=0.01, .* got 0.001"):
        update(worker)
    # A loss without an ActorConfig gets entropies that have a gradient.
    worker.set_loss_fn(lambda model_output, data, dp_group: (model_output["entropy"].values().sum(), {}))
    with pytest.raises(ValueError, match="gradient_budget must be 0 if the entropies have a gradient"):
        update(worker)


def test_invalid_settings_and_an_entropy_bonus_with_a_budget_are_refused(tmp_path: Path) -> None:
    run_ranks(refused_main, 1, tmp_path)


def test_the_documented_lines_set_budget_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    from gspo_kernels.integrations.verl.config import head_settings

    overrides = VERL_BUDGET.replace("\\\n", " ").split()
    with initialize_config_dir(str(Path(str(verl.__file__)).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=overrides).actor_rollout_ref
    monkeypatch.setattr(HFModelConfig, "__post_init__", lambda self: None)  # it loads the model
    model = omega_conf_to_dataclass(config.model)
    assert head_settings(model) == (1e-3, 1024, None)
    model.fused_kernel_options["head_precision"] = "fp32"
    assert head_settings(model) == (1e-3, 1024, "fp32")
    assert model.fused_kernel_options["impl_backend"] == "torch" and not model.use_fused_kernels
