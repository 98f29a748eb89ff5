"""Faults in code for heads and sequences that are sharded over ranks."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "tiles of the ranks in the wrong order": (
        "gather_tiles",
        "[-enumerate(tiles)-]{+reversed(list(enumerate(tiles)))+}",
        "distributed/sharded::test_case[bits tp 2 torch]",
    ),
    "no logit of a target in the columns of another rank": (
        "gather_tiles",
        "[-torch.where(is_nan, -torch.inf, logits).amax(0)-]{+logits[0]+}",
        "distributed/sharded::test_case[row tp=2]",
    ),
    "d_hidden not summed over ranks": (
        "_SumGradient.backward",
        "[-dist.all_reduce(d_x, group=ctx.group)-]{+pass+}",
        "distributed/sharded::test_case[row tp=2]",
    ),
    "padding of the vocabulary counted as columns": (
        "Shard.columns",
        "[-max(min(self.vocab_size - rank * self.rows, self.rows), 0)-]{+self.rows+}",
        "distributed/sharded::test_case[row tp=2 vocab_size=padded]",
    ),
    "cells of the first rank computed on every rank": (
        "Shard.own_tiles",
        "first = [-sum(tiles[: self.rank])-]{+0+}",
        "distributed/sharded::test_case[row tp=2 tiles=many policy=peaked gradient_budget=0.3]",
    ),
    "sums over the tokens of the first rank only": (
        "_add_ranks",
        "[-total = total + term-]{+pass+}",
        "distributed/sharded::test_case[row cp=2]",
    ),
    "lengths and normalizer of this rank's tokens": (
        "torch/sequence:policy_forward",
        "_weight_of_token(mask, sequence, [-lengths-]{+segment_sum(mask.to(lp.dtype), offsets)+}, policy, "
        "objective, objective.aggregation, policy.normalizer)",
        "distributed/sharded::test_case[row cp=2]",
    ),
    "ranks whose options differ are not refused": (
        "_differences",
        "[-any(fact != known[0] for fact in known)-]{+False+}",
        "distributed/sharded::test_case[linear_log_probs with other arguments of a rank, tp_group]",
    ),
    "metrics of ranks not combined": (
        "metrics:combine",
        "[-_combined(by_name, gather(combined, group.group_name))-]{+gather(combined, group.group_name)[0]+}",
        "distributed/sharded::test_case[metrics of ranks are combined, sequence ratios]",
    ),
    "masked tokens in the sums of ranks": (
        "_sums_after_gate",
        "[-torch.where(mask, torch.stack(list(present.values())), 0)-]{+torch.stack(list(present.values()))+}",
        "distributed/sharded::test_case[row cp=2 ratio=token tokens=masked_sequences]",
    ),
    "sequences that are empty on all ranks counted in means": (
        "torch/sequence:_metrics",
        "[-filled.sum(-]{+lengths.new_tensor(filled.numel(), +}dtype=torch.float64)",
        "distributed/sharded::test_case[row cp=2 ratio=token tokens=masked_sequences]",
    ),
}
