"""`restore_trainer` undoes `accelerate_trainer`: attributes, methods, logs and log-probs are again TRL's own.

Trainers that are deleted free their models, and copies of accelerated models are models of their own.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="0.29")
pytest.importorskip("datasets")
import transformers
import trl
from helpers.trl_trainer import SEQUENCE, checkpoint, make_trainer, replace_log_probs
from trl import GRPOTrainer

from gspo_kernels import linear_log_probs
from gspo_kernels.integrations.huggingface import HeadError, base_model, fuse_head, is_fused
from gspo_kernels.integrations.trl import GSPOTrainer, accelerate_trainer, restore_trainer

asks_the_model = hasattr(trl.trainer.utils, "add_fused_lm_head")
OPTIONS: dict[str, Any] = {**SEQUENCE, "max_steps": 2, "beta": 0.1}


def models_of(trainer: Any) -> list[Any]:
    """Return the policy, its transformers model, its head, and the same of the reference model."""
    models = [x for x in (trainer.model, trainer.ref_model) if x is not None]
    return [y for x in models for y in (x, base_model(x), base_model(x).get_output_embeddings())]


def snapshot(trainer: Any) -> list[dict[str, Any]]:
    """Return all attributes of the trainer and its models, and the hooks and submodules of each model."""
    return [dict(vars(owner)) for owner in (trainer, *models_of(trainer))]


def assert_unchanged(trainer: Any, before: list[dict[str, Any]]) -> None:
    for now, then in zip(snapshot(trainer), before, strict=True):
        assert now.keys() == then.keys()
        different = [name for name, x in then.items() if now[name] is not x and not now[name] == x]
        assert different == []


def traces(trainer: Any) -> list[str]:
    """Return the names of our attributes on the trainer and its models."""
    return [name for owner in (trainer, *models_of(trainer)) for name in vars(owner) if name.startswith("_gspo")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each call of `linear_log_probs` by a trainer."""
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return linear_log_probs(*args, **kwargs)

    replace_log_probs(monkeypatch, counted)
    return made


def stock(folder: Path, **options: Any) -> Any:
    return make_trainer(GRPOTrainer, checkpoint(folder / "model"), folder, **{**OPTIONS, **options})


def results(trainer: Any) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Return the logs without times, and the parameters."""
    timed = ("runtime", "per_second", "step_time", "time")
    logs = [{k: v for k, v in log.items() if not any(t in k for t in timed)} for log in trainer.state.log_history]
    return logs, [p.detach().clone() for p in trainer.model.parameters()]


def assert_same_run(ours: Any, theirs: Any) -> None:
    (logs, parameters), (their_logs, their_parameters) = results(ours), results(theirs)
    assert logs == their_logs and len(logs) > 1
    assert not any(key.startswith("gspo/") for log in logs for key in log)
    assert all(torch.equal(x, y) for x, y in zip(parameters, their_parameters, strict=True))


@pytest.mark.parametrize(("by_class", "peft"), [(False, False), (True, False), (False, True)])
def test_a_restored_trainer_is_a_stock_trainer(by_class: bool, peft: bool, tmp_path: Path, calls: list[int]) -> None:
    lora = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"]) if peft else None

    def make(trainer_class: type[GRPOTrainer], name: str) -> Any:
        folder = tmp_path / name
        return make_trainer(trainer_class, checkpoint(folder / "model"), folder, lora, **OPTIONS)

    expected = make(GRPOTrainer, "expected")
    expected.train()
    trainer = make(GSPOTrainer if by_class else GRPOTrainer, "ours")
    before = snapshot(trainer)
    if not by_class:
        assert accelerate_trainer(trainer, gradient_budget=1e-3) is trainer
        assert traces(trainer)
        accelerate_trainer(trainer)  # a second call only replaces the settings
    assert restore_trainer(trainer) is trainer
    if not by_class:
        assert_unchanged(trainer, before)
    assert traces(trainer) == []
    trainer.train()
    assert calls == []
    assert_same_run(trainer, expected)


def test_a_forward_inside_autocast_passes_calls_on(tmp_path: Path, calls: list[int]) -> None:
    """With bf16, accelerate wraps the forward when training starts. The restored trainer still runs TRL's code."""
    options = {"bf16": True, "max_steps": 1}
    trainer = accelerate_trainer(stock(tmp_path / "a", **options))
    expected = stock(tmp_path / "b", **options)
    trainer.train()
    expected.train()
    restore_trainer(trainer)
    calls.clear()
    expected.model.load_state_dict(trainer.model.state_dict())
    ids = torch.randint(2, 10, (4, 9), generator=torch.Generator().manual_seed(0))
    log_probs = [
        x._get_per_token_logps_and_entropies(x.model, ids, torch.ones_like(ids), 5, compute_entropy=True)[:2]
        for x in (trainer, expected)
    ]
    assert calls == [] and all(torch.equal(x, y) for x, y in zip(*log_probs, strict=True))
    trainer.train()
    assert not any(key.startswith("gspo/") for key in trainer.state.log_history[0])
    accelerate_trainer(trainer).train()
    assert calls and "gspo/passes" in trainer.state.log_history[0]


