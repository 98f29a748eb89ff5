"""Faults in the Triton backend."""

from __future__ import annotations

from faults.table import ROW, Fault

CHECK = "self_check::test_correct_kernels_of_the_loss_pass[float32]"
FAULTS: dict[str, Fault] = {
    "only the last pairs of a group are summed": (
        "sum_pairs",
        "acc [-+-]= factor[:, None] * load_rows(at, alive, h, width, ACC=ACC, RAGGED=RAGGED)",
        f"{ROW}[backend=triton kept_sets=offsets]",
    ),
    "the low parts of a split head are 0": (
        "_parts",
        "[-torch.sub(x, hi, out=out[:, i])-]{+out[:, i].zero_()+}",
        "decisions::test_autocast_does_not_round_an_fp32_head[triton-bf16-bf16x3]",
    ),
    "last ragged tile dropped": (
        "triton/forward:forward_and_cache",
        "[--(-(high - low) // config.block_v)-]{+max((high - low) // config.block_v, 1)+}",
        f"{ROW}[backend=triton tiles=parts]",
    ),
    "mass not rescaled to the new maximum": (
        "_log_sum_exp",
        "[-mass *= tl.exp(largest - finite(new_largest))-]{+pass+}",
        "kernels::test_reduction_steps_after_the_first_rescale_the_sum",
    ),
    "a column's offset in 32 bits": (
        "logit_tile",
        "tl.minimum(first_column + tl.arange(0, BLOCK_V), head.vocab_size - 1)[-.to(tl.int64)-]",
        "kernels::test_a_head_past_two_to_the_31_elements_is_read[sm_80]",
    ),
    "only the last partial sum over H kept": (
        "_product_by_pointers",
        "z [-+-]= chain",
        "kernels::test_sums_over_several_chains_of_hidden_elements_are_complete",
    ),
    "1 - p computed by subtraction in the kernel": (
        "gradient_of_target",
        "tl.load(row_inputs.d_log_probs + rows) * [--expm1(log_p-]{+(1.0 - tl.exp(log_p)+})",
        "edges::test_gradients_of_peaked_rows_keep_their_relative_precision[triton-fp32]",
    ),
    "chunks overwrite each other": (
        "_Gradients._add_chunk",
        "add_product(d_weight, d_z.t(), hidden, first=[-chunk.start == 0-]{+True+})",
        f"{ROW}[backend=triton tiles=parts]",
    ),
    "log-ratios summed in fp32": (
        "sequence_log_ratio",
        "total [-+= r.to(tl.float64-]{+= (total + r).to(ACC+})",
        "kernels::test_sums_of_equal_tokens_are_exact[triton]",
    ),
    "a caller's normalizer ignored": (
        "divisor_of",
        "[-normalizer is not None-]{+False+}",
        CHECK,
    ),
    "clip_fraction halved": (
        "finish",
        "sequences_clipped / filled_or_1{+ / 2+}",
        CHECK,
    ),
    "a ratio equal to the bound counted as clipped": (
        "triton/surrogates:surrogate",
        "(advantage > 0) & (u >{+=+} tl.full([], bounds.log_high, ACC))",
        "paper_claims::test_weights_lie_inside_the_bounds_and_are_zero_beyond[triton-gspo]",
    ),
    "NaN lost by a minimum or maximum": (
        "finish",
        "[-tl.where(ratio != ratio, ratio, tl.where(ratios > 0, smallest, 1.0))-]{+tl.where(ratios > 0, smallest, "
        "1.0)+}",
        "presets::test_an_infinite_ratio_is_clipped_or_reaches_the_loss[triton-nan-1.0-gspo]",
    ),
    "block shapes depend on the batch size": (
        "tile_config",
        '[-return getattr(blocks, f"heavy_{kernel}" if heavy else kernel)-]{+return replace(blocks.forward, '
        "block_h=16 if head.hidden.shape[0] < 64 else 32)+}",
        "heads::test_a_row_has_the_same_bits_alone_and_in_any_batch[triton-linear]",
    ),
    "rows beyond the last in a cell not zero": (
        "gradient_tile",
        "[-d = tl.where(n[:, None] < n_rows, d, 0.0)-]{+pass+}",
        f"{ROW}[backend=triton tiles=parts gradient_budget=0.001]",
    ),
    "sums of earlier parts overwritten": (
        "cells/products:write",
        "[-acc += tl.load(out, mask=inside, other=0.0)-]{+pass+}",
        f"{ROW}[backend=triton tiles=parts gradient_budget=0.001]",
    ),
    "no barrier between writing and reading coefficients": (
        "sequence_loss",
        "[-tl.debug_barrier()-]{+pass+}",
        "kernel_faults::test_there_is_a_barrier_between_writing_and_reading_coefficients",
    ),
    "rounding error of a difference not added back, in Triton": (
        "reduce_rows",
        "correction = [-(over_top_error + margin_error)-]{+over_top_error+} * tl.exp(log_rest)",
        "loss_faults::test_log_probs_are_rounded_once[triton]",
    ),
    "cells dropped for a head with an adapter": (
        "forward:cell_shape",
        "[-head.adapter_weight is not None-]{+False+}",
        "kernel_faults::test_heads_with_an_adapter_or_a_bias_have_no_cells_in_triton",
    ),
    "an id outside the vocabulary has a finite log-prob": (
        "triton/forward:forward_and_cache",
        "torch.[-full((n,), math.nan-]{+zeros(n+}, dtype=dtype, device=device)",
        "loss_faults::test_the_log_prob_of_an_id_outside_the_vocabulary_is_nan[triton--1]",
    ),
    "a kept cell's offset in 32 bits": (
        "cached_tile",
        "tl.program_id(0)[-.to(tl.int64)-] * (BLOCK_N * BLOCK_V)",
        "kernel_faults::test_tiles_write_cells_past_two_to_the_31[cached_tile]",
    ),
    "columns of a slab without cells keep the bytes of new memory": (
        "_CellGradients.add_slab",
        "[-total.zero_()-]{+pass+}",
        "kernel_faults::test_gradients_of_slabs_without_cells_in_some_chunks[1-36864]",
    ),
    "an empty sequence counted in the minimum ratio": (
        "_store_partials",
        '[-tl.where(filled, s, float("inf"))-]{+s+}',
        "loss_faults::test_empty_sequences_do_not_change_the_smallest_and_largest_ratio[triton-0.5-sequence]",
    ),
    "only the last block of sequences summed": (
        "totals:total",
        "acc [-+-]= x",
        "kernel_faults::test_metrics_combine_several_blocks_of_sequences[triton]",
    ),
}
