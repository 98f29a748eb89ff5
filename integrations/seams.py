"""`policy_loss` behind the signatures that trainers call: a seam each for five that exchange log-probs.

    prime-rl   [trainer.loss] type = "custom", import_path = "gspo_kernels.integrations.seams.prime_rl"
    slime      --loss-type custom_loss --custom-loss-function-path gspo_kernels.integrations.seams.slime
    SkyRL      PolicyLossRegistry.register("gspo_kernels", skyrl)
    ms-swift   _compute_loss_and_metrics = ms_swift, in a subclass of its GRPOTrainer
    OpenRLHF   openrlhf.models.PolicyLoss = OpenRLHFPolicyLoss, in every worker

docs/integrations.md has the lines whole, and the versions that were read; no trainer is imported here. `objective` is
what is optimised, GSPO as in its paper unless `functools.partial` (in a class `partialmethod`) sets another. Settings
that the trainer's own loss reads must agree with it: a ValueError names the one that does not, and its value. Answers
weigh alike, as GSPO has it: Objective.aggregation is "seq-mean-token-mean", except under prime-rl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gspo_kernels import LossOutput, Objective, linear_log_probs, policy_loss
from gspo_kernels.validation import Field, positive

from .huggingface import fuse_head

_GSPO = Objective()
_WEIGHTS = "in whose place is Objective(rollout_correction=...)"


class PrimeRLInputs(Protocol):
    """prime-rl's LossInputs: one sequence, each tensor [T]."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class PrimeRLOutputs(NamedTuple):
    """What prime-rl reads of its LossOutputs, all []."""

    loss: Tensor
    metrics: dict[str, Tensor]


def prime_rl(inputs: PrimeRLInputs, preset: str = "gspo", mean_length: float = 1.0, **changes: Any) -> PrimeRLOutputs:
    """prime-rl's custom loss: of one sequence, its ratio against the engine's log-probs (GSPO's paper, 5.4).

    prime-rl divides the sum over sequences by the step's tokens (by the sum of loss_weights), GSPO by its sequences:
    answers weigh alike all the same, but the gradient is GSPO's over the step's mean length.

    Args:
        inputs: loss_weights multiply the policy term. ref_logprobs are needed for kl_coef > 0.
        preset: of `Objective.preset`, and `changes` of its fields: the keys of [trainer.loss.kwargs].
        mean_length: multiplies the loss: with the mean length that you expect, in tokens, gradients are of GSPO's size,
            which a bound on their norm needs. Leave 1 for an aggregation that sums tokens; it becomes their mean.
    """
    Field("prime_rl").number("mean_length", mean_length, "a number > 0 of tokens", positive)
    log_probs = inputs.trainer_logprobs
    out = policy_loss(
        log_probs, inputs.advantages, mask=inputs.loss_mask, cu_seqlens=_offsets([len(log_probs)], log_probs),
        old_log_probs=inputs.inference_logprobs, ref_log_probs=inputs.ref_logprobs, token_weights=inputs.loss_weights,
        objective=Objective.preset(preset, **changes), normalizer=1 / mean_length,
    )  # fmt: skip
    return PrimeRLOutputs(out.loss, _metrics(out, is_clipped="token_clip_fraction"))


