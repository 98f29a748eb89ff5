"""Check a run of the reference trainer while it trains: every update and step against float64 and formulas.

The truth has its own copies of the models, in float64. It computes full logits of all answers of a mini-batch, without
cropping, reordering or leaving out rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from tolerance import (
    METRIC_ABSOLUTE,
    METRIC_RELATIVE,
    MODEL_LOG_PROB_ABSOLUTE,
    PARAMETER_ABSOLUTE,
    TRAINER_LOG_RELATIVE,
    decision_band,
)
from torch import Tensor

from gspo_kernels import policy_loss
from gspo_kernels.integrations.reference_trainer import TrainConfig
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.distributed import full, gather, gathered, world
from gspo_kernels.integrations.reference_trainer.policy import positions_of
from gspo_kernels.integrations.reference_trainer.sampling import sample
from gspo_kernels.integrations.reference_trainer.update import take
from gspo_kernels.integrations.reference_trainer.zero_advantage import live_rows, rows_to_run
from gspo_kernels.metrics import DIVISORS
from gspo_kernels.objective import CLIPPING
from gspo_kernels.reference import gspo_reference_loss, mask_of_sets
from gspo_kernels.sampler_mismatch import importance_weights


def close(value: Any) -> Any:
    return pytest.approx(float(value), rel=METRIC_RELATIVE, abs=METRIC_ABSOLUTE)


def of_log_probs(value: Any) -> Any:
    """Allow the error of log-probs of a model in fp32, which is larger for large logits."""
    return pytest.approx(float(value), rel=TRAINER_LOG_RELATIVE, abs=TRAINER_LOG_RELATIVE)


def assert_log_probs(ours: Tensor, true: Tensor) -> None:
    torch.testing.assert_close(ours.double(), true, rtol=TRAINER_LOG_RELATIVE, atol=MODEL_LOG_PROB_ABSOLUTE)


class Truth:
    """Wraps functions of the trainer. Log-probs, losses and gradients are checked if the policy is in fp32."""

    def __init__(self, config: TrainConfig, patch: pytest.MonkeyPatch) -> None:
        self.config = config
        self.is_exact = config.precision == "fp32"
        self.of_step: list[dict[str, dict[str, Tensor]] | None] = []  # metrics of each update, None if not decided
        self.stock: dict[str, Any] = {}
        wrapped = {loop: "policy_of_seed update padded", loop.Optimizer: "zero_grad collect"}
        for owner, names in {**wrapped, loop.Learner: "learn evaluate"}.items():
            for name in names.split():
                self.stock[name], wrapper = getattr(owner, name), getattr(self, name)
                patch.setattr(owner, name, wrapper if owner is loop else lambda *x, of=wrapper: of(*x))

    def policy_of_seed(self, *arguments: Any) -> Any:
        policy = self.stock["policy_of_seed"](*arguments)
        self.truth = self.stock["policy_of_seed"](replace(arguments[0], parallel="ddp"), *arguments[1:])  # not sharded
        for model in (self.truth.model, *(x.model for x in (self.truth.initial, self.truth.teacher) if x)):
            model.double()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")  # grouped products have no float64
        if self.config.parallel == "ddp" and policy.initial:  # the reference is the policy before any update
            assert all(map(torch.equal, policy.initial.model.parameters(), policy.model.parameters()))
        self.truth.model.requires_grad_(False)
        for name, weight in policy.model.named_parameters():
            self.truth.model.get_parameter(name).requires_grad_(weight.requires_grad)
        self.moments: list[Any] = []
        self.updates = 0
        return policy

    def padded(self, policy: Any, answers: Any) -> Any:
        self.answers = [(answer.text, answer.example.answer) for answer in answers]
        return self.stock["padded"](policy, answers)

    # Log-probs, loss and gradient

    def logits(self, policy: Any, rollout: Any) -> tuple[Tensor, Any]:
        """Return logits over the temperature, [B, T, V], and the routers' loss."""
        mask = rollout.attention_mask
        options = {"output_router_logits": True} if policy.router_loss_weight else {}
        out = policy.model(input_ids=rollout.input_ids, attention_mask=mask, position_ids=positions_of(mask), **options)
        logits = out.logits[:, rollout.prompt_width - 1 : -1] / self.config.temperature
        columns = policy.fused.options.vocab_size or logits.shape[-1]
        return logits[..., :columns], getattr(out, "aux_loss", None)

    def log_probs(self, logits: Tensor, rollout: Any) -> Tensor:
        """Return log-probs of the answers over the ids that the loss keeps, [B, T]; 0 where masked."""
        if self.kept(rollout) is not None:
            logits = logits.masked_fill(~mask_of_sets(self.kept(rollout), logits.shape[-1]).view_as(logits), -math.inf)
        table = logits.log_softmax(-1).gather(-1, rollout.answer_ids[..., None])[..., 0]
        return torch.where(rollout.answer_mask, table, 0)

    def kept(self, rollout: Any) -> Any:
        return rollout.kept_sets if self.config.replay_kept_sets else None

    def update(self, config: TrainConfig, policy: Any, optimizer: Any, batch: Any, rows: Tensor, first: bool) -> Any:
        self.truth.model.load_state_dict({name: full(x).double() for name, x in policy.model.state_dict().items()})
        if not self.of_step and self.is_exact:
            self.check_log_probs(batch)
        expected = self.expected(batch, rows, first) if self.is_exact else None
        before, old = [full(master).double() for master in optimizer.masters], batch.old_log_probs.clone()
        taken = self.stock["update"](config, policy, optimizer, batch, rows, first)
        assert not self.of_step or torch.equal(batch.old_log_probs, old)
        if config.old_log_probs == "trainer" and (not self.of_step or config.learning_rate < 1e-20):
            first_epoch = len(self.of_step) < config.updates_per_rollout
            assert not first_epoch or taken.numbers["ratio_min"] == taken.numbers["ratio_max"] == 1
        self.check_optimizer(optimizer, before, taken.numbers)
        assert 0 <= taken.numbers.get("dropped_gradient_mass", 0) <= config.gradient_budget
        if policy.row_checkpoint and not policy.row_checkpoint.fallbacks:
            assert 0 <= taken.numbers["rows_differentiated"] <= 1
        of_step = None
        if expected is not None and not self.is_undecided(expected):
            self.check_update(optimizer, taken.numbers, expected)
            if first:
                ran = expected["ran_rows"]
                assert_log_probs(batch.old_log_probs[rows[ran]], expected["log_probs"][ran])
            of_step = {"whole": expected["whole"], "ran": expected["ran"]}
        self.of_step.append(of_step)
        return taken

    def check_log_probs(self, batch: Any) -> None:
        """Compare the log-probs of a rollout, whose weights are still those that sampled it."""
        rollout, config, mask = batch.rollout, self.config, batch.rollout.answer_mask
        with torch.no_grad():
            now = self.log_probs(self.logits(self.truth, rollout)[0], rollout)
            if config.sampler_precision == "" and (config.replay_kept_sets or not config.truncation.is_on):
                assert_log_probs(rollout.log_probs, now)
            if batch.ref_log_probs is not None:
                with self.truth.reference() as reference:
                    ref = self.log_probs(self.logits(reference, rollout)[0], rollout)
                assert_log_probs(batch.ref_log_probs[mask], ref[mask])
        if config.old_log_probs == "sampler":
            assert torch.equal(batch.old_log_probs, rollout.log_probs)
            return
        ran = torch.ones(len(mask), dtype=torch.bool) if batch.live is None else batch.live
        # The first update has not yet stored the old log-probs of its own rows.
        known = (batch.old_log_probs != rollout.log_probs).any(1)
        # Of several processes, one with fewer live rows runs others, too.
        assert batch.live is None or world() > 1 or not known[~ran].any()
        if config.sampler_precision and not config.truncation.is_on:
            assert (ran & ~known).sum() <= config.mini_batch_size
        assert_log_probs(batch.old_log_probs[known], now[known])

    def expected(self, batch: Any, rows: Tensor, first: bool) -> dict[str, Any]:
        """Return loss, gradient and metrics of an update, in float64."""
        config, of, truth = self.config, self.config.objective, self.truth
        whole = take(batch, rows)
        rollout, mask = whole.rollout, whole.rollout.answer_mask
        shares = torch.arange(len(rows)).chunk(world())
        micro = [x for share in shares for x in share.split(config.micro_batch_size or len(share))]
        parts = [self.logits(truth, take(rollout, x)) for x in micro]
        logits = torch.cat([x for x, _ in parts])
        old: Any = None if first else whole.old_log_probs.double()
        ref = None if whole.ref_log_probs is None or not of.kl_coef else whole.ref_log_probs.double()
        weights = None
        corrections = of.rollout_correction or ()
        corrections = corrections if isinstance(corrections, tuple) else (corrections,)
        options: dict[str, Any] = {}
        for x in corrections:
            weighed = importance_weights(old, rollout.log_probs.double(), mask, **vars(x))
            weights = weighed.weights if weights is None else weights * weighed.weights
            options["rollout_log_probs"] = rollout.log_probs.double()
        out = gspo_reference_loss(  # with an identity for a head, hidden states are logits
            logits, torch.eye(logits.shape[-1], dtype=torch.float64), rollout.answer_ids, whole.advantages.double(),
            mask=mask, old_log_probs=old, ref_log_probs=ref, token_weights=weights, kept_sets=self.kept(rollout),
            objective=replace(of, rollout_correction=None),
        )  # fmt: skip
        ran = torch.isin(rows, rows_to_run(self.live(batch), rows))
        scopes = {}
        for name, chosen in (("whole", torch.ones_like(ran)), ("ran", ran)):

            def pick(x: Tensor | None, chosen: Tensor = chosen) -> Any:
                return None if x is None else x.detach()[chosen]

            metrics = policy_loss(
                pick(out.log_probs), pick(whole.advantages).double(), mask=mask[chosen], old_log_probs=pick(old),
                ref_log_probs=pick(ref), entropy=pick(out.entropy), objective=of, backend="torch",
                **{key: pick(x) for key, x in options.items()},
            ).metrics  # fmt: skip
            scopes[name] = dict(metrics)
        r = out.log_probs.detach() - (out.log_probs.detach() if old is None else old)
        scopes["ran"]["r"] = r[ran][mask[ran]]
        scopes["ran"]["u"] = torch.stack([x[m].mean() for x, m in zip(r[ran], mask[ran], strict=True)])
        loss = out.loss
        if truth.router_loss_weight:
            aux = torch.stack([x for _, x in parts]).mean()
            loss, scopes["ran"]["router_aux_loss"] = loss + truth.router_loss_weight * aux, aux.detach()
        if truth.teacher is not None:
            q = self.logits(truth.teacher, rollout)[0][mask][:, : logits.shape[-1]].softmax(-1).detach()
            q, ids = q.topk(config.distillation_k)
            p = logits[mask].softmax(-1).gather(-1, ids)
            p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
            divergence = (q * (q / p).log()).sum(-1).mean()
            loss = loss + config.distillation_coef * divergence
            scopes["ran"] |= {"distillation": divergence.detach(), "teacher_mass": 1 - q[:, -1].mean()}
        trained = [x for x in truth.model.parameters() if x.requires_grad]
        gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, trained, materialize_grads=True)])
        scopes["ran"]["lengths"] = mask.sum(1)[ran]
        log_probs = out.log_probs.detach()
        return {"loss": loss.detach(), "gradient": gradient, "ran_rows": ran, "log_probs": log_probs, **scopes}

    def live(self, batch: Any) -> Tensor | None:
        return None if batch.live is None else live_rows(batch.advantages, batch.rollout.answer_mask)

    def is_undecided(self, expected: dict[str, Any]) -> bool:
        """Whether a ratio is so close to a bound that fp32 may clip otherwise than float64."""
        of, ran = self.config.objective, expected["ran"]
        if of.surrogate not in (*CLIPPING, "gmpo", "topr", "cispo"):
            return False
        if of.surrogate.startswith("dppo"):
            return True
        tokens = of.ratio == "token" or of.surrogate == "gmpo"
        u = ran["r"] if tokens else ran["u"]
        if of.ratio == "sequence-product":
            u = ran["u"] * ran["lengths"]
        if of.surrogate == "gmpo":
            bounds = [-of.clip_low, of.clip_high]
        elif of.surrogate == "topr":
            bounds = [0.0] if u.any() else []
        else:
            bounds = [math.log1p(-of.clip_low) if of.clip_low < 1 else -math.inf, math.log1p(of.clip_high)]
        return any(((u - bound).abs() < decision_band(1 if tokens else 4)).any() for bound in bounds)

    def check_update(self, optimizer: Any, numbers: dict[str, float], expected: dict[str, Any]) -> None:
        config = self.config
        assert numbers["rows_run"] == close(expected["ran_rows"].double().mean())
        loss = float(expected["loss"])
        assert numbers["loss"] == pytest.approx(loss, rel=TRAINER_LOG_RELATIVE, abs=MODEL_LOG_PROB_ABSOLUTE)
        self.check_metrics(numbers, [expected])
        if config.gradient_budget:
            return
        true, ours = expected["gradient"], torch.cat([full(x.grad).flatten().double() for x in optimizer.masters])
        # With equal rewards, gradients of KL and teacher nearly cancel, and rounding remains. In the first step, the
        # gradient of the KL is 0 in fp32. In float64 it is not, because the reference's log-probs were rounded.
        of_rounding = 1 + 2 * (config.objective.kl_coef != 0)
        limit = TRAINER_LOG_RELATIVE * (true.norm().item() + of_rounding)
        assert numbers["grad_norm"] == pytest.approx(true.norm().item(), rel=0, abs=limit)
        factor = min(1.0, config.max_grad_norm / (numbers["grad_norm"] + 1e-6))
        assert (ours / factor - true).norm() <= limit

    def check_metrics(self, numbers: dict[str, float], updates: list[dict[str, Any]]) -> None:
        """Compare the metrics of one update or of a step. `updates`: see `of_step`."""
        ran = [x["ran"] for x in updates]
        for name, divisor in {**DIVISORS, "distillation": "tokens", "teacher_mass": "tokens"}.items():
            of_all = "clip_fraction" in name or name == "zero_coefficient_share"
            parts = [x["whole" if of_all else "ran"] for x in updates]
            name = name if name in parts[0] else f"rollout_{name}"
            # In the first step, KL has no gradient in fp32, and a tiny one from rounding in float64.
            if name not in parts[0] or (name == "zero_coefficient_share" and self.config.objective.kl_coef):
                continue
            counts = [float(x[divisor]) for x in parts]
            if sum(counts) == 0:
                continue
            values = [float(x[name]) for x in parts]
            expected = sum(x * count for x, count in zip(values, counts, strict=True)) / sum(counts)
            if name.endswith(("_min", "_max")):
                expected = (min if name.endswith("_min") else max)(values)
            assert numbers[name] == of_log_probs(expected), name
        if "router_aux_loss" in ran[0]:
            assert numbers["router_aux_loss"] == close(fmean(float(x["router_aux_loss"]) for x in ran))
        for name, key in (("token_log_ratio_std", "r"), ("sequence_log_ratio_std", "u")):
            assert numbers[name] == of_log_probs(torch.cat([x[key] for x in ran]).std(correction=0)), name

    # The optimizer

    def zero_grad(self, optimizer: Any) -> None:
        self.collected: list[Tensor] = []
        self.stock["zero_grad"](optimizer)

    def collect(self, optimizer: Any) -> None:
        """Record the gradient of a micro-batch before it is added to the masters' gradients."""
        half = [w for w, m in zip(optimizer.weights, optimizer.masters, strict=True) if m is not w]
        if half:
            gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in half]
            self.collected.append(torch.cat([full(g).double().flatten() for g in gradients]))
        self.stock["collect"](optimizer)

    def check_optimizer(self, optimizer: Any, before: list[Tensor], numbers: dict[str, float]) -> None:
        """Compare a step with AdamW's formula, in float64, and the sum of micro-batches in half precision."""
        config = self.config
        gradients = [full(x.grad).double() for x in optimizer.masters]
        half = config.half_dtype
        if config.parallel == "fsdp2" and half and not config.uses_autocast and any(map(torch.any, gradients)):
            rounded = [x.to(getattr(torch, half)).double() for x in gradients]
            assert not all(map(torch.equal, rounded, gradients)), "FSDP2 must average gradients in fp32"
        if self.collected:
            scaled = torch.stack(gather(torch.stack(self.collected).sum(0))).mean(0)
            norm = scaled.norm().item() / numbers.get("loss_scale", 1)
            assert numbers["grad_norm"] == pytest.approx(norm, rel=TRAINER_LOG_RELATIVE, abs=METRIC_ABSOLUTE)
            scale = numbers.get("loss_scale", 1) * max(1.0, (numbers["grad_norm"] + 1e-6) / config.max_grad_norm)
            expected = scaled / scale
            ours = torch.cat([x.flatten() for x in gradients])
            torch.testing.assert_close(ours, expected, rtol=TRAINER_LOG_RELATIVE, atol=METRIC_ABSOLUTE)
        self.updates += 1
        rate, decay = config.learning_rate_at(self.updates - 1), config.weight_decay
        self.moments = self.moments or [(0.0, 0.0)] * len(before)
        self.moments = [
            (0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2) for (m, v), g in zip(self.moments, gradients, strict=True)
        ]
        for weight, master, start, (m, v) in zip(
            optimizer.weights, optimizer.masters, before, self.moments, strict=True
        ):
            step = (m / (1 - 0.9**self.updates)) / ((v / (1 - 0.999**self.updates)).sqrt() + 1e-8)
            expected = start * (1 - rate * decay) - rate * step
            ours = full(master).double()
            torch.testing.assert_close(ours, expected, rtol=METRIC_RELATIVE, atol=PARAMETER_ABSOLUTE)
            assert torch.equal(full(weight), full(master).to(weight.dtype))

    # Steps and evaluations

    def learn(self, learner: Any, prepared: Any) -> Any:
        config, rollout, task = self.config, prepared.rollout, learner.task
        answers, self.of_step = self.answers, []
        of, policy = config.objective, learner.policy
        all_run = of.kl_coef or of.entropy_coef or policy.teacher or policy.router_loss_weight or config.needs_reference
        assert (prepared.batch.live is None) == bool(all_run or config.skip_zero_advantage is False)
        row, updates = self.stock["learn"](learner, prepared)
        columns = {x.name: [x.function(*pair) for pair in answers] for x in task.rewards.components}
        failed = sum(x != x for column in columns.values() for x in column)  # NaN
        columns = {name: [0.0 if x != x else x for x in column] for name, column in columns.items()}
        weights = {x.name: x.weight for x in task.rewards.components}
        totals = [
            [weights[name] * column[i] for name, column in columns.items() if column[i] is not None]
            for i in range(len(answers))
        ]
        scored = [sum(x) for x in totals if x]
        assert row["reward"] == close(fmean(scored)) if scored else row["reward"] == 0
        for name, column in columns.items():
            applied = [x for x in column if x is not None]
            assert not applied or row[f"reward/{name}"] == close(fmean(applied))
        assert row.get("reward_failures", 0) == failed
        assert row.get("unscored", 0) == close(1 - len(scored) / len(answers))
        sums = [sum(x) if x else None for x in totals]
        groups = [{*sums[i : i + config.group_size]} - {None} for i in range(0, len(sums), config.group_size)]
        assert row["groups_without_signal"] == close(fmean(len(group) < 2 for group in groups))
        assert row["truncated"] == close(rollout.truncated.double().mean())
        assert row["answer_tokens"] == close(rollout.answer_mask.sum() / len(answers))
        assert row["learning_rate"] == close(config.learning_rate_at(self.updates - 1))
        assert row["clip_fraction_first_update"] == updates[0].numbers["clip_fraction"]
        for name in ("loss", "grad_norm", "rows_run", *({"rows_differentiated"} & row.keys())):
            assert row[name] == close(fmean(x.numbers[name] for x in updates))
        if None not in self.of_step:
            self.check_metrics(row, self.of_step)  # type: ignore[arg-type]
        self.of_step = []
        return row, updates

    def evaluate(self, learner: Any, step: int) -> Any:
        metrics, samples = self.stock["evaluate"](learner, step)
        if self.is_exact:
            held_out = learner.task.held_out
            with gathered(learner.policy):
                greedy = sample(learner.policy, held_out, max_new_tokens=self.config.max_new_tokens, temperature=None)
            batch = learner.task.rewards(greedy.texts, held_out)
            assert metrics["eval_reward"] == close(batch.mean)
        return metrics, samples
