"""`KeptSets`: the ids that a truncating sampler kept for each token (top-k, top-p, min-p).

Such a sampler draws a token from the softmax over a few ids, not over the vocabulary. `linear_log_probs` and
`gspo_fused_loss` compute log-probs over the same ids if they are given these sets. The constructors accept the layouts
in which inference engines and trainers hand them over (docs/guides/truncated_sampling.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .validation import FLOATS, INDEX_DTYPES, TensorChecks, Unquoted, positive

EMPTY = ("error", "vocabulary")
ORDERS = ("vllm", "transformers")


class KeptSets(NamedTuple):
    """A set of ids for each token, in the order of the rows: token i of the batch has ids[offsets[i] : offsets[i + 1]].

    A padded batch [B, T] has N = B * T rows, sequence after sequence. The sets of masked tokens are not used. Sets may
    be in any order. They must contain the token that was sampled.

    Args:
        ids: [K] int32 or int64.
        offsets: [N + 1] int32 or int64, from 0 to K.
        empty: meaning of an empty set at an unmasked token. "error": it is invalid. "vocabulary": the token's log-prob
            is over the full vocabulary (slime, prime-rl and SkyRL, for tokens that the sampler did not draw).
    """

    ids: Tensor
    offsets: Tensor
    empty: str = "error"

    @staticmethod
    def from_padded(
        ids: Tensor, *, sizes: Tensor | None = None, fill: int | None = None, empty: str = "error"
    ) -> KeptSets:
        """Make sets from `ids` [B, T, k] or [N, k], padded at the end of each set or, with `fill`, anywhere.

        Args:
            ids: int32 or int64.
            sizes: [B, T] or [N], the number of ids in each set (NeMo RL).
            fill: the value of padding; with -1, all negative values are padding (SkyRL). Exactly one of `sizes` and
                `fill` is required.
            empty: see `KeptSets`.
        """
        check = TensorChecks("KeptSets.from_padded")
        _check(check, "ids", ids, "[B, T, k] or [N, k]", (2, 3))
        check.choice("empty", empty, EMPTY)
        if (sizes is None) == (fill is None):
            check.fail("sizes", "given, or fill instead of it, but not both", sizes)
        if sizes is not None:
            shape = ids.shape[:-1]
            text = lambda: f"{list(shape)}"  # noqa: E731
            check.tensor("sizes", sizes, dtypes=INDEX_DTYPES, shapes=[shape], shape_text=text, device=ids.device)
            if sizes.numel() and not 0 <= int(sizes.min()) <= int(sizes.max()) <= ids.shape[-1]:
                smallest, largest = sizes.aminmax()
                got = Unquoted(f"values from {int(smallest)} to {int(largest)}")
                check.fail("sizes", f"from 0 to k = {ids.shape[-1]}", got)
            kept = torch.arange(ids.shape[-1], device=ids.device) < sizes[..., None]
        else:
            check.integer("fill", fill, "an int within int32", lambda x: -(2**31) <= x < 2**31)
            kept = ids >= 0 if fill == -1 else ids != fill
        return KeptSets(ids[kept], _offsets(kept.sum(-1).reshape(-1)), empty)

    @staticmethod
    def from_counts(ids: Tensor, counts: Tensor, *, empty: str = "error") -> KeptSets:
        """Make sets from all ids, [K] in the order of the tokens, and the size of each set, [B, T] or [N]: prime-rl."""
        check = TensorChecks("KeptSets.from_counts")
        _check(check, "counts", counts, "[B, T] or [N]", (1, 2))
        _check(check, "ids", ids, "[K]", (1,), device=counts.device)
        check.choice("empty", empty, EMPTY)
        if counts.numel() and int(counts.min()) < 0:
            check.fail("counts", "at least 0", int(counts.min()))
        if int(counts.sum()) != ids.shape[0]:
            check.fail("ids", f"a tensor [K] with K = {int(counts.sum())}, the sum of counts", ids)
        return KeptSets(ids, _offsets(counts.reshape(-1)), empty)

    @staticmethod
    def from_lists(
        sets: Sequence[Any], *, length: int | None = None, empty: str = "error", device: torch.device | str = "cpu"
    ) -> KeptSets:
        """Make sets from nested lists: for each answer, for each of its tokens, the ids (vLLM, SGLang).

        Args:
            sets: one entry per answer.
            length: T of a padded batch [B, T]; the tokens of an answer are its first tokens. None: a packed batch.
            empty: see `KeptSets`.
            device: of the result.
        """
        check = TensorChecks("KeptSets.from_lists")
        _check_list(check, "sets", sets)
        device = _device(check, device)
        samples = []
        for answer in sets:
            try:
                tokens = [list(map(index, token)) for token in answer]
            except TypeError:
                got = Unquoted(f"{str(answer)[:60]} for an answer")
                check.fail("sets", "for each answer, for each of its tokens, a list of integer ids", got, TypeError)
            ids = torch.tensor([x for token in tokens for x in token], dtype=torch.int64, device=device)
            sizes = torch.tensor([len(token) for token in tokens], dtype=torch.int64, device=device)
            samples.append((ids, _offsets(sizes)))
        return _joined(check, "sets", samples, length, empty)

    @staticmethod
    def from_samples(
        samples: Sequence[tuple[Tensor, Tensor]], *, length: int | None = None, empty: str = "error"
    ) -> KeptSets:
        """Make sets from a pair (ids [k], offsets [tokens + 1]) for each answer (slime, miles).

        `length` and `empty` are those of `from_lists`.
        """
        check = TensorChecks("KeptSets.from_samples")
        _check_list(check, "samples", samples)
        for answer in samples:
            if not isinstance(answer, list | tuple) or len(answer) != 2:
                got = Unquoted(f"{str(answer)[:60]} for an answer")
                check.fail("samples", "a pair (ids, offsets) for each answer", got, TypeError)
        return _joined(check, "samples", samples, length, empty)

    @staticmethod
    def from_mask(mask: Tensor, *, empty: str = "error") -> KeptSets:
        """Make sets from a mask [B, T, V] or [N, V], True at the ids of each set."""
        check = TensorChecks("KeptSets.from_mask")
        _check(check, "mask", mask, "[B, T, V] or [N, V]", (2, 3), dtypes=(torch.bool,))
        check.choice("empty", empty, EMPTY)
        return _true_ids(mask.flatten(0, -2), empty)

    @staticmethod
    def from_logits(
        logits: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        order: str = "vllm",
        empty: str = "error",
    ) -> KeptSets:
        """Compute which ids a sampler keeps, from its own logits [B, T, V] or [N, V].

        This is for samplers that do not return their sets. Do not pass the logits of a trainer: rounding changes
        many sets, and a sampled token outside of its set has the log-prob -inf.

        Args:
            logits: before the temperature.
            temperature: divides the logits.
            top_k: number of largest logits to keep; ties with the last of them are also kept. None or 0: all.
            top_p: smallest total probability of the ids to keep, largest first.
            min_p: smallest probability to keep, relative to the largest.
            order: "vllm": min_p comes before top_p. "transformers": after it.
            empty: see `KeptSets`.
        """
        check = TensorChecks("KeptSets.from_logits")
        _check(check, "logits", logits, "[B, T, V] or [N, V]", (2, 3), dtypes=FLOATS)
        check.choice("order", order, ORDERS)
        check.choice("empty", empty, EMPTY)
        check.number("temperature", temperature, "a number > 0, within float32", positive)
        if top_k is not None:
            check.integer("top_k", top_k, "an int of at least 0, or None", lambda x: 0 <= x < 2**31)
        check.number("top_p", top_p, "a number > 0 and at most 1", lambda x: 0 < x <= 1)
        check.number("min_p", min_p, "a number from 0 to below 1", lambda x: 0 <= x < 1)
        z = logits.flatten(0, -2).double() / temperature
        if not bool(((z < torch.inf) & (z.amax(-1, keepdim=True) > -torch.inf)).all()):  # NaN compares false
            got = Unquoted("NaN, inf, or a row of -inf")
            check.fail("logits", "finite or -inf, with a finite one in each row", got)
        return _true_ids(kept_by_sampler(z, top_k, top_p, min_p, order), empty)

    def to(self, device: torch.device | str) -> KeptSets:
        """Move the sets to a device."""
        device = _device(TensorChecks("KeptSets.to"), device)
        return KeptSets(self.ids.to(device), self.offsets.to(device), self.empty)

    def including(self, target_ids: Tensor) -> KeptSets:
        """Add the target ids, N of them, to the sets that lack them. Empty sets stay empty, as in slime."""
        check = TensorChecks("KeptSets.including")
        _check(check, "target_ids", target_ids, "of N ids", (1, 2), device=self.ids.device)
        if target_ids.numel() != len(self.sizes):
            check.fail("target_ids", f"a tensor of N = {len(self.sizes)} ids, one for each set", target_ids)
        target_ids = target_ids.reshape(-1)
        token = torch.repeat_interleave(torch.arange(len(target_ids), device=self.ids.device), self.sizes)
        present = torch.zeros_like(target_ids, dtype=torch.bool)
        present[token[self.ids == target_ids[token]]] = True
        absent = (~present & (self.sizes > 0)).nonzero()[:, 0]
        token, order = torch.cat([token, absent]).sort(stable=True)
        ids = torch.cat([self.ids, target_ids[absent].to(self.ids.dtype)])[order]
        return KeptSets(ids, _offsets(torch.bincount(token, minlength=len(target_ids))), self.empty)

    def select(self, tokens: Tensor) -> KeptSets:
        """Return the sets of some tokens: their numbers in the batch, [n] int64, or a bool mask [N]."""
        check, count = TensorChecks("KeptSets.select"), len(self.sizes)
        dtypes = (*INDEX_DTYPES, torch.bool)
        _check(
            check, "tokens", tokens, "of numbers of tokens, or a mask", (1, 2), dtypes=dtypes, device=self.ids.device
        )
        tokens = tokens.reshape(-1)
        if tokens.dtype == torch.bool:
            if len(tokens) != count:
                check.fail("tokens", f"a mask of the {count} tokens", tokens)
            tokens = tokens.nonzero()[:, 0]
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < count:
            got = Unquoted(f"values from {int(tokens.min())} to {int(tokens.max())}")
            check.fail("tokens", f"numbers from 0 to {count - 1}", got)
        sizes = self.sizes[tokens]
        offsets = _offsets(sizes)
        skipped = torch.repeat_interleave(self.offsets[:-1][tokens] - offsets[:-1], sizes)  # before each set
        return KeptSets(self.ids[skipped + torch.arange(len(skipped), device=tokens.device)], offsets, self.empty)

    @property
    def sizes(self) -> Tensor:
        """The number of ids of each token, [N]."""
        return self.offsets[1:] - self.offsets[:-1]


def _check(
    check: TensorChecks,
    name: str,
    x: Any,
    shape: str,
    dimensions: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = INDEX_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Check that `x` is a tensor with values whose number of dimensions is in `dimensions`."""
    shapes = [(None,) * n for n in dimensions]
    check.tensor(name, x, dtypes=dtypes, shapes=shapes, shape_text=shape, device=device)
    if x.is_meta:
        check.fail(name, "a tensor with values", Unquoted("a meta tensor"))


