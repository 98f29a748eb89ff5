"""Call each seam as its trainer calls it, and compare the result with the trainer's GSPO formula in float64.

A seam is our function in place of a trainer's loss. The formulas are from the trainers' sources. The trainers are not
installed, so simple fakes stand for the objects that they pass. Some formulas have clamps (exp(10) in SkyRL, 1e4 in
prime-rl, k3 at 10 in ms-swift and slime). No value in these batches reaches a clamp.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.other_trainers import Rollout, assert_agree, rollout
from helpers.pages import INTEGRATIONS, OTHER_PYTHON, code_blocks
from tolerance import METRIC_RELATIVE, MODEL_GRADIENT_RELATIVE
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels.integrations.trainers import ms_swift, openrlhf, prime_rl, skyrl, slime
from gspo_kernels.sampler_mismatch import RolloutCorrection

B, EMPTY = 12, 7  # number of sequences, and the index of a sequence without unmasked tokens
GSPO = Objective()


@pytest.fixture
def batch() -> Rollout:
    """Return a batch with an entirely masked sequence, masked holes, a single-token sequence and an advantage of 0.

    Its ratios are beyond both bounds, and lengths differ.
    """
    batch = rollout(GSPO)
    batch.mask[EMPTY] = False
    return batch


def engine(b: Rollout) -> Tensor:
    """Return the sampler's log-probs [B, T]. Some of the importance weights that they give exceed 1.2."""
    return b.old + 0.15 * torch.randn(b.old.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def per_token(b: Rollout) -> Tensor:
    return b.advantages[:, None].expand_as(b.old).clone()


def lengths(b: Rollout) -> Tensor:
    return b.mask.sum(1, keepdim=True).clamp(min=1)


def sequence_ratio(lp: Tensor, old: Tensor, b: Rollout) -> Tensor:
    return (((lp - old) * b.mask).sum(1, keepdim=True) / lengths(b)).exp()


def clipped(ratio: Tensor, b: Rollout, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    return -torch.min(ratio * per_token(b), ratio.clamp(1 - low, 1 + high) * per_token(b))


def worse(ratio: Tensor, b: Rollout, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """Whether clipping changes the loss of a token, False where masked."""
    return (ratio.clamp(1 - low, 1 + high) * per_token(b) < ratio * per_token(b)) & b.mask


def k3(lp: Tensor, ref: Tensor) -> Tensor:
    return (ref - lp).exp() - (ref - lp) - 1


def check(b: Rollout, seam: Callable[[Tensor], tuple[Tensor, Any]], formula: Callable[[Tensor], Tensor]) -> Any:
    """Assert that a seam and a formula have the same loss and gradient. Return the seam's second result."""
    seam_input, formula_input = (b.log_probs.clone().requires_grad_() for _ in range(2))
    loss, second_result = seam(seam_input)
    loss.backward()
    expected = formula(formula_input)
    (gradient,) = torch.autograd.grad(expected, formula_input)
    assert seam_input.grad is not None and not seam_input.grad[~b.mask].any()
    assert_agree(b, (SimpleNamespace(loss=loss), seam_input.grad), expected.detach(), gradient)
    return second_result


# prime-rl: src/prime_rl/trainer/rl/loss.py. prime-rl has no GSPO. Its PPO with token ratios is the most similar loss.


def call_prime_rl(b: Rollout, lp: Tensor, weights: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call the seam like prime-rl's compute_loss: once per sequence. Divide the summed losses by the sum of weights."""
    total = lp.new_zeros(())
    outs = []
    scale = b.mask.sum() if weights is None else weights[b.mask].sum()
    for i in range(len(lp)):
        inputs: Any = SimpleNamespace(
            trainer_logprobs=lp[i],
            inference_logprobs=b.old[i],
            ref_logprobs=b.ref[i],
            advantages=per_token(b)[i],
            loss_mask=b.mask[i],
            loss_weights=None if weights is None else weights[i],
        )
        outs.append(prime_rl.loss(inputs, **kwargs))
        total = total + outs[-1].loss
    return total / scale, outs


def test_prime_rls_loss_is_gspo_divided_by_tokens(batch: Rollout) -> None:
    """With mean_length set to the mean length, the loss is GSPO's."""
    b = batch
    answers = B - 1

    def gspo(lp: Tensor, weights: Tensor | float = 1.0, kl: float = 0.0) -> Tensor:
        loss = clipped(sequence_ratio(lp, b.old, b), b) * weights + kl * k3(lp, b.ref)
        return (loss * b.mask / lengths(b)).sum()

    check(b, lambda lp: call_prime_rl(b, lp), lambda lp: gspo(lp) / b.mask.sum())
    length = b.mask.sum().item() / answers
    check(b, lambda lp: call_prime_rl(b, lp, mean_length=length), lambda lp: gspo(lp) / answers)
    check(b, lambda lp: call_prime_rl(b, lp, kl_coef=0.1), lambda lp: gspo(lp, kl=0.1) / b.mask.sum())
    weights = 0.5 + torch.arange(16.0, dtype=torch.float64).expand(B, 16) / 16
    check(b, lambda lp: call_prime_rl(b, lp, weights), lambda lp: gspo(lp, weights) / weights[b.mask].sum())
    with pytest.raises(ValueError, match="mean_length must be"):
        call_prime_rl(b, b.log_probs, mean_length=0.0)
    with pytest.raises(ValueError, match="clip_hi"):
        call_prime_rl(b, b.log_probs, clip_hi=0.1)


@pytest.mark.parametrize(("softcap", "truncated"), [(None, False), (4.0, False), (4.0, True)])
def test_prime_rls_head_equals_its_logits(softcap: float | None, truncated: bool) -> None:
    """Compare with src/prime_rl/trainer/models/layers/lm_head{,_gemma}.py, at another temperature for each token."""

    class FusedOutputLinear(torch.nn.Linear):
        softcap: float
        forward: Any = partialmethod(prime_rl.head, cache_mib=0)

    torch.manual_seed(0)
    head = FusedOutputLinear(16, 24, bias=False).double()
    if softcap is not None:
        head.softcap = softcap
    hidden = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(24, (2, 9))
    temperature = 0.5 + torch.rand(2, 9, dtype=torch.float64)
    logits = hidden @ head.weight.t()
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    log_p = (logits / temperature[..., None]).log_softmax(-1)
    expected = log_p.gather(-1, labels[..., None])[..., 0]
    sampling_mask = None
    if truncated:  # [2, 9, 4]: the label and up to three more ids, the label alone, another id alone, none
        sampling_mask = (labels[..., None] + torch.tensor([5, 0, 9, 2])) % 24
        sampling_mask[0, :, 3] = sampling_mask[0, :4, 0] = sampling_mask[1, :3, 2:] = sampling_mask[1, 0] = -1
        sampling_mask[1, 1, 1] = sampling_mask[0, 0, 2] = -1
        kept = torch.zeros(2, 9, 25, dtype=torch.bool).scatter(-1, sampling_mask % 25, True)[..., :24]
        replayed = (sampling_mask == labels[..., None]).any(-1)
        assert 0 < replayed.sum() < 17
        over_kept = expected - log_p.masked_fill(~kept, -torch.inf).logsumexp(-1)
        expected = torch.where(replayed, over_kept, expected)
        with pytest.raises(ValueError, match=r"sampling_mask must be a tensor \[B, T, K\] with B = 2 and T = 9"):
            head(hidden, labels, temperature=temperature, sampling_mask=sampling_mask[:, 1:])
    out = head(hidden, labels, temperature=temperature, sampling_mask=sampling_mask)
    operands = (hidden, head.weight)
    limit = MODEL_GRADIENT_RELATIVE[torch.float64]
    ours = torch.autograd.grad(out["logprobs"].exp().sum(), operands)
    theirs = torch.autograd.grad(expected.exp().sum(), operands)
    pairs = [(out["logprobs"], expected), (out["entropy"], -(log_p.exp() * log_p).sum(-1))]
    for x, y in [*pairs, *zip(ours, theirs, strict=True)]:
        assert (x - y).norm() <= limit * y.norm()
    assert out.keys() == {"logprobs", "entropy"} and not out["entropy"].requires_grad


# slime: slime/utils/ppo_utils.py, slime/backends/megatron_utils/{loss,cp_utils}.py.

SLIME: dict[str, Any] = dict(
    eps_clip=3e-4,
    eps_clip_high=4e-4,
    eps_clip_c=None,
    entropy_coef=0.0,
    use_kl_loss=False,
    kl_loss_coef=0.0,
    kl_loss_type="low_var_kl",
    use_unbiased_kl=False,
    calculate_per_token_loss=False,
    context_parallel_size=1,
    use_opsm=False,
    custom_pg_loss_reducer_function_path=None,
    use_tis=False,
    get_mismatch_metrics=False,
    use_rollout_logprobs=False,
)


@pytest.fixture
def slime_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a fake of slime's module, in which logits are log-probs, and entropies are squares of log-probs."""

    def get_log_probs_and_entropy(logits: Tensor, *, args: Any, with_entropy: bool, **inputs: Any) -> Any:
        assert with_entropy and inputs["total_lengths"] == inputs["unconcat_tokens"]
        assert inputs["total_lengths"] == [20] * len(inputs["response_lengths"])
        rows = list(logits[0].split(inputs["response_lengths"]))
        return torch.empty(0), {"log_probs": rows, "entropy": [x.square() for x in rows]}

    module: Any = ModuleType("loss")
    module.get_log_probs_and_entropy = get_log_probs_and_entropy
    module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.loss", module)


def call_slime(
    b: Rollout, lp: Tensor, objective: Objective = GSPO, denominators: Any = None, old: bool = True, **changes: Any
) -> Any:
    mask_sums = b.mask.sum(1) if denominators is None else denominators
    rows = lambda x: [*x]  # noqa: E731
    slime_batch = {
        "unconcat_tokens": [20] * len(b.mask),
        "total_lengths": [20] * len(b.mask),
        "response_lengths": [16] * len(b.mask),
        "rollout_mask_sums": mask_sums,
        "loss_masks": rows(b.mask.int()),
        "advantages": rows(per_token(b)),
        "log_probs": rows(b.old) if old else [],
        "ref_log_probs": rows(b.ref),
        "rollout_log_probs": rows(engine(b)),
        "opd_reverse_kl": rows(b.old - b.ref),
    }
    mean = lambda x: ((x.view(-1, 16) * b.mask).sum(1) / mask_sums.clamp(min=1)).sum()  # noqa: E731
    args = SimpleNamespace(**{**SLIME, **changes})
    return slime.loss(args, slime_batch, lp.reshape(1, -1), mean, objective=objective)


TERMS: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.01, "dual_clip": 1.0005}
FLAGS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "eps_clip_c": 1.0005}
TOKENS: dict[str, Any] = {"clip_low": 0.02, "clip_high": 0.02, "dual_clip": None}


@pytest.mark.parametrize(
    ("objective", "flags"),
    [
        (GSPO, {"kl_loss_coef": 0.1}),  # needs --use-kl-loss
        (Objective(**TERMS), FLAGS),
        (Objective(**TERMS), {**FLAGS, "use_rollout_logprobs": True}),
        (Objective(**TERMS, kl_estimator="unbiased"), {**FLAGS, "use_unbiased_kl": True}),
        (Objective(**TERMS, kl_estimator="k2"), {**FLAGS, "kl_loss_type": "k2"}),
        (
            Objective(ratio="token", surrogate="cispo", **{**TERMS, **TOKENS}),
            {**FLAGS, "eps_clip": 0.02, "eps_clip_high": 0.02, "eps_clip_c": None},
        ),
        (
            Objective(ratio="token", **{**TERMS, **TOKENS}),
            {**FLAGS, "eps_clip": 0.02, "eps_clip_high": 0.02, "eps_clip_c": None},
        ),
    ],
    ids=["gspo", "KL and entropy", "old log-probs of the engine", "unbiased KL", "k2", "cispo", "token ratios"],
)
def test_slimes_loss_and_metrics_are_its_sums_of_sample_means(
    objective: Objective, flags: dict[str, Any], batch: Rollout, slime_loss: None
) -> None:
    """Compare the loss, its gradient and every metric under a name of slime with slime's policy_loss_function.

    Lengths differ and only some samples are clipped, so means over all tokens would differ.
    """
    b = batch
    of_engine = flags.get("use_rollout_logprobs", False)
    old = engine(b) if of_engine else b.old
    mean = lambda x: (x * b.mask / lengths(b)).sum()  # noqa: E731 - sum_of_sample_mean

    def values(lp: Tensor) -> dict[str, Tensor]:
        a = per_token(b)
        ratio = (lp - old).exp() if objective.ratio == "token" else sequence_ratio(lp, old, b)
        pg = clipped(ratio, b, objective.clip_low, objective.clip_high)
        outside = worse(ratio, b, objective.clip_low, objective.clip_high)
        if objective.surrogate == "cispo":
            bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high).detach()
            pg, outside = -bounded * a * lp, bounded != ratio
        if objective.dual_clip is not None:
            pg = torch.where(a < 0, torch.min(pg, -objective.dual_clip * a), pg)
        kl = (lp - b.ref).square() / 2 if objective.kl_estimator == "k2" else k3(lp, b.ref)
        kl = kl * (lp - old).exp() if flags.get("use_unbiased_kl") else kl
        return {
            "loss": mean(pg) - objective.entropy_coef * mean(lp.square()) + objective.kl_coef * mean(kl),
            "pg_loss": mean(pg),
            "entropy_loss": mean(lp.square()),
            "pg_clipfrac": mean(outside.double()),
            "ppo_kl": mean(old - lp),
            "train_rollout_logprob_abs_diff": mean(((lp if of_engine else old) - engine(b)).abs()),
            "opd_reverse_kl": mean(b.old - b.ref),
            **({"kl_loss": mean(kl)} if flags.get("use_kl_loss") else {}),
        }

    logged = check(b, lambda lp: call_slime(b, lp, objective, **flags), lambda lp: values(lp)["loss"])
    torch.testing.assert_close({name: x for name, x in logged.items() if "/" not in name}, values(b.log_probs))
    assert 0 < logged["pg_clipfrac"] < B - 1


def test_slimes_truncated_importance_weights(batch: Rollout, slime_loss: None) -> None:
    """--use-tis multiplies the sequence form by token weights."""
    b = batch
    ours = Objective(rollout_correction=RolloutCorrection(high=1.2))

    def formula(lp: Tensor, old: Tensor) -> Tensor:
        weights = (old - engine(b)).exp().clamp(0, 1.2) * b.mask / lengths(b)
        return (clipped(sequence_ratio(lp, old, b), b) * weights).sum()

    check(b, lambda lp: call_slime(b, lp, ours), lambda lp: formula(lp, b.old))
    without_old = lambda lp: call_slime(b, lp, ours, old=False)  # noqa: E731
    check(b, without_old, lambda lp: formula(lp, lp.detach()))


def test_old_log_probs_of_the_engine_must_be_in_the_batch(
    batch: Rollout, slime_loss: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "engine", lambda _: [])
    with pytest.raises(ValueError, match="rollout_log_probs must be in the batch"):
        call_slime(batch, batch.log_probs, use_rollout_logprobs=True)


def test_a_rollout_of_several_samples_is_refused(batch: Rollout, slime_loss: None) -> None:
    shared = batch.mask.sum(1)
    shared[0] = shared[1] = shared[0] + shared[1]
    with pytest.raises(ValueError, match="rollout_mask_sums must be of one sample per rollout"):
        call_slime(batch, batch.log_probs, denominators=shared)


def test_a_token_that_the_sampler_could_not_score_has_weight_one(
    batch: Rollout, slime_loss: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports NaN for it. As in TRL, its importance weight is 1."""
    of_engine = engine(batch)
    unscored = torch.rand(of_engine.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    corrected = Objective(rollout_correction=RolloutCorrection(high=1.2))
    for seam in (call_slime, call_skyrl, call_swift, call_openrlhf):
        losses = []
        for replacement in (torch.nan, batch.old):
            sampled = torch.where(unscored, replacement, of_engine)
            monkeypatch.setattr(sys.modules[__name__], "engine", lambda _, sampled=sampled: sampled)
            losses.append(seam(batch, batch.log_probs, objective=corrected)[0])
        assert torch.equal(*losses) and losses[0].isfinite()


# SkyRL: skyrl/backends/skyrl_train/utils/{ppo_utils,off_policy_correction_utils}.py.


@dataclass
class OffPolicyCorrection:
    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0
    sequence_mask_metric: str | None = None


SKYRL: dict[str, Any] = dict(eps_clip_low=3e-4, eps_clip_high=4e-4, loss_reduction="sequence_mean")


def call_skyrl(
    b: Rollout, lp: Tensor, rows: slice = slice(None), objective: Objective = GSPO, tis: Any = None, **changes: Any
) -> Any:
    config = SimpleNamespace(**{**SKYRL, "off_policy_correction": OffPolicyCorrection(tis_ratio_type=tis), **changes})
    scaled = per_token(b) / (B * lengths(b))  # apply_loss_reduction_to_advantages_minibatch
    inputs: dict[str, Any] = dict(loss_mask=b.mask[rows].float(), rollout_logprobs=engine(b)[rows])
    return skyrl.loss(lp[rows], b.old[rows], scaled[rows], config=config, objective=objective, **inputs)


# ms-swift: swift/rlhf_trainers/grpo_trainer.py.


class Trainer:
    """A fake of ms-swift's GRPOTrainer with the attributes that the seam reads."""

    def __init__(self, lp: Tensor, training: bool = True, **changes: Any) -> None:
        self.args = SimpleNamespace(delta=None, log_entropy=False)
        self.importance_sampling_level, self.loss_type = "sequence", "grpo"
        self.epsilon_low, self.epsilon_high, self.beta, self.kl_in_reward = 3e-4, 4e-4, 0.0, False
        self.top_entropy_quantile, self.off_policy_sequence_mask_delta, self.sdar_loss_coef = 1.0, None, 0.0
        self.chord_sft_iterator = self.rollout_importance_sampling_mode = None
        self.overlong_filter, self.temperature = False, 0.7
        self.model = SimpleNamespace(training=training)
        self.accelerator = SimpleNamespace(gather_for_metrics=lambda x: x)
        self._get_per_token_logps_and_entropies = lambda *_: (lp, None)
        vars(self).update(changes)

    loss = ms_swift.loss


def swift_batch(b: Rollout, **changes: Any) -> Any:
    fields = {
        "completion_mask": b.mask,
        "truncated_mask": ~b.mask.any(1),
        "advantages": per_token(b),
        "old_per_token_logps": b.old,
        "ref_per_token_logps": None,
        "rollout_per_token_logps": engine(b),
    }
    return SimpleNamespace(**{**fields, **changes})


def call_swift(b: Rollout, lp: Tensor, objective: Objective = GSPO, **changes: Any) -> Any:
    return ms_swift.loss(Trainer(lp, **changes), None, {}, swift_batch(b), objective=objective)


def test_ms_swifts_loss_is_its_gspo(batch: Rollout) -> None:
    b = batch

    def formula(lp: Tensor, delta: float = 1e9, weights: Tensor | float = 1.0, beta: float = 0.0) -> Tensor:
        ratio = sequence_ratio(lp, b.old, b)
        a = per_token(b)
        loss = -torch.min(ratio.clamp(max=delta) * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a) + beta * k3(lp, b.ref)
        return (loss * weights * b.mask / lengths(b)).sum(1).mean()

    check(b, lambda lp: Trainer(lp).loss(None, {}, swift_batch(b)), formula)

    class WithKL(Trainer):
        loss = partialmethod(ms_swift.loss, objective=Objective(kl_coef=0.1, delta=1.0005))

    make = partial(WithKL, beta=0.1, args=SimpleNamespace(delta=1.0005, log_entropy=False))
    with_ref = swift_batch(b, ref_per_token_logps=b.ref)
    metrics = check(b, lambda lp: make(lp).loss(None, {}, with_ref), partial(formula, delta=1.0005, beta=0.1))
    kl = k3(b.log_probs, b.ref)[b.mask].mean()
    assert metrics["kl"] == pytest.approx(kl.item(), rel=METRIC_RELATIVE)
    check(b, lambda lp: Trainer(lp, beta=0.1, kl_in_reward=True).loss(None, {}, swift_batch(b)), formula)
    unfiltered = swift_batch(b, completion_mask=rollout(GSPO).mask)  # overlong_filter masks sequence EMPTY
    check(b, lambda lp: Trainer(lp, overlong_filter=True).loss(None, {}, unfiltered), formula)
    weights = (((b.old - engine(b)) * b.mask).sum(1, keepdim=True) / lengths(b)).exp().clamp(max=1.01)
    ours = Objective(rollout_correction=RolloutCorrection(level="geometric", high=1.01))  # sequence_truncate
    check(b, lambda lp: call_swift(b, lp, ours), partial(formula, weights=weights))
    for training, mode in ((True, "train"), (False, "eval")):
        assert call_swift(b, b.log_probs, training=training)[1]["mode"] == mode


# OpenRLHF: openrlhf/models/loss.py, openrlhf/utils/loss_utils.py.

OPENRLHF: dict[str, Any] = dict(
    clip_eps_low=3e-4,
    clip_eps_high=4e-4,
    dual_clip=None,
    token_level_loss=True,
    policy_loss_type="gspo",
    is_correction_level="off",
    is_correction_mode="mask",
    is_correction_gating="ratio",
    is_correction_threshold=[0.5, 5.0],
)


def call_openrlhf(b: Rollout, lp: Tensor, objective: Objective = GSPO, **changes: Any) -> tuple[Tensor, Any]:
    module = openrlhf.PolicyLoss(**{**OPENRLHF, **changes}, objective=objective)
    loss, *metrics = module(lp, b.old, per_token(b), b.mask.long(), engine(b))
    return loss, metrics


def step_of_prime_rl(parts: list[Rollout]) -> dict[str, float]:
    """What `compute_stats` logs: statistics of the values of all sequences."""
    outs = [out for part in parts for out in call_prime_rl(part, part.log_probs)[1]]
    values = {name: torch.cat([out.metrics[name] for out in outs]) for name in outs[0].metrics}
    assert values["is_clipped"].mean() == values["gspo/token_clip_fraction"].mean()
    shown = {name: x.mean().item() for name, x in values.items()}
    extremes = {"gspo/ratio_min": values["gspo/ratio_min"].min(), "gspo/ratio_max": values["gspo/ratio_max"].max()}
    return {**shown, **{name: x.item() for name, x in extremes.items()}}


def test_positions_of_skyrls_context_parallel_ranks() -> None:
    """Megatron splits a sequence into 2 CP equal parts, and gives parts r and 2 CP - 1 - r to rank r."""
    expected = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert skyrl._order(16, 4).tolist() == expected


def step_of_slime(parts: list[Rollout]) -> dict[str, float]:
    """What `reduce_train_step_metrics` logs: sums divided by the number of samples, one of which is masked."""
    logs = [call_slime(part, part.log_probs)[1] for part in parts]
    shown = {name: sum(log[name].item() for log in logs) / B for name in logs[0]}
    assert shown.keys().isdisjoint({"gspo/ratio_min", "gspo/ratio_max"})
    tokens, sequences = shown["gspo/tokens"], shown["gspo/sequences"]
    means = {name.removesuffix("_sum"): x / tokens for name, x in shown.items() if name.endswith("_sum")}
    return means | {f"gspo/{name}": shown[f"gspo/{name}"] / sequences for name in ("clip_fraction", "ratio_mean")}


def step_of_skyrl(parts: list[Rollout]) -> dict[str, float]:
    """What `reduce_metrics` logs of names that end in _min and _max. Others are means over micro-batches."""
    logs = [call_skyrl(part, part.log_probs, slice(None))[1] for part in parts]
    reductions = {"gspo/ratio_min": min, "gspo/ratio_max": max}
    return {name: reduction(log[name] for log in logs) for name, reduction in reductions.items()}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("step", [step_of_prime_rl, step_of_slime, step_of_skyrl])
def test_metrics_of_micro_batches_are_logged_as_those_of_the_step(
    step: Callable[[list[Rollout]], dict[str, float]], sign: int, batch: Rollout, slime_loss: None
) -> None:
    """Micro-batches of 1, 3 and 7 sequences and one without tokens, reduced as the trainer does."""
    b = replace(batch, log_probs=batch.old + sign * (batch.log_probs - batch.old).abs())  # all ratios above or below 1
    ratio = sequence_ratio(b.log_probs, b.old, b)
    is_clipped = worse(ratio, b)
    filled = b.mask.any(1)
    expected = {
        "token_clip_fraction": is_clipped[b.mask].double().mean(),
        "kl_to_old": (b.old - b.log_probs)[b.mask].mean(),
        "clip_fraction": is_clipped.any(1)[filled].double().mean(),
        "ratio_mean": ratio[filled].mean(),
        "ratio_min": ratio[filled].min(),
        "ratio_max": ratio[filled].max(),
    }
    parts = [
        replace(b, **{name: x[rows] for name, x in vars(b).items() if isinstance(x, Tensor) and len(x) == B})
        for rows in ([EMPTY], [0], [1, 2, 3], [4, 5, 6, 8, 9, 10, 11])
    ]
    shown = {name.removeprefix("gspo/"): x for name, x in step(parts).items()}
    assert len(shown.keys() & expected.keys()) >= (2 if step is step_of_skyrl else 4)
    for name in shown.keys() & expected.keys():
        assert shown[name] == pytest.approx(expected[name].item(), rel=METRIC_RELATIVE), name


def test_logged_metrics_have_no_gradient_and_the_dtype_of_the_loss(batch: Rollout, slime_loss: None) -> None:
    """Trainers stack the metrics of several micro-batches, so the dtypes must be equal."""
    lp = batch.log_probs.float().requires_grad_()
    b = replace(batch, log_probs=lp)
    for logged in (call_slime(b, lp)[1], call_prime_rl(b, lp)[1][0].metrics):
        assert not any(x.requires_grad for x in logged.values()) and {x.dtype for x in logged.values()} == {lp.dtype}


def test_openrlhfs_loss_without_a_batch_size_is_a_mean_over_answers(batch: Rollout) -> None:
    b = batch

    def mean(lp: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        return (clipped(sequence_ratio(lp, b.old, b), b) * weights * b.mask / lengths(b)).sum() / (B - 1)

    check(b, lambda lp: (call_openrlhf(b, lp)[0], None), mean)
    # With a correction, the engine's log-probs serve only its weights.
    ours = Objective(rollout_correction=RolloutCorrection(high=1.2))
    weights = (b.old - engine(b)).exp().clamp(max=1.2)
    check(b, lambda lp: call_openrlhf(b, lp, ours, is_correction_level="seq"), partial(mean, weights=weights))
    with pytest.raises(ValueError, match="rollout_log_probs must be given"):
        openrlhf.PolicyLoss(**{**OPENRLHF, "is_correction_level": "seq"})(b.log_probs, b.old, per_token(b), b.mask)


KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1}
ENTROPY, WITH_KL = {"objective": Objective(entropy_coef=0.1)}, {"objective": Objective(kl_coef=0.1)}
REFUSED: dict[Callable[..., Any], dict[str, dict[str, Any]]] = {
    call_slime: {
        "slime.loss: --eps-clip must be 0.0003": {"eps_clip": 0.2},
        "--eps-clip-high must be": {"eps_clip_high": 0.2},
        "--eps-clip-c must be None": {"eps_clip_c": 3.0},
        "--entropy-coef must be 0.0": {"entropy_coef": 0.1},
        "--kl-loss-coef must be 0.0": KL,
        "--kl-loss-type must be 'k3'": {**KL, **WITH_KL, "kl_loss_type": "k1"},
        "--calculate-per-token-loss must be False": {"calculate_per_token_loss": True},
        "--context-parallel-size must be 1": {"context_parallel_size": 2},
        "--use-opsm must be False": {"use_opsm": True},
        "--use-score-centering must be False": {"use_score_centering": True},
        "--custom-pg-loss-reducer-function-path must be": {"custom_pg_loss_reducer_function_path": "a.b"},
        r"--use-tis \(use Objective\(rollout_correction=...\) instead\) must be False": {"use_tis": True},
        r"--get-mismatch-metrics \(.* instead\) must be False": {"get_mismatch_metrics": True},
    },
    call_skyrl: {
        "skyrl.loss: trainer.algorithm.eps_clip_low must be 0.0003": {"eps_clip_low": 0.2},
        "trainer.algorithm.eps_clip_high must be 0.0004": {"eps_clip_high": 0.2},
        "trainer.algorithm.loss_reduction must be 'sequence_mean'": {"loss_reduction": "token_mean"},
        r"trainer.algorithm.off_policy_correction.tis_ratio_type \(use": {"tis": "token"},
        "objective.kl_coef must be 0.0": WITH_KL,
        "objective.entropy_coef must be 0.0": ENTROPY,
    },
    call_swift: {
        "ms_swift.loss: --importance_sampling_level must be 'seq": {"importance_sampling_level": "token"},
        "--loss_type must be 'grpo'": {"loss_type": "dapo"},
        "--epsilon must be 0.0003": {"epsilon_low": 0.2},
        "--epsilon_high must be 0.0004": {"epsilon_high": 0.2},
        "--delta must be None": {"args": SimpleNamespace(delta=2.0, log_entropy=False)},
        "--log_entropy must be False": {"args": SimpleNamespace(delta=None, log_entropy=True)},
        "--beta must be 0.0": {"beta": 0.04},
        "--top_entropy_quantile must be 1.0": {"top_entropy_quantile": 0.2},
        "--off_policy_sequence_mask_delta must be None": {"off_policy_sequence_mask_delta": 0.1},
        "--sdar_loss_coef must be 0.0": {"sdar_loss_coef": 0.1},
        "--chord_sft_dataset must be None": {"chord_sft_iterator": iter([])},
        r"--rollout_importance_sampling_mode \(use": {"rollout_importance_sampling_mode": "token_mask"},
        "objective.entropy_coef must be 0.0": ENTROPY,
    },
    call_openrlhf: {
        "openrlhf.PolicyLoss: --actor.policy_loss_type must be 'gspo'": {"policy_loss_type": "ppo"},
        r"--actor.eps_clip_low_high must be \(0.0003, 0.0004\)": {"clip_eps_low": 0.2},
        "--actor.eps_clip_low_high must be": {"clip_eps_high": 0.2},
        "--actor.dual_clip must be None": {"dual_clip": 3.0},
        "objective.kl_coef must be 0.0": WITH_KL,
        "objective.entropy_coef must be 0.0": ENTROPY,
    },
}
for messages in REFUSED.values():
    other = Objective(surrogate="sapo", aggregation="token-mean")
    messages["objective.aggregation must be 'seq-mean-token-mean'"] = {"objective": other}


@pytest.mark.parametrize(
    "seam, message", [(seam, message) for seam, messages in REFUSED.items() for message in messages]
)
def test_settings_of_another_loss_are_refused(
    seam: Callable[..., Any], message: str, batch: Rollout, slime_loss: None
) -> None:
    with pytest.raises(ValueError, match=message):
        seam(batch, batch.log_probs, **REFUSED[seam][message])


def fake(monkeypatch: pytest.MonkeyPatch, path: str, **contents: Any) -> Any:
    """Put a fake module and its parent packages into sys.modules. Return the top package."""
    module = sys.modules.get(path) or ModuleType(path)
    for name, x in contents.items():
        monkeypatch.setattr(module, name, x, raising=False)
    monkeypatch.setitem(sys.modules, path, module)
    parent, _, name = path.rpartition(".")
    return fake(monkeypatch, parent, **{name: module}) if parent else module


def test_the_documented_lines_of_each_trainer_run(batch: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of ms-swift and OpenRLHF run in test_ms_swift.py and test_openrlhf.py."""
    settings = {}
    layer = type("FusedOutputLinear", (), {})
    registry = SimpleNamespace(register=settings.__setitem__)
    fake(monkeypatch, "skyrl.backends.skyrl_train.utils.ppo_utils", PolicyLossRegistry=registry)
    fake(monkeypatch, "skyrl.train.entrypoints.main_base", main=lambda: None)
    fake(monkeypatch, "prime_rl.trainer.models.layers.lm_head", FusedOutputLinear=layer)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in OTHER_PYTHON:
        if "swift" not in block and "openrlhf" not in block:
            exec(block, scope)
    assert settings == {"gspo_kernels": skyrl.loss}
    assert vars(layer)["forward"] is prime_rl.head
    assert scope["slime_loss"].keywords["objective"].clip_low == 2e-4
    # The module for NeMo RL needs Megatron Core: another test calls its function.
    for module, name in re.findall(r"gspo_kernels\.integrations\.trainers\.((?!nemo)\w+)\.(\w+)", INTEGRATIONS):
        assert callable(getattr(import_module(f"gspo_kernels.integrations.trainers.{module}"), name))
    tomllib = pytest.importorskip("tomllib")
    loss = tomllib.loads(*code_blocks(INTEGRATIONS, "toml"))["trainer"]["loss"]
    assert loss["import_path"].endswith(".trainers.prime_rl.loss")
    call_prime_rl(batch, batch.log_probs, **loss["kwargs"])
