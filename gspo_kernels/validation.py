"""Checks of arguments. Every error message names the argument, the expected value and the value received.

Types, shapes, dtypes and devices are always checked. Bad values (target ids out of range, NaN advantages, unordered
offsets) raise errors on a CPU. On a GPU this check would make the host wait, so bad values are counted in
`metrics["invalid"]` and make the loss NaN. GSPO_CHECK=1 raises errors on a GPU as well. Under torch.compile and
torch.func.vmap, bad values are only counted, on any device.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,  # as by torch.func.vmap
    is_gradtrackingtensor,
)
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedParameter

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
WIDE = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INDEX_DTYPES = (torch.int32, torch.int64)
# A message, or a function that returns it: under torch.compile, sizes may be symbols that only a failing check prints.
Text = str | Callable[[], str]
# In bf16, a logit minus its log-sum-exp may be rounded to +0.25 if both are near 128.
ROUNDING = 0.25
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max  # normal and finite float32


class Unquoted(str):
    """Text that a message shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def describe(x: object) -> str:
    """Describe a value in a message: a tensor by its shape, other values by their repr or, if long, their type."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)}"
    text = repr(x)
    return text if len(text) <= 120 and "\n" not in text else f"a value of type {type(x).__name__}"


def up_to_five(wrong: Tensor) -> list[float]:
    """Return at most five distinct values out of the first 1,000 of `wrong`, or [NaN] if any value is NaN."""
    return list(dict.fromkeys(wrong[:1000].tolist()))[:5] if not wrong.isnan().any() else [math.nan]


def dtype_name(dtype: torch.dtype) -> Unquoted:
    """Return "float32" for torch.float32."""
    return Unquoted(str(dtype).removeprefix("torch."))


_warned: set[str] = set()


def warn_once(text: str, stacklevel: int, kind: str = "") -> None:
    """Emit a UserWarning once per `kind`, which defaults to the text before the first "=".

    `stacklevel` is used as by `warnings.warn`: 2 is the caller of this function.
    """
    kind = kind or text.split("=")[0]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(text, stacklevel=stacklevel)


class Checks:
    """Checks of plain values. Messages begin with `place`, the function or class that received the value."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._wrong: list[Tensor] = []  # bool, for `TensorChecks.invalid`
        self._raises: bool | None = None  # whether bad values raise errors; None before the first check of values

    def fail(self, name: str, expected: Text, got: object, error: type[Exception] = ValueError) -> NoReturn:
        """Raise "<place>: <name> must be <expected>, got <got>"."""
        raise error(f"{self.place}: {name} must be {_text_of(expected)}, got {describe(got)}")

    def choice(self, name: str, value: object, allowed: Sequence[str]) -> None:
        """Check that a value is one of `allowed`."""
        if not isinstance(value, str) or value not in allowed:
            self.fail(name, f"one of {', '.join(map(repr, allowed))}", value)

    def boolean(self, name: str, value: object) -> None:
        """Check that a value is a bool."""
        if not isinstance(value, bool):
            self.fail(name, "True or False", value, TypeError)

    def number(self, name: str, value: Any, expected: Text, is_valid: Callable[[float], bool]) -> float:
        """Check that a Python or numpy number is valid, and return it as a float."""
        # int and float are named because torch.compile does not support isinstance with numbers.Real.
        if isinstance(value, bool) or not (isinstance(value, int | float) or isinstance(value, Real)):
            self.fail(name, expected, value, TypeError)
        magnitude: Any = abs(value)
        if not isinstance(value, float) and magnitude > LARGEST:  # float() might overflow
            self.fail(name, expected, value)
        if not is_valid(float(value)):  # NaN fails every comparison
            self.fail(name, expected, value)
        return float(value)

    def integer(self, name: str, value: Any, expected: Text, is_valid: Callable[[int], bool]) -> int:
        """Check that a Python or NumPy integer is valid, and return it as an int."""
        # int is named because torch.compile does not support isinstance with numbers.Integral.
        if isinstance(value, bool) or not (isinstance(value, int) or isinstance(value, Integral)):
            self.fail(name, expected, value, TypeError)
        if not is_valid(int(value)):
            self.fail(name, expected, value)
        return int(value)

    def budget(self, value: Any) -> None:
        """Check that a `gradient_budget` is in [0, 1)."""
        self.number("gradient_budget", value, "a number from 0 (exact) to below 1", lambda x: 0 <= x < 1)