def test_trainers_that_share_a_model_are_restored_one_by_one(tmp_path: Path, calls: list[int]) -> None:
    path = checkpoint(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    first = make_trainer(GRPOTrainer, model, tmp_path / "first", **{**OPTIONS, "beta": 0.0})
    second = make_trainer(GRPOTrainer, model, tmp_path / "second", **{**OPTIONS, "beta": 0.0, "temperature": 0.7})
    before = snapshot(first), snapshot(second)
    accelerate_trainer(first)
    accelerate_trainer(second, cache_mib=3)
    restore_trainer(first)
    assert not any(name.startswith("_gspo") for name in vars(first))
    second.train()
    assert calls, "the second trainer is still accelerated"
    if asks_the_model:
        settings: Any = fuse_head(model).fused_lm_head
        assert settings.temperature == 0.7 and settings.backward.cache_mib == 3
    restore_trainer(second)
    assert traces(first) == traces(second) == []
    for trainer, then in zip((first, second), before, strict=True):
        assert vars(trainer.model).get("forward") == then[1].get("forward")
    calls.clear()
    first.train()
    assert calls == []


@pytest.mark.parametrize("fused_first", [False, True])
def test_a_model_that_the_user_fused_stays_fused(fused_first: bool, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path / "model"))
    fused = fuse_head(model) if fused_first else None
    trainer = make_trainer(GRPOTrainer, model, tmp_path, **OPTIONS)
    fused = fused or fuse_head(model)
    before = snapshot(trainer)
    restore_trainer(accelerate_trainer(trainer))
    assert_unchanged(trainer, before)
    assert is_fused(model) and fuse_head(model) is fused


def test_a_trainer_that_is_not_accelerated_is_named(tmp_path: Path) -> None:
    trainer = restore_trainer(accelerate_trainer(stock(tmp_path)))
    with pytest.raises(ValueError, match=r"trainer must be one that .* has accelerated, got a GRPOTrainer that is not"):
        restore_trainer(trainer)
    wrong: Any = object()
    with pytest.raises(TypeError, match="restore_trainer: trainer must be a GRPOTrainer, got a object"):
        restore_trainer(wrong)


def test_a_method_that_was_replaced_later_is_named_and_nothing_changes(tmp_path: Path) -> None:
    trainer = accelerate_trainer(stock(tmp_path))
    log = trainer.log
    trainer.log = lambda *args, **kwargs: log(*args, **kwargs)
    before = snapshot(trainer)
    with pytest.raises(ValueError, match=r"trainer.log must be the one that accelerate_trainer installed, got another"):
        restore_trainer(trainer)
    assert_unchanged(trainer, before)
    trainer.log = log
    restore_trainer(trainer)
    assert traces(trainer) == []


def test_a_method_of_the_instance_is_restored(tmp_path: Path) -> None:
    trainer = stock(tmp_path)
    mine = trainer.log = functools.partial(trainer.log)
    restore_trainer(accelerate_trainer(trainer))
    assert vars(trainer)["log"] is mine


@pytest.mark.skipif(not asks_the_model, reason="before TRL 1.15, TRL's log-probs come from logits, with the adapter")
def test_a_head_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """TRL's own log-probs would ignore the adapter."""
    lora = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    trainer = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, lora, **SEQUENCE)
    before = snapshot(trainer)
    with pytest.raises(ValueError, match="restore_trainer: trainer must be of a model without an adapter on its head"):
        restore_trainer(trainer)
    assert_unchanged(trainer, before)


def test_a_model_that_is_its_own_reference_keeps_the_head_that_the_user_fused(tmp_path: Path) -> None:
    trainer = stock(tmp_path)
    trainer.ref_model = trainer.model
    fuse_head(base_model(trainer.model))
    restore_trainer(accelerate_trainer(trainer))
    assert is_fused(base_model(trainer.model))


def test_a_model_that_was_replaced_is_restored_too(tmp_path: Path) -> None:
    trainer, other = stock(tmp_path / "first"), stock(tmp_path / "second")
    first = trainer.model
    before = snapshot(trainer)
    accelerate_trainer(trainer)
    trainer.model = other.model
    restore_trainer(accelerate_trainer(trainer))
    assert traces(trainer) == []
    trainer.model = first
    assert_unchanged(trainer, before)
    assert traces(trainer) == []


@pytest.mark.parametrize(("by_class", "trained"), [(False, False), (True, True)])
def test_a_deleted_trainer_frees_its_models_by_one_collection(by_class: bool, trained: bool, tmp_path: Path) -> None:
    kind = GSPOTrainer if by_class else GRPOTrainer
    trainer = make_trainer(kind, checkpoint(tmp_path / "model"), tmp_path, **OPTIONS)
    if not by_class:
        accelerate_trainer(trainer)
    if trained:
        trainer.train()
    references = [weakref.ref(x) for x in (trainer, *models_of(trainer))]
    del trainer
    gc.collect()
    assert [x for ref in references if (x := ref()) is not None] == []


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_of_a_trainers_model_can_be_trained(
    trained: bool, copied_by: Callable[[Any], Any], tmp_path: Path, calls: list[int]
) -> None:
    """The original does not change, and restoring the copy's trainer does not touch the original."""
    first = make_trainer(GSPOTrainer, checkpoint(tmp_path / "model"), tmp_path, **OPTIONS, bf16=trained)
    if trained:
        first.train()  # with bf16, accelerate wraps the forward
    copied = copied_by(first.model)
    before = [p.detach().clone() for p in first.model.parameters()]
    if copied_by is copy.deepcopy and asks_the_model:
        # TRL's forward is a closure that runs the original.
        with pytest.raises(HeadError, match="is this a deep copy of a trainer's model"):
            make_trainer(GSPOTrainer, copied, tmp_path, **OPTIONS)
        return
    second = make_trainer(GSPOTrainer, copied, tmp_path, **OPTIONS, temperature=0.7)
    calls.clear()
    second.train()
    assert calls
    assert all(torch.equal(x, y) for x, y in zip(first.model.parameters(), before, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(second.model.parameters(), before, strict=True))
    restore_trainer(second)
    enclosed = trained and copied_by is copy.deepcopy  # by accelerate's wrapper, so our forward stays
    assert bool(traces(second)) == enclosed and traces(first)
