"""torch.library operators whose parameters and results are named tuples.

The schema of an operator allows no named tuples. `Operator` derives the schema from the fields of the named
tuples in a function's signature. It flattens arguments before the call, and rebuilds the result afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from .derivatives import refuse_second_derivative, refuse_torch_func
from .objective import Objective

P = ParamSpec("P")
R = TypeVar("R")
_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", float | None: "float?", int: "int", bool: "bool",
    str: "str",
    # One string, because the time that PyTorch takes for a call grows with the square of the number of arguments. The
    # rollout correction is left out: it is already part of the token weights.
    Objective: "str",
}  # fmt: skip  # a table


class Group(NamedTuple):
    """One parameter or result: a tuple, or a single value such as an `Objective`."""

    kind: Any  # its type
    fields: dict[str, str]  # schema type of each field, by name; a single value has the name ""


def _group(kind: Any) -> Group:
    """Return the group of a parameter or result with type hint `kind`."""
    if kind in _SCHEMA_TYPES:
        return Group(kind, {"": _SCHEMA_TYPES[kind]})
    return Group(kind, {name: _SCHEMA_TYPES[hint] for name, hint in get_type_hints(kind).items()})


class Operator(Generic[P, R]):
    """The operator `gspo_kernels::<name of the function>`, made from a function.

    The parameters of the function are tensors, scalars, named tuples of tensors and scalars, or an `Objective`. The
    result is a named tuple of tensors and named tuples of tensors. Names in the schema join parameter and field: the
    field `mask` of the parameter `head` is `head_mask`.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        kinds = get_type_hints(function)
        self._result: Any = kinds.pop("return")
        self._inputs = [_group(kind) for kind in kinds.values()]
        nested = any(hint not in _SCHEMA_TYPES for hint in get_type_hints(self._result).values())
        parts = get_type_hints(self._result).values() if nested else [self._result]
        self._outputs = [_group(kind) for kind in parts]
        types = {
            "_".join(filter(None, [parameter, field])): kind
            for parameter, group in zip(kinds, self._inputs, strict=True)
            for field, kind in group.fields.items()
        }
        self.arguments = list(types)
        inputs = ", ".join(f"{kind} {name}" for name, kind in types.items())
        # A result is never None: gradients that are not needed are empty tensors.
        outputs = ", ".join(kind.rstrip("?") for group in self._outputs for kind in group.fields.values())
        name = function.__name__  # pyright: ignore[reportAttributeAccessIssue] - it is a function
        self.name = f"gspo_kernels::{name}"
        self.function = {"fused_loss": "gspo_fused_loss"}.get(name, name)  # the public function, for messages
        self.op: Any = torch.library.custom_op(
            self.name,
            self._of_flat(function),
            mutates_args=(),
            schema=f"({inputs}) -> ({outputs})",
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            raise TypeError(f"{self.name} takes its arguments by position, got {', '.join(kwargs)} by name")
        flat = flatten(args)
        refuse_torch_func(self.function, flat)
        return self._result_of(self.op(*flat))

    def fake(self, function: Callable[P, R]) -> Callable[P, R]:
        """Register a function with the same parameters that returns empty tensors of the right shapes and dtypes."""
        self.op.register_fake(self._of_flat(function))
        return function

    def autograd(
        self,
        setup: Callable[[Any, tuple[Any, ...], R], None],
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
            setup(ctx, tuple(_grouped(inputs, self._inputs)), self._result_of(output))

        def backward_flat(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
            needs = dict(zip(self.arguments, ctx.needs_input_grad, strict=True))
            gradients = backward(ctx, self._result_of(upstream), needs)
            return tuple(gradients.get(name) for name in self.arguments)

        self.op.register_autograd(backward_flat, setup_context=setup_flat)

    def no_autograd(self, function: Callable[..., str]) -> None:
        """Register a backward that raises an error. `function(*args)` is the public function that the error names."""

        def setup_flat(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.function = function(*_grouped(inputs, self._inputs))

        self.op.register_autograd(
            lambda ctx, *upstream: refuse_second_derivative(ctx.function), setup_context=setup_flat
        )

    def _of_flat(self, function: Callable[P, R]) -> Callable[..., tuple[Tensor, ...]]:
        call: Callable[..., Any] = function
        return lambda *flat: tuple(flatten(call(*_grouped(flat, self._inputs))))

    def _result_of(self, flat: Iterable[Any]) -> R:
        parts = _grouped(tuple(flat), self._outputs)
        return parts[0] if len(parts) == 1 else self._result(*parts)


def save(ctx: Any, *tuples: tuple[Any, ...]) -> None:
    """Save named tuples of tensors and scalars for the backward."""
    values = flatten(tuples)
    ctx.groups = [Group(type(x), dict.fromkeys(x._fields, "")) for x in tuples]  # pyright: ignore[reportAttributeAccessIssue]
    ctx.scalars = [None if isinstance(x, Tensor) else x for x in values]
    ctx.are_tensors = [isinstance(x, Tensor) for x in values]
    ctx.save_for_backward(*(x for x in values if isinstance(x, Tensor)))


def restore(ctx: Any) -> list[Any]:
    """Return the tuples that were passed to `save`."""
    tensors = iter(ctx.saved_tensors)
    values = zip(ctx.scalars, ctx.are_tensors, strict=True)
    return _grouped(tuple(next(tensors) if is_tensor else scalar for scalar, is_tensor in values), ctx.groups)


def flatten(values: Iterable[Any]) -> list[Any]:
    """Return the fields of tuples and objectives, and single values unchanged, in one list."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, tuple):
            flat.extend(flatten(value))
        elif isinstance(value, Objective):
            flat.append(value.text)
        else:
            flat.append(value)
    return flat


def _grouped(flat: tuple[Any, ...], groups: list[Group]) -> list[Any]:
    """Rebuild tuples and objectives from flat values; the inverse of `flatten`."""
    tuples, start = [], 0
    for kind, fields in groups:
        values = flat[start : start + len(fields)]
        if kind is Objective:
            tuples.append(Objective.from_text(*values))
        elif "" in fields:
            tuples.extend(values)
        else:
            tuples.append(kind(*values))
        start += len(fields)
    return tuples