def slime(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor], *,
    objective: Objective = _GSPO,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """slime's custom loss: the sum over the samples of a micro-batch, which slime divides by those of the step.

    Log-probs and entropies are slime's own, KL and entropy bonus objective's. One sample to a rollout, else ValueError.

    Args:
        args, batch: slime's; a list in batch has a tensor [R] per sample.
        logits: [1, T, V / tensor-parallel size], fp32.
        sum_of_sample_mean: slime's, of one value per token of the responses, [sum R].

    Returns:
        The loss [] and what slime logs: means over tokens times the samples, [].
    """
    kl = args.kl_loss_type.replace("low_var_kl", "k3") + (", unbiased" if args.use_unbiased_kl else "")
    estimator = objective.kl_estimator.replace("unbiased", "k3, unbiased")
    _agree("slime", objective, {
        "--eps-clip": (args.eps_clip, objective.clip_low),
        "--eps-clip-high": (args.eps_clip_high, objective.clip_high),
        "--eps-clip-c": (args.eps_clip_c, objective.dual_clip),
        "--entropy-coef": (args.entropy_coef, objective.entropy_coef),
        "--kl-loss-coef": (args.kl_loss_coef if args.use_kl_loss else 0.0, objective.kl_coef),
        "--kl-loss-type": (kl if objective.kl_coef > 0 else estimator, estimator),
        "--calculate-per-token-loss": (args.calculate_per_token_loss, False),
        "--context-parallel-size": (args.context_parallel_size, 1),
        "--use-opsm": (args.use_opsm, False),
        "--use-score-centering": (getattr(args, "use_score_centering", False), False),
        "--custom-pg-loss-reducer-function-path": (args.custom_pg_loss_reducer_function_path, None),
        f"--use-tis, {_WEIGHTS},": (args.use_tis, False),
        f"--get-mismatch-metrics, {_WEIGHTS},": (args.get_mismatch_metrics, False),
    })  # fmt: skip
    own = sys.modules["slime.backends.megatron_utils.loss"]  # the call comes from there
    given = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    given |= own.get_rollout_top_p_logprob_kwargs(args, batch)
    _, found = own.get_log_probs_and_entropy(logits, args=args, with_entropy=True, **given)
    log_probs, entropy, mask = (torch.cat(x) for x in (found["log_probs"], found["entropy"], batch["loss_masks"]))
    samples, weight = sum(int(m.any()) for m in batch["loss_masks"]), sum_of_sample_mean(torch.ones_like(log_probs))
    if weight != samples:
        Field("slime").fail("rollout_mask_sums", f"of one sample to a rollout, in all {samples} means", weight.item())
    cat = lambda name: torch.cat(batch[name]) if batch.get(name) else None  # noqa: E731
    old = cat("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    out = _loss(
        log_probs, torch.cat(batch["advantages"]), mask, log_probs.detach() if old is None else old,
        cat("rollout_log_probs"), 1.0, objective, ref_log_probs=cat("ref_log_probs"), entropy=entropy,
        cu_seqlens=_offsets(batch["response_lengths"], log_probs),
    )  # fmt: skip
    means = _metrics(out, pg_clipfrac="token_clip_fraction", ppo_kl="kl_to_old", entropy_loss="entropy", kl_loss="kl")
    return out.loss, {"loss": out.loss.detach(), **{name: x * samples for name, x in means.items()}}


