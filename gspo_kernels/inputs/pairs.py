"""Check kept sets and extra ids, and list them as (row, id) pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.rows import ExtraRows, HeadRows, KeptRows, Pairs
from ..kept_sets import EMPTY, KeptSets
from ..layout import segment_sum, sequence_of_row
from ..ranks.shards import columns_of_all_ranks, first_column
from ..validation import INDEX_DTYPES, TensorChecks, Unquoted


def kept_rows(check: TensorChecks, kept_sets: KeptSets, target_ids: Tensor, head: HeadRows) -> KeptRows:
    """Check kept sets, and list their pairs. Pairs of masked rows and of sets with one id are not live."""
    if not isinstance(kept_sets, KeptSets):
        check.fail("kept_sets", "a KeptSets", Unquoted(f"a {type(kept_sets).__name__}"), TypeError)
    ids, offsets, mask = kept_sets.ids, kept_sets.offsets, head.mask
    rows, device = mask.shape[0], mask.device
    check.choice("kept_sets.empty", kept_sets.empty, EMPTY)
    check.tensor("kept_sets.ids", ids, dtypes=INDEX_DTYPES, shapes=[(None,)], shape_text="[K]", device=device)
    shapes, text = [(rows + 1,)], f"[N + 1] = [{rows + 1}], one more than there are tokens"
    check.tensor("kept_sets.offsets", offsets, dtypes=INDEX_DTYPES, shapes=shapes, shape_text=text, device=device)
    count = ids.shape[0]
    wrong = offsets[1:] < offsets[:-1]
    neighbors = lambda: torch.stack([offsets[:-1], offsets[1:]], 1)[wrong][:3].tolist()  # noqa: E731
    check.flag("kept_sets.offsets", wrong, "non-decreasing", neighbors)
    ends = torch.stack([offsets[0], offsets[-1]])
    expected = f"from 0 to K = {count}, the number of ids"
    bad_ends = (ends[0] != 0) | (ends[1] != count)
    check.flag("kept_sets.offsets", bad_ends, expected, ends.tolist)
    bad_offsets = bad_ends | wrong.any()
    # On an accelerator, bad offsets raise no error, so clamp them before anything indexes with them.
    inner = offsets.long().clamp(0, count)[1:-1].cummax(0).values
    zero = offsets.new_zeros(1, dtype=torch.int64)
    offsets = torch.cat([zero, inner, zero + count]) if rows else zero
    sizes = offsets[1:] - offsets[:-1]
    of_row, ids = sequence_of_row(offsets, count), ids.long()
    columns = columns_of_all_ranks(head.shard, head.vocab_size)
    first = first_column(head.shard)

    unmasked = mask[of_row] if rows else ids.new_empty(0, dtype=torch.bool)
    outside = unmasked & (ids != ids.clamp(0, columns - 1))
    inside_text = f"between 0 and {columns - 1} where mask is true"
    check.flag("kept_sets.ids", outside, inside_text, lambda: sorted(set(ids[outside].tolist()))[:5])
    # Sorted by row and id, equal ids of a set are neighbors.
    key = (of_row * columns + ids.clamp(0, columns - 1)).sort().values
    twice = (key[1:] == key[:-1]) & mask[key[1:] // columns] if rows else unmasked
    check.flag("kept_sets.ids", twice, "different ids in each set", lambda: (key[1:][twice] % columns)[:5].tolist())
    repeats = torch.zeros(rows, dtype=torch.uint8, device=device)
    if rows:
        repeats.scatter_reduce_(0, key[1:] // columns, twice.byte(), "amax")
    is_target = unmasked & (ids == target_ids.reshape(-1)[of_row]) if rows else unmasked
    hits = segment_sum(is_target.float(), offsets) if rows else mask.float()
    absent = mask & (hits == 0) & (sizes > 0)
    check.flag(
        "kept_sets", absent, "sets that contain the target id where mask is true", lambda: _tokens(absent, "without it")
    )
    invalid = absent
    full = mask & (sizes == 0) if kept_sets.empty == "vocabulary" else None
    if full is None:
        empty = mask & (sizes == 0)
        check.flag(
            "kept_sets",
            empty,
            "sets with at least one id where mask is true, or KeptSets(..., empty='vocabulary')",
            lambda: _tokens(empty, "with an empty set"),
        )
        invalid = invalid | empty
    if rows:
        invalid = invalid | (segment_sum(outside.float(), offsets) > 0) | (mask & ((repeats > 0) | bad_offsets))
    computed = mask & (sizes > 1)
    pairs = Pairs(offsets, of_row, ids - first, computed[of_row] if rows else unmasked)
    return KeptRows(pairs, is_target, computed, mask & (sizes == 1), full, invalid)


def extra_pairs(check: TensorChecks, extra_ids: Tensor, target_ids: Tensor, head: HeadRows) -> ExtraRows:
    """Check extra ids [B, T, k] or [N, k], and list each row's target and extra ids. Negative ids are not live."""
    shape = tuple(target_ids.shape)
    text = f"{[*shape, 'k']}, k ids per token".replace("'", "")
    shapes, device = [(*shape, None)], target_ids.device
    check.tensor("extra_ids", extra_ids, dtypes=INDEX_DTYPES, shapes=shapes, shape_text=text, device=device)
    ids = extra_ids.flatten(0, -2).long()
    columns = columns_of_all_ranks(head.shard, head.vocab_size)
    first = first_column(head.shard)
    wrong = head.mask[:, None] & (ids >= columns)
    expected = f"below {columns} where mask is true (negative: absent)"
    check.flag("extra_ids", wrong, expected, lambda: sorted(set(ids[wrong].tolist()))[:5])
    live = head.mask[:, None] & (ids >= 0)
    live = torch.cat([live.any(1, keepdim=True), live], 1)
    ids = torch.cat([target_ids.reshape(-1, 1), ids], 1) - first
    width = ids.shape[1]
    offsets = torch.arange(ids.shape[0] + 1, device=device) * width
    rows = torch.arange(ids.shape[0], device=device).repeat_interleave(width)
    return ExtraRows(Pairs(offsets, rows, ids.reshape(-1), live.reshape(-1)), wrong)


def _tokens(wrong: Tensor, what: str) -> Unquoted:
    index = wrong.nonzero()[:, 0]
    return Unquoted(f"{len(index)} tokens {what}, such as number {int(index[0])}")
