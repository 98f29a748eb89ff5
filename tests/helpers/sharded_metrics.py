"""Cases of tests/distributed: metrics of ranks that have different sequences, compared with float64 formulas."""

from __future__ import annotations

import pytest
from helpers.array import assert_close, policy_of, run, unmasked
from helpers.features import build, row_of
from helpers.sharded_cases import Context, case
from helpers.sharded_runs import rank_in

from gspo_kernels.metrics import combine

for _ratio in ("sequence", "token"):

    @case(f"metrics of ranks are combined, {_ratio} ratios", 2)
    def _combined_metrics(context: Context, ratio: str = _ratio) -> None:
        """Ranks have 1 and 3 micro-batches. The first micro-batch of the second rank is empty."""
        group = context.group(2)
        whole = build(row_of(f"dtype=fp64 tokens=masked_sequences kl=metric entropy=True ratio={ratio}"), 4)
        *rest, empty, longest = whole.mask.sum(1).argsort(descending=True).tolist()
        micro_batches = [[longest, rest[0]]] if rank_in(group) == 0 else [[empty], rest[1:2], rest[2:]]
        parts = [run(whole.take(rows)).metrics for rows in micro_batches]
        names = ("log_probs", "entropy")
        lp, entropy = (run(whole).outputs[name][whole.mask] for name in names)
        expected = policy_of(whole, unmasked(whole), lp, entropy, lp).metrics
        assert 0 < expected["token_clip_fraction"] < 1
        combined = combine(parts, group)
        assert_close({name: combined[name] for name in expected}, expected)
        wrong = parts[0] if rank_in(group) else {"tokens": parts[0]["tokens"]}
        with pytest.raises(ValueError, match="combine: the keys of parts must be equal on all ranks of group"):
            combine([wrong], group)