def skyrl(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor,
    rollout_logprobs: Tensor | None = None, *, objective: Objective = _GSPO,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """SkyRL's policy loss: the sum over a micro-batch; SkyRL divided the advantages before. KL and entropy are its own.

    SkyRL's own GSPO is the token form, ratio="sequence-token": the same if an answer has one advantage and weight.

    Args:
        log_probs, old_log_probs, rollout_logprobs, loss_mask: [B, T], fp32.
        advantages: [B, T], over (sequences of the mini-batch x tokens of the row): loss_reduction="sequence_mean".
        config: SkyRL's AlgorithmConfig.

    Returns:
        The loss [] and what SkyRL logs, on the host.
    """
    correction = config.off_policy_correction
    switches = [f.name for f in fields(correction) if f.default is None]
    _agree("skyrl", objective, {
        "trainer.algorithm.eps_clip_low": (config.eps_clip_low, objective.clip_low),
        "trainer.algorithm.eps_clip_high": (config.eps_clip_high, objective.clip_high),
        "trainer.algorithm.loss_reduction": (config.loss_reduction, "sequence_mean"),
        "objective.kl_coef": (objective.kl_coef, 0.0),
        "objective.entropy_coef": (objective.entropy_coef, 0.0),
        **{f"trainer.algorithm.off_policy_correction.{name}, {_WEIGHTS},": (getattr(correction, name), None)
           for name in switches},
    })  # fmt: skip
    lengths = (loss_mask != 0).sum(1, keepdim=True)
    out = _loss(log_probs, advantages * lengths, loss_mask, old_log_probs, rollout_logprobs, 1.0, objective)
    logged = _metrics(out, clip_ratio="token_clip_fraction")
    return out.loss, dict(zip(logged, torch.stack([*logged.values()]).tolist(), strict=True))


def ms_swift(
    trainer: Any, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, *, objective: Objective = _GSPO
) -> tuple[Tensor, dict[str, Any]]:
    """`_compute_loss_and_metrics` of ms-swift's GRPOTrainer: a mean over rows, masked ones too, with objective's KL.

    Args:
        trainer: the GRPOTrainer: `self` of a function in its class.
        model, model_inputs, grpo_batch: ms-swift's; of grpo_batch tensors [B, T] and truncated_mask [B].

    Returns:
        The loss [] and ms-swift's dictionary of metrics, of all processes.
    """
    _agree("ms_swift", objective, {
        "--importance_sampling_level": (trainer.importance_sampling_level, objective.ratio.replace("-", "_")),
        "--loss_type": (trainer.loss_type, "grpo"),
        "--epsilon": (trainer.epsilon_low, objective.clip_low),
        "--epsilon_high": (trainer.epsilon_high, objective.clip_high),
        "--delta": (trainer.args.delta, objective.delta),
        "--beta": (0.0 if trainer.kl_in_reward else trainer.beta, objective.kl_coef),
        "--top_entropy_quantile": (trainer.top_entropy_quantile, 1.0),
        "--log_entropy": (trainer.args.log_entropy, False),
        "--off_policy_sequence_mask_delta": (trainer.off_policy_sequence_mask_delta, None),
        "--sdar_loss_coef": (trainer.sdar_loss_coef, 0.0),
        "--chord_sft_dataset": (trainer.chord_sft_iterator, None),
        "objective.entropy_coef": (objective.entropy_coef, 0.0),
        f"--rollout_importance_sampling_mode, {_WEIGHTS},": (trainer.rollout_importance_sampling_mode, None),
    })  # fmt: skip
    mask = grpo_batch.completion_mask
    if trainer.overlong_filter:
        mask = mask & ~grpo_batch.truncated_mask[:, None]
    log_probs, _ = trainer._get_per_token_logps_and_entropies(model, model_inputs, grpo_batch)
    old = log_probs.detach() if grpo_batch.old_per_token_logps is None else grpo_batch.old_per_token_logps
    out = _loss(
        log_probs, grpo_batch.advantages, mask, old, grpo_batch.rollout_per_token_logps, float(len(mask)), objective,
        ref_log_probs=grpo_batch.ref_per_token_logps,
    )  # fmt: skip
    names = ["token_clip_fraction_low", "token_clip_fraction_high", "token_clip_fraction", "kl"]
    shares = torch.stack([out.metrics[name] for name in names if name in out.metrics])
    gathered = trainer.accelerator.gather_for_metrics(shares[None])
    low, high, region, *kl = gathered.mean(0).tolist()
    clipping = {
        "low_clip_mean": low, "low_clip_min": gathered[:, 0].min().item(), "high_clip_mean": high,
        "high_clip_max": gathered[:, 1].max().item(), "region_clip_mean": region,
    }  # fmt: skip
    return out.loss, {
        "mode": "train" if trainer.model.training else "eval", "entropy": {}, "completion_mask": mask,
        "completion_token_count": mask.sum().clamp(min=1), "clipping": clipping, **({"kl": kl[0]} if kl else {}),
    }  # fmt: skip


def ms_swift_log_probs(
    trainer: Any, model: Any, model_inputs: dict[str, Any], logits_to_keep: int, input_ids: Tensor,
    compute_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`_get_logps_via_local_forward` of ms-swift's GRPOTrainer without logits: log-probs, old, reference and new.

    Args:
        model: a transformers model, plain, in PEFT or DDP, on which `fuse_head` is called.
        input_ids: [B, L], or [1, total] without padding; the last logits_to_keep are scored.

    Returns:
        Log-probs and entropies, which are None unless asked for, fp32, [B, logits_to_keep].
    """
    fuse_head(trainer.accelerator.unwrap_model(model))

    def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return linear_log_probs(
            hidden[:, -logits_to_keep - 1 : -1], lm_head, input_ids[:, -logits_to_keep:],
            temperature=trainer.temperature, entropy=compute_entropy, **options,
        )  # fmt: skip

    found, _ = model(**{**model_inputs, "use_cache": False}, with_head=score)
    return found.log_probs, found.entropy


class OpenRLHFPolicyLoss(nn.Module):
    """OpenRLHF's PolicyLoss, its arguments and results, for --actor.policy_loss_type gspo; KL and entropy are its own.

    As in its own GSPO an is_correction_level makes the ratio one against vLLM's log-probs, and token_level_loss, mode,
    gating and threshold are not read; with Objective(rollout_correction=...) it gets vLLM's log-probs for the weights.
    """

    def __init__(
        self, clip_eps_low: float = 0.2, clip_eps_high: float = 0.2, dual_clip: float | None = None,
        token_level_loss: bool = True, policy_loss_type: str = "ppo", is_correction_level: str = "off",
        is_correction_mode: str = "mask", is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0), *, objective: Objective = _GSPO,
    ) -> None:  # fmt: skip
        super().__init__()
        window, scored = (objective.clip_low, objective.clip_high), is_correction_level != "off"
        _agree("OpenRLHFPolicyLoss", objective, {
            "--actor.policy_loss_type": (policy_loss_type, "gspo"),
            "--actor.eps_clip_low_high": ((clip_eps_low, clip_eps_high), window),
            "--actor.dual_clip": (dual_clip, objective.dual_clip),
            "objective.kl_coef": (objective.kl_coef, 0.0),
            "objective.entropy_coef": (objective.entropy_coef, 0.0),
        })  # fmt: skip
        self.objective, self.against_engine = objective, scored and objective.rollout_correction is None

    def forward(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, action_mask: Tensor,
        rollout_log_probs: Tensor | None = None, dp_size: int = 1, batch_num_tokens: Any = None,
        global_batch_size: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:  # fmt: skip
        """Of [B, T], over global_batch_size / dp_size: the loss, its clip_ratio and ppo_kl [], None, None."""
        old = rollout_log_probs if self.against_engine else old_log_probs
        if old is None:
            Field("OpenRLHFPolicyLoss").fail("rollout_log_probs", "given, with an is_correction_level", None)
        normalizer = None if global_batch_size is None else global_batch_size / dp_size
        out = _loss(log_probs, advantages, action_mask, old, rollout_log_probs, normalizer, self.objective)
        return out.loss, out.metrics["token_clip_fraction"], out.metrics["kl_to_old"], None, None


def _agree(place: str, objective: Objective, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Settings by the name that their user gave them: what came, and what this loss and its objective have."""
    mean = {"objective.aggregation": (objective.aggregation, "seq-mean-token-mean")}
    for name, (got, expected) in {**settings, **mean}.items():
        if got != expected:
            Field(place).fail(name, f"{expected!r} with this objective", got)


def _loss(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, old: Tensor, rollout: Tensor | None, normalizer: Any,
    objective: Objective, **options: Any,
) -> LossOutput:  # fmt: skip
    """`policy_loss`, which takes the engine's log-probs only for an objective that reads them."""
    return policy_loss(
        log_probs, advantages, mask=mask, old_log_probs=old, normalizer=normalizer, objective=objective,
        rollout_log_probs=rollout if objective.rollout_correction else None, **options,
    )  # fmt: skip


def _offsets(lengths: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], device=like.device)


def _metrics(out: LossOutput, **own: str) -> dict[str, Tensor]:
    """Ours under the trainer's `own` names, and all of them as gspo/..., in the loss's dtype."""
    ours = {name: x.to(out.loss.dtype) for name, x in out.metrics.items()}
    named = {theirs: ours[name] for theirs, name in own.items() if name in ours}
    return named | {f"gspo/{name}": x for name, x in ours.items()}
