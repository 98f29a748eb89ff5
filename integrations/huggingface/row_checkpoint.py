"""Gradient checkpointing whose backward leaves out the rows without a gradient.

    skip_rows_without_gradient(model)  # once; then train with gradient checkpointing as before

GSPO clips whole answers, so the gradient of every hidden state of a clipped answer is exactly 0. With gradient
checkpointing, the backward of a layer recomputes its forward anyway. Here it does so for the rows with a gradient only.
The forward does not change. Gradients are the same up to the rounding of products with fewer rows. This holds for every
loss that gives whole rows no gradient: clipped by sequence, masked, or with advantage 0.

A row is a sequence of a padded batch, or a sequence of a packed row (`position_ids` begin again at 0). A batch in which
all rows lack a gradient runs one of them, so that parameters get gradients of 0 and collectives run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from gspo_kernels.ranks.dtensors import is_dtensor
from gspo_kernels.validation import Checks, Unquoted

from .fused_head import base_model
from .rows import PACKED_BY_POSITIONS, interaction_of_rows, is_flash_attention, text_config

_ATTRIBUTE = "_gspo_row_checkpoint"
_SETTER = "_set_gradient_checkpointing"  # of transformers' models: gives a checkpoint function to the layers
_FUNCTION = "_gradient_checkpointing_func"  # of modules: the checkpoint function
_CAPTURING = "transformers.utils.output_capturing"  # missing in early versions of transformers 5
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")  # of the sequences of a packed row, arguments of flash attention
_SAME = (type(None), bool, int, float, str, torch.dtype, torch.device)  # arguments that do not depend on rows


class NotByRows(Exception):
    """We cannot take some rows of a layer's argument or output. The layer uses the model's own checkpoint function."""


class UnknownRows(Exception):
    """The shapes of a batch do not tell which axis holds its rows. The layer runs all of them.

    It does so here and not in the model's own checkpoint function: the batch of another rank may have other shapes, and
    under ZeRO-3, ranks must run modules in the same order.
    """


def skip_rows_without_gradient(model: nn.Module) -> RowCheckpoint:
    """Make the backward of checkpointed layers leave out the rows whose gradient is 0.

    Works with gradient checkpointing of transformers, which may be enabled before or after this call. As always, layers
    are checkpointed only in training mode (`model.train()`). A second call returns the same RowCheckpoint.

    Under DistributedDataParallel, FSDP and ZeRO-3, every rank leaves out rows of its own batch.

    As with torch's reentrant checkpoint, call `loss.backward()`, not `torch.autograd.grad`, and tensors that a layer
    only stores in its forward, such as a loss of its own, have no gradient.

    Args:
        model: a model of transformers, plain or wrapped by PEFT, DistributedDataParallel, FSDP or DeepSpeed's engine.

    Returns:
        The RowCheckpoint of the model.

    Raises:
        TypeError: `model` is not a model of transformers with gradient checkpointing.
        ValueError: rows of the model act on each other, for example by dropout. The message names the part.
    """
    check = Checks("skip_rows_without_gradient")
    base = base_model(model) if isinstance(model, nn.Module) else model
    if not hasattr(base, _SETTER) or not getattr(base, "supports_gradient_checkpointing", False):
        expected = "a model of transformers that supports gradient checkpointing"
        check.fail("model", expected, Unquoted(f"a {type(base).__name__}"), TypeError)
    setter = vars(base).get(_SETTER)  # pickle restores it as the method of the class
    if setter is not None and setter.__func__ is not getattr(type(base), _SETTER):
        return vars(base)[_ATTRIBUTE]
    reason = interaction_of_rows(base) or parallel_in_rows(base)
    if reason:
        check.fail("model", "a model whose rows do not act on each other", Unquoted(reason))
    return RowCheckpoint(base)


def parallel_in_rows(model: nn.Module) -> str | None:
    """Name a parallelism that shares the tokens of a row, where all ranks would have to choose the same rows."""
    sharded: Any = [p for p in model.parameters() if is_dtensor(p)]
    is_parallel = any("tp" in (p.device_mesh.mesh_dim_names or ()) for p in sharded) or getattr(model, "_tp_size", None)
    return "tensor parallelism" if is_parallel else None


class RowCheckpoint:
    """The checkpoint function of a model's layers.

    Attributes:
        model: the transformers model.
        is_on: whether rows are left out. If False, the layers use the model's own checkpoint function.
        counts_rows: whether `take` counts the rows of forwards from now on.
        fallbacks: why layers ran all rows, for example because of an argument.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_on = True
        self.counts_rows = True
        self.fallbacks: set[str] = set()
        self._live = self._rows = 0  # since the last `take`
        setattr(model, _ATTRIBUTE, self)
        for module in model.modules():
            if _FUNCTION in vars(module):
                setattr(module, _FUNCTION, self._replacing(vars(module)[_FUNCTION]))
        setter = getattr(type(model), _SETTER)

        @functools.wraps(setter)
        def set_checkpointing(
            model: Any, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **options: Any
        ) -> None:
            skipping = vars(model)[_ATTRIBUTE]
            setter(model, enable, skipping._replacing(gradient_checkpointing_func), **options)

        setattr(model, _SETTER, types.MethodType(set_checkpointing, model))

    def _replacing(self, function: Any) -> _CheckpointFunction:
        original = function.original if isinstance(function, _CheckpointFunction) else function
        return _CheckpointFunction(self, original)

    def take(self) -> tuple[int, int]:
        """The numbers of rows with a gradient and of all rows in the backwards since the last call."""
        counts = self._live, self._rows
        self._live = self._rows = 0
        return counts

    def count(self, live: int, rows: int) -> None:
        """Count the rows of one micro-batch."""
        self._live += live
        self._rows += rows


