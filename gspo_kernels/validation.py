"""Every error of the library is raised here, in one form: the argument, what was expected and what came.

Metadata (types, shapes, dtypes, devices) is always checked. Values (target ids in range, finite advantages, ordered
offsets) are checked eagerly on a CPU. On an accelerator that would make the host wait, so there they are counted into
`metrics["invalid"]` and turn the loss into NaN; set GSPO_CHECK=1 to raise there too.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedParameter

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALF)
WIDE = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# Text for a message, or how to make it: under torch.compile sizes may be symbols, which only a failure may print.
Text = str | Callable[[], str]
# What float32 holds without turning into 0 or inf.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Said(str):
    """A description, which a message shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def describe(x: object) -> str:
    """A value for a message: tensors by their shape, everything else short."""
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)}"
    text = repr(x)
    return text if len(text) <= 120 and "\n" not in text else f"a value of type {type(x).__name__}"


def few(wrong: Tensor) -> list[float]:
    """Up to five different values."""
    return list(dict.fromkeys(wrong[:1000].tolist()))[:5] if not wrong.isnan().any() else [math.nan]


def dtype_name(dtype: torch.dtype) -> Said:
    return Said(str(dtype).removeprefix("torch."))


_said: set[str] = set()


def warn_once(text: str, stacklevel: int, kind: str = "") -> None:
    """Emit a UserWarning (stacklevel 2: the caller) once per kind, which by default is the text up to "="."""
    kind = kind or text.split("=")[0]
    if kind not in _said:
        _said.add(kind)
        warnings.warn(text, stacklevel=stacklevel)


