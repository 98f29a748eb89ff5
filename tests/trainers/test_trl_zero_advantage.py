"""Answers with advantage 0 in TRL's trainer: they do not run, and losses, gradients and weights equal stock TRL's."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers.pair_cover import pair_cover, value_cover
from helpers.ranks import run_ranks
from helpers.trl_trainer import LETTERS, SEQUENCE, checkpoint, make_trainer, replace_log_probs

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import accelerate
import datasets
import transformers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tolerance import (
    LOSS_PER_ADVANTAGE,
    TRAINER_ABSOLUTE,
    TRAINER_GRADIENT_RELATIVE,
    TRAINER_LOG_RELATIVE,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from trl import GRPOTrainer

from gspo_kernels import linear_log_probs
from gspo_kernels.integrations.backwards import METRICS
from gspo_kernels.integrations.huggingface.rows import interaction_of_rows
from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer, accelerate_trainer, zero_advantage
from gspo_kernels.integrations.trl.model_forward import rearranged
from gspo_kernels.integrations.trl.row_checkpoint import reason_against_skipping
from gspo_kernels.integrations.trl.zero_advantage import (
    LiveAnswers,
    live_rows,
    loss_mask,
    rows_by_length,
    skipping,
    tokens_of_slowest,
)

METHOD = "_get_per_token_logps_and_entropies"
# AdamW divides rounding errors by the size of a gradient. This epsilon keeps those of gradients near 0 small.
ADAM: dict[str, Any] = {**SEQUENCE, "optim": "adamw_torch", "adam_epsilon": 1e-4, "weight_decay": 0.1}
ADAM |= {"learning_rate": 3e-3, "max_steps": 6}


class AtSubstep(transformers.TrainerCallback):
    """Calls a function after `count` micro-batches. The last one of an optimizer step does not count."""

    def __init__(self, function: Callable[[], Any], count: int = 1) -> None:
        self.function = function
        self.left = count

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.function()


class AtStepEnd(AtSubstep):
    """Calls a function after `count` optimizer steps."""

    on_step_end = AtSubstep.on_substep_end

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None: ...


def stop() -> None:
    raise KeyboardInterrupt


# A callback, after how many steps it is called, and what it does.
CALLBACKS: dict[str, tuple[type[AtSubstep], int, Callable[[Any], Any]]] = {
    "interrupted": (AtSubstep, 1, lambda trainer: stop()),  # optimizer steps then begin at odd micro-batches
    "loss_type changes": (AtStepEnd, 1, lambda trainer: setattr(trainer, "loss_type", "bnpo")),
    "quantile changes": (AtStepEnd, 1, lambda trainer: setattr(trainer, "top_entropy_quantile", 0.5)),
    "accumulation changes": (AtStepEnd, 1, lambda trainer: setattr(trainer.args, "gradient_accumulation_steps", 1)),
    "temperature changes": (AtStepEnd, 1, lambda trainer: setattr(trainer, "temperature", 0.5)),
    "skipping changes": (AtSubstep, 1, lambda trainer: setattr(trainer.args, "skip_zero_advantage", False)),
    # Then the second rollout has no old log-probs.
    "iterations change": (AtStepEnd, 2, lambda trainer: setattr(trainer, "num_iterations", 1)),
    "evaluated in a step": (AtSubstep, 1, lambda trainer: trainer.evaluate()),
}


# What may act together, the usual first. Every pair is trained.
FACTORS = {
    "loss_type": ["grpo", "dr_grpo", "dapo", "bnpo", "luspo", "cispo", "sapo", "vespo"],
    "dead": ["half dead", "none dead", "all dead"],
    "updates": ["two updates", "eight updates", "updates across rollouts", "one update"],  # per rollout
    "lengths": ["lengths differ", "equal lengths"],
    "window": ["clips", "wide window"],
    "level": ["sequence", "token"],
    "checkpointing": ["checkpointing", "no checkpointing"],
    "term": ["no term", "KL", "KL with ratio", "entropy bonus"],
    "layout": ["cropped", "packed", "padded"],
    "answers": ["no mask", "with tools", "truncated", "off policy"],
    "sampler": ["TRL's", "rollout_func", "corrected"],
    "breaks": ["no break", "evaluated", "resumed", "interrupted"],
    "weights": ["all weights", "LoRA", "experts"],
    "tokens": ["all tokens", "high entropy"],
    "advantages": ["per answer", "per token"],
    "bound": ["no delta", "delta"],
    "temperature": ["temperature 1", "temperature 0.7"],
    "cache": ["no cache", "cache"],
    "kind": ["accelerate_trainer", "GSPOTrainer"],
    "old": ["deferred", "with the rollout"],  # when old log-probs are computed
    "moves": ["if cheaper", "always"],  # when answers move to another of two ranks
    "ranks": ["one rank"],
}
DEAD = {"half dead": 0.5, "none dead": 0.0, "all dead": 1.0}  # share of the prompts
SETTINGS: dict[str, dict[str, Any]] = {
    "eight updates": {"num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 8},
    "updates across rollouts": {"steps_per_generation": 2, "gradient_accumulation_steps": 3},
    "one update": {"steps_per_generation": 2},
    "equal lengths": {"generation_kwargs": {"min_new_tokens": 6}},
    "wide window": {"epsilon": 0.2, "epsilon_high": 0.28},
    "cispo": {"epsilon_high": 5.0, "learning_rate": 1e-3},
    "checkpointing": {"gradient_checkpointing": True},
    "KL": {"beta": 0.1},
    "KL with ratio": {"beta": 0.1, "use_bias_correction_kl": True},
    "entropy bonus": {"entropy_coef": 0.01},
    "truncated": {"mask_truncated_completions": True},
    "off policy": {"off_policy_mask_threshold": 1e-4},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "resumed": {"save_strategy": "steps", "save_steps": 3},  # with two updates per rollout, after the first of them
    "LoRA": {"lora": True},
    "experts": {"learning_rate": 5e-4},  # routers enlarge rounding
    "high entropy": {"top_entropy_quantile": 0.5},
    "delta": {"delta": 1.0006},
    "temperature 0.7": {"temperature": 0.7},
}


CLIP_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
# These depend on which answers are in a micro-batch. TRL's entropy is compared by a formula.
BY_MICRO_BATCH = {"clip_ratio/low_min", "clip_ratio/high_max", "entropy"}


def is_allowed(row: dict[str, str]) -> bool:
    """Equal lengths are the largest, so all answers would be truncated. With KL alone, first gradients are rounding.

    A wide window or cispo's reaches beyond delta.
    """
    values = {*row.values()}
    banned = [
        "equal lengths, truncated",
        "all dead, KL",
        "all dead, KL with ratio",
        "delta, wide window",
        "delta, cispo",
        "eight updates, interrupted",  # an optimizer step has one micro-batch
    ]
    return not any({*pair.split(", ")} <= values for pair in banned)


def has_skipping(row: dict[str, str]) -> bool:
    """Whether rows may be left out or moved."""
    return row["tokens"] == "all tokens" and row["weights"] != "experts"


class Prompts:
    """A reward: 1 for every answer to some prompts, otherwise the letters a minus the letters b."""

    __name__ = "reward"

    def __init__(self, dead: float) -> None:
        self.dead = dead

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        dead = [LETTERS.index(prompt[1]) < 8 * self.dead for prompt in prompts]
        scores = [float(text.count("a") - text.count("b")) for text in completions]
        return [1.0 if is_dead else score for is_dead, score in zip(dead, scores, strict=True)]


def trainer_of(
    folder: Path,
    reward: Any,
    kind: Any = GRPOTrainer,
    lora: bool = False,
    model: str = "",
    **options: Any,
) -> Any:
    peft = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"]) if lora else None
    prompts = datasets.Dataset.from_list([{"prompt": "ab"}, {"prompt": "ah"}])
    trainer = make_trainer(kind, model or checkpoint(folder / "model"), folder, peft, prompts, **{**ADAM, **options})
    trainer.reward_funcs = [reward]
    return trainer


class Seen(NamedTuple):
    """A batch in training with stock TRL."""

    batch: dict[str, Any]
    entropies: list[Tensor]  # [B, C], of one forward
    has_gradient: list[Tensor]  # bool [B], a gradient of log-probs or entropies
    metrics: dict[str, float]  # of this micro-batch


def spy(trainer: Any) -> list[Seen]:
    loss, method, seen = trainer._compute_loss, getattr(trainer, METHOD), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        out = method(*args, **kwargs)
        if kwargs.get("compute_entropy") and trainer.model.training:
            latest = seen[-1]
            latest.entropies.append(out[1].detach())
            for x in out[:2]:
                x.register_hook(lambda gradient: latest.has_gradient.append(gradient.ne(0).any(1)))
        return out

    def compute_loss(model: Any, inputs: Any) -> Any:
        if trainer.model.training:
            seen.append(Seen(dict(inputs), [], [], {}))
        result = loss(model, inputs)
        if trainer.model.training:
            seen[-1].metrics.update({name: values[-1] for name, values in trainer._metrics["train"].items()})
        return result

    trainer._compute_loss, trainer._get_per_token_logps_and_entropies = compute_loss, recorded
    return seen


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def rollout_of(trainer: Any, corrects: bool) -> Callable[..., dict[str, Any]]:
    """Return a rollout_func that computes log-probs with the trainer. Those of the sampler are 0.1 too high.

    `corrects`: TRL compares them with its old log-probs at once, as for a rollout of vLLM.
    """
    generator = torch.Generator().manual_seed(trainer.accelerator.process_index)
    if corrects:
        trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, "token_truncate"
        trainer.vllm_generation, trainer._last_loaded_step = SimpleNamespace(sync_weights=lambda: None), -1

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = torch.randint(2, 10, (len(prompts), 8), generator=generator)
        found = getattr(trainer, METHOD)(trainer.model, ids, torch.ones_like(ids), 5)[0].detach()
        answers = {"prompt_ids": ids[:, :3].tolist(), "completion_ids": ids[:, 3:].tolist()}
        return answers | {"logprobs": (found + 0.1).tolist()}

    return rollout


# As in test_sharded_heads.py, every parameter is partitioned.
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
}


def shard(trainer: Any) -> None:
    """Make accelerate shard the model by FSDP2. On CPUs, it ignores the configuration, and replicates the model."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    trainer.is_fsdp_enabled = True