@functools.cache
def _capturing() -> Any:
    return importlib.import_module(_CAPTURING) if importlib.util.find_spec(_CAPTURING) else None


def _recorded_outputs() -> list[str]:
    """Outputs that transformers records inside the layers of the current forward, such as router_logits."""
    if _capturing() is None:
        return ["outputs that this version of transformers may record"]
    collected = _capturing()._active_collector.get() or {}
    return sorted(name for name in collected if name not in ("hidden_states", "_hidden_states_layers"))


class _CheckpointFunction:
    """Replaces `torch.utils.checkpoint.checkpoint` in the layers of a model."""

    def __init__(self, skipping: RowCheckpoint, original: Callable[..., Any]) -> None:
        self.skipping = skipping
        self.original = original

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        hidden = args[0] if args else None
        is_off = not self.skipping.is_on or torch.compiler.is_compiling() or bool(options)
        if is_off or not isinstance(hidden, Tensor) or not _is_differentiated(hidden):
            return self.original(function, *args, **options)
        try:
            call = _Call.of(function, hidden, args[1:], self.skipping)
            return _Layer.apply(call, hidden)
        except NotByRows as reason:
            self.skipping.fallbacks.add(str(reason))
            return self.original(function, *args)


def _is_differentiated(hidden: Tensor) -> bool:
    """True for hidden states [B, T, H] with a gradient. Vision layers may have another shape."""
    return hidden.ndim == 3 and hidden.requires_grad and not is_dtensor(hidden)


