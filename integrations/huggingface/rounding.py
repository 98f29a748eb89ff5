"""Measure which clip decisions rounding changes in your model: in its body, and in its head.

    before = log_probs_by_precision(model, input_ids, attention_mask, answer_mask)
    ...  # updates
    after = log_probs_by_precision(model, input_ids, attention_mask, answer_mask)
    noise = clip_noise(before, after, advantages, answer_mask[:, 1:])
    print(f"{noise.share:.1%} of the clip decisions differ in fp32")

The reference is a forward of the same weights in fp32, whose own rounding changes about 0.002% of the decisions
(docs/guides/precision.md). Each measurement costs two forwards of the answers, one of them in fp32, so a few answers
are enough: add up several measurements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gspo_kernels import Objective, linear_log_probs, policy_loss
from gspo_kernels.inputs.lm_head import is_fsdp_unit
from gspo_kernels.objective import CLIPPING
from gspo_kernels.ranks.dtensors import is_dtensor
from gspo_kernels.validation import FLOATS, INTEGERS, TensorChecks, Unquoted, up_to_five

from .fused_head import base_model, check_model, fuse_head, is_fused
from .head_options import generators_restored, in_mode
from .rows import live_tokens

_HALF = (torch.bfloat16, torch.float16)


class LogProbsByPrecision(NamedTuple):
    """Log-probs of the same tokens from the same weights, in three precisions: fp32 [B, T - 1], 0 at masked tokens.

    If your loss takes other log-probs, such as those of an inference engine, put them in place of `used`:
    `before._replace(used=engine_log_probs)`.
    """

    used: Tensor  # as training computes them, by `linear_log_probs` at the head
    fp32_head: Tensor  # of the same hidden states, with the head in fp32
    fp32: Tensor  # of a forward in fp32


class ClipNoise(NamedTuple):
    """Clip decisions that rounding changes. All fields are sums: add up several measurements field by field.

    A decision is whether a gradient is clipped: one per answer with ratio="sequence", otherwise one per token. Answers
    and tokens with advantage 0 do not count. If advantages differ inside an answer, its decision counts as changed as
    soon as one of its tokens is clipped differently.
    """

    decisions: float
    changed: float  # decisions that come out differently with the log-probs of a forward in fp32
    changed_by_body: float  # decisions of an fp32 head that change if the body runs in fp32 too
    changed_by_head: float  # decisions that change if only the head runs in fp32
    squared_error: float  # sum over decisions of the squared error of the log-ratio, in nats squared

    @property
    def share(self) -> float:
        """Share of the decisions that change; NaN without decisions."""
        return self.changed / self.decisions if self.decisions else math.nan

    @property
    def error(self) -> float:
        """Root mean square of the errors of the log-ratios, in nats; NaN without decisions."""
        return math.sqrt(self.squared_error / self.decisions) if self.decisions else math.nan

    def metrics(self) -> dict[str, float]:
        """Shares of the decisions and the error of log-ratios, by the names under which trainers log them.

        {} without decisions.
        """
        if not self.decisions:
            return {}
        return {
            "clip_noise": self.share,
            "clip_noise_body": self.changed_by_body / self.decisions,
            "clip_noise_head": self.changed_by_head / self.decisions,
            "clip_noise_log_ratio": self.error,
        }


def log_probs_by_precision(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    answer_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    **inputs: Any,
) -> LogProbsByPrecision:
    """Compute log-probs of `input_ids[:, 1:]` three times: as training does, with an fp32 head, and fully in fp32.

    Call this in the same autocast as your training step. Weights in bf16 or fp16 are cast to fp32 while they are used:
    those of one decoder layer at a time, and those outside the layers. Flash attention, which has no fp32, is replaced
    by PyTorch's `scaled_dot_product_attention` or, for a model that it does not support, by eager attention.

    The model runs in evaluation mode, without dropout. The call restores the mode of each module, and the random number
    generators of Python, NumPy and torch.

    Args:
        model: a causal language model of transformers, plain or wrapped by PEFT or DistributedDataParallel. If it is
            not fused yet (`fuse_head`), it is fused for this call.
        input_ids, attention_mask: [B, T], of prompts and answers.
        answer_mask: [B, T], not 0 at the tokens of answers. None: all tokens.
        temperature: divides the logits, as in the loss.
        inputs: more arguments of the model's forward, such as position_ids.

    Raises:
        TypeError, ValueError: the model is sharded (FSDP, ZeRO-3, tensor parallelism) or quantized; an argument is not
            [B, T]; or `fuse_head` refuses the model.
    """
    check = TensorChecks("log_probs_by_precision")
    check_model(check.place, model)
    base = base_model(model)
    check.tensor("input_ids", input_ids, dtypes=[torch.int64], shapes=[(None, None)], shape_text="of token ids [B, T]")
    if input_ids.shape[1] < 2:
        check.fail("input_ids", "a tensor of token ids [B, T] with T >= 2", input_ids)
    for name, mask in (("attention_mask", attention_mask), ("answer_mask", answer_mask)):
        if mask is not None:
            dtypes, text = [torch.bool, *FLOATS, *INTEGERS], f"{list(input_ids.shape)} like input_ids, or None"
            shapes = [input_ids.shape]
            check.tensor(name, mask, dtypes=dtypes, shapes=shapes, shape_text=text, device=input_ids.device)
    if any(map(is_fsdp_unit, model.modules())):
        check.fail("model", "a model with whole weights", Unquoted("one that FSDP shards"))
    for name, parameter in base.named_parameters():
        if is_dtensor(parameter) or hasattr(parameter, "ds_id") or not parameter.is_floating_point():
            expected = "whole weights in floating point, neither sharded nor quantized"
            check.fail("model", expected, Unquoted(f"{name} as a {type(parameter).__name__} of {parameter.dtype}"))
    targets = input_ids[:, 1:]
    mask = torch.ones_like(targets) if answer_mask is None else answer_mask[:, 1:] != 0
    options: dict[str, Any] = {"mask": mask, "temperature": temperature}

    def both_heads(hidden: Tensor, head: nn.Module, **kwargs: Any) -> tuple[Tensor, Tensor]:
        used = linear_log_probs(hidden[:, :-1], head, targets, **options, **kwargs).log_probs
        return used, fp32_head(hidden, head, **kwargs)

    def fp32_head(hidden: Tensor, head: nn.Module, **kwargs: Any) -> Tensor:
        hidden = hidden[:, :-1]
        with torch.autocast(hidden.device.type, enabled=False), _weights_in_fp32(*head.modules()):
            hidden = hidden.float() if hidden.dtype in _HALF else hidden
            return linear_log_probs(hidden, head, targets, **options, **kwargs).log_probs

    was_fused = is_fused(model)
    inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    with torch.no_grad(), generators_restored(model), in_mode(list(model.modules()), training=False):
        fused = fuse_head(model)
        try:
            used, head_only = model(**inputs, with_head=both_heads).result
            with _body_in_fp32(base):
                exact = model(**inputs, with_head=fp32_head).result
        finally:
            if not was_fused:
                fused.remove()
    return LogProbsByPrecision(used, head_only, exact)


@contextlib.contextmanager
def _body_in_fp32(model: Any) -> Iterator[None]:
    """Make the forward of a transformers model compute hidden states in fp32. Its head does not change."""
    head = set(model.get_output_embeddings().modules())
    layers: list[nn.Module] = []  # the outermost entries of module lists
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            layers += module
            inside.update(x for layer in module for x in layer.modules())
    outside = [x for x in model.modules() if x not in inside and x not in head]
    configs = {id(x.config): x.config for x in model.modules() if "flash" in _attention_of(x)}.values()
    implementations = [(config, config._attn_implementation) for config in configs]
    # Soft-caps and sinks of attention exist in flash and in eager attention only.
    replacement = "sdpa" if all(_takes_sdpa(x) for x in model.modules() if hasattr(x, "config")) else "eager"
    with contextlib.ExitStack() as stack:
        for layer in layers:
            _enter_while_called(layer, lambda layer=layer: _weights_in_fp32(*layer.modules()), stack)
        device = next(model.parameters()).device.type
        for child in model.children():  # inside the autocast that accelerate's forward enters
            if child not in head:
                _enter_while_called(child, lambda: torch.autocast(device, enabled=False), stack)
        stack.enter_context(_weights_in_fp32(*outside))
        for config, implementation in implementations:
            stack.callback(setattr, config, "_attn_implementation", implementation)
            config._attn_implementation = replacement
        yield


def _takes_sdpa(module: Any) -> bool:
    capped = getattr(module.config, "attn_logit_softcapping", None) is not None
    return getattr(module, "_supports_sdpa", True) and not capped


def _attention_of(module: Any) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) or ""


def _enter_while_called(
    module: nn.Module, make: Callable[[], contextlib.AbstractContextManager[Any]], stack: contextlib.ExitStack
) -> None:
    """Run every call of `module` inside a new context from `make`, until `stack` closes."""
    entered: list[contextlib.AbstractContextManager[Any]] = []

    def before(*_: Any) -> None:
        context = make()
        context.__enter__()
        entered.append(context)

    def after(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after, always_call=True).remove)


@contextlib.contextmanager
def _weights_in_fp32(*modules: nn.Module) -> Iterator[None]:
    """Replace half-precision parameters and buffers of these modules by fp32 copies, but not those of submodules."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in modules:
            owners: list[Any] = [module._parameters, module._buffers]
            for tensors in owners:
                for name, x in tensors.items():
                    if x is not None and x.dtype in _HALF:
                        replaced.append((tensors, name, x))
                        copy = x.detach().float()
                        tensors[name] = nn.Parameter(copy, False) if isinstance(x, nn.Parameter) else copy
        yield
    finally:
        for tensors, name, x in replaced:
            tensors[name] = x