def save_models(folder: Path) -> None:
    checkpoint(folder / "model")
    checkpoint(folder / "experts", experts=True)


def train(ours: bool, folder: Path, row: dict[str, str]) -> tuple[Any, list[Seen]]:
    """Train a model in the parent of `folder`, which ranks share."""
    options: dict[str, Any] = {"loss_type": row["loss_type"], "importance_sampling_level": row["level"]}
    for value in sorted(row.values(), key="cispo".__eq__):  # its settings come last
        options |= SETTINGS.get(value, {})
    options |= {"deepspeed": ZERO3} if row["ranks"] == "ZeRO-3" else {}
    kind = GSPOTrainer if ours and row["kind"] == "GSPOTrainer" else GRPOTrainer
    model = folder.parent / ("experts" if row["weights"] == "experts" else "model")
    trainer = trainer_of(folder, Prompts(DEAD[row["dead"]]), kind, model=str(model), **options)
    # With at least four tokens, no batch has as many rows as tokens, where all rows are differentiated.
    prompts = [{"prompt": prompt["prompt"] + "cdef"[: 2 + i % 3]} for i, prompt in enumerate(trainer.train_dataset)]
    trainer.train_dataset = datasets.Dataset.from_list(prompts)
    if row["layout"] == "padded":
        trainer.pad_to_multiple_of = 4
    if row["ranks"] == "FSDP2":
        shard(trainer)
    if row["sampler"] != "TRL's":
        trainer.rollout_func = rollout_of(trainer, row["sampler"] == "corrected")
    generate = trainer._generate_and_score_completions

    def of_tokens(inputs: Any) -> Any:
        output = generate(inputs)
        places = torch.arange(output["completion_ids"].shape[1])
        if row["answers"] == "with tools":
            output["tool_mask"] = (places % 3 != 2).expand_as(output["completion_ids"]).contiguous()
        if row["advantages"] == "per token":
            output["advantages"] = output["advantages"][:, None] * (1 + 0.1 * places)
        # A subclass may add keys, in alphabetical order before all tensors with rows.
        return {**output, "a": torch.tensor(1.0), "a list": output["prompt_ids"].tolist()}

    if row["answers"] == "with tools" or row["advantages"] == "per token":
        trainer._generate_and_score_completions = of_tokens
    seen = [] if ours else spy(trainer)
    chosen = trainer.get_high_entropy_mask
    # First tokens of a group have equal entropies, up to rounding, which could move them across the quantile.
    trainer.get_high_entropy_mask = lambda entropies, *rest: chosen(entropies.round(decimals=1), *rest)
    with pytest.MonkeyPatch.context() as patch:
        if row["layout"] == "packed":  # SDPA gets a mask that keeps sequences apart
            patch.setattr(zero_advantage, "may_be_packed", lambda model: True)
        if row["old"] == "with the rollout":
            patch.setattr(LiveAnswers, "_can_defer", lambda self: False)
        if row["moves"] == "always":
            costs = itertools.cycle((1.0, 0.0))  # alone, shared
            patch.setattr(zero_advantage, "tokens_of_slowest", lambda *_: torch.tensor(next(costs)))
        if ours:
            skips = has_skipping(row) and row["term"] == "no term" and row["breaks"] != "skipping changes"
            accelerate_trainer(trainer, skip_zero_advantage=skips or None, cache_mib=8 * (row["cache"] == "cache"))
        if row["breaks"] in CALLBACKS:
            at, count, function = CALLBACKS[row["breaks"]]
            trainer.add_callback(at(partial(function, trainer), count))
        with pytest.raises(KeyboardInterrupt) if row["breaks"] == "interrupted" else nullcontext():
            trainer.train()
        if row["breaks"] == "interrupted":
            trainer.train()
        if row["breaks"] == "resumed":
            trainer.args.max_steps = 9
            trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
    return trainer, seen


