"""A teacher in TRL's trainer: losses, gradients, weights and logs match a computation from full float64 logits."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
import datasets
import transformers
from helpers.ranks import run_ranks
from helpers.trl_trainer import checkpoint, make_trainer
from tolerance import LOG_PROB_RMS_BF16X3, MODEL_GRADIENT_RELATIVE, TRAINER_ABSOLUTE, TRAINER_LOG_RELATIVE
from torch import Tensor
from trl import GRPOTrainer

from gspo_kernels.integrations.trl import GSPOConfig, GSPOTrainer, accelerate_trainer, zero_advantage
from gspo_kernels.integrations.trl.zero_advantage import loss_mask

K, COEF = 3, 0.7
OPTIONS: dict[str, Any] = {"distillation_coef": COEF, "distillation_k": K, "max_grad_norm": 1e9, "epsilon": 0.2}
OPTIONS |= {"epsilon_high": 0.2, "gradient_accumulation_steps": 4, "steps_per_generation": 8, "temperature": 0.8}


def teacher_of(folder: Path) -> str:
    """Write another model with the same tokenizer, whose head has two more columns of padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(folder))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.resize_token_embeddings(12)
    model.save_pretrained(folder)
    return str(folder)


def full_log_probs(model: Any, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """Compute log-probs [B, C, V] of the answers from full logits, a row at a time, without padding."""
    ids, attended = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    width, rows = batch["completion_ids"].shape[1], []
    for row, answer, mask in zip(ids, batch["completion_mask"], attended.bool(), strict=True):
        logits = model(input_ids=row[mask][None], use_cache=False).logits[0, -1 - int(answer.sum()) : -1, :10]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, width - len(logits))))
    return (torch.stack(rows) / temperature).log_softmax(-1)


def dead_reward(completions: list[str], **_: Any) -> list[float]:
    """Of every second group, all answers get 1."""
    return [1.0 if i // 4 % 2 else float(text.count("a") - text.count("b")) for i, text in enumerate(completions)]


class Reference:
    """Repeats each optimizer step in float64 with full logits, from the batches that the trainer gets."""

    def __init__(self, trainer: Any, teacher: Any, is_uneven: bool = False) -> None:
        self.trainer = trainer
        self.teacher = teacher.double()
        self.is_uneven = is_uneven  # whether answers have different numbers of teacher ids per token
        self.batches: list[dict[str, Any]] = []
        self.errors: list[float] = []
        self.logs: list[tuple[float, ...]] = []  # divergence and the teacher's probability per token, rows that run
        self.stepped = 0
        compute, reference = trainer._compute_loss, self

        def compute_loss(model: Any, inputs: Any) -> Tensor:
            if model.training:
                reference.batches.append(dict(inputs))
            return compute(model, inputs)

        class Check(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                reference.check()

        trainer._compute_loss = compute_loss
        trainer.add_callback(Check())

    def check(self) -> None:
        trainer, temperature = self.trainer, self.trainer.temperature
        model = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model)).eval()
        twin = type(model)(model.config).double().eval()
        twin.load_state_dict(model.state_dict())
        total, divergences, inside, tokens = torch.zeros(()), 0.0, 0.0, 0
        run = torch.cat([loss_mask(batch).any(1) for batch in self.batches])
        for batch in self.batches:
            mask = loss_mask(batch)
            log_p = full_log_probs(twin, batch, temperature)
            with torch.no_grad():
                q, ids = full_log_probs(self.teacher, batch, temperature).exp().topk(K, -1)
            kept = torch.arange(K) < (count_of(batch["completion_ids"])[:, None, None] if self.is_uneven else K)
            q = q * kept
            new = log_p.gather(-1, batch["completion_ids"][..., None])[..., 0]
            old = batch.get("old_per_token_logps", new.detach()).double()
            ratio = (((new - old) * mask).sum(1) / mask.sum(1).clamp(min=1)).exp()
            advantages = batch["advantages"]
            policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean() / len(self.batches)
            p = log_p.exp().gather(-1, ids) * kept
            x, y = (p, q) if trainer.args.distillation_kind == "reverse" else (q, p)
            per_token = (x * (torch.where(kept, x, 1) / torch.where(kept, y, 1)).log()).sum(-1)
            if trainer.args.distillation_tail == "bucket":
                rest_x, rest_y = 1 - x.sum(-1), 1 - y.sum(-1)
                per_token = per_token + rest_x * (rest_x / rest_y).log()
            count = batch["num_items_in_batch"] * len(self.batches) / trainer.accelerator.num_processes
            total = total + policy + self.coef() * (per_token * mask).sum() * trainer.args.steps_per_generation / count
            divergences += (per_token * mask).sum().item()
            inside += (q.sum(-1) * mask).sum().item()
            tokens += int(mask.sum())
        total.backward()
        ours, truth = (torch.cat([p.grad.flatten() for p in x.parameters()]) for x in (trainer.model, twin))
        truth = trainer.accelerator.reduce(truth, reduction="mean")
        assert truth.norm() > 0
        self.errors.append(((ours - truth).norm() / truth.norm()).item())
        self.logs.append((divergences / tokens, inside / tokens, run.double().mean().item()))
        self.batches = []
        self.stepped += 1

    def coef(self) -> float:
        steps = self.trainer.state.max_steps
        return COEF * (1 - self.stepped / steps if self.trainer.args.distillation_schedule == "linear" else 1)


