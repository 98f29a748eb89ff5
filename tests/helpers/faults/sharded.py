"""Faults in code for heads and sequences that are sharded over ranks."""

from __future__ import annotations

from helpers.faults.table import Fault

FAULTS: dict[str, Fault] = {
    "tiles of the ranks in the wrong order": (
        "parallel",
        "for rank, count in enumerate(tiles)]))",
        "for rank, count in reversed(list(enumerate(tiles)))]))",
        "distributed/sharded::test_case[bits tp 2 torch]",
    ),
    "no logit of a target in the columns of another rank": (
        "parallel",
        "torch.where(is_nan, -torch.inf, logits).amax(0)",
        "logits[0]",
        "distributed/sharded::test_case[tp 2 torch plain]",
    ),
    "d_hidden not summed over ranks": (
        "parallel",
        "dist.all_reduce(d_x, group=ctx.group)",
        "pass",
        "distributed/sharded::test_case[tp 2 torch plain]",
    ),
    "padding of the vocabulary counted as columns": (
        "parallel",
        "max(min(self.vocab_size - rank * self.rows, self.rows), 0)",
        "self.rows",
        "distributed/sharded::test_case[tp 2 torch padded-vocab]",
    ),
    "cells of the first rank computed on every rank": (
        "parallel",
        "first = sum(tiles[: self.rank])",
        "first = 0",
        "distributed/sharded::test_case[tp 2 torch gradient_budget]",
    ),
    "sums over the tokens of the first rank only": (
        "backends/torch/sharded_sequence",
        "total = total + term",
        "pass",
        "distributed/sharded::test_case[cp 2 torch gspo]",
    ),
    "sums over the tokens of ranks in fp32": (
        "backends/torch/sharded_sequence",
        'return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0)',
        "x = x if x.is_floating_point() else x.double()\n"
        '    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0).double()',
        "distributed/sharded::test_case[cp 2 equal tokens]",
    ),
    "lengths and normalizer of this rank's tokens": (
        "backends/torch/sequence",
        "share = _share_of_token(mask, sequence, lengths,",
        "share = _share_of_token(mask, sequence, segment_sum(mask.to(lp.dtype), offsets),",
        "distributed/sharded::test_case[cp 2 torch gspo]",
    ),
    "ranks whose options differ are not refused": (
        "agreement",
        "if any(fact != known[0] for fact in known)",
        "if False",
        "distributed/sharded::test_case[errors on every rank]",
    ),
    "soft-cap not compared": (
        "agreement",
        '"gradient_budget": gradient_budget,',
        '"gradient_budget": gradient_budget, "logit_softcap": None,',
        "distributed/sharded::test_case[linear_log_probs with other arguments of a rank, tp_group]",
    ),
    "one field of the objective not compared": (
        "agreement",
        "for x in fields(arguments.objective)}",
        "for x in fields(arguments.objective) if x.name != 'clip_low'}",
        "distributed/sharded::test_case[policy_loss with other arguments of a rank, cp_group]",
    ),
    "an argument in neither list": (
        "agreement",
        'del values["objective"]',
        'del values["objective"], values["kl_normalizer"]',
        "distributed/agreement::test_every_argument_is_compared_or_excused",
    ),
    "arguments compared by the sum of their values": (
        "agreement",
        "return zlib.crc32(ctypes.string_at(x.data_ptr(), x.nbytes))",
        "return int(x.sum())",
        "distributed/sharded::test_case[linear_log_probs with other arguments of a rank, tp_group]",
    ),
    "values of masked tokens compared": (
        "agreement",
        "value[mask] if name in PER_TOKEN else value",
        "value",
        "distributed/sharded::test_case[equal arguments that are spelled differently]",
    ),
    "advantages per sequence not compared with a cp_group": (
        "agreement",
        'values |= _of_sequences("advantages", arguments.advantages, policy, mask)',
        "pass",
        "distributed/sharded::test_case[policy_loss with other arguments of a rank, cp_group]",
    ),
    "token weights per sequence not compared with a cp_group": (
        "agreement",
        'values |= _of_sequences("token_weights", arguments.token_weights, policy, mask)',
        "pass",
        "distributed/sharded::test_case[tokens of a cp_group read per sequence or per token]",
    ),
    "environment variables not compared": (
        "agreement",
        'values |= {f"environment variable {name}": read(device) for name, read in ENVIRONMENT.items()}',
        "pass",
        "distributed/sharded::test_case[only the first call on an accelerator is compared]",
    ),
    "default caches of a cp_group compared": (
        "agreement",
        '        "cache_mib": "the default of this rank\'s device",  # each rank keeps rows of its own tokens\n',
        "",
        "distributed/sharded::test_case[default caches of GPUs with different memory]",
    ),
    "default caches of a tp_group not compared": (
        "agreement",
        'Unquoted(f"{mib:g} (default)") if',
        'Unquoted("default") if',
        "distributed/sharded::test_case[default caches of GPUs with different memory]",
    ),
    "an environment variable in neither list": (
        "agreement",
        '    "GSPO_CACHE_MIB": lambda _: cache_variable(),\n',
        "",
        "distributed/agreement::test_every_environment_variable_is_compared_or_excused",
    ),
    "a first call that raised is not compared again": (
        "agreement",
        'failure = "" if error is None else str(error)',
        'failure, _met[key] = "" if error is None else str(error), device',
        "distributed/sharded::test_case[only the first call on an accelerator is compared]",
    ),
    "ranks weighted without the soft-cap": (
        "backends/live_tiles",
        "total, unmasked = _least_mass(head, result, at_target), head.mask.sum().double()",
        "total, unmasked = at_target.double().sum(), head.mask.sum().double()",
        "distributed/sharded::test_case[work cp torch softcap]",
    ),
    "ranks weighted without the temperature": (
        "backends/live_tiles",
        "_, at_target = _mass_at_target(head, result, coefficient)",
        "_, at_target = _mass_at_target(head._replace(temperature=None), result, coefficient)",
        "distributed/sharded::test_case[work cp torch temperature]",
    ),
    "soft-cap of a rank without the temperature": (
        "backends/live_tiles",
        "total, unmasked = _least_mass(head, result, at_target), head",
        "total, unmasked = _least_mass(head._replace(temperature=None), result, at_target), head",
        "distributed/sharded::test_case[work cp torch softcap one temperature]",
    ),
    "live rows of ranks weighted equally": (
        "backends/live_tiles",
        "*(x.double() * unmasked for x in work[1:])",
        "*(x.double() * (unmasked > 0) for x in work[1:])",
        "distributed/sharded::test_case[work cp torch softcap]",
    ),
    "masked tokens in ratio_min": (
        "backends/torch/sharded_sequence",
        "torch.where(mask, ratio, torch.inf)",
        "ratio",
        "distributed/sharded::test_case[metrics of the loss, token ratios]",
    ),
    "masked tokens in ratio_max": (
        "backends/torch/sharded_sequence",
        "torch.where(mask, ratio, -torch.inf)",
        "ratio",
        "distributed/sharded::test_case[metrics of the loss, token ratios]",
    ),
    "masked tokens in the sums of ranks": (
        "backends/torch/sharded_sequence",
        "_sequence_sum(torch.where(mask, x, 0), policy.offsets) for x in per_token",
        "_sequence_sum(x, policy.offsets) for x in per_token",
        "distributed/sharded::test_case[metrics of the loss, token ratios]",
    ),
    "empty sequences in ratio_min": (
        "backends/torch/sharded_sequence",
        "torch.where(filled, ratio, torch.inf)",
        "ratio",
        "distributed/sharded::test_case[metrics of the loss, sequence ratios]",
    ),
    "empty sequences in ratio_max": (
        "backends/torch/sharded_sequence",
        "torch.where(filled, ratio, -torch.inf)",
        "ratio",
        "distributed/sharded::test_case[metrics of the loss, sequence ratios]",
    ),
    "sequences that are empty on all ranks counted in means": (
        "backends/torch/sharded_sequence",
        "tokens, sequences = lengths.double().sum(), filled.sum().double()",
        "tokens, sequences = lengths.double().sum(), lengths.new_tensor(filled.numel()).double()",
        "distributed/sharded::test_case[metrics of the loss, sequence ratios]",
    ),
    "no padding on a rank without rows of a DTensor": (
        "parallel",
        "if is_dtensor(x) and rows.shape[0] == 0 else rows",
        "if False else rows",
        "distributed/sharded::test_case[dtensor head with 5 rows on 4 ranks]",
    ),
}