def sums_of(seen: Seen, loss_type: str, by_advantage: bool) -> dict[str, float]:
    """Return sums over a micro-batch of all ranks."""
    live, mask = live_rows(seen.batch, loss_type, by_advantage), loss_mask(seen.batch)
    ran = mask * live[:, None]
    sums = {"rows": len(live), "live": live.sum(), "tokens": mask.sum(), "tokens that ran": ran.sum()}
    sums |= {"entropy": (seen.entropies[0] * ran).sum()}
    sums |= {"with a gradient": torch.stack(seen.has_gradient).any(0).sum() if seen.has_gradient else 0}
    sums |= {name: seen.metrics[name] * mask.sum() for name in ("kl", *CLIP_MEANS) if name in seen.metrics}
    values = torch.tensor([float(x) for x in sums.values()], dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return dict(zip(sums, values.tolist(), strict=True))


def whole(trainer: Any) -> list[Tensor]:
    """Return the weights, which FSDP2 or ZeRO-3 may have sharded."""
    full = []
    for x in trainer.model.parameters():
        if hasattr(x, "ds_id"):
            x = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param(x)
        full.append((x.full_tensor() if isinstance(x, DTensor) else x).detach())
    return full


class Run(NamedTuple):
    logs: list[dict[str, float]]
    weights: list[Tensor]
    sums: list[dict[str, float]]  # of each micro-batch, of stock TRL
    size: int  # micro-batches of an optimizer step


def run_of(ours: bool, folder: Path, row: dict[str, str]) -> Run:
    trainer, seen = train(ours, folder, row)
    assert any(isinstance(p, DTensor) for p in trainer.model.parameters()) == (row["ranks"] == "FSDP2")
    assert any(hasattr(p, "ds_id") for p in trainer.model.parameters()) == (row["ranks"] == "ZeRO-3")
    sums = [sums_of(x, trainer.loss_type, row["term"] == "no term") for x in seen]
    return Run(steps_of(trainer), whole(trainer), sums, trainer.args.gradient_accumulation_steps)


def compare(row: dict[str, str], stock: Run, ours: Run) -> None:
    assert len(ours.logs) == len(stock.logs) > 5
    token_means = {"kl"} | ({*CLIP_MEANS} if row["level"] == "token" else set())
    for a, b in zip(ours.logs, stock.logs, strict=True):
        skips = "gspo/rows_run" in a
        assert a.keys() >= {f"gspo/{name}" for name in METRICS}
        assert row["breaks"] in ("skipping changes", "quantile changes") or skips == has_skipping(row)
        others = token_means | BY_MICRO_BATCH if has_skipping(row) else set()
        # The mean ratio counts answers that did not run as 1. Of tokens, it depends on the micro-batch.
        moves_phi = a.get("gspo/rows_run", 1) < 1 or (has_skipping(row) and row["advantages"] == "per token")
        others = others | ({"vespo/phi_seq_mean"} if moves_phi else set())
        for key in b.keys() - others:
            # The loss of the routers is not a sum of advantages.
            is_policy_loss = key == "loss" and row["weights"] != "experts"
            relative = LOSS_PER_ADVANTAGE if is_policy_loss else TRAINER_LOG_RELATIVE
            floor = TRAINER_ABSOLUTE if key == "grad_norm" else LOSS_PER_ADVANTAGE
            if key == "grad_norm" and b["step"] == 1:
                relative, floor = TRAINER_GRADIENT_RELATIVE, LOSS_PER_ADVANTAGE
            if b[key] is None:  # a minimum over no tokens
                assert a[key] is None, key
            elif "time" not in key:
                assert a[key] == pytest.approx(b[key], rel=relative, abs=floor, nan_ok=True), key
    for a, b in zip(ours.weights, stock.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)
    # Resumed or interrupted, stock TRL has run some micro-batches twice.
    if row["breaks"] not in ("no break", "evaluated") or not has_skipping(row):
        return
    for i, log in enumerate(ours.logs):
        batches = stock.sums[i * stock.size : (i + 1) * stock.size]
        total = {name: sum(x[name] for x in batches) for name in batches[0]}
        assert log["gspo/rows_run"] == pytest.approx(total["live"] / total["rows"])
        assert ("entropy" in log) == bool(total["tokens that ran"])
        if total["tokens that ran"]:
            entropy = total["entropy"] / total["tokens that ran"]
            assert log["entropy"] == pytest.approx(entropy, rel=TRAINER_LOG_RELATIVE)
        # With several ranks, TRL averages the means of ranks.
        for name in token_means & total.keys() if row["ranks"] == "one rank" else ():
            expected = total[name] / max(total["tokens"], 1)
            assert log[name] == pytest.approx(expected, rel=TRAINER_LOG_RELATIVE, abs=LOSS_PER_ADVANTAGE), name
        differentiates = row["checkpointing"] == "checkpointing" and bool(total["tokens that ran"])
        assert ("gspo/rows_differentiated" in log) == differentiates
        if differentiates:
            share = total["with a gradient"] / total["live"]
            assert log["gspo/rows_differentiated"] == pytest.approx(share)


def name_of(row: dict[str, str]) -> str:
    return ", ".join(row.values())


ARRAY = pair_cover(FACTORS, is_allowed)
FIRST = {name: values[0] for name, values in FACTORS.items()}
OF_BREAKS = {x: FIRST | {"breaks": x, "updates": FACTORS["updates"][x == "iterations change"]} for x in CALLBACKS}
# A few rows that together have every value. They are not marked slow, so they also run with the oldest supported TRL.
QUICK = value_cover(ARRAY)
ROWS = [pytest.param(x, id=name_of(x), marks=[] if x in QUICK else pytest.mark.slow) for x in ARRAY]
ROWS += [pytest.param(row, id=name) for name, row in OF_BREAKS.items()]


@pytest.mark.parametrize("row", ROWS)
def test_training_equals_stock_trl(row: dict[str, str], tmp_path: Path) -> None:
    save_models(tmp_path)
    compare(row, *(run_of(ours, tmp_path / str(ours), row) for ours in (False, True)))


def rows_of_ranks() -> list[dict[str, str]]:
    others = value_cover([{name: x for name, x in row.items() if name != "loss_type"} for row in ARRAY])
    losses = itertools.cycle(["dapo", "grpo"])
    rows = [FIRST, FIRST | {"moves": "always"}, *({**row, "loss_type": next(losses)} for row in others)]
    return [row | {"ranks": ("two ranks", "FSDP2")[i % 2]} for i, row in enumerate(rows)]


def rank_main(rank: int, folder: Path, rows: list[dict[str, str]]) -> None:
    for i, row in enumerate(rows):
        if row["ranks"] == "ZeRO-3":
            importlib.import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles C++
        try:
            runs = [run_of(ours, folder / f"{i}-{ours}", row) for ours in (False, True)]
            compare(row, *runs)
        except Exception as error:
            raise AssertionError(name_of(row)) from error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "zero3"])
