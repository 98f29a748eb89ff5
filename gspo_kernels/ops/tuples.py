"""torch.library operators whose parameters and results are named tuples.

The schema of an operator allows no named tuples. `Operator` derives the schema from the type hints of a function: one
argument for each tensor and number, and one string for everything else. PyTorch's time per call is quadratic in the
number of arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ..objective import Objective
from ..validation import refuse_second_derivative, refuse_torch_func

# Namespace of our torch.library operators. The kernels hub imports a copy of this package under another name, next to
# the installed one.
NAMESPACE = __name__.partition(".")[0]
P = ParamSpec("P")
R = TypeVar("R")
# Numbers have arguments of their own, because torch.compile may replace them by symbols.
_ARGUMENTS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
}
SEPARATOR = "|"
_READ: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: text == "True",
    str: str,
    # Without its rollout correction, which is already part of the token weights.
    Objective: Objective.from_text,
}


class Group(NamedTuple):
    """One parameter or one part of the result: a named tuple, or a single value such as an `Objective`."""

    kind: Any  # its type
    hints: dict[str, Any]  # type of each field, by name; a single value has the name ""
    are_arguments: list[bool]  # for each field: whether it is an argument of the operator, or a part of `text`
    is_tuple: bool


def _group(kind: Any) -> Group:
    """Describe a parameter or result with type hint `kind`."""
    is_tuple = kind not in _ARGUMENTS and kind not in _READ
    hints = get_type_hints(kind) if is_tuple else {"": kind}
    return Group(kind, hints, [hint in _ARGUMENTS for hint in hints.values()], is_tuple)


class Operator(Generic[P, R]):
    """The operator `gspo_kernels::<name>`, made from a function `<name>_op`.

    The parameters of the function are tensors, scalars, named tuples of tensors and scalars, or an `Objective`. The
    result is a named tuple of tensors and named tuples of tensors. Names in the schema join parameter and field: the
    field `mask` of the parameter `head` is `head_mask`. The last argument, `text`, joins the strings, bools and
    objectives. It has no newline, because inductor writes arguments into a comment of the code that it generates.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        kinds = get_type_hints(function)
        self._result: Any = kinds.pop("return")
        self._inputs = [_group(kind) for kind in kinds.values()]
        parts = [_group(kind) for kind in get_type_hints(self._result).values()]
        self._is_nested = any(part.is_tuple for part in parts)
        self._outputs = parts if self._is_nested else [_group(self._result)]
        hints = {
            "_".join(filter(None, [parameter, field])): hint
            for parameter, group in zip(kinds, self._inputs, strict=True)
            for field, hint in group.hints.items()
        }
        self._words = tuple(hint for hint in hints.values() if hint in _READ)
        self.arguments = [*(name for name, hint in hints.items() if hint in _ARGUMENTS), "text"]
        inputs = ", ".join([*(f"{_ARGUMENTS[hints[name]]} {name}" for name in self.arguments[:-1]), "str text"])
        # A result is never None: gradients that are not needed are empty tensors.
        outputs = ", ".join(["Tensor"] * sum(len(group.hints) for group in self._outputs))
        name = function.__name__.removesuffix("_op")  # pyright: ignore[reportAttributeAccessIssue] - it is a function
        self.name = f"{NAMESPACE}::{name}"
        # The public function, for messages.
        self.function = {"fused_loss": "gspo_fused_loss", "logits_at": "linear_log_probs"}.get(name, name)
        self.op: Any = torch.library.custom_op(
            self.name,
            self._of_flat(function),
            mutates_args=(),
            schema=f"({inputs}) -> ({outputs})",
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            raise TypeError(f"{self.name} takes its arguments by position, got {', '.join(kwargs)} by name")
        flat = self.flatten(args)
        if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:  # inside torch.func
            refuse_torch_func(self.function, flat)
        return self._result_of(self.op(*flat))

    def fake(self, function: Callable[P, R]) -> Callable[P, R]:
        """Register a function with the same parameters that returns empty tensors of the right shapes and dtypes."""
        self.op.register_fake(self._of_flat(function))
        return function

    def autograd(
        self,
        setup: Callable[[Any, list[Any], R], None],
        backward: Callable[[Any, R, dict[str, bool]], dict[str, Tensor | None]],
    ) -> None:
        """Register the backward, and the function that saves tensors for it.

        Args:
            setup: setup(ctx, inputs, result), called after the forward.
            backward: backward(ctx, upstream, needs). `upstream` holds the gradient of each tensor of the result, or
                None. `needs` says which gradients are needed, by argument name. Returns gradients by argument name.
        """

        def setup_flat(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)
            setup(ctx, self._parameters(inputs), self._result_of(output))

        def backward_flat(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
            needs = dict(zip(self.arguments, ctx.needs_input_grad, strict=True))
            gradients = backward(ctx, self._result_of(upstream), needs)
            return tuple([gradients.get(name) for name in self.arguments])

        self.op.register_autograd(backward_flat, setup_context=setup_flat)

    def no_autograd(self, function: Callable[..., str]) -> None:
        """Register a backward that raises an error. `function(*args)` is the public function that the error names."""

        def setup_flat(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.function = function(*self._parameters(inputs))

        self.op.register_autograd(
            lambda ctx, *upstream: refuse_second_derivative(ctx.function), setup_context=setup_flat
        )

    def flatten(self, args: Iterable[Any]) -> list[Any]:
        """Convert the function's arguments to the operator's: tensors and numbers, then `text`."""
        arguments: list[Any] = []
        words: list[str] = []
        for x, group in zip(args, self._inputs, strict=True):
            for value, is_argument in zip(x if group.is_tuple else (x,), group.are_arguments, strict=True):
                if is_argument:
                    arguments.append(value)
                elif isinstance(value, str):
                    words.append(value)
                elif isinstance(value, Objective):
                    words.append(value.text)
                else:  # a bool; torch.compile may make it a symbol as well
                    words.append("True" if value else "False")
        return [*arguments, SEPARATOR.join(words)]

    def _parameters(self, flat: tuple[Any, ...]) -> list[Any]:
        """Rebuild the parameters that `flatten` flattened."""
        arguments = iter(flat[:-1])
        words = iter(_read(flat[-1], self._words))
        parameters = []
        for group in self._inputs:
            values = [next(arguments if is_argument else words) for is_argument in group.are_arguments]
            parameters.append(group.kind(*values) if group.is_tuple else values[0])
        return parameters

    def _of_flat(self, function: Callable[P, R]) -> Callable[..., tuple[Tensor, ...]]:
        call: Callable[..., Any] = function

        def of_flat(*flat: Any) -> tuple[Tensor, ...]:
            result = call(*self._parameters(flat))
            if not self._is_nested:
                return tuple(result)
            return tuple([x for part in result for x in ((part,) if isinstance(part, Tensor) else part)])

        return of_flat

    def _result_of(self, flat: Iterable[Any]) -> R:
        tensors = iter(flat)
        parts = []
        for group in self._outputs:
            values = islice(tensors, len(group.hints))
            parts.append(group.kind(*values) if group.is_tuple else next(values))
        return self._result(*parts) if self._is_nested else parts[0]


@functools.lru_cache(maxsize=1024)
def _read(text: str, hints: tuple[Any, ...]) -> list[Any]:
    """Parse a text that `Operator.flatten` wrote."""
    words = text.split(SEPARATOR) if hints else []
    return [_READ[hint](word) for hint, word in zip(hints, words, strict=True)]


def save(ctx: Any, *tuples: Any) -> None:
    """Save named tuples of tensors and scalars for the backward."""
    values = [value for fields in tuples for value in fields]
    ctx.kinds = [type(fields) for fields in tuples]
    ctx.scalars = [None if isinstance(value, Tensor) else value for value in values]
    ctx.save_for_backward(*[value if isinstance(value, Tensor) else None for value in values])


def restore(ctx: Any) -> list[Any]:
    """The tuples that were passed to `save`."""
    pairs = zip(ctx.saved_tensors, ctx.scalars, strict=True)
    values = iter([scalar if tensor is None else tensor for tensor, scalar in pairs])
    return [kind(*islice(values, len(kind._fields))) for kind in ctx.kinds]