class _Call(NamedTuple):
    """One forward of a layer, which the backward repeats for some rows."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # after the hidden states
    keywords: dict[str, Any]
    rows: _Padded | _Packed
    skipping: RowCheckpoint
    is_counted: bool
    autocast: list[dict[str, Any]]

    @classmethod
    def of(cls, function: Any, hidden: Tensor, args: tuple[Any, ...], skipping: RowCheckpoint) -> _Call:
        """Check the arguments. Transformers passes a partial with the keyword arguments of the layer.

        Raises:
            NotByRows: an argument needs a gradient or has an unknown type, or layers record outputs.
        """
        keywords = {}
        if isinstance(function, functools.partial):
            keywords = function.keywords
            function = functools.partial(function.func, *function.args)
        if recorded := _recorded_outputs():  # the recomputation would not give them a gradient
            raise NotByRows(f"{', '.join(recorded)}, which layers record")
        autocast = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {"cpu", hidden.device.type}
            if torch.amp.is_autocast_available(kind)
        ]
        call = cls(function, args, keywords, _All(hidden), skipping, False, autocast)
        mask = keywords.get("attention_mask", args[0] if args else None)
        positions: Any = keywords.get("position_ids")
        is_packed = _may_be_packed(skipping.model.config, hidden, mask, positions)
        try:
            rows = _Packed(hidden, positions, mask, keywords.get("cu_seq_lens_q")) if is_packed else _Padded(hidden)
            by_rows = call._replace(rows=rows, is_counted=skipping.counts_rows)
            by_rows._check_all()
        except UnknownRows as reason:
            call._check_all()  # of what the check above did not reach
            skipping.fallbacks.add(str(reason))
            return call
        return by_rows

    def _check_all(self) -> None:
        for i, x in enumerate(self.args, 1):
            self._check(f"argument {i}", x)
        for name, x in self.keywords.items():
            self._check(name, x)

    def _check(self, name: str, x: Any) -> None:
        if isinstance(x, tuple | list):
            for item in x:
                self._check(name, item)
        elif isinstance(x, Tensor):
            if x.requires_grad:
                raise NotByRows(f"{name}, which needs a gradient")
            self.rows.check_tensor(name, x)
        elif isinstance(x, BlockMask):
            self.rows.check_block_mask(name, x)
        elif not isinstance(x, _SAME):
            raise NotByRows(f"{name}, a {type(x).__name__}")

    def __call__(self, hidden: Tensor) -> Any:
        return self.function(hidden, *self.args, **self.keywords)

    def repeat(self, part: Tensor, choice: Choice) -> Any:
        """Run the layer on the chosen part of its input."""
        if choice.places is None:
            return self(part)
        args = [self._taken(f"argument {i}", x, choice) for i, x in enumerate(self.args, 1)]
        keywords = {name: self._taken(name, x, choice) for name, x in self.keywords.items()}
        return self.function(part, *args, **keywords)

    def _taken(self, name: str, x: Any, choice: Choice) -> Any:
        if isinstance(x, tuple | list):
            return type(x)([self._taken(name, item, choice) for item in x])
        if isinstance(x, Tensor):
            return self.rows.of_tensor(name, x, choice)
        return self.rows.of_block_mask(name, x, choice) if isinstance(x, BlockMask) else x


@contextlib.contextmanager
def _autocast(states: list[dict[str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(torch.autocast(**state))
        yield


class _Layer(torch.autograd.Function):
    """A layer that keeps its input only, and repeats its forward in the backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            outputs = call(hidden)
        for x in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(x, Tensor) and x.shape[: 1 + call.rows.axis] != hidden.shape[: 1 + call.rows.axis]:
                raise NotByRows(f"an output {list(x.shape)}")
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:  # type: ignore[override]
        if all(x is None for x in gradients):
            return None, None
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[attr-defined] - as torch's reentrant checkpoint
            raise RuntimeError(
                "skip_rows_without_gradient: torch.autograd.grad and loss.backward(inputs=...) are not supported, "
                "because a checkpointed layer computes the gradients of its parameters in a backward of its own"
            )
        call: _Call = ctx.call
        (hidden,) = ctx.saved_tensors
        choice = _choice(call, [x for x in gradients if x is not None])
        with torch.enable_grad(), _autocast(call.autocast):
            part = choice.of_tokens(hidden).detach().requires_grad_()
            outputs = call.repeat(part, choice)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (x, choice.of_tokens(gradient))
            for x, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and x.requires_grad
        ]
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        d_hidden = choice.filled(hidden, torch.zeros_like(part) if part.grad is None else part.grad)
        # The layer below usually gets this very tensor, and then need not look for its rows.
        d_hidden._gspo_choice = choice, d_hidden._version  # type: ignore[attr-defined]
        return None, d_hidden


def _choice(call: _Call, gradients: list[Tensor]) -> Choice:
    """Choose the rows to differentiate. Usually reads numbers on the host in one layer of a backward only."""
    if len(gradients) == 1 and hasattr(gradients[0], "_gspo_choice"):
        choice, version = gradients[0]._gspo_choice  # type: ignore[attr-defined]
        if gradients[0]._version == version and call.rows.accepts(choice):
            return choice
    choice = call.rows.choose(gradients)
    if call.is_counted:
        call.skipping.count(choice.live, choice.rows)
    return choice