def _check_list(check: TensorChecks, name: str, x: Any) -> None:
    if not isinstance(x, list | tuple):
        check.fail(name, "a list with one entry for each answer", Unquoted(f"a {type(x).__name__}"), TypeError)


def kept_by_sampler(z: Tensor, top_k: int | None, top_p: float, min_p: float, order: str = "vllm") -> Tensor:
    """Say which ids a sampler keeps, [N, V] bool, from logits after the temperature, [N, V]. See `from_logits`."""

    def apply_min_p(z: Tensor) -> Tensor:
        p = z.softmax(-1)
        return z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf) if min_p > 0 else z

    if order == "vllm":
        z = apply_min_p(z)
    if top_k:
        z = z.masked_fill(z < z.topk(min(int(top_k), z.shape[-1])).values[..., -1:], -torch.inf)
    if top_p < 1:
        ascending, index = z.sort(dim=-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[..., -1] = False
        z = z.masked_fill(dropped.scatter(-1, index, dropped), -torch.inf)
    return (apply_min_p(z) if order == "transformers" else z) > -torch.inf


def _device(check: TensorChecks, device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        check.fail("device", "a torch.device or its name", device, TypeError)


def _true_ids(mask: Tensor, empty: str) -> KeptSets:
    """Make sets from a mask [N, V], True at the ids of each set."""
    return KeptSets(mask.nonzero()[:, 1], _offsets(mask.sum(-1)), empty)


def _offsets(sizes: Tensor) -> Tensor:
    """[N] -> [N + 1] int64."""
    return torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int64), (1, 0))


