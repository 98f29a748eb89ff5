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

from .validation import INDEX_DTYPES, Checks, Unquoted, positive

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
        check = Checks("KeptSets.from_padded")
        check_integers(check, "ids", ids, "[B, T, k] or [N, k]", (2, 3))
        check.choice("empty", empty, EMPTY)
        if (sizes is None) == (fill is None):
            check.fail("sizes", "given, or fill instead of it, but not both", sizes)
        if sizes is not None:
            check_integers(check, "sizes", sizes, str(list(ids.shape[:-1])), (ids.ndim - 1,))
            if sizes.shape != ids.shape[:-1]:
                check.fail("sizes", f"a tensor {list(ids.shape[:-1])}", sizes)
            if sizes.numel() and not 0 <= int(sizes.min()) <= int(sizes.max()) <= ids.shape[-1]:
                smallest, largest = sizes.aminmax()
                got = Unquoted(f"values from {int(smallest)} to {int(largest)}")
                check.fail("sizes", f"from 0 to k = {ids.shape[-1]}", got)
            kept = torch.arange(ids.shape[-1], device=ids.device) < sizes[..., None]
        else:
            if isinstance(fill, bool) or not isinstance(fill, int):
                check.fail("fill", "an int", fill, TypeError)
            kept = ids >= 0 if fill == -1 else ids != fill
        return KeptSets(ids[kept], _offsets(kept.sum(-1).reshape(-1)), empty)

    @staticmethod
    def from_counts(ids: Tensor, counts: Tensor, *, empty: str = "error") -> KeptSets:
        """Make sets from all ids, [K] in the order of the tokens, and the size of each set, [B, T] or [N]: prime-rl."""
        check = Checks("KeptSets.from_counts")
        check_integers(check, "counts", counts, "[B, T] or [N]", (1, 2))
        check_integers(check, "ids", ids, "[K]", (1,))
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
        check = Checks("KeptSets.from_lists")
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
        return _joined(Checks("KeptSets.from_samples"), "samples", samples, length, empty)

    @staticmethod
    def from_mask(mask: Tensor, *, empty: str = "error") -> KeptSets:
        """Make sets from a mask [B, T, V] or [N, V], True at the ids of each set."""
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim not in (2, 3):
            Checks("KeptSets.from_mask").fail("mask", "a bool tensor [B, T, V] or [N, V]", mask, TypeError)
        Checks("KeptSets.from_mask").choice("empty", empty, EMPTY)
        flat = mask.flatten(0, -2)
        return KeptSets(flat.nonzero()[:, 1], _offsets(flat.sum(-1)), empty)

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
        check = Checks("KeptSets.from_logits")
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim not in (2, 3):
            check.fail("logits", "a floating-point tensor [B, T, V] or [N, V]", logits, TypeError)
        check.choice("order", order, ORDERS)
        check.number("temperature", temperature, "a number > 0, within float32", positive)
        whole = "an integer of at least 0, or None"
        check.number("top_k", top_k or 0, whole, lambda x: 0 <= x < 2**31 and x == int(x))
        check.number("top_p", top_p, "a number > 0 and at most 1", lambda x: 0 < x <= 1)
        check.number("min_p", min_p, "a number from 0 to below 1", lambda x: 0 <= x < 1)
        z = logits.flatten(0, -2).double() / temperature
        if not bool(((z < torch.inf) & (z.amax(-1, keepdim=True) > -torch.inf)).all()):  # NaN compares false
            got = Unquoted("NaN, inf, or a row of -inf")
            check.fail("logits", "finite or -inf, with a finite one in each row", got)
        return KeptSets.from_mask(kept_by_sampler(z, top_k, top_p, min_p, order), empty=empty)

    def to(self, device: torch.device | str) -> KeptSets:
        """Move the sets to a device."""
        return KeptSets(self.ids.to(device), self.offsets.to(device), self.empty)

    def including(self, target_ids: Tensor) -> KeptSets:
        """Add the target ids, N of them, to the sets that lack them. Empty sets stay empty, as in slime."""
        check = Checks("KeptSets.including")
        check_integers(check, "target_ids", target_ids, "of N ids", (1, 2))
        target_ids = target_ids.reshape(-1)
        if len(target_ids) != len(self.sizes):
            check.fail("target_ids", f"{len(self.sizes)} ids, one for each set", len(target_ids))
        token = torch.repeat_interleave(torch.arange(len(target_ids), device=self.ids.device), self.sizes)
        present = torch.zeros_like(target_ids, dtype=torch.bool)
        present[token[self.ids == target_ids[token]]] = True
        absent = (~present & (self.sizes > 0)).nonzero()[:, 0]
        token, order = torch.cat([token, absent]).sort(stable=True)
        ids = torch.cat([self.ids, target_ids[absent].to(self.ids.dtype)])[order]
        return KeptSets(ids, _offsets(torch.bincount(token, minlength=len(target_ids))), self.empty)

    def select(self, tokens: Tensor) -> KeptSets:
        """Return the sets of some tokens: their numbers in the batch, [n] int64, or a bool mask [N]."""
        check, count = Checks("KeptSets.select"), len(self.sizes)
        if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
            if tokens.numel() != count:
                check.fail("tokens", f"a mask of the {count} tokens", tokens)
            tokens = tokens.reshape(-1).nonzero()[:, 0]
        check_integers(check, "tokens", tokens, "of numbers of tokens", (1, 2))
        tokens = tokens.reshape(-1)
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


def check_integers(check: Checks, name: str, x: Any, shape: str, dimensions: tuple[int, ...]) -> None:
    """Check that `x` is an int32 or int64 tensor whose number of dimensions is in `dimensions`."""
    integers = isinstance(x, Tensor) and x.dtype in INDEX_DTYPES
    if not integers or x.ndim not in dimensions:
        got = x if integers else Unquoted(f"a {getattr(x, 'dtype', type(x).__name__)}")
        check.fail(name, f"a tensor {shape} of int32 or int64", got, TypeError)


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


def _offsets(sizes: Tensor) -> Tensor:
    """[N] -> [N + 1] int64."""
    return torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int64), (1, 0))


def _joined(
    check: Checks, name: str, samples: Sequence[tuple[Tensor, Tensor]], length: int | None, empty: str
) -> KeptSets:
    """Join the sets of several answers, packed or, with a length, padded with empty sets to `length` tokens each."""
    check.choice("empty", empty, EMPTY)
    if not samples:
        check.fail(name, "the sets of at least one answer", Unquoted("none"))
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        check.fail("length", "an int or None", length, TypeError)
    ids, sizes = [], []
    for of_ids, offsets in samples:
        for what, x in (("ids", of_ids), ("offsets", offsets)):
            check_integers(check, f"the {what} of {name}", x, "with one dimension", (1,))
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
