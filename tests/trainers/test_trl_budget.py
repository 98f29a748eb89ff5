"""`gradient_budget` and `cache_mib` in TRL's trainer on a CPU, and the metrics of its backwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes
from helpers.trl_trainer import SEQUENCE, SHAPE, make_trainer, replace_log_probs, tokenizer

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import datasets
import transformers
from tolerance import TRAINER_LOG_RELATIVE
from trl import GRPOTrainer
from trl.kernels import chunked_logprob

from gspo_kernels import linear_log_probs, memory
from gspo_kernels.backends import dispatch
from gspo_kernels.backends.self_check import verdict
from gspo_kernels.integrations import backwards
from gspo_kernels.integrations.backwards import METRICS, BackwardMetrics, RowShare, describe_backend
from gspo_kernels.integrations.huggingface import fuse_head
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer, accelerate_trainer

ROWS = ", skip_rows_without_gradient="
ON_A_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": []}


def peaked_model(folder: Path, factor: float = 150.0) -> str:
    """Save a model whose head is multiplied by `factor`, so that one id gets most of the probability."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=False)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        model.get_output_embeddings().weight.mul_(factor / 2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def step_logs(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def test_logs_are_means_over_tokens_of_micro_batches_and_only_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[dict[str, float]] = []
    collect = BackwardMetrics.collect

    def watched(self: BackwardMetrics) -> None:
        collect(self)
        recorded.append({name: self._backwards[-1][name].item() for name in (*METRICS, "tokens")})

    monkeypatch.setattr(BackwardMetrics, "collect", watched)
    options: dict[str, Any] = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"per_device_eval_batch_size": 4, "eval_dataset": datasets.Dataset.from_list([{"prompt": "ab"}] * 4)}
    trainer = make_trainer(GRPOTrainer, peaked_model(tmp_path / "model", 20.0), tmp_path, **SEQUENCE, **options)
    accelerate_trainer(trainer)
    trainer.train()
    assert len(recorded) == 8
    first, second = step_logs(trainer)
    for log, of_step in ((first, recorded[:4]), (second, recorded[4:])):
        for name in METRICS:
            mean = sum(backward[name] * backward["tokens"] for backward in of_step) / sum(x["tokens"] for x in of_step)
            assert log[f"gspo/{name}"] == pytest.approx(mean, rel=TRAINER_LOG_RELATIVE)
        assert log["gspo/dropped_gradient_mass"] == 0
        # All columns of a row are computed, by three products.
        assert log["gspo/passes"] == pytest.approx(1 + 3 * log["gspo/live_row_share"])
    others = [log for log in trainer.state.log_history if "loss" not in log]
    assert sum("eval_loss" in log for log in others) == 4
    assert not [key for log in others for key in log if "gspo" in key]


def test_the_last_call_decides_and_each_change_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GSPO_CACHE_MIB", raising=False)
    args = GSPOConfig(str(tmp_path), **ON_A_CPU, gradient_budget=1e-3, cache_mib=64)
    prompts = datasets.Dataset.from_list([{"prompt": "ab"}] * 8)
    trainer = GSPOTrainer(peaked_model(tmp_path / "model"), lambda completions, **_: [0.0], args, train_dataset=prompts)
    calls: list[dict[str, Any]] = []
    replace_log_probs(
        monkeypatch, lambda *args, **options: (calls.append(options), linear_log_probs(*args, **options))[1]
    )

    def settings() -> tuple[float, float | None]:
        ids = torch.randint(2, 10, (2, 7))
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 3)
        return calls[-1]["gradient_budget"], calls[-1]["cache_mib"]

    line = "gspo_kernels: backend torch on cpu; head 10 x 16 float32; "
    assert (
        capsys.readouterr().out
        == line + "gradient_budget=0.001, cache_mib=64; skip_zero_advantage=True" + f"{ROWS}True\n"
    )
    assert settings() == (1e-3, 64)
    accelerate_trainer(trainer)  # the settings of GSPOConfig
    assert capsys.readouterr().out == "" and settings() == (1e-3, 64)
    accelerate_trainer(trainer, gradient_budget=0.0)
    assert (
        capsys.readouterr().out == line + "gradient_budget=0, cache_mib=64; skip_zero_advantage=True" + f"{ROWS}True\n"
        and settings() == (0.0, 64)
    )
    monkeypatch.setenv("GSPO_CACHE_MIB", "3")
    args.cache_mib = None
    accelerate_trainer(trainer, gradient_budget=0.5)
    assert (
        capsys.readouterr().out
        == line + "gradient_budget=0.5, cache_mib=3 (GSPO_CACHE_MIB); skip_zero_advantage=True" + f"{ROWS}True\n"
    )
    assert settings() == (0.5, None)
    for skips in (True, False):
        accelerate_trainer(trainer, skip_rows_without_gradient=skips)
        assert vars(trainer)["_gspo_live"].rows._checkpoint.is_on == skips
    capsys.readouterr()
    # Another trainer of the same model, whose GRPOConfig has no such settings.
    monkeypatch.delenv("GSPO_CACHE_MIB")
    make_trainer(GSPOTrainer, trainer.model, tmp_path, **SEQUENCE, bf16=True)
    in_bf16 = line.replace("float32", "float32, cast to bfloat16")
    assert (
        capsys.readouterr().out
        == in_bf16
        + "gradient_budget=0, cache_mib=0 (default); skip_zero_advantage=True"
        + f"{ROWS}False (gradient_checkpointing=False)\n"
    )
    options = {"config": GSPOConfig, "head_precision": "fp32"}  # which keeps autocast from casting the head
    make_trainer(GSPOTrainer, trainer.model, tmp_path, **SEQUENCE, **options, bf16=True)
    settings_line = "gradient_budget=0, cache_mib=0 (default), head_precision=fp32; "
    assert capsys.readouterr().out.startswith(line + settings_line)


