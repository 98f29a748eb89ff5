"""`model_log_probs` and `output_processor`: log-probs at the sharded output layer of a GPTModel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from gspo_kernels import LogProbOutput, linear_log_probs
from gspo_kernels.validation import Checks, Unquoted


@dataclass(frozen=True)
class Targets:
    """The target ids of a model call, and options of `linear_log_probs`. The context of `output_processor`.

    Megatron converts floating-point tensors in tuples to half precision, but leaves dataclasses alone.
    """

    target_ids: Tensor  # [B, S] int64, already shifted, over the vocabulary of all ranks; under CP this rank's tokens
    mask: Tensor | None = None  # [B, S]: unmasked tokens; None: target_ids != -100
    temperature: float | Tensor = 1.0  # a number, a tensor with no dimension, or [B, S]
    vocab_size: int | None = None  # columns without Megatron's padding; None: padding counts, as in Megatron's own loss
    entropy: bool = False
    gradient_budget: float = 0.0
    cache_mib: float | None = None
    backend: str = "auto"


def model_log_probs(
    model: nn.Module,
    target_ids: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    entropy: bool = False,
    gradient_budget: float = 0.0,
    cache_mib: float | None = None,
    backend: str = "auto",
    **inputs: Any,
) -> LogProbOutput | Tensor:
    """Call a GPTModel, and return the log-probs of `target_ids` instead of logits.

    Args:
        model: a GPTModel, plain or wrapped in DistributedDataParallel and Float16Module.
        target_ids: [B, S] int64. hidden[s] predicts target_ids[s]: this function shifts nothing. Under context
            parallelism, pass this rank's tokens.
        mask, temperature, vocab_size, entropy: see `Targets`.
        gradient_budget, cache_mib, backend: arguments of `linear_log_probs`.
        inputs: arguments of the model's forward by name, such as input_ids, position_ids and packed_seq_params.

    Returns:
        LogProbOutput with fields [B, S] on the last pipeline stage. Other stages run only Megatron's own code, and
        return the model's output, hidden states for the next stage.

    Raises:
        TypeError: the output layer is not a plain ColumnParallelLinear.
        ValueError: `labels` is among the inputs, target_ids does not have the shape of the hidden states, or the model
            trains multi-token prediction or defers the output layer's weight gradient.
    """
    check = Checks("model_log_probs")
    if "labels" in inputs:
        check.fail("labels", "absent, because target_ids takes its place", inputs["labels"])
    targets = Targets(target_ids, mask, temperature, vocab_size, entropy, gradient_budget, cache_mib, backend)
    gpt: Any = model
    while not hasattr(gpt, "post_process") and hasattr(gpt, "module"):
        gpt = gpt.module
    if not hasattr(gpt, "post_process"):
        check.fail("model", "a GPTModel of megatron.core, or a wrapper of one", model, TypeError)
    if not gpt.post_process:
        return model(**inputs)
    if gpt.config.mtp_num_layers:
        check.fail("mtp_num_layers", "None (no multi-token prediction)", gpt.config.mtp_num_layers)
    if "output_processor" in inspect.signature(gpt.forward).parameters:
        out = model(**inputs, output_processor=output_processor, output_processor_context=targets)
        return LogProbOutput(*out)  # Float16Module returns a plain tuple
    if getattr(gpt.config, "use_mup", False):  # the model would scale what the output layer returns
        check.fail("use_mup", "False, because this release of Megatron Core has no output_processor", True)
    with _replaced(gpt.output_layer, targets):
        out = model(**inputs)  # [B, S], or [B, S, 2] with entropies
    return LogProbOutput(*out.unbind(-1)) if entropy else LogProbOutput(out, None)


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None = None,
    context: Targets,
    **_: Any,
) -> LogProbOutput:
    """Compute log-probs from the hidden states of a GPTModel, as the value of its argument `output_processor`.

    Args:
        hidden_states: [S, B, H], or [S / TP, B, H] with sequence parallelism.
        output_layer: the model's output layer.
        output_weight: the weight of tied embeddings, [V / TP, H]; None: the layer's own.
        context: the model call's `output_processor_context`.

    Returns:
        LogProbOutput with fields [B, S].

    Raises:
        TypeError, ValueError: as in `model_log_probs`.
    """
    out = _log_probs(output_layer, hidden_states, output_weight, context)
    return LogProbOutput(_transposed(out.log_probs).contiguous(), _transposed(out.entropy))


def local_cu_seqlens(packed_seq_params: Any, cp_group: Any) -> Tensor:
    """Offsets of this rank's tokens in each packed sequence, [sequences + 1], for `policy_loss`.

    Megatron pads every sequence to a multiple of 2 CP tokens, and gives each of the CP ranks the same number of tokens.
    The mask of the loss must leave out the padding.
    """
    padded = packed_seq_params.cu_seqlens_q_padded
    offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
    return offsets // cp_group.size()


def _log_probs(layer: Any, hidden: Tensor, weight: Any, targets: Targets) -> LogProbOutput:
    """Compute log-probs [S, B] where the layer would compute logits."""
    weight = layer.weight if weight is None else weight
    check_layer(layer, weight)
    if layer.sequence_parallel:
        hidden = gathered(hidden, layer.tp_group)
    ids = _transposed(targets.target_ids)
    if ids.shape != hidden.shape[:2]:
        expected = f"[B, S] = {list(hidden.shape[1::-1])}, as the hidden states"
        Checks("output_processor").fail("target_ids", expected, targets.target_ids)
    config = layer.config
    return linear_log_probs(
        hidden,
        weight,
        ids,
        mask=_transposed(targets.mask),
        logit_scale=config.mup_output_mult if getattr(config, "use_mup", False) else 1.0,
        temperature=_transposed(targets.temperature),
        vocab_size=targets.vocab_size,
        entropy=targets.entropy,
        gradient_budget=targets.gradient_budget,
        cache_mib=targets.cache_mib,
        backend=targets.backend,
        **layer_options(layer),
    )


def gathered(hidden: Tensor, tp_group: Any) -> Tensor:
    """Gather hidden states of sequence parallelism, [S / TP, B, H] -> [S, B, H]. The backward reduce-scatters."""
    return tensor_parallel.gather_from_sequence_parallel_region(hidden, group=tp_group)


def layer_options(layer: Any) -> dict[str, Any]:
    """Translate a ColumnParallelLinear's settings to options of `linear_log_probs`."""
    return {
        "bias": None if layer.skip_bias_add else layer.bias,  # GPTModel ignores a bias that the layer returns
        "tp_group": layer.tp_group,
        "reduce_hidden": "all" if layer.allreduce_dgrad else "none",
    }


