"""Drop-in replacements for methods of trainers, and a custom loss for slime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs
from gspo_kernels.reference import kl_to_reference
from gspo_kernels.validation import Checks

from ..huggingface import fuse_head
from .common import GSPO, USE_CORRECTION, check_settings, logged_metrics, loss_of_log_probs, offsets


def slime(
    args: Any,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
    *,
    objective: Objective = GSPO,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the GSPO loss of a micro-batch, for use as slime's custom loss.

    The loss is a sum over samples, because slime divides it by the number of samples of the step. slime computes the
    log-probs and entropies. `objective` sets the KL term and the entropy bonus.

    Args:
        args, batch: slime's arguments. Each list in batch has one tensor [R] per sample, for its R response tokens.
        logits: [1, T, V / tensor-parallel size], fp32.
        sum_of_sample_mean: slime's function that takes one value per response token, [sum of R], and returns the sum
            of the samples' means, [].

    Returns:
        The loss [], and tensors [] for slime's log. Under slime's names: the values of slime's `policy_loss_function`,
        sums over samples of means over their tokens. Under "gspo/...": our metrics times the number of samples. slime
        divides both by the number of samples.

    Raises:
        ValueError: a setting of slime disagrees with `objective`, or a rollout has several samples.
    """
    check_settings("slime", objective, _slime_settings(args, objective))
    log_probs, entropy = _slime_log_probs(args, batch, logits)  # [sum of R] each
    samples = sum(int(mask.any()) for mask in batch["loss_masks"])
    means_of_ones = sum_of_sample_mean(torch.ones_like(log_probs))
    if means_of_ones != samples:
        Checks("slime").fail(
            "rollout_mask_sums",
            f"of one sample per rollout, so that {samples} sample means of ones add up to {samples}",
            means_of_ones.item(),
        )

    def concatenated(name: str) -> Tensor | None:
        return torch.cat(batch[name]) if batch.get(name) else None

    rollout = concatenated("rollout_log_probs")
    if args.use_rollout_logprobs and rollout is None:
        Checks("slime").fail("rollout_log_probs", "in the batch with --use-rollout-logprobs", None)
    old = rollout if args.use_rollout_logprobs else concatenated("log_probs")
    old = log_probs.detach() if old is None else old
    ref = concatenated("ref_log_probs")
    advantages = torch.cat(batch["advantages"])
    loss_of = partial(
        loss_of_log_probs,
        advantages=advantages,
        mask=torch.cat(batch["loss_masks"]),
        old_log_probs=old,
        rollout=rollout,
        cu_seqlens=offsets(batch["response_lengths"], log_probs),
        normalizer=1.0,
    )
    out = loss_of(log_probs, ref_log_probs=ref, entropy=entropy, objective=objective)

    with torch.no_grad():
        policy_term = replace(objective, kl_coef=0.0, entropy_coef=0.0)
        per_token = {"ppo_kl": old - log_probs, "entropy_loss": entropy}  # [sum of R] each
        if rollout is not None:
            compared = log_probs if args.use_rollout_logprobs else old
            per_token["train_rollout_logprob_abs_diff"] = (compared - rollout).abs()
        if args.use_kl_loss and ref is not None:
            per_token["kl_loss"] = _slime_kl(args, log_probs, ref, old)
        if objective.surrogate in ("clip", "cispo"):  # slime has no other surrogate
            by_token = objective.ratio == "token"
            lengths = torch.tensor(batch["response_lengths"], device=log_probs.device)
            tokens = len(log_probs)
            log_ratio = out.log_ratio if by_token else out.log_ratio.repeat_interleave(lengths, output_size=tokens)
            per_token["pg_clipfrac"] = _slime_clipped(log_ratio.exp(), advantages, objective)
        metrics = {
            "loss": out.loss.detach(),
            "pg_loss": loss_of(log_probs, objective=policy_term).loss,
            **{name: sum_of_sample_mean(x.to(log_probs.dtype)) for name, x in per_token.items()},
        }
    return out.loss, metrics | {name: x * samples for name, x in logged_metrics(out).items()}