class Choice(NamedTuple):
    """The rows of a micro-batch that are differentiated."""

    axis: int  # of `places` in hidden states [B, T, H]: 0 for rows of a padded batch, 1 for tokens of a packed row
    places: Tensor | None  # int64; None: all
    live: int  # rows with a gradient
    rows: int  # all rows
    cu_seqlens: Tensor | None = None  # int32 [chosen sequences + 1] of a packed row, where the layer gets such offsets

    def of_tokens(self, x: Tensor) -> Tensor:
        """Take the chosen part of a tensor [B, T, ...]."""
        return x if self.places is None else x.index_select(self.axis, self.places)

    def filled(self, like: Tensor, part: Tensor) -> Tensor:
        """Put the chosen part into zeros, in the shape of `like`."""
        return part if self.places is None else torch.zeros_like(like).index_copy_(self.axis, self.places, part)


def _may_be_packed(config: Any, hidden: Tensor, mask: Any, positions: Any) -> bool:
    """True for a row [1, T, H] of a model that separates the sequences of a packed row by their position_ids."""
    has_mask = mask is None if is_flash_attention(config) else isinstance(mask, Tensor) and mask.ndim == 4
    has_positions = isinstance(positions, Tensor) and positions.shape == hidden.shape[:2]
    return hidden.shape[0] == 1 and has_positions and has_mask and text_config(config).model_type in PACKED_BY_POSITIONS


class _Padded:
    """The rows of a padded batch [B, T, H]."""

    axis = 0  # of the rows

    def __init__(self, hidden: Tensor) -> None:
        self.count, self.length = hidden.shape[:2]
        if self.count == self.length:
            raise UnknownRows("a batch with as many rows as tokens in a row")

    def check_tensor(self, name: str, x: Tensor) -> None:
        """Raise UnknownRows if we cannot tell whether `x` has a row per answer.

        Per row are [B, T], [B, T, D] such as RoPE's, and [B, 1 or heads, queries, T], but [B, T, T] only for RoPE.
        Shared are [1, ...], and [T] or [T, D] for positions. Others may have heads in the first axis, which could be as
        many as rows.
        """
        length = self.length
        has_rows = x.shape[:1] == (self.count,) and (
            (x.ndim == 2 and x.shape[1] == length)
            or (x.ndim == 3 and x.shape[1] == length and (x.shape[2] != length or name == "position_embeddings"))
            or (x.ndim == 4 and x.shape[3] == length)
        )
        is_shared = x.ndim == 0 or (x.shape[0] == 1 != self.count) or (x.ndim <= 2 and x.shape[0] == length)
        if not (has_rows or is_shared or self.count == 1):
            raise UnknownRows(f"{name}, a tensor {list(x.shape)}")

    def accepts(self, choice: Choice) -> bool:
        """True if a choice of another layer is one of these rows."""
        return choice.axis == self.axis and choice.rows == self.count

    def choose(self, gradients: list[Tensor]) -> Choice:
        live = torch.stack([x.flatten(1).any(1) for x in gradients]).any(0)
        index = live.nonzero()[:, 0]
        found = len(index)
        if found == 0:
            return Choice(0, torch.zeros(1, dtype=torch.long, device=live.device), 0, self.count)
        return Choice(0, None if found == self.count else index, found, self.count)

    def of_tensor(self, name: str, x: Tensor, choice: Choice) -> Tensor:
        """Take the chosen rows of an argument of the layer."""
        return x.index_select(0, choice.places) if x.ndim and x.shape[0] == self.count else x  # type: ignore[arg-type]

    def of_block_mask(self, name: str, x: BlockMask, choice: Choice) -> BlockMask:
        """Take the chosen rows of flex attention's mask."""
        if x.kv_num_blocks.shape[0] == 1:
            return x
        index: Any = choice.places
        full = x.full_kv_num_blocks is not None and x.full_kv_indices is not None

        def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return x.mask_mod(index[b], h, q, kv)

        return BlockMask.from_kv_blocks(
            x.kv_num_blocks[index],
            x.kv_indices[index],
            x.full_kv_num_blocks[index] if full else None,  # type: ignore[index]
            x.full_kv_indices[index] if full else None,  # type: ignore[index]
            BLOCK_SIZE=x.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=x.seq_lengths,
        )

    def check_block_mask(self, name: str, x: BlockMask) -> None:
        if x.kv_num_blocks.ndim != 3 or x.kv_num_blocks.shape[0] not in (1, self.count):
            raise UnknownRows(f"{name}, a block mask with batch size {x.kv_num_blocks.shape[0]}")