class TensorChecks(Checks):
    """Checks of the arguments of one public call. Messages describe tensors by shape and never print them."""

    def tensor(
        self,
        name: str,
        x: Any,
        *,
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int | None]],
        shape_text: Text,
        device: torch.device | None = None,
    ) -> None:
        """Check that `x` is a tensor of one of `dtypes` and `shapes` (None matches any size), on `device`."""
        if not isinstance(x, Tensor):
            got = None if x is None else Unquoted(f"a {type(x).__name__}")
            self.fail(name, f"a tensor {_text_of(shape_text)}", got, TypeError)
        if x.is_nested:  # checked first, because reading the shape of a nested tensor raises an error
            fixes = "torch.nested.to_padded_tensor, or packed with cu_seqlens"
            expected = f"a dense tensor {_text_of(shape_text)} ({fixes})"
            self.fail(name, expected, Unquoted("a nested tensor"), TypeError)
        if type(x).__name__ == "DTensor":
            expected = "a plain tensor (gather a sharded one, or call inside the forward of its module)"
            self.fail(name, expected, Unquoted("a DTensor"), TypeError)
        if not _matches(x.shape, shapes):
            self.fail(name, f"a tensor {_text_of(shape_text)}", x)
        if x.layout != torch.strided:
            self.fail(name, "a dense tensor", Unquoted(f"a tensor of layout {x.layout}"), TypeError)
        if not torch.compiler.is_compiling() and forward_ad._current_level >= 0 and _has_tangent(x):
            expected = "a tensor without forward-mode tangent (only reverse mode is supported)"
            self.fail(name, expected, Unquoted("a dual tensor"), TypeError)
        if x.dtype not in dtypes:
            self.fail(name, f"of dtype {' or '.join(map(dtype_name, dtypes))}", dtype_name(x.dtype), TypeError)
        if device is not None and x.device != device:
            self.fail(name, f"on {device} like the other tensors", Unquoted(x.device))

    def log_probs(self, name: str, x: Any, **expected: Any) -> None:
        """Check log-probs, which must be fp32 or fp64: half precision cannot resolve GSPO's clip window."""
        if isinstance(x, Tensor) and x.dtype in HALF:
            wide = (
                "float32 or float64 (near 1 nat, half precision has steps of 1e-3 to 8e-3, wider than a clip window "
                "of 3e-4; compute it with linear_log_probs, or pass .float() to accept the rounding)"
            )
            self.fail(name, wide, dtype_name(x.dtype), TypeError)
        self.tensor(name, x, dtypes=WIDE, **expected)

    def sign(self, name: str, x: Tensor, unmasked: Tensor, *, positive: bool = False) -> None:
        """Check that log-probs are <= 0, or entropies >= 0, up to ROUNDING. NaN passes: it makes the loss NaN."""
        wrong = unmasked & (x < -ROUNDING if positive else x > ROUNDING)
        sign = ">=" if positive else "<="
        expected = lambda: f"{sign} 0 where mask is true (rounding may add {ROUNDING:g})"  # noqa: E731
        self.flag(name, wrong, expected, lambda: up_to_five(x[wrong]))

    def unsharded(self, weight: Any) -> None:
        """Check that a head's weight is a plain, initialized, non-empty tensor, neither sharded nor quantized."""
        # Called before the other checks of a head. ZeRO-3 and FSDP add hooks, and without this order the error would
        # name the hooks as the reason.
        expected = (
            "an unsharded weight [V, H] (under ZeRO-3 or FSDP, call inside the module's forward, or gather the weight)"
        )
        if hasattr(type(weight), "__tensor_flatten__") and not weight.is_nested:  # such as torchao's quantized tensors
            got = Unquoted(f"a {type(weight).__name__} of {type(weight).__module__.partition('.')[0]}")
            plain = "a plain tensor (leave the head out of quantization, or dequantize it)"
            self.fail("lm_head", plain, got, TypeError)
        if isinstance(weight, UninitializedParameter):
            self.fail("lm_head", "an initialized module", Unquoted("a lazy module that was never called"))
        if isinstance(weight, Tensor) and not weight.is_nested and weight.numel() == 0:
            self.fail("lm_head", expected, Unquoted(f"an empty tensor {list(weight.shape)}"))

    def mask(self, x: Any, **expected: Any) -> Tensor:
        """Check a mask, whose values are 0 and 1. Return it as bool."""
        self.tensor("mask", x, dtypes=(torch.bool, *FLOATS, *INTEGERS), **expected)
        if x.dtype == torch.bool:
            return x
        wrong = (x != 0) & (x != 1)
        self.flag("mask", wrong, "0 or 1", lambda: up_to_five(x[wrong]))
        return x != 0

    def weight(self, weight: Any, hidden: Tensor) -> None:
        """Check the weight of a head, [V, H]."""
        self.unsharded(weight)
        width, device = hidden.shape[-1], hidden.device
        if not isinstance(weight, Tensor):
            got = None if weight is None else Unquoted(f"a {type(weight).__name__}")
            self.fail("lm_head", f"a tensor [V, H] with H = {width}, or an nn.Linear", got, TypeError)
        if not weight.is_nested and weight.ndim == 2 and weight.shape[1] != width == weight.shape[0]:
            got = Unquoted(f"a tensor {list(weight.shape)} (is it transposed, or does hidden hold logits?)")
            self.fail("lm_head", f"a tensor [V, H] with H = {width}", got)
        text = lambda: f"[V, H] with H = {width}"  # noqa: E731
        self.tensor("lm_head", weight, dtypes=FLOATS, shapes=[(None, width)], shape_text=text, device=device)

    def head(self, weight: Any, bias: Any, hidden: Tensor, has_precision: bool) -> None:
        """Check weight and bias of a head: shapes, and the dtype and device of `hidden`."""
        self.weight(weight, hidden)
        if weight.dtype != hidden.dtype:
            remedy = "autocast casts both, but never float64"
            if has_precision:
                remedy = "head_precision widens hidden states, not lm_head"
            elif weight.dtype == torch.float32 and hidden.dtype in HALF:
                remedy = "for a float32 head pass head_precision='fp32'"
            expected = f"of the dtype of hidden ({dtype_name(hidden.dtype)}; {remedy})"
            self.fail("lm_head", expected, dtype_name(weight.dtype), TypeError)
        if bias is not None:
            vocab, dtypes, device = weight.shape[0], [hidden.dtype], hidden.device
            text = lambda: f"[V] = [{vocab}]"  # noqa: E731
            self.tensor("bias", bias, dtypes=dtypes, shapes=[(vocab,)], shape_text=text, device=device)

    def logit_options(self, logit_scale: Any, logit_softcap: Any, vocab_size: Any, columns: int) -> None:
        """Check the scalar options of a head whose weight has `columns` rows, one per vocabulary column."""
        expected = "a finite number other than 0, within float32"
        self.number("logit_scale", logit_scale, expected, lambda x: SMALLEST <= abs(x) <= LARGEST)
        if logit_softcap is not None:
            self.number("logit_softcap", logit_softcap, "a finite number > 0, within float32, or None", positive)
        if vocab_size is not None:
            text = lambda: f"an int between 1 and the {columns} rows of lm_head"  # noqa: E731
            self.integer("vocab_size", vocab_size, text, lambda x: 1 <= x <= columns)

    def normalizer(self, name: str, value: Any, mask: Tensor) -> None:
        """Check a normalizer: a number, a tensor [] or None.

        Valid values are finite and > 0. If all tokens are masked, a tensor may also be 0, because it may hold the
        number of unmasked tokens.
        """
        expected = "a finite number > 0 within float32, a tensor with no dimension that holds one, or None"
        if not isinstance(value, Tensor):
            if value is not None:
                self.number(name, value, expected, positive)
            return
        dtypes = (*FLOATS, *INTEGERS)
        self.tensor(name, value, dtypes=dtypes, shapes=[()], shape_text="with no dimension", device=mask.device)
        x = value.float() if value.dtype in HALF else value  # half precision cannot represent SMALLEST and LARGEST
        is_valid = (x >= SMALLEST) & (x <= LARGEST) if x.is_floating_point() else x > 0
        self.flag(name, ~is_valid & ((x != 0) | mask.any()), expected, value.item)

    def offsets(self, cu_seqlens: Any, rows: int, device: torch.device) -> None:
        """Check offsets [S + 1] of sequences in `rows` rows."""
        dtypes, text = INDEX_DTYPES, "[S + 1]"
        self.tensor("cu_seqlens", cu_seqlens, dtypes=dtypes, shapes=[(None,)], shape_text=text, device=device)
        if cu_seqlens.shape[0] < (2 if rows else 1):
            self.fail("cu_seqlens", lambda: f"[S + 1] values, starting with 0 and ending at N = {rows}", cu_seqlens)

        def values() -> str:
            x = cu_seqlens.tolist()
            return Unquoted(x if len(x) <= 8 else f"{x[:4]} ... {x[-3:]}")

        self.flag("cu_seqlens", cu_seqlens[1:] < cu_seqlens[:-1], "non-decreasing offsets", values)
        self.flag("cu_seqlens", cu_seqlens[:1] != 0, "offsets starting at 0", values)
        self.flag("cu_seqlens", cu_seqlens[-1:] != rows, lambda: f"offsets ending at N = {rows}", values)

    def flag(self, name: str, wrong: Tensor, expected: Text, got: Callable[[], object]) -> None:
        """Raise if `wrong` (bool) has a true entry, on a CPU or with GSPO_CHECK=1. Elsewhere `invalid` counts them."""
        if self._raises is None:  # all tensors of a call are on one device
            self._raises = values_are_checked(wrong.device)
        if not self._raises or type(wrong).__name__ == "FakeTensor" or is_functorch_wrapped_tensor(wrong):
            self._wrong.append(wrong)
        elif wrong.any().item():
            self.fail(name, expected, got())

    def hint(self, like: Tensor, suspicious: Callable[[], Tensor], text: str, stacklevel: int) -> None:
        """Warn once about values that are allowed but rarely intended. On a GPU, only with GSPO_CHECK=1, as in `flag`.

        `suspicious` returns a bool tensor on the device of `like`. `stacklevel` is as in `warn_once`.
        """
        if not values_are_checked(like.device):  # the next line cannot be compiled
            return
        has_values = type(like).__name__ != "FakeTensor" and not is_functorch_wrapped_tensor(like)
        if has_values and suspicious().any().item():
            warn_once(f"{self.place}: {text}", stacklevel, kind=text)

    def not_made_in_inference_mode(self, **tensors: Tensor | None) -> None:
        """Check tensors that autograd saves, because its own error does not name them."""
        for name, x in tensors.items():
            if x is not None and not torch.compiler.is_compiling() and x.is_inference():
                expected = "a tensor made outside of torch.inference_mode() (use torch.no_grad(), or pass a clone)"
                self.fail(name, expected, Unquoted("an inference tensor, which autograd cannot save for the backward"))

    def invalid(self, device: torch.device) -> Tensor:
        """Return the number of invalid values that were not checked on the host, [] int64."""
        wrong = [x.reshape(-1) for x in self._wrong]
        return torch.cat(wrong).sum() if wrong else torch.zeros((), dtype=torch.int64, device=device)

    def nan_if_invalid(self, x: Tensor) -> Tensor:
        """Return `x`, or NaN everywhere if there are invalid values that were not checked on the host."""
        return torch.where(self.invalid(x.device) > 0, torch.nan, x) if self._wrong else x