def test_training_of_two_ranks_equals_stock_trl(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of the array but loss types occurs. All rows run in one start of the processes."""
    rows = rows_of_ranks()
    if kind == "zero3":
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        rows = [FIRST | {"ranks": "ZeRO-3"}]
    save_models(tmp_path)
    run_ranks(rank_main, 2, tmp_path, rows, deadline=900.0)


def test_eight_ranks_run_hardly_more_tokens_than_the_live_answers_have() -> None:
    """Simulate rollouts of eight ranks: each has four groups of eight answers. A group is dead with probability 0.5.

    Lengths are lognormal, at most 1,000 tokens.
    """
    ranks, batches, rows = 8, 8, 4
    generator = torch.Generator().manual_seed(0)
    sorted_tokens = unsorted_tokens = 0
    slowest = []
    for _ in range(100):
        live = (torch.rand(ranks, 4, generator=generator) < 0.5).repeat_interleave(8, 1)
        lengths = (350 * torch.randn(ranks, batches * rows, generator=generator).mul(0.6).exp()).clamp(1, 1000).long()
        widths = (live * lengths).view(ranks, batches, rows)
        order = rows_by_length(widths)
        assert torch.equal(order.flatten().sort()[0], torch.arange(widths.numel()))
        moved = widths.flatten()[order].view_as(widths)
        tokens = moved.sum((1, 2)).double()
        slowest.append((tokens.max() / tokens.mean()).item())
        sorted_tokens += ranks * tokens_of_slowest(moved).sum().item() / widths.sum().item() / 100
        unsorted_tokens += ranks * tokens_of_slowest(widths).sum().item() / widths.sum().item() / 100
    assert max(slowest) < 1.1
    assert sorted_tokens < 1.35 and unsorted_tokens > 2


def live_answers_alternate(completions: list[str], **_: Any) -> list[float]:
    return [float(i % 4) * (i // 4 % 2) for i in range(len(completions))]


def test_live_answers_share_micro_batches(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 2}
    options |= {"max_steps": 4, "gradient_checkpointing": True}
    trainer = accelerate_trainer(trainer_of(tmp_path, live_answers_alternate, **options))
    rows: list[int] = []
    trainer.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(len(inputs[0])) if torch.is_grad_enabled() else None
    )
    trainer.train()
    assert rows == [1, 1, 4, 4] * 4
    assert steps_of(trainer)[0]["gspo/rows_differentiated"] == 1  # the rows that only keep ranks in step do not count


def test_a_log_is_of_all_steps_since_the_last(tmp_path: Path) -> None:
    logs: list[list[dict[str, float]]] = []
    for every in (1, 2):
        options = {"logging_steps": every, "importance_sampling_level": "token"}
        trainer = trainer_of(tmp_path / str(every), Prompts(0.5), **options)
        accelerate_trainer(trainer).train()
        logs.append(steps_of(trainer))
    for i, log in enumerate(logs[1]):
        for name in ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            low, high = sorted(x[name] for x in logs[0][2 * i : 2 * i + 2])  # their mean weighs tokens
            assert low < log[name] < high or low == log[name] == high, name


def test_old_log_probs_are_not_computed_with_the_weights_of_an_older_checkpoint(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, Prompts(0.0), **options)
    accelerate_trainer(trainer)
    trainer.add_callback(AtSubstep(stop, 3))  # in the first step of the second rollout
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    rollout = trainer._buffered_inputs
    for number, is_kept in ((2, True), (1, False)):
        trainer.state.global_step = number
        trainer._gspo_live._steps.on_train_begin(trainer.args, trainer.state, trainer.control)
        assert (trainer._buffered_inputs is rollout) == is_kept


def test_ranks_that_must_have_equal_rows_share_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = accelerate_trainer(trainer_of(tmp_path, Prompts(0.5), gradient_checkpointing=True))
    trainer._buffered_inputs = [{"prompt_ids": torch.ones(2, 3), "advantages": torch.ones(2)}]
    assert trainer._gspo_live._can_share() and reason_against_skipping(trainer) is None
    with monkeypatch.context() as patch:  # learned positions and prompts of different widths
        patch.setattr(zero_advantage, "positions_are_relative", lambda model: False)
        both = lambda x: [*x, *((kinds, width + 1) for kinds, width in x)]  # noqa: E731
        patch.setattr(zero_advantage, "gather_object", both)
        assert not trainer._gspo_live._can_share()
    for kind in ("tp", "cp", "sp"):
        sizes = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, f"{kind}_size": 2})
        monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", sizes)
        assert not trainer._gspo_live._can_share()
        assert (reason_against_skipping(trainer) == "context or sequence parallelism") == (kind != "tp")


def test_only_live_rows_run_and_old_log_probs_have_the_bits_of_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout has four updates, so the old log-probs of the last three batches are computed."""
    calls: list[tuple[bool, int, int]] = []  # gradients, rows, tokens of the completions

    def recorded(hidden: Tensor, head: Any, targets: Tensor, **options: Any) -> Any:
        calls.append((torch.is_grad_enabled(), len(targets), int((targets != -100).sum())))
        return linear_log_probs(hidden, head, targets, **options)

    replace_log_probs(monkeypatch, recorded)
    options = {"gradient_accumulation_steps": 1, "learning_rate": 0.0, "max_steps": 4}
    trainer = trainer_of(tmp_path, Prompts(0.5), **options)
    accelerate_trainer(trainer)
    batches: list[Any] = []
    loss = trainer._compute_loss

    def compute_loss(model: Any, inputs: Any) -> Any:
        batches.append(dict(inputs))
        return loss(model, inputs)

    trainer._compute_loss = compute_loss
    trainer.train()
    expected = []
    for batch in batches:
        live = live_rows(batch, "grpo")
        expected.append((max(1, int(live.sum())), max(1, int(batch["completion_mask"][live].sum()))))
    assert min(rows for rows, _ in expected) < 4
    assert [call[1:] for call in calls if not call[0]] == expected[1:]
    assert [call[1:] for call in calls if call[0]] == expected
    assert ["old_per_token_logps" in batch for batch in batches] == [False, True, True, True]
    for batch, after in zip(batches, trainer._buffered_inputs, strict=True):
        old = batch.get("old_per_token_logps", after["old_per_token_logps"])
        with torch.no_grad():
            assert torch.equal(trainer._gspo_live._old_log_probs(after | {"old_per_token_logps": old}), old)


def test_tokens_are_aligned_or_packed_unless_rows_have_gaps() -> None:
    ids = torch.arange(2, 12).view(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    targets = torch.tensor([[-100, -100, 5, -100], [-100, -100, 10, 11]])
    aligned, packed = (rearranged(layout, ids, mask, targets) for layout in ("aligned", "packed"))
    assert aligned is not None and packed is not None
    assert aligned.inputs["input_ids"].tolist() == [[3, 4, 5, 0], [8, 9, 10, 11]]
    assert aligned.inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert aligned.targets.tolist() == [[-100, 5, -100, -100], [-100, 10, 11, -100]]
    assert packed.inputs["input_ids"].tolist() == [[3, 4, 5, 8, 9, 10, 11]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.inputs["cu_seq_lens_q"].tolist() == [0, 3, 7] and packed.inputs["max_length_k"] == 4
    assert packed.targets.tolist() == [[-100, 5, -100, -100, 10, 11, -100]]
    for batch in (aligned, packed):
        assert batch.as_given(batch.targets).tolist() == [[0, -100, 5, -100], [0, -100, 10, 11]]
    one = rearranged("packed", ids, mask * torch.tensor([[1], [0]]), torch.full((2, 4), -100))
    assert one is not None and one.inputs["cu_seq_lens_q"].tolist() == [0, 3]
    without_prompt = targets.clone()
    without_prompt[0, 0] = 3
    with_gap = mask * torch.tensor([1, 1, 0, 1, 1])
    begins_with_gap = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    for other, scored in (
        (mask, without_prompt), (with_gap, targets), (0 * mask, targets), (begins_with_gap, targets),
    ):  # fmt: skip  # a table
        assert rearranged("packed", ids, other, scored) is None


@pytest.mark.parametrize("dead", [1, 2])
def test_old_log_probs_far_below_the_new_ones_make_no_nan(dead: int, tmp_path: Path) -> None:
    trainer = accelerate_trainer(trainer_of(tmp_path, Prompts(0.0), importance_sampling_level="token"))
    trainer.current_gradient_accumulation_steps = 1
    ones = torch.ones(2, 3, dtype=torch.long)
    batch = {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones * 3, "completion_mask": ones}
    batch |= {"advantages": torch.tensor([1.0, 0.0]) if dead == 1 else torch.zeros(2)}
    batch["old_per_token_logps"] = torch.tensor([-1.0, -100.0])[:, None].expand(2, 3).clone()
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    gradients = [p.grad for p in trainer.model.parameters()]
    assert loss.isfinite() and all(x is not None and x.isfinite().all() for x in gradients)
    assert any(x.any() for x in gradients) == (dead == 1)


def test_rows_are_live_by_mask_advantage_and_weight() -> None:
    batch: dict[str, Any] = {"completion_mask": torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]])}
    batch["advantages"] = torch.tensor([1e-30, 1.0, 1.0, 0.0, torch.nan])
    assert live_rows(batch, "grpo").tolist() == [True, True, False, False, True]
    batch["tool_mask"] = torch.tensor([[0, 1], [0, 1], [1, 1], [1, 1], [1, 1]])
    assert live_rows(batch, "grpo").tolist() == [True, False, False, False, True]
    batch["importance_sampling_ratio"] = torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0]])
    assert live_rows(batch, "grpo").tolist() == [False, False, False, False, True]
    assert live_rows(batch, "vespo").tolist() == [True, False, False, False, True]


