"""Seeded faults of both backends that earlier tests let through, with the tests that kill them.

(module, text, the text with the fault, a test that must fail): `test_mutations.py` seeds them.
"""

from __future__ import annotations

# fmt: off

# The torch backend and what both share.
LOSS: dict[str, tuple[str, str, str, str]] = {
    "what a difference rounds off is dropped": (
        "backends/torch/forward", "lost = (lost + lost_too) * F", "lost = lost * F",
        "loss_faults::test_log_probs_are_rounded_once[torch]",
    ),
    "power of two without the slope": (
        "backends/torch/backward", "self.boost = power_of_two(self.at_target * slope, self.d_entropy, live)",
        "self.boost = power_of_two(self.at_target, self.d_entropy, live)",
        "loss_faults::test_half_gradients_of_a_small_slope_do_not_vanish[1.0]",
    ),
    "half operands on ROCm": (
        "backends/torch/tiles", "tensor_cores = device.type == \"cuda\" and torch.version.hip is None",
        "tensor_cores = device.type == \"cuda\"", "loss_faults::test_operands_are_half_where_their_product_is_fp32",
    ),
    "power of two of an infinite gradient": (
        "backends/precision", "(largest > 0) & largest.isfinite()", "largest > 0",
        "loss_faults::test_the_power_of_two_brings_the_largest_of_both_gradients_near_one",
    ),
    "power of two without the entropy's gradient": (
        "backends/precision", "size = gradients.abs() if more is None else torch.maximum(gradients.abs(), more.abs())",
        "size = gradients.abs()", "loss_faults::test_the_power_of_two_brings_the_largest_of_both_gradients_near_one",
    ),
    "negative mass of a negative scale": (
        "backends/live_tiles", "abs(head.logit_scale)", "head.logit_scale",
        "loss_faults::test_a_negative_scale_drops_as_much_as_a_positive_one",
    ),
    "cells dropped while a graph is captured": (
        "backends/live_tiles", "pays = sparse_pays(rows, head.hidden.shape[1], vocab, share) & (not _captured(mass))",
        "pays = sparse_pays(rows, head.hidden.shape[1], vocab, share) & (not False)",
        "loss_faults::test_nothing_is_dropped_while_a_graph_is_captured[torch]",
    ),
    "a budget used up to rounding": (
        "backends/live_tiles", "_MARGIN = 1 - 1e-4", "_MARGIN = 1",
        "loss_faults::test_a_cell_that_fits_the_budget_by_less_than_fp32_resolves_is_kept",
    ),
    "temperature missing in the mass under a soft-cap": (
        "backends/live_tiles", "* (1 if head.temperature is None else head.temperature)", "* 1",
        "loss_faults::test_a_budget_holds_under_a_soft_cap_that_binds_at_a_high_temperature",
    ),
    "the policy term's normalizer for KL too, in torch": (
        "backends/torch/sequence",
        "if normalizer is None and aggregation == objective.aggregation:", "if normalizer is None:",
        "loss_faults::test_a_kl_term_with_another_aggregation_counts_its_own_normalizer[torch-sequence]",
    ),
    "length_norm ignored for KL": (
        "backends/torch/sequence", "mask, sequence, lengths, aggregation, objective.length_norm, normalizer\n",
        "mask, sequence, lengths, aggregation, 1.0, normalizer\n",
        "loss_faults::test_a_kl_term_has_a_length_norm_of_its_own_aggregation[torch]",
    ),
    "an exploded ratio at masked tokens": (
        "backends/torch/sequence", "kl_share = torch.where(mask, kl_share * log_ratio.exp(), 0)",
        "kl_share = kl_share * log_ratio.exp()",
        "loss_faults::test_an_exploded_ratio_times_kl_leaves_masked_tokens_alone[torch-True]",
    ),
    "entropy gradients not counted": (
        "backends/torch/sequence", "live = live | (entropy_coefficient != 0)", "pass",
        "loss_faults::test_tokens_with_an_entropy_gradient_are_not_counted_as_without_one[torch]",
    ),
    "clipped on the ceiling": (
        "backends/torch/surrogates", "(u > math.log(objective.ceiling))", "(u >= math.log(objective.ceiling))",
        "loss_faults::test_a_ratio_on_a_bound_is_inside_it[torch-dual clip]",
    ),
    "gmpo bound on its bound": (
        "backends/torch/surrogates", "low = (advantages < 0) & (log_ratio < -objective.clip_low)",
        "low = (advantages < 0) & (log_ratio <= -objective.clip_low)",
        "loss_faults::test_a_ratio_on_a_bound_is_inside_it[torch-gmpo, bottom]",
    ),
    "cispo bound on its bound": (
        "backends/torch/surrogates", "counts & (u < log_low), counts & (u > log_high)",
        "counts & (u <= log_low), counts & (u >= log_high)",
        "loss_faults::test_a_ratio_on_a_bound_is_inside_it[torch-cispo, top]",
    ),
    "sapo's ratio bounded at exp(8), in torch": (
        "backends/torch/surrogates", "_FAR = 80.0", "_FAR = 8.0",
        "loss_faults::test_a_small_sapo_temperature_has_a_slope_at_far_ratios[torch-1e-12]",
    ),
    "reinforce counted as clipped": (
        "backends/torch/surrogates", "return Term(-advantages, -advantages, never, never)",
        "return Term(-advantages, -advantages, advantages < 0, never)",
        "loss_faults::test_reinforce_clips_nothing[torch]",
    ),
}