def valid_bound(x: float) -> bool:
    """Return whether an upper bound is within the range of float32, or inf, which means no bound."""
    return x <= LARGEST or x == math.inf


def positive(x: float) -> bool:
    """Return whether a number is > 0 and finite in float32."""
    return SMALLEST <= x <= LARGEST


def _text_of(text: Text) -> str:
    return text if isinstance(text, str) else text()


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def values_are_checked(device: torch.device) -> bool:
    """Return whether bad values in tensors on `device` raise errors."""
    if torch.compiler.is_compiling():  # reading a value would break the graph
        return False
    text = os.environ.get("GSPO_CHECK", "0")
    if text not in ("", "0", "1"):
        raise ValueError(f"environment variable GSPO_CHECK must be 0 or 1, got {text!r}")
    return device.type == "cpu" or (text == "1" and device.type != "meta")


def _matches(shape: torch.Size, patterns: Sequence[Sequence[int | None]]) -> bool:
    """Return whether a shape matches one of the patterns, in which None matches any size."""
    for pattern in patterns:
        if len(shape) == len(pattern) and all([p is None or p == s for s, p in zip(shape, pattern, strict=True)]):
            return True
    return False


# -- derivatives that the operators do not have

# Functions of `gspo_kernels.reference` that autograd differentiates any number of times.
REPLACEMENTS = {
    "gspo_fused_loss": "gspo_reference_loss",
    "linear_log_probs": "token_log_probs",
    "policy_loss": "log_ratios_of_sequence and surrogate",
}


def refuse_second_derivative(function: str) -> NoReturn:
    """Raise the error of a backward through the backward of a public function."""
    raise RuntimeError(
        f"{function}: the gradient is not differentiable, got a second backward through it (gradient penalty, hvp, "
        f"hessian, jvp). Use gspo_kernels.reference.{REPLACEMENTS[function]}, which autograd differentiates twice"
    )


def refuse_torch_func(function: str, values: Iterable[object]) -> None:
    """Raise an error if `torch.func` differentiates one of `values`. PyTorch's error would name no function of ours."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if any(isinstance(x, Tensor) and _is_tracked(x) for x in values):
        raise RuntimeError(
            f"{function}: torch.func.grad, vjp, jacrev and hessian are not supported. Use .backward() or "
            "torch.autograd.grad; both work with torch.func.functional_call"
        )


def _is_tracked(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = get_unwrapped(x)
    return False