def _slime_clipped(ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """Return where the clip window decides the loss. As in slime, dual clip does not count."""
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return bounded != ratio if objective.surrogate == "cispo" else bounded * advantages < ratio * advantages


def _slime_kl(args: Any, log_probs: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """Return slime's KL estimate per token, for its log."""
    estimator = args.kl_loss_type.replace("low_var_kl", "k3")
    kl = kl_to_reference(log_probs, ref, log_probs - old, estimator)
    return kl * (log_probs - old).exp() if args.use_unbiased_kl else kl


def _slime_settings(args: Any, objective: Objective) -> dict[str, tuple[Any, Any]]:
    """Return slime's settings of the loss by flag: the value, and the value that `objective` requires."""
    kl_type = args.kl_loss_type.replace("low_var_kl", "k3") + (", unbiased" if args.use_unbiased_kl else "")
    estimator = objective.kl_estimator.replace("unbiased", "k3, unbiased")
    return {
        "--eps-clip": (args.eps_clip, objective.clip_low),
        "--eps-clip-high": (args.eps_clip_high, objective.clip_high),
        "--eps-clip-c": (args.eps_clip_c, objective.dual_clip),
        "--entropy-coef": (args.entropy_coef, objective.entropy_coef),
        "--kl-loss-coef": (args.kl_loss_coef if args.use_kl_loss else 0.0, objective.kl_coef),
        "--kl-loss-type": (kl_type if objective.kl_coef > 0 else estimator, estimator),
        "--calculate-per-token-loss": (args.calculate_per_token_loss, False),
        "--context-parallel-size": (args.context_parallel_size, 1),
        "--use-opsm": (args.use_opsm, False),
        "--use-score-centering": (getattr(args, "use_score_centering", False), False),
        "--custom-pg-loss-reducer-function-path": (args.custom_pg_loss_reducer_function_path, None),
        f"--use-tis {USE_CORRECTION}": (args.use_tis, False),
        f"--get-mismatch-metrics {USE_CORRECTION}": (args.get_mismatch_metrics, False),
    }


def _slime_log_probs(args: Any, batch: Mapping[str, Any], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return slime's log-probs and entropies of the response tokens, [sum of R] each."""
    slime_loss = sys.modules["slime.backends.megatron_utils.loss"]  # it calls `slime`, so it is imported
    inputs = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    inputs |= slime_loss.get_rollout_top_p_logprob_kwargs(args, batch)
    _, per_sample = slime_loss.get_log_probs_and_entropy(logits, args=args, with_entropy=True, **inputs)
    return torch.cat(per_sample["log_probs"]), torch.cat(per_sample["entropy"])


def ms_swift(
    trainer: Any, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, *, objective: Objective = GSPO
) -> tuple[Tensor, dict[str, Any]]:
    """Compute the GSPO loss, as the method `_compute_loss_and_metrics` of ms-swift's GRPOTrainer.

    As in ms-swift, the loss is a mean over all answers, including entirely masked ones. `objective` sets the KL term.

    Args:
        trainer: the GRPOTrainer, which is `self` if this function is a method of its class.
        model, model_inputs: ms-swift's arguments.
        grpo_batch: ms-swift's batch, with tensors [B, T] and truncated_mask [B].

    Returns:
        The loss [], and ms-swift's dictionary of metrics over all processes.

    Raises:
        ValueError: a setting of ms-swift disagrees with `objective`.
    """
    check_settings("ms_swift", objective, _swift_settings(trainer, objective))
    mask = grpo_batch.completion_mask
    if trainer.overlong_filter:
        mask = mask & ~grpo_batch.truncated_mask[:, None]
    log_probs, _ = trainer._get_per_token_logps_and_entropies(model, model_inputs, grpo_batch)
    old = log_probs.detach() if grpo_batch.old_per_token_logps is None else grpo_batch.old_per_token_logps
    out = loss_of_log_probs(
        log_probs,
        grpo_batch.advantages,
        mask,
        old_log_probs=old,
        rollout=grpo_batch.rollout_per_token_logps,
        ref_log_probs=grpo_batch.ref_per_token_logps,
        normalizer=float(len(mask)),
        objective=objective,
    )
    names = ["token_clip_fraction_low", "token_clip_fraction_high", "token_clip_fraction", "kl"]
    metrics = torch.stack([out.metrics[name] for name in names if name in out.metrics])  # [metrics]
    gathered = trainer.accelerator.gather_for_metrics(metrics[None])  # [processes, metrics]
    low, high, region, *kl = gathered.mean(0).tolist()
    clipping = {
        "low_clip_mean": low,
        "low_clip_min": gathered[:, 0].min().item(),
        "high_clip_mean": high,
        "high_clip_max": gathered[:, 1].max().item(),
        "region_clip_mean": region,
    }
    return out.loss, {
        "mode": "train" if trainer.model.training else "eval",
        "entropy": {},
        "completion_mask": mask,
        "completion_token_count": mask.sum().clamp(min=1),
        "clipping": clipping,
        **({"kl": kl[0]} if kl else {}),
    }


def _swift_settings(trainer: Any, objective: Objective) -> dict[str, tuple[Any, Any]]:
    """Return ms-swift's settings of the loss by flag: the value, and the value that `objective` requires."""
    return {
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
        f"--rollout_importance_sampling_mode {USE_CORRECTION}": (trainer.rollout_importance_sampling_mode, None),
    }


def ms_swift_log_probs(
    trainer: Any,
    model: Any,
    model_inputs: dict[str, Any],
    logits_to_keep: int,
    input_ids: Tensor,
    compute_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs without logits, as the method `_get_logps_via_local_forward` of ms-swift's GRPOTrainer.

    ms-swift calls this method for old, reference and new log-probs.

    Args:
        model: a transformers model, plain or wrapped by PEFT or DDP. Raises the errors of `fuse_head`.
        input_ids: [B, L], or packed without padding, [1, tokens].

    Returns:
        The log-probs of the last logits_to_keep tokens, and their entropies or None: fp32, [B, logits_to_keep].
    """
    fuse_head(trainer.accelerator.unwrap_model(model))

    def score(hidden: Tensor, lm_head: Any, **options: Any) -> Any:
        return linear_log_probs(
            hidden[:, -logits_to_keep - 1 : -1],
            lm_head,
            input_ids[:, -logits_to_keep:],
            temperature=trainer.temperature,
            entropy=compute_entropy,
            **options,
        )

    scores, _ = model(**{**model_inputs, "use_cache": False}, with_head=score)
    return scores.log_probs, scores.entropy


def prime_rl_head(
    head: Any, hidden_states: Tensor, labels: Tensor, temperature: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Compute log-probs and entropies, as the forward of prime-rl's FusedOutputLinear or GemmaFusedOutputLinear.

    Args:
        head: the layer, which is `self` if this function is the forward of its class.
        hidden_states: [B, T, H].
        labels: [B, T] int64, already shifted.
        temperature: [B, T].
        options: gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`. Bind them with
            `functools.partialmethod`.

    Returns:
        "logprobs" and "entropy", fp32, [B, T]. As in prime-rl, the entropy has no gradient.
    """
    out: Any = linear_log_probs(
        hidden_states,
        head.weight,
        labels,
        logit_softcap=getattr(head, "softcap", None),
        temperature=temperature,
        entropy=True,
        **options,
    )
    return {"logprobs": out.log_probs, "entropy": out.entropy.detach()}