# The owner of an attribute, its name and value, and the reason that messages name.
INEXACT: list[tuple[str, str, Any, str]] = [
    ("", "beta", 0.1, "beta=0.1"),
    ("", "_entropy_bonus_enabled", True, "an entropy bonus"),
    ("", "aux_loss_enabled", True, "router_aux_loss_coef="),
    ("", "top_entropy_quantile", 0.5, "top_entropy_quantile=0.5"),
    ("", "loss_type", "new", "loss_type='new'"),
    *(("", name, lambda *_: None, f"an override of {name}") for name in ("_compute_loss", "compute_loss", METHOD)),
    ("", "processing_class", object.__new__(transformers.ProcessorMixin), "a processor of images"),
    ("args", "neftune_noise_alpha", 5.0, "neftune_noise_alpha=5.0"),
    ("accelerator.state", "_mixed_precision", "fp8", "fp8"),
    ("model", "added", nn.Dropout(0.1), "dropout=0.1 in added"),
    ("model", "attention_dropout", 0.1, "attention_dropout=0.1 in "),
    ("model", "added", nn.BatchNorm1d(2), "batch normalization in added"),
    ("model", "experts", nn.ModuleList([nn.Linear(2, 2)]), "experts that are separate modules in "),
]
WITH_GRADIENT = ("beta=0.1", "an entropy bonus")
NO_CHECKPOINTING = "skip_rows_without_gradient=False (gradient_checkpointing=False)\n"