def count_of(completion_ids: Tensor) -> Tensor:
    """Number of teacher ids per token that `Scored` returns for each answer, [B]; fewer after an odd first token."""
    return K - completion_ids[:, 0] % 2


class Scored:
    """A rollout_func that returns random answers and what a local teacher returns for them."""

    def __init__(self, teacher: Any) -> None:
        self.teacher, self.generator = teacher, torch.Generator().manual_seed(0)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        made: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs")}
        made |= {"teacher_ids": [], "teacher_log_probs": []}
        for i in range(len(prompts)):
            prompt, answer = (torch.randint(2, 10, (1, n), generator=self.generator) for n in (2 + i % 2, 1 + i % 6))
            if i % 3:  # the others are truncated
                answer[0, -1] = trainer.processing_class.eos_token_id
            batch = {"prompt_ids": prompt, "completion_ids": answer}
            batch |= {name.replace("ids", "mask"): torch.ones_like(x) for name, x in batch.items()}
            with torch.no_grad():
                count = int(count_of(answer))
                log_q, ids = full_log_probs(self.teacher, batch, trainer.temperature)[0].topk(count, -1)
            values = prompt[0], answer[0], torch.zeros(answer.shape[1]), ids, log_q
            for name, value in zip(made, values, strict=True):
                made[name].append(value.tolist())
        return made


