"""slime's head, from hidden states instead of logits, and its custom loss.

    --custom-megatron-init-path gspo_kernels.integrations.trainers.slime.head
    --loss-type custom_loss --custom-loss-function-path gspo_kernels.integrations.trainers.slime.loss

slime's model returns logits of all tokens, and slime's `get_log_probs_and_entropy` reads the response tokens from them.
`head` changes both ends: the actor's output layer returns its input, the hidden states, and our function computes
log-probs and entropies of the response tokens from them. `loss` works with slime's head and with ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels import KeptSets, LossOutput, Objective, linear_log_probs
from gspo_kernels.metrics import divisor_of
from gspo_kernels.reference import kl_to_reference
from gspo_kernels.validation import Checks, Unquoted

from .common import GSPO, USE_CORRECTION, check_settings, loss_of_log_probs, offsets, outside_window

__all__ = ["head", "loss"]

_PACKAGE = "slime.backends.megatron_utils"


def head(args: Any, **options: Any) -> None:
    """Make slime's actor compute log-probs without logits. Pass this function as --custom-megatron-init-path.

    slime calls this function in every worker before it builds the model. Policy, reference and teacher log-probs use
    it; critics do not change. Your own code that reads logits, such as a custom loss, gets hidden states [1, T, H].
    Temperature, packing, tensor parallelism, sequence parallelism and both layouts of context parallelism are as in
    slime. As in slime, entropies have a gradient only if --entropy-coef is not 0.

    Args:
        args: slime's arguments.
        options: gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`. Without vocab_size,
            the softmax includes Megatron's padding of the vocabulary, as in slime.

    Raises:
        ValueError: --rollout-top-p is not 1 with --allgather-cp, --enable-mtp-training is set, or this is slime's
            log-prob server. When slime calls the model, output layers that `model_log_probs` refuses raise the same
            errors.
    """
    check = Checks("slime.head")
    if args.rollout_top_p != 1.0 and args.allgather_cp:
        check.fail("--rollout-top-p", "1.0 with --allgather-cp", args.rollout_top_p)
    if args.enable_mtp_training:
        check.fail("--enable-mtp-training", "False, because losses of multi-token prediction need logits", True)
    if f"{_PACKAGE}.server.logprob_utils" in sys.modules:
        path = args.custom_megatron_init_path
        check.fail("--custom-megatron-init-path", "another function in the log-prob server, which reads logits", path)
    ours = _Head(options)
    slime_model: Any = sys.modules[f"{_PACKAGE}.model"]
    slime_model.get_model_provider_func = ours.wrap(slime_model.get_model_provider_func)
    original = sys.modules[f"{_PACKAGE}.loss"].get_log_probs_and_entropy
    module: Any
    for name, module in list(sys.modules.items()):  # slime's actor imports the function by name
        if name.startswith("slime") and vars(module).get("get_log_probs_and_entropy") is original:
            module.get_log_probs_and_entropy = ours.log_probs_and_entropy


class _Head:
    """The output layer that ran last in this process, and slime's functions that use it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.layer: Any = None
        self.weight: Any = None  # of tied embeddings, or the layer's own

    def wrap(self, provider_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap slime's `get_model_provider_func`, so that actors return hidden states."""

        @wraps(provider_func)
        def with_head(args: Any, role: str = "actor") -> Any:
            provider = provider_func(args, role)
            if role != "actor":
                return provider

            @wraps(provider)
            def provide(*args: Any, **kwargs: Any) -> Any:
                model = provider(*args, **kwargs)
                self._replace(model)
                return model

            return provide

        return with_head

    def _replace(self, model: nn.Module) -> None:
        """Make the model's output layer return the hidden states of all tokens. Other pipeline stages have no layer."""
        for name, layer in model.named_modules():
            if name.rpartition(".")[2] == "output_layer":
                layer.forward = self._forward_of(layer)

    def _forward_of(self, layer: Any) -> Callable[..., Any]:
        from ..megatron.output_layer import check_layer, gathered  # these need megatron-core; `loss` does not

        def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
            self.layer = layer
            self.weight = layer.weight if weight is None else weight
            check_layer(layer, self.weight)
            return gathered(hidden, layer.tp_group) if layer.sequence_parallel else hidden, None

        return forward

    def log_probs_and_entropy(
        self,
        logits: Tensor,
        *,
        args: Any,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
        top_p_token_ids: list[Tensor] | None = None,
        top_p_token_offsets: list[Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Compute log-probs and entropies of the response tokens. Replaces slime's `get_log_probs_and_entropy`.

        Args:
            logits: the hidden states, [1, T, H], where slime passes the output of the model.
            unconcat_tokens, total_lengths, response_lengths: of each sample of the packed micro-batch.
            non_loss_data: not used.
            top_p_token_ids, top_p_token_offsets: with --rollout-top-p, the ids that the sampler kept for the response
                tokens of each sample. Entropies are over the full vocabulary, as in slime.

        Returns:
            An empty tensor, and lists with one tensor [R] per sample, for its response tokens. Under context
            parallelism, only this rank's tokens are included.
        """
        from ..megatron.output_layer import layer_options

        if self.layer is None:
            got = Unquoted("one without it, or of another process")
            Checks("slime.head").fail("model", "a GPTModel with a module output_layer, which ran before", got)
        slime_loss = sys.modules[f"{_PACKAGE}.loss"]
        lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
        rows, ids = zip(
            *slime_loss.get_responses(
                logits, args=args, unconcat_tokens=unconcat_tokens, apply_temperature=False, **lengths
            ),
            strict=True,
        )
        tensors = torch.cat(rows).to(self.weight.dtype), self.weight, torch.cat(ids)  # Float16Module made fp32 rows
        options = dict(temperature=args.rollout_temperature, **layer_options(self.layer), **self.options)
        counts = [len(x) for x in ids]
        log_probs = entropy = None
        if top_p_token_ids is not None and top_p_token_offsets is not None:
            sets = _kept_sets(top_p_token_ids, top_p_token_offsets, total_lengths, response_lengths, tensors[2])
            log_probs = linear_log_probs(*tensors, kept_sets=sets, **options).log_probs
        if log_probs is None or with_entropy:
            with torch.set_grad_enabled(torch.is_grad_enabled() and (log_probs is None or args.entropy_coef != 0)):
                full = linear_log_probs(*tensors, entropy=with_entropy, **options)
            log_probs, entropy = full.log_probs if log_probs is None else log_probs, full.entropy
        results = {"log_probs": list(log_probs.split(counts))}
        if entropy is not None:
            entropy = entropy if args.entropy_coef != 0 else entropy.detach()
            results["entropy"] = list(entropy.split(counts))
        if args.allgather_cp:
            slime_loss._allgather_cp_redistribute(results, logits_local_len=logits.shape[1], **lengths)
        return logits.new_empty(0), results


def _kept_sets(
    ids: list[Tensor],
    offsets: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    target_ids: Tensor,
) -> KeptSets:
    """Make the sets of this rank's response tokens. Empty sets and absent targets mean what they mean in slime."""
    cp_utils = sys.modules[f"{_PACKAGE}.cp_utils"]
    to_device = partial(torch.as_tensor, device=target_ids.device)
    samples = [(to_device(x), to_device(y)) for x, y in zip(ids, offsets, strict=True)]
    sets = KeptSets.from_samples(samples, empty="vocabulary")
    start, tokens = 0, []
    for total, response in zip(total_lengths, response_lengths, strict=True):
        all_tokens = torch.arange(start, start + response, device=target_ids.device)
        tokens.append(cp_utils.slice_log_prob_with_cp(all_tokens, total, response))  # this rank's part of them
        start += response
    return sets.select(torch.cat(tokens)).including(target_ids)


def loss(
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
        sums over samples of means over their tokens. Under "gspo/...": the sums of our metrics, see `_sums`. slime adds
        up the values of micro-batches and ranks, and divides by the number of samples.

    Raises:
        ValueError: a setting of slime disagrees with `objective`, or a rollout has several samples.
    """
    check_settings("slime.loss", objective, _settings(args, objective))
    log_probs, entropy = _log_probs(args, batch, logits)  # [sum of R] each
    samples = sum(int(mask.any()) for mask in batch["loss_masks"])
    means_of_ones = sum_of_sample_mean(torch.ones_like(log_probs))
    if means_of_ones != samples:
        Checks("slime.loss").fail(
            "rollout_mask_sums",
            f"of one sample per rollout, so that {samples} sample means of ones add up to {samples}",
            means_of_ones.item(),
        )

    def concatenated(name: str) -> Tensor | None:
        return torch.cat(batch[name]) if batch.get(name) else None

    rollout = concatenated("rollout_log_probs")
    if args.use_rollout_logprobs and rollout is None:
        Checks("slime.loss").fail("rollout_log_probs", "in the batch with --use-rollout-logprobs", None)
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
        policy_term = objective.without("kl_coef", "entropy_coef")
        per_token = {"ppo_kl": old - log_probs, "entropy_loss": entropy}  # [sum of R] each
        if rollout is not None:
            compared = log_probs if args.use_rollout_logprobs else old
            per_token["train_rollout_logprob_abs_diff"] = (compared - rollout).abs()
        reverse_kl = concatenated("opd_reverse_kl")
        if reverse_kl is not None:
            per_token["opd_reverse_kl"] = reverse_kl
        if args.use_kl_loss and ref is not None:
            per_token["kl_loss"] = _kl(args, log_probs, ref, old)
        if objective.surrogate in ("clip", "cispo"):  # slime has no other surrogate
            by_token = objective.ratio == "token"
            lengths = torch.tensor(batch["response_lengths"], device=log_probs.device)
            tokens = len(log_probs)
            log_ratio = out.log_ratio if by_token else out.log_ratio.repeat_interleave(lengths, output_size=tokens)
            per_token["pg_clipfrac"] = outside_window(log_ratio.exp(), advantages, objective)
        metrics = {
            "loss": out.loss.detach(),
            "pg_loss": loss_of(log_probs, objective=policy_term).loss,
            **{name: sum_of_sample_mean(x.to(log_probs.dtype)) for name, x in per_token.items()},
        }
    return out.loss, metrics | _sums(out, objective)


def _sums(out: LossOutput, objective: Objective) -> dict[str, Tensor]:
    """Our metrics as sums: over samples named "gspo/<name>", over tokens named "gspo/<name>_sum".

    slime divides all of them by the number of samples, which turns sums over samples into means. Minima and maxima are
    left out, because they do not add up.
    """
    sums = {f"gspo/{name}": out.metrics[name] for name in ("tokens", "sequences", "invalid")}
    for name, x in out.metrics.items():
        divisor = divisor_of(name)
        if divisor is not None and not name.endswith(("_min", "_max")):
            by_sample = divisor == "sequences" or (divisor == "ratios" and objective.ratio != "token")
            sums[f"gspo/{name}" if by_sample else f"gspo/{name}_sum"] = x * out.metrics[divisor]
    return {name: x.to(out.loss.dtype) for name, x in sums.items()}


def _kl(args: Any, log_probs: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """Compute slime's KL estimate per token, for its log."""
    estimator = args.kl_loss_type.replace("low_var_kl", "k3")
    kl = kl_to_reference(log_probs, ref, log_probs - old, estimator)
    return kl * (log_probs - old).exp() if args.use_unbiased_kl else kl


def _settings(args: Any, objective: Objective) -> dict[str, tuple[Any, Any]]:
    """slime's settings of the loss by flag: the value, and the value that `objective` requires."""
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


def _log_probs(args: Any, batch: Mapping[str, Any], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Call slime's function for log-probs and entropies of the response tokens, [sum of R] each."""
    slime_loss = sys.modules[f"{_PACKAGE}.loss"]  # it calls `loss`, so it is imported
    inputs = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    inputs |= slime_loss.get_rollout_top_p_logprob_kwargs(args, batch)
    _, per_sample = slime_loss.get_log_probs_and_entropy(logits, args=args, with_entropy=True, **inputs)
    return torch.cat(per_sample["log_probs"]), torch.cat(per_sample["entropy"])