def test_settings_that_make_skipping_inexact_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, Prompts(0.0))
    for path, name, value, reason in INEXACT:
        with monkeypatch.context() as patch:
            owner = trainer
            for part in path.split("."):
                owner = getattr(owner, part) if part else owner
            patch.setattr(owner, name, value, raising=False)
            now = skipping(trainer, None, interaction_of_rows(trainer.model))
            assert now.description.startswith(f"skip_zero_advantage=False ({reason}") and not now.by_advantage
            # KL and entropy bonus give answers with advantage 0 a gradient, but padding has none.
            assert now.is_on == now.crops == (reason in WITH_GRADIENT)
            assert now.moves == (reason == "beta=0.1")
            with pytest.raises(ValueError, match=r"^accelerate_trainer: skip_zero_advantage must be .*") as error:
                accelerate_trainer(trainer, skip_zero_advantage=True)
            assert reason in str(error.value) and not hasattr(trainer, "_gspo_live")
    with pytest.raises(ValueError, match=r"skip_rows_without_gradient must be .* with gradient_checkpointing=False"):
        accelerate_trainer(trainer, skip_rows_without_gradient=True)
    with pytest.raises(TypeError, match="skip_zero_advantage must be True or False, got 1"):
        accelerate_trainer(trainer, skip_zero_advantage=1)  # type: ignore[arg-type]
    for name, value, reason in (
        ("loss_type", "bnpo", "loss_type='bnpo'"),
        ("_prepare_inputs", lambda batch: batch, "an override of _prepare_inputs"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, value)
            now = skipping(trainer, True, None)
            assert now.by_advantage and now.crops and not now.moves
            assert now.description == f"skip_zero_advantage=True (order kept: {reason})"
    accelerate_trainer(trainer, skip_zero_advantage=False)
    assert capsys.readouterr().out.endswith("; skip_zero_advantage=False, " + NO_CHECKPOINTING)
    for owner, name, value, reason in (
        (trainer, "pad_to_multiple_of", 8, "pad_to_multiple_of=8"),
        (trainer.model.model.rotary_emb, "rope_type", {"full_attention": "longrope"}, "rope_type='longrope'"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            patch.setattr(trainer.model.config, "_attn_implementation", "flash_attention_2")
            now = skipping(trainer, True, None)
            assert now.by_advantage and now.moves and not now.crops and now.layout == "as given"
            assert now.description == f"skip_zero_advantage=True (padding kept: {reason})"
    accelerate_trainer(trainer)
    assert capsys.readouterr().out.endswith("; skip_zero_advantage=True, " + NO_CHECKPOINTING)


def equal_rewards(prompts: list[str], **_: Any) -> list[float]:
    return [0.7] * len(prompts)


# A trainer, whether it sets advantages of equal rewards to 0, and what it prints about them.
EQUAL: dict[str, tuple[Any, bool, str]] = {
    "GSPOTrainer": (GSPOTrainer, True, "They are set to 0, unless GSPOConfig(zero_equal_rewards=False) keeps them"),
    "GSPOTrainer, TRL's advantages": (GSPOTrainer, False, ""),
    "accelerate_trainer": (GRPOTrainer, True, "frac_reward_zero_std may miss these groups"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_rewards_move_weights_in_stock_trl_only(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, zeroes, text = EQUAL[name]
    options = {"config": GSPOConfig, "zero_equal_rewards": zeroes, "num_generations": 8, "weight_decay": 0.0}
    trainer = accelerate_trainer(trainer_of(tmp_path, equal_rewards, kind, **options))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = max((a - b).abs().max().item() for a, b in zip(trainer.model.parameters(), before, strict=True))
    printed = capsys.readouterr().out
    assert printed.count("groups with equal rewards had advantages from rounding, up to ") == bool(text)
    assert text in printed
    rows = {log["gspo/rows_run"] for log in steps_of(trainer)}
    shares = {log["frac_reward_zero_std"] for log in steps_of(trainer) if "frac_reward_zero_std" in log}
    if kind is GSPOTrainer and zeroes:
        assert moved == 0 and set(trainer._logs["advantages"]) == {0.0}
        assert (rows, shares) == ({0}, {1})
    else:
        assert moved > 1e-3 and min(map(abs, trainer._logs["advantages"])) > 1e-5
        assert (rows, shares) == ({1}, {0})


@pytest.mark.parametrize(
    ("training", "scale", "share"), [(True, "group", 0.5), (True, "batch", 0.0), (False, "group", 0.75)]
)
def test_equal_groups_get_advantage_0_on_every_rank(
    training: bool, scale: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks have eight answers each, in groups of four, and of two in evaluation."""
    trainer = trainer_of(tmp_path, equal_rewards, GSPOTrainer, scale_rewards=scale, num_generations_eval=2)
    rewards, metrics = trainer._calculate_rewards.__self__, trainer._metrics["train" if training else "eval"]
    trainer.model.train(training)
    rewards._rewards = torch.tensor([0.7] * 4 + [0, 0, 2, 3] * 2 + [0.7] * 4)[:, None]

    def generate(inputs: Any) -> dict[str, Tensor]:
        metrics["frac_reward_zero_std"].append(0.0)
        trainer._logs["advantages"].extend([1.0] * 16)
        return {"advantages": torch.ones(8)}

    monkeypatch.setattr(rewards, "_generate", generate)
    expected = [0, 0, 0, 0, 1, 1, 1, 1] if training else [0, 0, 0, 0, 0, 0, 1, 1]
    expected += expected[4:] + expected[:4]
    for rank in range(2):
        monkeypatch.setattr(accelerate.Accelerator, "process_index", rank)
        local = rewards._generate_and_score(None)["advantages"]
        assert local.tolist() == expected[8 * rank :][:8]
        assert list(trainer._logs["advantages"]) == expected and metrics["frac_reward_zero_std"][-1] == share


class OwnAdvantages(GSPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        return output | {"advantages": torch.ones_like(output["advantages"])}


def test_a_subclass_keeps_its_own_advantages(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, equal_rewards, OwnAdvantages, max_steps=1)
    trainer.train()
    assert steps_of(trainer)[0]["gspo/rows_run"] == 1


def test_groups_are_equal_by_their_totals_or_by_every_reward(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, equal_rewards, GSPOTrainer)
    rewards = trainer._calculate_rewards.__self__
    nan = torch.nan
    groups = [
        [[0.7, 0.1]] * 4,
        [[0.7, 0.1]] * 3 + [[0.7, 0.2]],
        [[nan, nan]] * 4,
        [[nan, nan]] + [[0.7, 0.1]] * 3,
        [[0.5, 0.25], [0.25, 0.5], [nan, 0.75], [0.75, nan]],
    ]
    rewards._rewards = torch.tensor(groups).view(20, 2)
    trainer.reward_weights = torch.ones(2)
    assert rewards._equal(4).view(5, 4).tolist() == [[x] * 4 for x in (True, False, True, False, True)]
    trainer.reward_weights = torch.tensor([2.0, 1.0])
    assert rewards._equal(4).view(5, 4).tolist() == [[x] * 4 for x in (True, False, True, False, False)]
    trainer.multi_objective_aggregation = "normalize_then_sum"
    assert rewards._equal(4).view(5, 4).tolist() == [[x] * 4 for x in (True, False, True, False, False)]
