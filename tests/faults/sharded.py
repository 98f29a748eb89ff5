"""Faults in code for heads and sequences that are sharded over ranks."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "tiles of the ranks in the wrong order": (
        "gather_tiles",
        "enumerate(tiles)",
        "reversed(list(enumerate(tiles)))",
        "distributed/sharded::test_case[bits tp 2 torch]",
    ),
    "no logit of a target in the columns of another rank": (
        "gather_tiles",
        "torch.where(is_nan, -torch.inf, logits).amax(0)",
        "logits[0]",
        "distributed/sharded::test_case[tp 2 torch plain]",
    ),
    "d_hidden not summed over ranks": (
        "_SumGradient.backward",
        "dist.all_reduce(d_x, group=ctx.group)",
        "pass",
        "distributed/sharded::test_case[tp 2 torch plain]",
    ),
    "padding of the vocabulary counted as columns": (
        "Shard.columns",
        "max(min(self.vocab_size - rank * self.rows, self.rows), 0)",
        "self.rows",
        "distributed/sharded::test_case[tp 2 torch padded-vocab]",
    ),
    "cells of the first rank computed on every rank": (
        "Shard.own_tiles",
        "first = sum(tiles[: self.rank])",
        "first = 0",
        "distributed/sharded::test_case[tp 2 torch gradient_budget]",
    ),
    "sums over the tokens of the first rank only": (
        "_add_ranks",
        "total = total + term",
        "pass",
        "distributed/sharded::test_case[cp 2 torch gspo]",
    ),
    "sums over the tokens of ranks in fp32": (
        "torch/sequence:_segment_sum",
        'return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0)',
        "x = x if x.is_floating_point() else x.double()\n"
        'return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0).double()',
        "distributed/sharded::test_case[cp 2 equal tokens]",
    ),
    "lengths and normalizer of this rank's tokens": (
        "torch/sequence:policy_forward",
        "_share_of_token(mask, sequence, lengths, policy, objective, objective.aggregation, policy.normalizer)",
        "_share_of_token(mask, sequence, segment_sum(mask.to(lp.dtype), offsets), policy, objective, "
        "objective.aggregation, policy.normalizer)",
        "distributed/sharded::test_case[cp 2 torch gspo]",
    ),
    "ranks whose options differ are not refused": (
        "_differences",
        "any(fact != known[0] for fact in known)",
        "False",
        "distributed/sharded::test_case[linear_log_probs with other arguments of a rank, tp_group]",
    ),
    "an argument in neither list": (
        "policy_values",
        'del values["objective"]',
        'del values["objective"], values["kl_normalizer"]',
        "distributed/agreement::test_every_argument_is_compared_or_excused",
    ),
    "arguments compared by the sum of their values": (
        "_checksum",
        "return zlib.crc32(ctypes.string_at(x.data_ptr(), x.nbytes))",
        "return int(x.sum())",
        "distributed/sharded::test_case[linear_log_probs with other arguments of a rank, tp_group]",
    ),
    "values of masked tokens compared": (
        "_facts",
        'value[values["mask"].reshape(-1)] if name in PER_TOKEN else value',
        "value",
        "distributed/sharded::test_case[equal arguments that are spelled differently]",
    ),
    "token weights per sequence not compared with a cp_group": (
        "policy_values",
        'values |= _of_sequences("token_weights", arguments.token_weights, policy, mask)',
        "pass",
        "distributed/sharded::test_case[tokens of a cp_group read per sequence or per token]",
    ),
    "environment variables not compared": (
        "compared:environment",
        'return {f"environment variable {name}": read(device) for name, read in ENVIRONMENT.items()}',
        "return {}",
        "distributed/sharded::test_case[only the first call on an accelerator is compared]",
    ),
    "an environment variable in neither list": (
        "ENVIRONMENT",
        '"GSPO_CACHE_MIB"',
        '"GSPO_CACHE"',
        "distributed/agreement::test_every_environment_variable_is_compared_or_excused",
    ),
    "a first call that raised is not compared again": (
        "_compared",
        'failure = "" if error is None else str(error) or type(error).__name__',
        'failure, _met[key] = "" if error is None else str(error), device or type(error).__name__',
        "distributed/sharded::test_case[only the first call on an accelerator is compared]",
    ),
    "metrics of ranks not combined": (
        "metrics:combine",
        "_combined(by_name, gather(combined, group.group_name))",
        "gather(combined, group.group_name)[0]",
        "distributed/sharded::test_case[metrics of ranks are combined, sequence ratios]",
    ),
    "ranks weighted without the soft-cap": (
        "work_of_all_ranks",
        "total, unmasked = _least_mass(head, result, at_target), head.mask.sum().double()",
        "total, unmasked = at_target.double().sum(), head.mask.sum().double()",
        "distributed/sharded::test_case[work cp torch softcap]",
    ),
    "live rows of ranks weighted equally": (
        "work_of_all_ranks",
        "x.double() * unmasked",
        "x.double() * (unmasked > 0)",
        "distributed/sharded::test_case[work cp torch softcap]",
    ),
    "masked tokens in the sums of ranks": (
        "_sums_after_gate",
        "torch.where(mask, torch.stack(list(present.values())), 0)",
        "torch.stack(list(present.values()))",
        "distributed/sharded::test_case[metrics of the loss, token ratios]",
    ),
    "empty sequences in ratio_min": (
        "torch/sequence:_metrics",
        "torch.where(filled, torch.stack([ratio, -ratio]), torch.inf)",
        "torch.stack([ratio, -ratio])",
        "distributed/sharded::test_case[metrics of the loss, sequence ratios]",
    ),
    "sequences that are empty on all ranks counted in means": (
        "torch/sequence:_metrics",
        "filled.sum(dtype=torch.float64)",
        "lengths.new_tensor(filled.numel(), dtype=torch.float64)",
        "distributed/sharded::test_case[metrics of the loss, sequence ratios]",
    ),
    "no padding on a rank without rows of a DTensor": (
        "local_rows",
        "is_dtensor(x) and rows.shape[0] == 0",
        "False",
        "distributed/sharded::test_case[dtensor head with 5 rows on 4 ranks]",
    ),
}