# The Triton backend.
KERNELS: dict[str, tuple[str, str, str, str]] = {
    "what a difference rounds off is dropped, in Triton": (
        "backends/triton/forward", "lost = (lost + lost_too) * tl.exp(log_rest)", "lost = lost * tl.exp(log_rest)",
        "loss_faults::test_log_probs_are_rounded_once[triton]",
    ),
    "cells for a head with an adapter": (
        "backends/triton/forward", "if head.bias is not None or head.adapter_weight is not None:\n        return None",
        "if head.bias is not None:\n        return None",
        "kernel_faults::test_an_adapter_or_a_bias_has_no_cells_in_the_triton_backend",
    ),
    "a log-prob for an id outside the vocabulary": (
        "backends/triton/forward", "torch.full((n,), math.nan, dtype=dtype, device=device)",
        "torch.zeros(n, dtype=dtype, device=device)",
        "loss_faults::test_an_id_outside_the_vocabulary_has_no_log_prob[triton--1]",
    ),
    "padding columns as targets": (
        "backends/triton/logit_tile", "(target >= 0) & (target < V)", "target >= 0",
        "loss_faults::test_an_id_outside_the_vocabulary_has_no_log_prob[triton-70]",
    ),
    "stride of the bias ignored": (
        "backends/triton/logit_tile", "tl.load(bias + columns * stride_bias)", "tl.load(bias + columns)",
        "loss_faults::test_operands_of_a_head_need_not_be_contiguous[triton]",
    ),
    "stride of the adapter's weight ignored": (
        "backends/triton/logit_tile", "+ at * stride_adapter_weight", "+ at",
        "loss_faults::test_operands_of_a_head_need_not_be_contiguous[triton]",
    ),
    "ids that are not contiguous": (
        "backends/triton/logit_tile", "target_ids=head.target_ids.contiguous()", "target_ids=head.target_ids",
        "loss_faults::test_operands_of_a_head_need_not_be_contiguous[triton]",
    ),
    "rows at no multiple of 16 bytes": (
        "backends/triton/logit_tile",
        "padded = -(-width * hidden.itemsize // 16) * 16 // hidden.itemsize", "padded = width",
        "kernel_faults::test_rows_that_a_descriptor_cannot_read_are_copied[ragged-rows]",
    ),
    "rows of stride 0 given to descriptors": (
        "backends/triton/logit_tile", "x.stride(1) == 1 and x.stride(0) >= x.shape[1]", "x.stride(1) == 1",
        "kernel_faults::test_rows_that_a_descriptor_cannot_read_are_copied[expanded]",
    ),
    "an offset along H in 32 bits": (
        "backends/triton/logit_tile", "k = tl.arange(0, BLOCK_H).to(tl.int64)", "k = tl.arange(0, BLOCK_H)",
        "kernel_faults::test_columns_of_the_head_past_two_to_the_31[24]",
    ),
    "the step to the next block of H in 32 bits": (
        "backends/triton/logit_tile", "step = tl.full([], BLOCK_H, tl.int64) * stride_weight",
        "step = BLOCK_H * stride_weight", "kernel_faults::test_columns_of_the_head_past_two_to_the_31[40]",
    ),
    "a cell's offset in 32 bits where it is written": (
        "backends/triton/gradient_tile", "at = tl.program_id(0).to(tl.int64) * (BLOCK_N * BLOCK_V)",
        "at = tl.program_id(0) * (BLOCK_N * BLOCK_V)",
        "kernel_faults::test_gradients_of_cells_past_two_to_the_31_are_written",
    ),
    "an offset along H in 32 bits for d_hidden": (
        "backends/triton/sparse_products", "left = tl.minimum(h, H - 1).to(tl.int64) * stride_weight",
        "left = tl.minimum(h, H - 1) * stride_weight",
        "kernel_faults::test_the_hidden_product_reads_columns_of_the_head_past_two_to_the_31",
    ),
    "a slab without a cell in its first chunk": (
        "backends/triton/sparse_backward",
        "if d_weight is not None and any(counts):", "if d_weight is not None and counts[0]:",
        "kernel_faults::test_a_slab_whose_first_chunk_has_no_cell_has_a_gradient",
    ),
    "entropy gradients not counted, in Triton": (
        "backends/triton/sequence", "dead &= bonus == 0", "pass",
        "loss_faults::test_tokens_with_an_entropy_gradient_are_not_counted_as_without_one[triton]",
    ),
    "an empty sequence as the least ratio": (
        "backends/triton/sequence", "tl.where(filled, s, float(\"inf\"))", "s",
        "loss_faults::test_an_empty_sequence_is_neither_the_least_nor_the_largest_ratio[triton-0.5-sequence]",
    ),
    "a masked token as the least ratio": (
        "backends/triton/sequence", "tl.where(counts, s, float(\"inf\"))", "s",
        "loss_faults::test_an_empty_sequence_is_neither_the_least_nor_the_largest_ratio[triton-0.5-token]",
    ),
    "log-probs that are not contiguous": (
        "backends/triton/sequence", "return None if x is None else x.contiguous()", "return x",
        "kernel_faults::test_packed_tokens_need_not_lie_next_to_each_other[triton]",
    ),
    "clipped on the ceiling, in Triton": (
        "backends/triton/surrogates", "(u > tl.full([], log_ceiling, ACC))", "(u >= tl.full([], log_ceiling, ACC))",
        "loss_faults::test_a_ratio_on_a_bound_is_inside_it[triton-dual clip]",
    ),
    "gmpo bound on its bound, in Triton": (
        "backends/triton/surrogates", "low, high = (advantage < 0) & (r < least), (advantage > 0) & (r > most)",
        "low, high = (advantage < 0) & (r <= least), (advantage > 0) & (r >= most)",
        "loss_faults::test_a_ratio_on_a_bound_is_inside_it[triton-gmpo, top]",
    ),
    "cispo bound on its bound, in Triton": (
        "backends/triton/surrogates",
        "low, high = counts & (u < tl.full([], log_low, ACC)), counts & (u > tl.full([], log_high, ACC))",
        "low, high = counts & (u <= tl.full([], log_low, ACC)), counts & (u >= tl.full([], log_high, ACC))",
        "loss_faults::test_a_ratio_on_a_bound_is_inside_it[triton-cispo, top]",
    ),
    "length_norm ignored for KL, in Triton": (
        "backends/triton/sequence", "share_of_token(length, kl_normalizer, length_norm, KL_AGGREGATION, ACC)",
        "share_of_token(length, kl_normalizer, 1.0, KL_AGGREGATION, ACC)",
        "loss_faults::test_a_kl_term_has_a_length_norm_of_its_own_aggregation[triton]",
    ),
    "the sum of the last block of sequences": (
        "backends/triton/totals", "        if KIND == 0:\n            found += x",
        "        if KIND == 0:\n            found = x",
        "kernel_faults::test_a_batch_of_more_sequences_than_a_block_adds_up[triton]",
    ),
    "the least ratio of the last block of sequences": (
        "backends/triton/totals", "found = tl.minimum(found, x)", "found = x",
        "kernel_faults::test_a_batch_of_more_sequences_than_a_block_adds_up[triton]",
    ),
}
# fmt: on