def _transposed(x: Any) -> Any:
    """Transpose a matrix, [B, S] to [S, B] or back. Other values pass unchanged."""
    return x.t() if isinstance(x, Tensor) and x.ndim == 2 else x


def check_layer(layer: Any, weight: Tensor) -> None:
    """Raise an error if the layer computes more than a product, or if Megatron would lose the weight's gradient."""
    check = Checks("output_processor")
    if type(layer).forward is not tensor_parallel.ColumnParallelLinear.forward:
        got = Unquoted(f"{type(layer).__module__}.{type(layer).__name__}")
        check.fail("output_layer", "a ColumnParallelLinear of megatron.core, no subclass", got, TypeError)
    config = layer.config
    if config.defer_embedding_wgrad_compute:
        check.fail("defer_embedding_wgrad_compute", "False", True)
    # With fusion, the losses of multi-token prediction mark the weight's gradient as already added. Megatron's hook
    # then drops ours, unless the weight has this attribute, which tied weights do.
    fused = getattr(config, "mtp_num_layers", None) and layer.gradient_accumulation_fusion
    if fused and not getattr(weight, "zero_out_wgrad", False):
        check.fail("gradient_accumulation_fusion", "False with multi-token prediction and an untied output layer", True)


@contextmanager
def _replaced(layer: Any, targets: Targets) -> Iterator[None]:
    """Make the layer return log-probs [S, B], or [S, B, 2] with entropies. Its hooks still fire."""
    original = vars(layer).get("forward")
    calls = 0

    def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        nonlocal calls
        calls += 1
        out = _log_probs(layer, hidden, weight, targets)
        return (out.log_probs if out.entropy is None else torch.stack([out.log_probs, out.entropy], -1)), None

    if original is not None:
        got = Unquoted("one that was replaced before")
        Checks("model_log_probs").fail("output_layer", "a layer with the forward of its class", got, TypeError)
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
    if calls != 1:
        Checks("model_log_probs").fail("model", "one that calls its output layer once", Unquoted(f"{calls} calls"))
