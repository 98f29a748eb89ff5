"""Cases of tests/distributed: metrics combined over ranks, by float64 formulas, and invalid values of other ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers.array import assert_close, policy_of, run, unmasked
from helpers.features import build, row_of
from helpers.sharded_cases import Context, case
from helpers.sharded_runs import rank_in

from gspo_kernels import policy_loss, validation
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


for _compiled in (False, True):

    @case(f"invalid values of all ranks are counted on each{', compiled' * _compiled}", 2)
    def _invalid(context: Context, compiled: bool = _compiled) -> None:
        group = context.group(2)
        function = torch.compile(policy_loss, backend="aot_eager") if compiled else policy_loss
        advantages = torch.ones(2, 3)
        advantages[1] = torch.nan if rank_in(group) == 1 else 1
        with mock.patch.object(validation, "values_are_checked", lambda device: False):
            out = function(-torch.ones(2, 3), advantages, cp_group=group)
        assert out.loss.isnan() and out.metrics["invalid"] == 3
