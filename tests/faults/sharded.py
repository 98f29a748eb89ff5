"""Faults in code for heads and sequences that are sharded over ranks."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "tiles of the ranks in the wrong order": (
        "gather_tiles",
        "[-enumerate(tiles)-]{+reversed(list(enumerate(tiles)))+}",
        "distributed/sharded::test_case[bits tp 2 torch]",
    ),
    "d_hidden not summed over ranks": (
        "_SumGradient.backward",
        "[-dist.all_reduce(d_x, group=ctx.group)-]{+pass+}",
        "distributed/sharded::test_case[row tp=2]",
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
}