CASES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "packed": {"mask_truncated_completions": True},
    "not skipped": {
        "skip_zero_advantage": False,
        "gradient_checkpointing": True,
        "distillation_kind": "reverse",
        "distillation_tail": "drop",
    },
    "rollout_func": {"gradient_checkpointing": True, "num_iterations": 2, "mask_truncated_completions": True},
    "short last step of an epoch": {
        "prompts": 6,
        "num_train_epochs": 2,
        "max_steps": -1,
        "distillation_schedule": "linear",
        "steps_per_generation": 6,
    },
    "linear": {"distillation_schedule": "linear", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    "tools": {},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_logs_equal_those_of_full_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = teacher_of(tmp_path / "teacher")
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    if case == "packed":  # SDPA gets a mask that keeps sequences apart
        monkeypatch.setattr(zero_advantage, "may_be_packed", lambda model: True)
    kind = partial(GSPOTrainer, **({"rollout_func": Scored(full)} if case == "rollout_func" else {"teacher": folder}))
    options = OPTIONS | CASES[case]
    if case == "evaluated":
        options["eval_dataset"] = datasets.Dataset.from_list([{"prompt": "ab"}] * 4)
    trainer: Any = make_trainer(kind, checkpoint(tmp_path / "model"), tmp_path, config=GSPOConfig, **options)  # type: ignore[arg-type]
    trainer.reward_funcs = [dead_reward]
    generate = trainer._generate_and_score_completions

    def with_tools(inputs: Any) -> Any:
        output = generate(inputs)
        ids = output["completion_ids"]
        return output | {"tool_mask": (torch.arange(ids.shape[1]) % 3 != 2).expand_as(ids).contiguous()}

    if case == "tools":
        trainer._generate_and_score_completions = with_tools
    reference = Reference(trainer, full, is_uneven=case == "rollout_func")
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == len(reference.errors) == 4
    assert max(reference.errors) <= MODEL_GRADIENT_RELATIVE[torch.float32], reference.errors
    for log, (divergence, inside, run) in zip(logs, reference.logs, strict=True):
        assert log["gspo/distillation"] == pytest.approx(divergence, rel=TRAINER_LOG_RELATIVE)
        assert log["gspo/teacher_mass"] == pytest.approx(inside, rel=TRAINER_LOG_RELATIVE)
        assert log.get("gspo/rows_run", run) == pytest.approx(run)  # also answers with advantage 0


def rank_main(rank: int, folder: Path) -> None:
    full = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float64).eval()
    runs = []
    for moves in (None, False):
        scored = Scored(full)
        scored.generator.manual_seed(rank)
        options = OPTIONS | {"max_steps": 2, "skip_zero_advantage": moves}
        kind: Any = partial(GSPOTrainer, rollout_func=scored)
        trainer: Any = make_trainer(kind, str(folder / "model"), folder / str(rank), config=GSPOConfig, **options)
        costs = itertools.cycle((1.0, 0.0))  # alone, shared
        reference = Reference(trainer, full, is_uneven=True) if moves is False else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zero_advantage, "tokens_of_slowest", lambda *_, costs=costs: torch.tensor(next(costs)))
            trainer.train()
        assert reference is None or max(reference.errors) <= MODEL_GRADIENT_RELATIVE[torch.float32], reference.errors
        assert [len(order) for order in trainer._gspo_live._orders] == ([] if moves is False else [2, 2])
        logs = [log["gspo/distillation"] for log in trainer.state.log_history if "loss" in log]
        runs.append((torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), logs))
    (weights, logs), (expected, expected_logs) = runs
    assert logs == pytest.approx(expected_logs, rel=TRAINER_LOG_RELATIVE)
    torch.testing.assert_close(weights, expected, rtol=TRAINER_ABSOLUTE, atol=TRAINER_ABSOLUTE)