class _All(_Padded):
    """The rows of a batch whose shapes do not tell them from tokens: all run."""

    def __init__(self, hidden: Tensor) -> None:
        self.count = hidden.shape[0]

    def check_tensor(self, name: str, x: Tensor) -> None:
        pass

    def check_block_mask(self, name: str, x: BlockMask) -> None:
        pass

    def accepts(self, choice: Choice) -> bool:
        return choice.places is None

    def choose(self, gradients: list[Tensor]) -> Choice:
        return Choice(0, None, self.count, self.count)


class _Packed:
    """The sequences of a packed row [1, T, H]: position_ids begin again at 0, and attention stays inside a sequence."""

    axis = 1  # of the tokens

    def __init__(
        self, hidden: Tensor, positions: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None = None
    ) -> None:
        self.length = hidden.shape[1]
        self.positions = positions
        self.mask = mask  # [1, heads, T, T]; None for flash attention, which reads cu_seqlens or position_ids
        self.cu_seqlens = cu_seqlens  # [sequences + 1]

    def check_tensor(self, name: str, x: Tensor) -> None:
        """Raise UnknownRows if we cannot tell which axes of `x` hold tokens."""
        is_known = self._is_offsets(name, x) if name.startswith("cu_seq") else x.ndim == 0 or self._axes(x)
        if not is_known:
            raise UnknownRows(f"{name}, a tensor {list(x.shape)}")

    def _is_offsets(self, name: str, x: Tensor) -> bool:
        """True for the offsets of queries and keys, which are the same in self-attention."""
        return self.cu_seqlens is not None and name in _OFFSETS and x.ndim == 1 and x.shape == self.cu_seqlens.shape

    def accepts(self, choice: Choice) -> bool:
        """True if a choice of another layer is one of these rows."""
        return choice.axis == self.axis

    def _axes(self, x: Tensor) -> tuple[int, ...]:
        """The axes of tokens."""
        shape = tuple(x.shape)
        if x.ndim == 4 and shape[0] == 1 and shape[2:] == (self.length, self.length):
            return 2, 3
        if x.ndim in (2, 3) and shape[:2] == (1, self.length):
            return (1,)
        return (0,) if shape == (self.length,) else ()

    def choose(self, gradients: list[Tensor]) -> Choice:
        positions = self.positions[0]
        begins = positions.diff(prepend=positions[:1]) <= 0
        number = begins.cumsum(0) - 1  # of each token's sequence
        live = torch.stack([x[0].any(-1) for x in gradients]).any(0)
        is_live = torch.zeros_like(number).index_add(0, number, live.long()) > 0
        # All tokens are needed if a sequence does not begin at 0, such as an answer after a prompt that it shares, or
        # if the mask lets a token see another sequence.
        needs_all = (begins & (positions != 0)).any()
        if self.mask is not None:
            sees = self.mask if self.mask.dtype == torch.bool else self.mask > torch.finfo(self.mask.dtype).min / 2
            needs_all = needs_all | (sees & (number[:, None] != number)).any()
        if self.cu_seqlens is not None:
            are_begins = begins[self.cu_seqlens[:-1].clamp(max=self.length - 1).long()]
            needs_all = needs_all | ~are_begins.all() | (number[-1] + 2 != len(self.cu_seqlens))
        every, found, everything = torch.stack([number[-1] + 1, is_live.sum(), needs_all.long()]).tolist()
        if everything or found == every:
            return Choice(1, None, every, every)
        if found == 0:
            is_live[0] = True
        cu_seqlens = None
        if self.cu_seqlens is not None:
            lengths = self.cu_seqlens.diff()[is_live[:every]]
            cu_seqlens = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return Choice(1, is_live[number].nonzero()[:, 0], found, every, cu_seqlens)

    def of_tensor(self, name: str, x: Tensor, choice: Choice) -> Tensor:
        """Take the chosen tokens of an argument of the layer."""
        if name in _OFFSETS:
            return choice.cu_seqlens  # type: ignore[return-value]
        for axis in self._axes(x):
            x = x.index_select(axis, choice.places)  # type: ignore[arg-type]
        return x

    def check_block_mask(self, name: str, x: BlockMask) -> None:
        raise UnknownRows(f"{name}, a block mask of a packed row")

    def of_block_mask(self, name: str, x: BlockMask, choice: Choice) -> BlockMask:
        raise AssertionError("check_block_mask raises")
