"""The fast tests kill seeded faults: each fault is one edit of a copy of the library, and the copy must fail.

A fault that survives means that a promise is made but not tested.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from survivors import KERNELS, LOSS
from survivors_around import AROUND

ROOT = Path(__file__).parent.parent
PARITY = "parity::test_every_head_and_layout_equals_the_oracle"
OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
BLOCKS = "kernels::test_block_shapes_of_every_architecture_equal_the_oracle"
CELLS = "live_tiles::test_gradients_of_every_dtype_are_those_of_the_kept_entries"

# What is wrong: (module, text, the text with the fault, a test that must fail). The torch backend and what both share.
SHARED_FAULTS: dict[str, tuple[str, str, str, str]] = {
    "gradient x 1.01": (
        "ops",
        "select_times(coefficient, d_loss.to(coefficient.dtype))",
        "select_times(coefficient, 1.01 * d_loss.to(coefficient.dtype))",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "upstream gradient ignored": (
        "ops",
        "select_times(coefficient, d_loss.to(coefficient.dtype))",
        "coefficient",
        "parity::test_the_two_seams_chained_are_the_fused_loss_bitwise[torch-False-gspo]",
    ),
    "no 1/L in the ratio": (
        "backends/torch/sequence",
        "segment_sum(entering, offsets) / lengths.clamp(min=1)",
        "segment_sum(entering, offsets)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "no 1/L in the gradient": (
        "backends/torch/sequence",
        "segment_sum(through_ratio, offsets) / lengths.clamp(min=1)",
        "segment_sum(through_ratio, offsets)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "no 1/L in the weight": (
        "backends/torch/sequence",
        "share = share / lengths.clamp(min=1)",
        "pass",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "stale clip sign": (
        "backends/torch/surrogates",
        "low = (advantages < 0) & (u <",
        "low = (advantages > 0) & (u <",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "upper bound from clip_low": (
        "objective",
        "math.log1p(self.clip_high)",
        "math.log1p(self.clip_low)",
        f"{OBJECTIVE}[torch-padded-grpo-narrow]",
    ),
    "dual clip ignored": (
        "backends/torch/surrogates",
        "if math.isfinite(objective.ceiling):",
        "if False:",
        f"{OBJECTIVE}[torch-padded-dual-clip]",
    ),
    "empty sequences counted": (
        "backends/torch/sequence",
        "(lengths > 0).sum()",
        "(lengths >= 0).sum()",
        "edges::test_empty_and_masked_sequences_change_nothing_for_the_others[torch-gspo]",
    ),
    "token weights not in the gradient": (
        "backends/torch/sequence",
        "select_times(policy.token_weights, value), select_times(policy.token_weights, slope)",
        "select_times(policy.token_weights, value), slope",
        f"{OBJECTIVE}[torch-packed-per-token-weights-gspo]",
    ),
    "token weights on the KL too": (
        "backends/torch/sequence",
        "kl_share = objective.kl_coef *",
        "kl_share = (1 if policy.token_weights is None else policy.token_weights) * objective.kl_coef *",
        f"{OBJECTIVE}[torch-packed-per-token-weights-cispo-sequence]",
    ),
    "gradient through a bound token of gmpo": (
        "backends/torch/sequence",
        "torch.where(differentiable, per_sequence[sequence], 0)",
        "torch.where(mask, per_sequence[sequence], 0)",
        f"{OBJECTIVE}[torch-padded-gmpo]",
    ),
    "cispo flat where it is bound": (
        "backends/torch/surrogates",
        "slope = torch.where(counts, -weight * advantages, 0)",
        "slope = torch.where(counts & ~low & ~high, -weight * advantages, 0)",
        f"{OBJECTIVE}[torch-padded-cispo]",
    ),
    "sapo's gate differentiated by s alone": (
        "backends/torch/surrogates",
        "* s * advantages",
        "* advantages",
        f"{OBJECTIVE}[torch-padded-sapo]",
    ),
    "k3+ with the slope of k3": (
        "backends/torch/surrogates",
        'd if estimator.endswith("+") else slope',
        "slope",
        f"{OBJECTIVE}[torch-padded-k1+]",
    ),
    "k3 slope of the wrong sign": (
        "backends/torch/surrogates",
        "value, slope = decay + d, -decay",
        "value, slope = decay + d, decay",
        f"{OBJECTIVE}[torch-padded-cispo-sequence]",
    ),
    "ratio factor without its gradient": (
        "backends/torch/sequence",
        "through_ratio = through_ratio + divergence_times(kl, kl_share)",
        "pass",
        f"{OBJECTIVE}[torch-padded-cispo-sequence]",
    ),
    "masked old log-probs multiplied": (
        "backends/torch/sequence",
        "torch.where(mask, log_probs - old, 0)",
        "mask * (log_probs - old)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "mask off by one": (
        "backends/torch/forward",
        "work = Tiles(head, head.mask.nonzero()[:, 0])",
        "work = Tiles(head, head.mask.roll(1).nonzero()[:, 0])",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "temperature missing in the backward": (
        "backends/torch/tiles",
        "slope = slope.div_(t) if isinstance(slope, Tensor) else slope / t",
        "pass",
        f"{PARITY}[torch-temperature-padded-fp64]",
    ),
    "soft-cap missing in the backward": (
        "backends/torch/tiles",
        "if head.logit_softcap is not None:\n            t = 1",
        "if False:\n            t = 1",
        f"{PARITY}[torch-scale-softcap-padded-fp64]",
    ),
    "last vocabulary slab dropped": (
        "backends/torch/tiles",
        "for low in range(0, vocab, width)]",
        "for low in range(0, vocab, width)][: max(1, (vocab - 1) // width)]",
        "parity::test_several_tiles_of_rows_and_columns[torch]",
    ),
    "padded vocabulary counted": (
        "backends/torch/tiles",
        "self.head.vocab_size, self.tile_columns",
        "self.head.weight.shape[0], self.tile_columns",
        f"{PARITY}[torch-padded-vocab-padded-fp64]",
    ),
    "logits rounded to bf16": (
        "backends/torch/tiles",
        "        head = self.head\n        z = _product(self.hidden_rows(rows), weight.t())",
        "        head = self.head\n        z = _product(self.hidden_rows(rows), weight.t()).bfloat16().to(self.dtype)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "fp64 products in fp32": (
        "layout",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "1 - p by subtraction": (
        "backends/torch/backward",
        "self.d_log_probs * -torch.expm1(self.log_probs)",
        "self.d_log_probs * (1 - self.log_probs.exp())",
        "edges::test_peaked_rows_keep_the_relative_precision_of_what_is_left_to_learn[torch-fp64]",
    ),
    "entropy gradient dropped": (
        "ops",
        "d_entropy = _times(entropy_coefficient, d_loss) if entropy_coefficient.numel() else None",
        "d_entropy = None",
        f"{OBJECTIVE}[torch-padded-entropy-bonus]",
    ),
    "bias gradient dropped": (
        "backends/torch/backward",
        "self.d_bias[first:last] += d_z.sum(0)",
        "pass",
        f"{PARITY}[torch-bias-padded-fp64]",
    ),
    "last rows of the batch dropped": (
        "backends/torch/tiles",
        "for low in range(0, self.padded, self.tile_rows))",
        "for low in range(0, max(self.padded - self.tile_rows, min(self.padded, 1)), self.tile_rows))",
        "parity::test_several_tiles_of_rows_and_columns[torch]",
    ),
    "fp16 gradients left to underflow": (
        "backends/torch/backward",
        "if work.operand_dtype == torch.float16:",
        "if False:",
        "parity::test_small_fp16_gradients_survive_the_product",
    ),
    "products as the process likes them": (
        "backends/precision",
        '_request_ieee("cuda" if device.type == "cuda" else "cpu")',
        "pass",
        "heads::test_exact_products_are_asked_for_on_every_processor[medium]",
    ),
    "one thread restores what another needs": (
        "backends/precision",
        "if not _calls:\n                _restore",
        "if True:\n                _restore",
        "heads::test_two_threads_at_once_keep_exact_products_and_restore_the_wish[torch]",
    ),
    "sequence sums in fp32": (
        "layout",
        'torch.segment_reduce(x.double(), "sum"',
        'torch.segment_reduce(x, "sum"',
        "edges::test_long_sequences_obey_the_law_too[torch-sequence-False-256]",
    ),
    "weight 0 times an exploded ratio": (
        "backends/precision",
        "torch.where((factor == 0) | (x == 0), 0, factor * x)",
        "factor * x",
        "edges::test_a_token_weight_of_zero_silences_an_infinite_ratio[torch-sequence]",
    ),
    "a NaN ratio hidden by no divergence": (
        "backends/torch/surrogates",
        "(kl == 0) & ratio.isinf()",
        "kl == 0",
        "presets::test_a_ratio_that_is_no_number_is_seen_where_there_is_no_divergence[torch-unbiased]",
    ),
    "correction of the sampler left out": (
        "inputs/policy",
        "weights if token_weights is None else",
        "token_weights if token_weights is None else",
        "sampler_mismatch::test_a_weight_that_is_no_number_or_exploded_weighs_nothing_on_nothing[torch-token]",
    ),
    "NaN log-probs hidden on-policy": (
        "backends/torch/sequence",
        "torch.where(mask, log_probs - old, 0)",
        "torch.zeros_like(lp) if policy.old_log_probs is None else torch.where(mask, log_probs - old, 0)",
        "edges::test_a_nan_hidden_state_reaches_exactly_what_depends_on_it[torch-nan-sequence-True]",
    ),
    "LoRA ignored": (
        "inputs/lm_head",
        "return Head(module.weight, bias, *_low_rank_term(call, lora, hidden, mask))",
        "return Head(module.weight, bias)",
        "heads::test_lora_on_the_head_is_computed_as_peft_would[torch-False-False-1]",
    ),
    "hooks of an adapter ignored": (
        "inputs/lm_head",
        "called += [lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]]",
        "pass",
        "bad_inputs::test_an_unsupported_adapter_is_named[hook-on-lora-a]",
    ),
    "rows that PEFT trains ignored": (
        "inputs/lm_head",
        "if tokens is not None and _adapts(call, tokens):",
        "if False:",
        "heads::test_rows_that_peft_trains_are_in_the_weight[torch]",
    ),
    "the budget spent twice": (
        "backends/live_tiles",
        "int(budget * _MARGIN * _UNITS)",
        "int(2 * budget * _MARGIN * _UNITS)",
        "live_tiles::test_the_dropped_mass_is_the_one_reported_and_within_the_budget",
    ),
    "the heaviest cells dropped": (
        "backends/live_tiles",
        "flatten().sort(stable=True)",
        "flatten().sort(stable=True, descending=True)",
        "live_tiles::test_a_bias_and_its_gradient_take_part_in_the_torch_backend",
    ),
    "the target's own mass forgotten": (
        "backends/live_tiles",
        "mass[at] += torch.where(weighs, at_target[filled], 0)",
        "pass",
        "live_tiles::test_the_dropped_mass_is_the_one_reported_and_within_the_budget",
    ),
    "a slope of 1 for every soft-cap": (
        "backends/live_tiles",
        "if head.logit_softcap is None:",
        "if True:",
        "live_tiles::test_the_dropped_mass_is_the_one_reported_and_within_the_budget",
    ),
    "rows not in the order of the cells": (
        "backends/torch/backward",
        "live.order[:count] if live and sparse",
        "live.order[:count].sort().values if live and sparse",
        "live_tiles::test_the_dropped_mass_is_the_one_reported_and_within_the_budget",
    ),
    "the last run of a slab forgotten": (
        "backends/torch/tiles",
        "for alive, run in itertools.groupby(live[at : -(-high // columns)]):",
        "for alive, run in itertools.groupby(live[at : high // columns]):",
        "live_tiles::test_the_dropped_mass_is_the_one_reported_and_within_the_budget",
    ),
    "a sum past what an integer holds": (
        "backends/live_tiles",
        "over.cumsum(0) == 0",
        "~over",
        "live_tiles::test_cells_heavier_than_the_whole_and_more_than_an_integer_holds",
    ),
    "more passes than said": (
        "backends/live_tiles",
        "(size * cells).sum() / (counted * vocab)",
        "(size * cells).sum() / (counted * vocab) / 2",
        "live_tiles::test_the_dropped_mass_is_the_one_reported_and_within_the_budget",
    ),
    "products as autocast likes them": (
        "backends/precision",
        "with torch.autocast(device.type, enabled=False) if device.type in AUTOCAST_DEVICES else nullcontext():\n"
        "            yield",
        "yield",
        "heads::test_autocast_computes_on_operands_cast_to_bf16_and_rounds_nothing_else[torch-False]",
    ),
    "threads of ours that split operations": (
        "backends/torch/workers",
        "torch.set_num_threads(1)\n    ready",
        "ready",
        "workers::test_every_tile_is_computed_by_one_thread_alone",
    ),
    "terms added as they come": (
        "backends/torch/workers",
        "pop(self._added[index], None)",
        "pop(min(self._kept[index], default=None), None)",
        "workers::test_terms_are_added_in_their_order",
    ),
    "offsets of weights unchecked": (
        "sampler_mismatch",
        "invalid = invalid + call.offsets(cu_seqlens, mask.shape[0], mask.device)",
        "pass",
        "sampler_mismatch::test_offsets_that_are_no_sequences_are_refused",
    ),
    "a normalizer tensor that nobody looks at": (
        "validation",
        "return self.flag(name, ~right & ((x != 0) | mask.any()), expected, value.item)",
        "return 0",
        "bad_inputs::test_a_bad_input_is_named_and_nothing_is_written[normalizer-tensor-zero-gspo_fused_loss]",
    ),
}

# The Triton backend: (module, text, the text with the fault, the test that finds it: interpreted ones take long).
TRITON_FAULTS: dict[str, tuple[str, str, str, str]] = {
    "padded columns counted as the last one": (
        "backends/triton/forward",
        "at_target | (v[None, :] >= V)",
        "at_target",
        f"{PARITY}[triton-plain-padded-fp32]",
    ),
    "the target among the others": (
        "backends/triton/forward",
        "at_target | (v[None, :] >= V)",
        "v[None, :] >= V",
        f"{PARITY}[triton-plain-padded-fp32]",
    ),
    "last ragged tile dropped": (
        "backends/triton/forward",
        "-(-head.vocab_size // config.block_v)",
        "max(head.vocab_size // config.block_v, 1)",
        f"{BLOCKS}[sm_90-plain-fp32]",
    ),
    "rows not in their order": (
        "backends/triton/forward",
        "rows = tl.load(order + tl.minimum(n, n_rows - 1))",
        "rows = tl.minimum(n, n_rows - 1)",
        f"{PARITY}[triton-plain-padded-fp32]",
    ),
    "masked rows computed": (
        "backends/triton/forward",
        "if row_block.to(tl.int64) * BLOCK_N < kept:",
        "if True:",
        "kernels::test_programs_share_columns_in_groups_and_none_computes_masked_rows",
    ),
    "programs in another order": (
        "backends/triton/logit_tile",
        "return group * GROUP + within % height, within // height",
        "return program // column_blocks, program % column_blocks",
        "kernels::test_programs_share_columns_in_groups_and_none_computes_masked_rows",
    ),
    "mass not brought to the new maximum": (
        "backends/triton/forward",
        "mass *= tl.exp(largest - finite(grown))",
        "pass",
        "kernels::test_more_tiles_than_are_added_up_at_once",
    ),
    "a tile's offset in 32 bits": (
        "backends/triton/forward",
        "t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)",
        "t = start + tl.arange(0, BLOCK_T)",
        "kernels::test_partial_results_past_two_to_the_31",
    ),
    "a column's offset in 32 bits": (
        "backends/triton/logit_tile",
        "V - 1).to(tl.int64)",
        "V - 1)",
        "kernels::test_rows_of_the_head_past_two_to_the_31[sm_80]",
    ),
    "a gradient's offset in 32 bits": (
        "backends/triton/gradient_tile",
        "n = row_block.to(tl.int64) * BLOCK_N",
        "n = row_block * BLOCK_N",
        "kernels::test_hidden_states_and_gradients_of_logits_past_two_to_the_31",
    ),
    "ragged end of H not masked": (
        "backends/triton/logit_tile",
        "inside = tl.arange(0, BLOCK_H)[None, :] < H - start",
        "inside = tl.arange(0, BLOCK_H)[None, :] < H",
        f"{BLOCKS}[sm_90-plain-fp32]",
    ),
    "only the last chain of H": (
        "backends/triton/logit_tile",
        "z += part",
        "z = part",
        "kernels::test_more_hidden_elements_than_a_chain_has",
    ),
    "descriptors stay at the first block of H": (
        "backends/triton/logit_tile",
        "weight.load([first_column, start])",
        "weight.load([first_column, 0])",
        f"{BLOCKS}[sm_90-plain-bf16]",
    ),
    "soft-cap missing in the kernel": (
        "backends/triton/gradient_tile",
        "d *= 1.0 - part * part",
        "pass",
        f"{PARITY}[triton-scale-softcap-padded-fp32]",
    ),
    "temperature missing in the kernel": (
        "backends/triton/gradient_tile",
        "slope /= heat",
        "pass",
        f"{PARITY}[triton-temperature-padded-fp32]",
    ),
    "1 - p by subtraction in the kernel": (
        "backends/triton/gradient_tile",
        "d_log_p * -expm1(log_p)",
        "d_log_p * (1.0 - tl.exp(log_p))",
        "edges::test_peaked_rows_keep_the_relative_precision_of_what_is_left_to_learn[triton-fp32]",
    ),
    "the target's own share of the entropy": (
        "backends/triton/gradient_tile",
        "at_own -= d_h * tl.exp(own) * (own + h)",
        "pass",
        f"{OBJECTIVE}[triton-padded-entropy-bonus]",
    ),
    "rows without gradient multiplied": (
        "backends/triton/gradient_tile",
        "d = tl.where(live[:, None], d, 0.0)",
        "d *= live[:, None].to(ACC)",
        "kernels::test_a_nan_row_without_gradient_is_zero_where_all_rows_take_part",
    ),
    "chunks overwrite each other": (
        "backends/triton/backward",
        "add_product(d_slab, d_z.t(), some)",
        "add_product(d_slab.zero_(), d_z.t(), some)",
        "kernels::test_many_chunks_and_slabs_are_one[fp32]",
    ),
    "rows moved onto others": (
        "backends/triton/gradient_rows",
        "in range(0, n, chunk):\n        some",
        "in reversed(range(0, n, chunk)):\n        some",
        "kernels::test_rows_move_to_their_places_inside_the_memory_of_their_sums",
    ),
    "power of two left in": (
        "backends/triton/gradient_rows",
        "some.clone() if up.boost is None else some / up.boost",
        "some.clone()",
        f"{PARITY}[triton-plain-padded-fp16]",
    ),
    "masked tokens in the length": (
        "backends/triton/sequence",
        "found += tl.load(mask + t, mask=t < end, other=0).to(tl.int32)",
        "found += (t < end).to(tl.int32)",
        f"{OBJECTIVE}[triton-padded-gspo]",
    ),
    "KL clipped with the ratio": (
        "backends/triton/sequence",
        "factor = tl.where(counts, kl_share, 0.0)",
        "factor = tl.where(counts & (slope != 0), kl_share, 0.0)",
        f"{OBJECTIVE}[triton-padded-k3]",
    ),
    "log-ratios summed in fp32": (
        "backends/triton/sequence",
        "total += r.to(tl.float64)",
        "total = (total + r).to(ACC)",
        "kernels::test_the_mean_of_equal_log_ratios_is_that_log_ratio",
    ),
    "bound tokens of gmpo in the gradient": (
        "backends/triton/sequence",
        "inside = counts & (low == 0) & (high == 0)",
        "inside = counts",
        f"{OBJECTIVE}[triton-padded-gmpo]",
    ),
    "cispo through its ratio": (
        "backends/triton/sequence",
        "part, direct, loss_of_token = direct, part, select_times(share * value, lp)",
        "loss_of_token = select_times(share * value, lp)",
        f"{OBJECTIVE}[triton-packed-per-token-weights-cispo-sequence]",
    ),
    "clipped on the bound": (
        "backends/triton/surrogates",
        "high = (advantage > 0) & (u > tl.full([], log_high, ACC))",
        "high = (advantage > 0) & (u >= tl.full([], log_high, ACC))",
        "decisions::test_the_gate_is_inclusive_and_taken_on_the_log_ratio[triton]",
    ),
    "NaN lost by an extreme": (
        "backends/triton/totals",
        "tl.where(ratio != ratio, ratio, tl.where(count > 0, smallest, 1.0))",
        "tl.where(count > 0, smallest, 1.0)",
        "kernels::test_metrics_are_those_of_torch",
    ),
    "a host read in the forward": (
        "backends/triton/forward",
        "count = head.mask.sum().reshape(1)",
        "count = torch.tensor([head.mask.sum().item()])",
        "kernels::test_a_small_workspace_is_kept_to",
    ),
    "a block shape for small batches": (
        "backends/triton/tuning",
        "heavy = more or",
        "heavy = more or head.hidden.shape[0] < 64 or",
        "kernels::test_a_row_has_the_same_bits_alone_and_in_any_batch",
    ),
    "a tile without mass at a shift of nothing": (
        "backends/triton/forward",
        ".clamp_(max=0).exp_()",
        ".exp_()",
        "live_tiles::test_a_last_tile_that_is_only_the_target_weighs_what_it_weighs[triton]",
    ),
    "cells in the order of blocks for both products": (
        "backends/triton/cells",
        "by_tile, by_block = whole.permute(2, 0, 3, 1), whole.permute(2, 0, 1, 3)",
        "by_tile, by_block = whole.permute(2, 0, 1, 3).mT, whole.permute(2, 0, 3, 1).mT.flip(2)",
        f"{CELLS}[triton-plain-fp32]",
    ),
    "a part's cells counted from the first of all": (
        "backends/triton/cells",
        "place[..., 0] - first[..., None]",
        "place[..., 0]",
        f"{CELLS}[triton-plain-fp32]",
    ),
    "ends of a cell not zero": (
        "backends/triton/gradient_tile",
        "tl.where(inside, d, 0.0)",
        "d",
        f"{CELLS}[triton-plain-fp32]",
    ),
    "sums of earlier slabs overwritten": (
        "backends/triton/sparse_products",
        "tl.load(at, mask=ok, other=0.0) + acc",
        "acc",
        f"{CELLS}[triton-plain-fp32]",
    ),
    "the policy term's normalizer for KL too": (
        "backends/triton/sequence",
        "if kl_normalizer is None and kl_aggregation == objective.aggregation:",
        "if kl_normalizer is None:",
        "loss_faults::test_a_kl_term_with_another_aggregation_counts_its_own_normalizer[triton-sequence]",
    ),
    "sapo's ratio bounded at exp(8)": (
        "backends/triton/elementary",
        "FAR: tl.constexpr = tl.constexpr(80.0)",
        "FAR: tl.constexpr = tl.constexpr(8.0)",
        "loss_faults::test_a_small_sapo_temperature_has_a_slope_at_far_ratios[triton-1e-12]",
    ),
    "a cell's offset in 32 bits for d_hidden": (
        "backends/triton/sparse_products",
        "tl.load(block_place + j).to(tl.int64)",
        "tl.load(block_place + j)",
        "kernel_faults::test_the_hidden_product_reads_cells_past_two_to_the_31",
    ),
    "a cell's offset in 32 bits for d_weight": (
        "backends/triton/sparse_products",
        "(j * ROWS + start + k).to(tl.int64)",
        "(j * ROWS + start + k)",
        "kernel_faults::test_the_weight_product_reads_cells_past_two_to_the_31",
    ),
    "unaligned rows given to descriptors": (
        "backends/triton/logit_tile",
        " and x.data_ptr() % 16 == 0",
        "",
        "kernel_faults::test_rows_that_a_descriptor_cannot_read_are_copied[2-bytes]",
    ),
    "no barrier before coefficients are read again": (
        "backends/triton/sequence",
        "tl.debug_barrier()",
        "pass",
        "kernel_faults::test_a_barrier_stands_before_coefficients_are_read_again",
    ),
    "interpreted kernels unasked": (
        "backends/dispatch",
        'or (backend == "auto" and device.type == "cpu")',
        "",
        "kernels::test_auto_takes_triton_on_a_gpu_and_torch_on_a_cpu",
    ),
}

FAULTS = {**SHARED_FAULTS, **TRITON_FAULTS, **LOSS, **KERNELS, **AROUND}
# What Python ends with when a kernel has written where it must not.
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
# A process a fault, forked from one that has imported what takes long.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["hypothesis", "pytest", "torch", "triton.language", "transformers"])


def run_with_fault(fault: str, folder: Path) -> int | None:
    """What pytest ends with on a copy of the library with the fault; its output is in the copy's log."""
    for name in ("gspo_kernels", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "integrations", folder / "gspo_kernels" / "integrations")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("README.md", "constraints.txt", "docs"):  # tests read them
        (folder / name).symlink_to(ROOT / name)
    module, old, new, test = FAULTS[fault]
    source = folder / "gspo_kernels" / f"{module}.py"
    source.write_text(source.read_text().replace(old, new))
    suite, _, name = test.partition("::")
    path = Path("tests", suite).with_name(f"test_{Path(suite).name}.py")
    process = FORKS.Process(target=_run_test, args=(folder, f"{path}::{name}"))
    process.start()
    process.join()
    return process.exitcode


def _run_test(folder: Path, test: str) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test])
    sys.stdout.flush()
    os._exit(code)


def test_every_fault_is_an_edit_of_the_library() -> None:
    folders = {
        path: ROOT if path.startswith("integrations/") else ROOT / "gspo_kernels" for path, *_ in FAULTS.values()
    }
    sources = {path: (folder / f"{path}.py").read_text() for path, folder in folders.items()}
    assert [fault for fault, (path, old, *_) in FAULTS.items() if old not in sources[path]] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_killed(fault: str, tmp_path: Path) -> None:
    if FAULTS[fault][3].startswith("trainers/trl"):
        pytest.importorskip("trl", minversion="1.15")
    if FAULTS[fault][3].startswith("trainers/verl") and importlib.util.find_spec("verl") is None:
        pytest.skip("verl has an environment of its own: make test-trainers")
    code = run_with_fault(fault, tmp_path)
    killed = code == 1 or (FAULTS[fault][0].startswith("backends/triton/") and code in CRASHES)
    assert killed, f"{fault}: survived or did not run\n{(tmp_path / 'log').read_text()[-2000:]}"