def clip_noise(
    before: LogProbsByPrecision,
    after: LogProbsByPrecision,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective | None = None,
) -> ClipNoise:
    """Count the clip decisions that rounding changes.

    Args:
        before, after: log-probs of the same tokens [B, T] by the weights of the old log-probs, and by those of the
            update (`log_probs_by_precision`).
        advantages, mask: of `policy_loss`.
        objective: of the loss; its KL term, entropy bonus and rollout correction are left out. None: `Objective()`.

    Raises:
        ValueError: the surrogate of the objective has a gradient outside its window, or clips single tokens of a
            sequence ratio (gmpo).
        TypeError, ValueError: log-probs or the mask are not [B, T], log-probs are not finite, or `policy_loss` refuses
            an argument.
    """
    check = TensorChecks("clip_noise")
    objective = Objective() if objective is None else objective
    expected = f"an Objective whose surrogate is one of {', '.join(CLIPPING)}"
    if not isinstance(objective, Objective):
        check.fail("objective", expected, objective, TypeError)
    if objective.surrogate not in CLIPPING:
        check.fail("objective", expected, Unquoted(f"surrogate={objective.surrogate!r}"))
    mask = check.mask(mask, shapes=[(None, None)], shape_text="[B, T]")
    shapes, text = [mask.shape], f"{list(mask.shape)} like mask"
    for name, of in (("before", before), ("after", after)):
        if not isinstance(of, LogProbsByPrecision):
            check.fail(name, "LogProbsByPrecision, from log_probs_by_precision", of, TypeError)
        for field, x in of._asdict().items():
            check.log_probs(f"{name}.{field}", x, shapes=shapes, shape_text=text, device=mask.device)
            check.sign(f"{name}.{field}", x, mask)
            wrong = mask & ~x.isfinite()
            check.flag(f"{name}.{field}", wrong, "finite where mask is true", lambda x=x[wrong]: up_to_five(x))
    of_answers = objective.ratio == "sequence"
    changes: dict[str, Any] = {"kl_coef": 0.0, "entropy_coef": 0.0, "rollout_correction": None}
    changes["aggregation"] = "seq-mean-token-mean"  # irrelevant here, and other values may warn
    # Both ratios clip alike, but with "sequence" the gradient of each token is a sum over its answer.
    changes["ratio"] = "sequence-token" if of_answers else objective.ratio
    objective = replace(objective, **changes)

    def decided(kind: str) -> tuple[Tensor, Tensor]:
        """Whether each token [B, T] gets a gradient, and the log-ratios of answers [B] or tokens [B, T]."""
        with torch.inference_mode(False), torch.enable_grad():
            log_probs = getattr(after, kind).detach().clone().requires_grad_()
            old = getattr(before, kind).clone()
            out = policy_loss(log_probs, advantages, mask=mask, old_log_probs=old, objective=objective)
            return torch.autograd.grad(out.loss, log_probs)[0] != 0, out.log_ratio

    (used, log_ratio), (head_only, _), (exact, true_ratio) = map(decided, LogProbsByPrecision._fields)
    live = live_tokens(advantages, mask)

    def count(tokens: Tensor) -> int:
        """Count the decisions about these tokens, bool [B, T]."""
        return int((tokens.any(1) if of_answers else tokens).sum())

    pairs = ((used, exact), (head_only, exact), (used, head_only))
    changed, by_body, by_head = (count((a != b) & live) for a, b in pairs)
    squares = (log_ratio.double() - true_ratio.double()).square()
    if squares.ndim == 1 and not of_answers:
        squares = squares[:, None].expand_as(live)
    squared_error = squares[live.any(1) if of_answers else live].sum().item()
    return ClipNoise(count(live), changed, by_body, by_head, squared_error)
