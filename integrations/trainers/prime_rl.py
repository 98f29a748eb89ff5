"""prime-rl's head and its custom loss.

FusedOutputLinear.forward = prime_rl.head
[trainer.loss] type = "custom", import_path = "gspo_kernels.integrations.trainers.prime_rl.loss"
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gspo_kernels import KeptSets, LossOutput, Objective, linear_log_probs, policy_loss
from gspo_kernels.metrics import divisor_of
from gspo_kernels.validation import INDEX_DTYPES, Checks, TensorChecks, positive

from .common import offsets

__all__ = ["LossInputs", "LossOutputs", "head", "loss"]

DIVISOR_NAMES = ("tokens", "sequences", "ratios")


class LossInputs(Protocol):
    """prime-rl's LossInputs of one sequence. Each tensor is [T]."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class LossOutputs(NamedTuple):
    """The fields of LossOutputs that prime-rl reads."""

    loss: Tensor  # []
    metrics: dict[str, Tensor]  # each [values of the sequence]


def loss(inputs: LossInputs, preset: str = "gspo", mean_length: float = 1.0, **changes: Any) -> LossOutputs:
    """Compute the GSPO loss of one sequence, for use as prime-rl's custom loss.

    The sampling engine computed the old log-probs, which section 5.4 of GSPO's paper allows. prime-rl divides the sum
    over sequences by the number of tokens of the step, or by the sum of loss_weights. GSPO divides by the number of
    sequences. So sequences have equal weight, as in GSPO, but the gradient is GSPO's divided by the step's mean length.

    Args:
        inputs: prime-rl's inputs. The policy term is multiplied by loss_weights. kl_coef > 0 requires ref_logprobs.
        preset, changes: a name of `Objective.preset`, and the fields that differ from the preset. Set them in
            [trainer.loss.kwargs].
        mean_length: a factor of the loss. Set it to the mean length that you expect, in tokens, so that gradients have
            GSPO's size and gradient clipping acts as with GSPO. Leave it at 1 for an aggregation that sums tokens:
            prime-rl's division turns the sum into a mean.
    """
    Checks("prime_rl.loss").number("mean_length", mean_length, "a number of tokens > 0", positive)
    log_probs = inputs.trainer_logprobs
    out = policy_loss(
        log_probs,
        inputs.advantages,
        mask=inputs.loss_mask,
        cu_seqlens=offsets([len(log_probs)], log_probs),
        old_log_probs=inputs.inference_logprobs,
        ref_log_probs=inputs.ref_logprobs,
        token_weights=inputs.loss_weights,
        objective=Objective.preset(preset, **changes),
        normalizer=1 / mean_length,
    )
    return LossOutputs(out.loss, _repeated(out))


def _repeated(out: LossOutput) -> dict[str, Tensor]:
    """Our metrics as "gspo/<name>", each repeated as often as its divisor counts, and prime-rl's `is_clipped`.

    prime-rl concatenates the values of all sequences of a step, on all ranks, and logs their mean, minimum and maximum.
    A mean over tokens is repeated for each unmasked token. So the logged mean is the mean over the tokens of the step.
    """
    numbers = torch.stack([out.metrics[name] for name in DIVISOR_NAMES]).tolist()  # one wait for the device
    counts: dict[str | None, int] = {name: int(x) for name, x in zip(DIVISOR_NAMES, numbers, strict=True)}
    names = {f"gspo/{name}": name for name in out.metrics if name not in DIVISOR_NAMES}
    logged = {}
    for key, name in {"is_clipped": "token_clip_fraction", **names}.items():
        logged[key] = out.metrics[name].to(out.loss.dtype).expand(counts.get(divisor_of(name), 1))
    return logged


def head(
    layer: Any,
    hidden_states: Tensor,
    labels: Tensor,
    temperature: Tensor,
    sampling_mask: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Compute log-probs and entropies. Replaces the forward of prime-rl's FusedOutputLinear or GemmaFusedOutputLinear.

    Args:
        layer: the layer, which is `self` if this function is the forward of its class.
        hidden_states: [B, T, H].
        labels: [B, T] int64, already shifted.
        temperature: [B, T].
        sampling_mask: [B, T, K] int32 or int64, padded with -1: the ids that a truncating sampler kept for each label.
            As in prime-rl, log-probs are over these ids, or over the vocabulary if the label is not among them.
        options: gradient_budget, cache_mib, vocab_size and backend of `linear_log_probs`. Bind them with
            `functools.partialmethod`.

    Returns:
        "logprobs" and "entropy", fp32, [B, T]. As in prime-rl, the entropy has no gradient and is over the vocabulary.
        With a sampling_mask, it takes another forward pass over the vocabulary.
    """
    operands = hidden_states, layer.weight, labels
    options |= {"logit_softcap": getattr(layer, "softcap", None), "temperature": temperature}
    if sampling_mask is None:
        out: Any = linear_log_probs(*operands, entropy=True, **options)
        return {"logprobs": out.log_probs, "entropy": out.entropy.detach()}
    expected = f"[B, T, K] with B = {labels.shape[0]} and T = {labels.shape[1]}"
    shapes = [(*labels.shape, None)]
    TensorChecks("prime_rl.head").tensor(
        "sampling_mask", sampling_mask, dtypes=INDEX_DTYPES, shapes=shapes, shape_text=expected, device=labels.device
    )
    has_label = (sampling_mask == labels[..., None]).any(-1, keepdim=True)
    sets = KeptSets.from_padded(sampling_mask.masked_fill(~has_label, -1), fill=-1, empty="vocabulary")
    log_probs = linear_log_probs(*operands, kept_sets=sets, **options).log_probs
    with torch.no_grad():
        entropy: Any = linear_log_probs(*operands, entropy=True, **options).entropy
    return {"logprobs": log_probs, "entropy": entropy}