@pytest.mark.slow
def test_a_teachers_log_probs_move_to_other_ranks_with_their_answers(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    teacher_of(tmp_path / "teacher")
    run_ranks(rank_main, 2, tmp_path, deadline=480.0)


@pytest.mark.parametrize(
    "option",
    [
        {"head_precision": "fp32"},
        {"cast_lm_head_to_fp32": True},
        {"cast_lm_head_to_fp32": True, "head_precision": "bf16x3"},
        {},  # by a later call
    ],
    ids=str,
)
def test_autocast_does_not_round_the_teachers_head(option: dict[str, Any], tmp_path: Path) -> None:
    kind: Any = partial(GSPOTrainer, teacher=teacher_of(tmp_path / "teacher"))
    options = OPTIONS | {"bf16": True, "model_init_kwargs": {"dtype": "float32"}, **option}
    trainer: Any = make_trainer(kind, checkpoint(tmp_path / "model"), tmp_path, config=GSPOConfig, **options)
    if not option:
        accelerate_trainer(trainer, head_precision="fp32")
    teacher = vars(trainer)[zero_advantage.TEACHER]
    assert teacher.head_precision == option.get("head_precision", "fp32")
    ids = torch.randint(2, 10, (4, 9), generator=torch.Generator().manual_seed(0))
    top = teacher.top_k(ids, torch.ones_like(ids), torch.ones(4, 6, dtype=torch.bool), "as given")
    with torch.no_grad(), trainer.accelerator.autocast():
        hidden = teacher.model.model(ids, use_cache=False).last_hidden_state[:, 2:-1]
    logits = 4 * (hidden.double() @ teacher.model.lm_head.weight[:10].double().T / 4).tanh()
    truth = (logits / trainer.temperature).log_softmax(-1).topk(K)
    assert (top.log_probs - truth.values).abs().max() < LOG_PROB_RMS_BF16X3
    assert torch.equal(top.ids, truth.indices)


def test_a_teacher_with_learned_positions_keeps_the_padding(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 10, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    teacher = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    policy = checkpoint(tmp_path / "model")
    for model, layout in ((teacher, "as given"), (policy, "aligned")):
        kind: Any = partial(GSPOTrainer, teacher=model)
        trainer: Any = make_trainer(kind, policy, tmp_path, config=GSPOConfig, **OPTIONS)
        assert trainer._gspo_live.skipping.layout == layout
        assert not vars(trainer)[zero_advantage.TEACHER].model.training


def test_a_teacher_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    policy, other = (
        checkpoint(tmp_path / "model"),
        transformers.AutoModelForCausalLM.from_pretrained(teacher_of(tmp_path / "teacher")),
    )

    def made(teacher: Any, kind: Any = GSPOTrainer, **options: Any) -> Any:
        kind = kind if teacher is None else partial(kind, teacher=teacher)
        return make_trainer(kind, policy, tmp_path, config=GSPOConfig, **{**OPTIONS, **options})

    with pytest.raises(ValueError, match=r"^GSPOTrainer: distillation_coef must be a number > 0 with teacher, got 0$"):
        made(other, distillation_coef=0)
    with pytest.raises(ValueError, match=r"teacher must be a model with 10 ids, like the policy, got one with 12$"):
        made(other)
    with pytest.raises(
        TypeError, match=r"^GSPOTrainer: teacher must be a transformers model, its folder or .*, got 3$"
    ):
        made(3)
    with pytest.raises(ValueError, match=r"skip_zero_advantage must be None or False with distillation_coef=0.7"):
        made(policy, skip_zero_advantage=True)
    with pytest.raises(ValueError, match=r"^accelerate_trainer: distillation_coef must be 0 \(GSPOTrainer takes"):
        accelerate_trainer(made(None, GRPOTrainer))
    with pytest.raises(ValueError, match=r"^GSPOTrainer: teacher_ids must be \[\d, k\] for answer 0, .*, got None$"):
        made(None).train()
    model = transformers.AutoModelForCausalLM.from_pretrained(policy)
    for change, message in (
        (lambda rows: rows[:-1], r"teacher_ids must be \[\d, k\] for answer 0"),
        (
            lambda rows: [row[:-1] for row in rows],
            r"teacher_log_probs must be \[.*, 2\] like teacher_ids, got .*, 3\]",
        ),
    ):

        def returns(prompts: list[str], trainer: Any, change: Any = change) -> dict[str, Any]:
            made = Scored(model)(prompts, trainer)
            return {**made, "teacher_ids": [change(ids) for ids in made["teacher_ids"]]}

        kind: Any = partial(GSPOTrainer, rollout_func=returns)
        with pytest.raises(ValueError, match=message):
            make_trainer(kind, policy, tmp_path, config=GSPOConfig, **OPTIONS).train()
    kind = partial(GSPOTrainer, teacher=model)
    with pytest.raises(ValueError, match=r"teacher must be another model than the policy, which it would freeze"):
        make_trainer(kind, model, tmp_path, config=GSPOConfig, **OPTIONS)
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"h"', '"i"'))
    with pytest.raises(ValueError, match=r"vocabulary, where 'h' has the id 9, got one where it has no id$"):
        made(str(tmp_path / "teacher"))