class Field:
    """Checks of plain values, for one place that is named in every message."""

    def __init__(self, place: str) -> None:
        self.place = place

    def fail(self, name: str, expected: Text, got: object, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.place}: {name} must be {_say(expected)}, got {describe(got)}")

    def choice(self, name: str, value: object, allowed: Sequence[str]) -> None:
        if not isinstance(value, str) or value not in allowed:
            self.fail(name, f"one of {', '.join(map(repr, allowed))}", value)

    def boolean(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            self.fail(name, "True or False", value, TypeError)

    def number(self, name: str, value: Any, expected: Text, holds: Callable[[float], bool]) -> float:
        """A Python or numpy number for which `holds`, as a float."""
        # int and float by name as well: torch.compile knows them, and not their abstract class.
        if isinstance(value, bool) or not (isinstance(value, int | float) or isinstance(value, Real)):
            self.fail(name, expected, value, TypeError)
        magnitude: Any = abs(value)
        if not isinstance(value, float) and magnitude > LARGEST:  # float() might overflow
            self.fail(name, expected, value)
        if not holds(float(value)):  # NaN fails every comparison
            self.fail(name, expected, value)
        return float(value)


class Call(Field):
    """Checks of the arguments of one public call. Tensors are described in messages, never printed."""

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
        """A tensor of one of `dtypes` and one of `shapes` (None matches any size), on `device`."""
        if not isinstance(x, Tensor):
            got = None if x is None else Said(f"a {type(x).__name__}")
            self.fail(name, f"a tensor {_say(shape_text)}", got, TypeError)
        if x.is_nested:  # before anything asks for its shape
            expected = f"a dense tensor {_say(shape_text)} (torch.nested.to_padded_tensor, or packed with cu_seqlens)"
            self.fail(name, expected, Said("a nested tensor"), TypeError)
        if type(x).__name__ == "DTensor":
            expected = "a plain tensor (gather a sharded one, or call inside the module that owns it)"
            self.fail(name, expected, Said("a DTensor"), TypeError)
        if not any(_matches(x.shape, shape) for shape in shapes):
            self.fail(name, f"a tensor {_say(shape_text)}", x)
        if x.layout != torch.strided:
            self.fail(name, "a dense tensor", Said(f"one of layout {x.layout}"), TypeError)
        if _has_tangent(x):
            expected = "a tensor for reverse mode, the only one there is"
            self.fail(name, expected, Said("one with a forward-mode tangent"), TypeError)
        if x.dtype not in dtypes:
            self.fail(name, f"of dtype {' or '.join(map(dtype_name, dtypes))}", dtype_name(x.dtype), TypeError)
        if device is not None and x.device != device:
            self.fail(name, f"on {device} like the other tensors", Said(x.device))

    def log_probs(self, name: str, x: Any, **expected: Any) -> None:
        """Log-probs in fp32 or fp64: half precision cannot hold a ratio inside GSPO's window."""
        if isinstance(x, Tensor) and x.dtype in HALF:
            wide = (
                "float32 or float64 (near 1 nat half precision steps by 1e-3 to 8e-3, wider than a clip window of "
                "3e-4; compute it with linear_log_probs, or pass .float() to accept the rounding)"
            )
            self.fail(name, wide, dtype_name(x.dtype), TypeError)
        self.tensor(name, x, dtypes=WIDE, **expected)

    def whole(self, weight: Any) -> None:
        """Said before anything else about a head: the hooks of ZeRO-3 and FSDP are not the user's mistake."""
        expected = "a whole weight [V, H] (under ZeRO-3 or FSDP call inside the module's own forward, or gather it)"
        if type(weight).__name__ == "DTensor":
            self.fail("lm_head", f"a plain tensor and {expected}", Said("a DTensor"), TypeError)
        if (
            hasattr(type(weight), "__tensor_flatten__") and not weight.is_nested
        ):  # a tensor made of others: torchao's quantised ones
            got = Said(f"a {type(weight).__name__} of {type(weight).__module__.partition('.')[0]}")
            self.fail(
                "lm_head", "a plain tensor (leave the head out of quantisation, or dequantise it)", got, TypeError
            )
        if isinstance(weight, UninitializedParameter):
            self.fail("lm_head", "an initialised module", Said("a lazy one that was never called"))
        if isinstance(weight, Tensor) and not weight.is_nested and weight.numel() == 0:
            self.fail("lm_head", expected, Said(f"an empty tensor {list(weight.shape)}"))

    def mask(self, x: Any, **expected: Any) -> tuple[Tensor, Tensor]:
        """A mask as bool, and how many of its values are neither 0 nor 1."""
        self.tensor("mask", x, dtypes=(torch.bool, *FLOATS, *INTEGERS), **expected)
        if x.dtype == torch.bool:
            return x, torch.zeros((), dtype=torch.int64, device=x.device)
        wrong = (x != 0) & (x != 1)
        return x != 0, self.flag("mask", wrong, "0 or 1", lambda: few(x[wrong]))

    def weight(self, weight: Any, hidden: Tensor) -> None:
        self.whole(weight)
        width = hidden.shape[-1]
        if not isinstance(weight, Tensor):
            got = None if weight is None else Said(f"a {type(weight).__name__}")
            self.fail("lm_head", f"a tensor [V, H] with H = {width}, or an nn.Linear", got, TypeError)
        if not weight.is_nested and weight.ndim == 2 and weight.shape[1] != width == weight.shape[0]:
            got = Said(f"a tensor {list(weight.shape)} (is it transposed, or are hidden in fact logits?)")
            self.fail("lm_head", f"a tensor [V, H] with H = {width}", got)
        self.tensor(
            "lm_head",
            weight,
            dtypes=FLOATS,
            shapes=[(None, width)],
            shape_text=lambda: f"[V, H] with H = {width}",
            device=hidden.device,
        )

    def head(self, weight: Any, bias: Any, hidden: Tensor) -> None:
        self.weight(weight, hidden)
        if weight.dtype != hidden.dtype:
            expected = f"of the dtype of hidden ({dtype_name(hidden.dtype)}; autocast casts both, but never float64)"
            self.fail("lm_head", expected, dtype_name(weight.dtype), TypeError)
        if bias is not None:
            vocab = weight.shape[0]
            self.tensor(
                "bias",
                bias,
                dtypes=[hidden.dtype],
                shapes=[(vocab,)],
                shape_text=lambda: f"[V] = [{vocab}]",
                device=hidden.device,
            )

    def logit_options(self, logit_scale: Any, logit_softcap: Any, vocab_size: Any, columns: int) -> None:
        expected = "a finite number other than 0, within float32"
        self.number("logit_scale", logit_scale, expected, lambda x: SMALLEST <= abs(x) <= LARGEST)
        if logit_softcap is not None:
            self.number("logit_softcap", logit_softcap, "a finite number > 0, within float32, or None", positive)
        if vocab_size is not None:
            if isinstance(vocab_size, bool) or not (isinstance(vocab_size, int) or isinstance(vocab_size, Integral)):
                self.fail("vocab_size", "an int", vocab_size, TypeError)
            if not 1 <= int(vocab_size) <= columns:
                self.fail("vocab_size", lambda: f"between 1 and the {columns} rows of lm_head", vocab_size)

    def temperature(self, temperature: Any, shape: Sequence[int], device: torch.device) -> None:
        if not isinstance(temperature, Tensor):
            expected = "a finite number > 0, within float32, or a tensor with no dimension or one value per token"
            self.number("temperature", temperature, expected, positive)
            return
        self.tensor(
            "temperature",
            temperature,
            dtypes=FLOATS,
            shapes=[(), shape],
            shape_text=lambda: f"with no dimension, or {list(shape)} (one per token)",
            device=device,
        )
        if temperature.requires_grad:
            self.fail("temperature", "without gradient (it is a constant of the loss)", Said("requires_grad=True"))

    def normalizer(self, name: str, value: Any, mask: Tensor) -> Tensor | int:
        """Check a number or a tensor with no dimension; return how many values are not finite and > 0.

        A tensor may also be 0 where no token counts, as the number of tokens of such a batch is.
        """
        expected = "a finite number > 0, within float32, a tensor with no dimension that holds one, or None"
        if value is None:
            return 0
        if not isinstance(value, Tensor):
            self.number(name, value, expected, positive)
            return 0
        dtypes = (*FLOATS, *INTEGERS)
        self.tensor(name, value, dtypes=dtypes, shapes=[()], shape_text="with no dimension", device=mask.device)
        x = value.float() if value.dtype in HALF else value  # half precision has no number for these bounds
        right = (x >= SMALLEST) & (x <= LARGEST) if x.is_floating_point() else x > 0
        return self.flag(name, ~right & ((x != 0) | mask.any()), expected, value.item)

    def offsets(self, cu_seqlens: Any, rows: int, device: torch.device) -> Tensor:
        """Check [S + 1] offsets of sequences in `rows` rows; return how many values are out of order or place."""
        dtypes = (torch.int32, torch.int64)
        self.tensor("cu_seqlens", cu_seqlens, dtypes=dtypes, shapes=[(None,)], shape_text="[S + 1]", device=device)
        if cu_seqlens.shape[0] == 0:
            self.fail("cu_seqlens", "[S + 1] values, so at least the leading 0", Said("an empty tensor"))

        def values() -> str:
            x = cu_seqlens.tolist()
            return Said(x if len(x) <= 8 else f"{x[:4]} ... {x[-3:]}")

        backwards = self.flag("cu_seqlens", cu_seqlens[1:] < cu_seqlens[:-1], "non-decreasing offsets", values)
        start = self.flag("cu_seqlens", cu_seqlens[:1] != 0, "offsets starting at 0", values)
        end = self.flag("cu_seqlens", cu_seqlens[-1:] != rows, lambda: f"offsets ending at N = {rows}", values)
        return backwards + start + end

    def flag(self, name: str, wrong: Tensor, expected: Text, got: Callable[[], object]) -> Tensor:
        """Count the entries of `wrong`; raise if there are any and looking is free (CPU) or wanted (GSPO_CHECK=1)."""
        count = wrong.sum()
        if _values_are_checked(wrong.device) and type(count).__name__ != "FakeTensor" and count.item():
            self.fail(name, expected, got())
        return count


def bound(x: float) -> bool:
    """A bound that a tensor can be compared with, or none."""
    return x <= LARGEST or x == math.inf


def positive(x: float) -> bool:
    return SMALLEST <= x <= LARGEST


def _say(text: Text) -> str:
    return text if isinstance(text, str) else text()


def _has_tangent(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def _values_are_checked(device: torch.device) -> bool:
    if torch.compiler.is_compiling():  # a value check would break the graph
        return False
    text = os.environ.get("GSPO_CHECK", "0")
    if text not in ("", "0", "1"):
        raise ValueError(f"environment variable GSPO_CHECK must be 0 or 1, got {text!r}")
    return device.type == "cpu" or (text == "1" and device.type != "meta")


def _matches(shape: torch.Size, pattern: Sequence[int | None]) -> bool:
    return len(shape) == len(pattern) and all(p is None or p == s for s, p in zip(shape, pattern, strict=True))