def test_a_replaced_forward_is_warned_of(tmp_path: Path) -> None:
    options: dict[str, Any] = SEQUENCE | {"num_iterations": 1, "max_steps": 1}
    first = make_trainer(GSPOTrainer, peaked_model(tmp_path / "model", 20.0), tmp_path, **options)
    make_trainer(GRPOTrainer, first.model, tmp_path, **options)  # TRL replaces the forward of its model
    with pytest.warns(UserWarning, match="forward of the model was replaced .* Call accelerate_trainer.trainer. again"):
        first.train()
    assert not fuse_head(first.model).is_outermost()
    accelerate_trainer(first)
    first.train()
    assert fuse_head(first.model).is_outermost()


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "frozen"),
    [
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, False),  # under autocast
    ],
)
@pytest.mark.parametrize(("n", "width", "vocab"), [(9000, 896, 151_936), (700, 1536, 40_000)])
def test_the_formula_for_the_memory_of_trls_head_counts_its_tensors(
    n: int, width: int, vocab: int, dtype: torch.dtype, weight_dtype: torch.dtype, frozen: bool
) -> None:
    """Run TRL's head on meta tensors. What TRL's Triton kernels and cuBLAS compute in place on a GPU does nothing."""
    autocast = dtype != weight_dtype
    ids = torch.empty(n, dtype=torch.int64, device="meta")
    hidden = torch.empty(n, width, dtype=weight_dtype, device="meta", requires_grad=True)
    weight = torch.empty(vocab, width, dtype=weight_dtype, device="meta", requires_grad=not frozen)
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:
        for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
            patch.setattr(chunked_logprob, name, lambda *args, **options: None)
        patch.setattr(torch, "is_autocast_enabled", lambda *device: autocast)
        patch.setattr(torch, "get_autocast_dtype", lambda *device: dtype)
        options = (1.0, 32_768, None, 1.0, ("log_probs", "entropy"))
        log_probs = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, ids, *options)[0]
        torch.autograd.grad(log_probs, [hidden] if frozen else [hidden, weight], torch.empty_like(log_probs))
    formula = memory.trl_head_bytes(n, width, vocab, dtype.itemsize, frozen, weight_dtype.itemsize if autocast else 0)
    assert formula <= live.peak <= formula + 12 * 4 * n  # and at most 12 vectors


def test_backwards_of_another_model_do_not_count() -> None:
    counted = BackwardMetrics()
    log_probs = linear_log_probs(torch.ones(2, 3).requires_grad_(), torch.ones(5, 3), torch.tensor([0, 1])).log_probs
    log_probs.sum().backward()
    counted.begin()
    counted.collect()
    assert counted.take() == {}


def test_layers_that_differentiate_all_rows_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = SimpleNamespace(take=lambda: (0, 0), fallbacks={"router logits"})
    share = RowShare(checkpoint, lambda counts: counts, "cpu", True)
    assert [share.take(), share.take()] == [{}, {}]
    line = "gspo_kernels: skip_rows_without_gradient has no effect: layers get router logits"
    assert capsys.readouterr().out.splitlines() == [line]


def test_the_backend_of_a_device_is_named_with_its_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, mps, cuda = (torch.device(name) for name in ("cpu", "mps", "cuda:0"))
    assert describe_backend("here", cpu, torch.bfloat16) == "backend torch on cpu"
    assert describe_backend("here", mps, torch.bfloat16).startswith("backend torch on mps (the Triton kernels run on")
    monkeypatch.setattr(backwards, "triton_obstacle", lambda _: None)
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda _: None)
    for failure, text in (
        ("forward_tile is wrong", "torch on cuda:0 (the self-check failed)"),
        (None, "triton on cuda:0"),
    ):
        monkeypatch.setattr(verdict, "obstacle", lambda *_, failure=failure: failure)
        assert describe_backend("here", cuda, torch.bfloat16) == f"backend {text}"
    monkeypatch.setenv("GSPO_BACKEND", "torch")
    assert describe_backend("here", cuda, torch.bfloat16) == "backend torch on cuda:0 (GSPO_BACKEND)"