def _joined(
    check: TensorChecks, name: str, samples: Sequence[tuple[Tensor, Tensor]], length: int | None, empty: str
) -> KeptSets:
    """Join the sets of several answers, packed or, with a length, padded with empty sets to `length` tokens each."""
    check.choice("empty", empty, EMPTY)
    if not samples:
        check.fail(name, "the sets of at least one answer", Unquoted("none"))
    if length is not None:
        length = check.integer("length", length, "an int >= 0, or None", lambda x: 0 <= x < 2**31)
    ids, sizes = [], []
    for of_ids, offsets in samples:
        for what, x in (("ids", of_ids), ("offsets", offsets)):
            _check(check, f"the {what} of {name}", x, "with one dimension", (1,))
        count = len(offsets) - 1
        if count < 0 or int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any()):
            check.fail(f"the offsets of {name}", "non-decreasing, from 0 on", Unquoted(offsets.tolist()[:8]))
        if length is not None and count > length:
            check.fail("length", f"at least {count}, the tokens of an answer", length)
        if len(of_ids) != int(offsets[-1]):
            check.fail(name, f"{int(offsets[-1])} ids, as many as the offsets of the answer say", len(of_ids))
        padding = 0 if length is None else length - count
        ids.append(of_ids)
        sizes.append(torch.nn.functional.pad(offsets[1:] - offsets[:-1], (0, padding)))
    return KeptSets(torch.cat(ids), _offsets(torch.cat(sizes)), empty)
