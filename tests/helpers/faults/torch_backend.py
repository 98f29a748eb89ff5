"""Faults in the torch backend."""

from __future__ import annotations

from helpers.faults.table import Fault

PARITY = "parity::test_every_head_and_layout_equals_the_oracle"
OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
FAULTS: dict[str, Fault] = {
    "log-ratio not divided by the length": (
        "torch/sequence:policy_forward",
        "u = total / lengths.clamp(min=1)",
        "u = total",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "gradient of the log-ratio not divided by the length": (
        "torch/sequence:policy_forward",
        "(d_total.to(lp.dtype) / lengths.clamp(min=1))[sequence]",
        "d_total.to(lp.dtype)[sequence]",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "aggregation weight not divided by the length": (
        "_share_of_token",
        "share = share / lengths.clamp(min=1)",
        "pass",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "lower clip bound applied to positive advantages": (
        "_clip",
        "(advantages < 0) & (u < log_low)",
        "(advantages > 0) & (u < log_low)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "dual clip ignored": (
        "_clip",
        "if math.isfinite(objective.ceiling):\n    high |= (advantages < 0) & (u > math.log(objective.ceiling))",
        "if False:\n    high |= (advantages < 0) & (u > math.log(objective.ceiling))",
        f"{OBJECTIVE}[torch-padded-dual-clip]",
    ),
    "empty sequences counted": (
        "_share_of_token",
        "(lengths > 0).sum()",
        "(lengths >= 0).sum()",
        "edges::test_empty_and_masked_sequences_equal_the_oracle[torch-gspo]",
    ),
    "token weights not in the gradient": (
        "torch/sequence:policy_forward",
        "slope = multiply_no_nan(policy.token_weights, slope)",
        "pass",
        f"{OBJECTIVE}[torch-packed-per-token-weights-gspo]",
    ),
    "token weights also multiply the KL": (
        "torch/sequence:policy_forward",
        "objective.kl_coef * _kl_share(mask, sequence, lengths, policy, objective)",
        "(1 if policy.token_weights is None else policy.token_weights) * objective.kl_coef * _kl_share(mask, "
        "sequence, lengths, policy, objective)",
        f"{OBJECTIVE}[torch-packed-per-token-weights-cispo-sequence]",
    ),
    "gmpo: gradient through a clipped token": (
        "torch/sequence:policy_forward",
        "torch.where(free, (d_total.to(lp.dtype) / lengths.clamp(min=1))[sequence], 0)",
        "torch.where(mask, (d_total.to(lp.dtype) / lengths.clamp(min=1))[sequence], 0)",
        f"{OBJECTIVE}[torch-padded-gmpo]",
    ),
    "cispo: no gradient where the clip binds": (
        "_cispo",
        "slope = torch.where(nonzero, -weight * advantages, 0)",
        "slope = torch.where(nonzero & ~low & ~high, -weight * advantages, 0)",
        f"{OBJECTIVE}[torch-padded-cispo]",
    ),
    "dppo: tokens dropped in both directions": (
        "torch/surrogates:dppo",
        "(advantages < 0) & (u < 0) & (divergence > objective.clip_low)",
        "(advantages < 0) & (divergence > objective.clip_low)",
        "presets::test_a_preset_is_the_formula_of_its_source[torch-dppo_tv]",
    ),
    "dppo: upper bound taken from clip_low": (
        "torch/surrogates:dppo",
        "divergence > objective.clip_high",
        "divergence > objective.clip_low",
        f"{OBJECTIVE}[torch-padded-dppo-tv]",
    ),
    "dppo: a divergence equal to its bound drops the token": (
        "torch/surrogates:dppo",
        "divergence > objective.clip_low",
        "divergence >= objective.clip_low",
        "loss_faults::test_a_divergence_equal_to_its_bound_is_inside_the_trust_region[torch-kl, bottom]",
    ),
    "dppo: a gradient outside the trust region": (
        "torch/surrogates:dppo",
        "slope = torch.where(free, -s * advantages, 0)",
        "slope = -s * advantages",
        "decisions::test_tokens_that_leave_the_trust_region_of_dppo_are_those_of_float64[torch-dppo_tv-fp32]",
    ),
    "dppo: the factor of the gradient not bounded": (
        "torch/surrogates:dppo",
        "s = s.clamp(max=objective.ceiling)",
        "pass",
        "presets::test_dppo_with_dual_clip_bounds_the_factor_of_the_gradient[torch-dppo_kl]",
    ),
    "dppo: KL without the other tokens": (
        "torch/surrogates:_divergence",
        "sampled + torch.where(other_q == 0, 0, other_q * (other_q.log() - other_p.log()))",
        "sampled",
        "presets::test_a_preset_is_the_formula_of_its_source[torch-dppo_kl]",
    ),
    "dppo: a probability above 1": (
        "torch/surrogates:_divergence",
        "log_p, log_q = (x.clamp(max=0) for x in (log_p, log_q))",
        "pass",
        "decisions::test_tokens_that_leave_the_trust_region_of_dppo_are_those_of_float64[torch-dppo_tv-bf16]",
    ),
    "dppo: a KL of 0 times inf": (
        "torch/surrogates:_divergence",
        "torch.where(other_q == 0, 0, other_q * (other_q.log() - other_p.log()))",
        "other_q * (other_q.log() - other_p.log())",
        "loss_faults::test_a_divergence_equal_to_its_bound_is_inside_the_trust_region[torch-kl, bottom]",
    ),
    "sapo: the ratio left out of the gradient": (
        "_sapo",
        "-4 * (gate * torch.sigmoid(temperature * (1 - s))) * s",
        "-4 * (gate * torch.sigmoid(temperature * (1 - s)))",
        f"{OBJECTIVE}[torch-padded-sapo]",
    ),
    "k3+ with the gradient of k3": (
        "torch/surrogates:kl_and_slope",
        'd if estimator.endswith("+") else slope',
        "slope",
        f"{OBJECTIVE}[torch-padded-k1+]",
    ),
    "k3 gradient with the wrong sign": (
        "torch/surrogates:kl_and_slope",
        "value, slope = decay + d, -decay",
        "value, slope = decay + d, decay",
        f"{OBJECTIVE}[torch-padded-cispo-sequence]",
    ),
    "ratio factor without its gradient": (
        "torch/sequence:policy_forward",
        "d_log_ratio = d_log_ratio + divergence_times(kl, kl_share)",
        "pass",
        f"{OBJECTIVE}[torch-padded-cispo-sequence]",
    ),
    "masked old log-probs multiplied by 0": (
        "_log_ratios",
        "torch.where(mask, log_probs - old, 0)",
        "mask * (log_probs - old)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "mask off by one": (
        "torch/forward:forward_and_keep",
        "index = head.mask.nonzero()[:, 0]",
        "index = head.mask.roll(1).nonzero()[:, 0]",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "temperature missing in the backward": (
        "Tiles.tail_slope",
        "slope = slope.div_(t) if isinstance(slope, Tensor) else slope / t",
        "pass",
        f"{PARITY}[torch-temperature-padded-fp64]",
    ),
    "soft-cap missing in the backward": (
        "Tiles.tail_slope",
        "head.logit_softcap is not None",
        "False",
        f"{PARITY}[torch-scale-softcap-padded-fp64]",
    ),
    "last vocabulary slab dropped": (
        "Tiles.__init__",
        "[(low, min(low + width, vocab)) for low in range(0, vocab, width)]",
        "[(low, min(low + width, vocab)) for low in range(0, vocab, width)][: max(1, (vocab - 1) // width)]",
        "parity::test_several_tiles_of_rows_and_columns[torch]",
    ),
    "padded vocabulary counted": (
        "Tiles.__init__",
        "head.vocab_size, self.tile_columns",
        "head.weight.shape[0], self.tile_columns",
        f"{PARITY}[torch-padded-vocab-padded-fp64]",
    ),
    "logits rounded to bf16": (
        "Tiles.logits",
        "_product(self.hidden[rows].to(self.operand_dtype), weight.t())",
        "_product(self.hidden[rows].to(self.operand_dtype), weight.t()).bfloat16().to(self.dtype)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "1 - p computed by subtraction": (
        "LogitGradients.__init__",
        "self.d_log_probs * -torch.expm1(self.log_probs)",
        "self.d_log_probs * (1 - self.log_probs.exp())",
        "edges::test_gradients_of_peaked_rows_keep_their_relative_precision[torch-fp64]",
    ),
    "bias gradient dropped": (
        "_Gradients._add_group",
        "self.d_bias[first:end] += d_z.sum(0)",
        "pass",
        f"{PARITY}[torch-bias-padded-fp64]",
    ),
    "last rows of the batch dropped": (
        "Tiles.chunks",
        "self.padded",
        "max(self.padded - self.tile_rows, min(self.padded, 1))",
        "parity::test_several_tiles_of_rows_and_columns[torch]",
    ),
    "fp16 gradients not lifted out of underflow": (
        "LogitGradients.__init__",
        "tiles.operand_dtype == torch.float16",
        "False",
        "parity::test_small_fp16_gradients_survive_the_product",
    ),
    "a NaN ratio hidden by a KL of 0": (
        "torch/surrogates:divergence_times",
        "(kl == 0) & ratio.isinf()",
        "kl == 0",
        "presets::test_a_nan_ratio_reaches_the_loss_where_the_kl_is_zero[torch-unbiased]",
    ),
    "NaN log-probs hidden without old log-probs": (
        "_log_ratios",
        "torch.where(mask, log_probs - old, 0)",
        "torch.zeros_like(lp) if policy.old_log_probs is None else torch.where(mask, log_probs - old, 0)",
        "edges::test_a_nan_hidden_state_reaches_only_dependent_outputs[torch-nan-sequence-True]",
    ),
    "rows not in the order of their cells": (
        "torch/backward:head_backward",
        "live_tiles.order[:count]",
        "live_tiles.order[:count].sort().values",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "the last, narrower cell of a slab left out": (
        "WorkList._columns",
        "-(-high // columns)",
        "high // columns",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "worker threads split operations over further threads": (
        "_take_jobs",
        "torch.set_num_threads(1)",
        "pass",
        "workers::test_every_tile_is_computed_by_a_single_thread",
    ),
    "terms added out of order": (
        "Sums._next",
        "self._added[index]",
        "min(self._kept[index], default=None)",
        "workers::test_terms_are_added_in_order",
    ),
    "rounding error of a difference not added back": (
        "torch/forward:forward_and_keep",
        "over_top_error + margin_error",
        "over_top_error",
        "loss_faults::test_log_probs_are_rounded_once[torch]",
    ),
    "power-of-two scale without the soft-cap's slope": (
        "LogitGradients.__init__",
        "self.boost = power_of_two(self.at_target, self.d_entropy, is_row, slope)",
        "self.boost = power_of_two(self.at_target, self.d_entropy, is_row, 1.0)",
        "loss_faults::test_fp16_gradients_of_a_small_slope_do_not_underflow[torch-1.0-1e-06]",
    ),
    "half-precision operands multiplied on ROCm": (
        "operand_dtype",
        "not refuses_mixed_products()",
        "True",
        "loss_faults::test_operands_are_half_precision_only_if_products_are_fp32",
    ),
    "the policy normalizer used for KL, in torch": (
        "_kl_share",
        "aggregation == objective.aggregation",
        "True",
        "loss_faults::test_a_kl_term_with_another_aggregation_has_its_own_divisor[torch-sequence]",
    ),
    "length_norm ignored for KL": (
        "_kl_share",
        "_share_of_token(mask, sequence, lengths, policy, objective, aggregation, normalizer)",
        "(objective.length_norm or 1) * _share_of_token(mask, sequence, lengths, policy, objective, "
        "aggregation, normalizer)",
        "loss_faults::test_a_kl_term_with_another_aggregation_has_its_own_divisor[torch-length-norm]",
    ),
    "KL's ratio factor not masked": (
        "torch/sequence:policy_forward",
        "kl_share = torch.where(mask, kl_share * log_ratio.exp(), 0)",
        "kl_share = kl_share * log_ratio.exp()",
        "loss_faults::test_an_infinite_ratio_times_kl_does_not_change_masked_tokens[torch-True]",
    ),
    "tokens with only an entropy gradient counted as having none": (
        "torch/sequence:_is_zero",
        "is_zero & (entropy_coefficient == 0) if entropy_coefficient.numel() else is_zero",
        "is_zero",
        "loss_faults::test_tokens_with_only_an_entropy_gradient_count_as_having_a_gradient[torch]",
    ),
    "a ratio equal to the upper bound of dual_clip counted as clipped": (
        "_clip",
        "u > math.log(objective.ceiling)",
        "u >= math.log(objective.ceiling)",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-dual clip]",
    ),
    "gmpo: a ratio equal to its bound counted as clipped": (
        "torch/surrogates:bounded",
        "log_ratio < -objective.clip_low",
        "log_ratio <= -objective.clip_low",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-gmpo, bottom]",
    ),
    "cispo: a ratio equal to its bound counted as clipped": (
        "_cispo",
        "nonzero & (u < log_low), nonzero & (u > log_high)",
        "nonzero & (u <= log_low), nonzero & (u >= log_high)",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-cispo, top]",
    ),
    "sapo: ratio clamped at exp(8), in torch": (
        "_FAR",
        "80.0",
        "8.0",
        "loss_faults::test_a_small_sapo_temperature_has_a_slope_at_far_ratios[torch-1e-12]",
    ),
    "reinforce counted as clipped": (
        "_reinforce",
        "return Term(-advantages, -advantages, never, never)",
        "return Term(-advantages, -advantages, advantages < 0, never)",
        "loss_faults::test_reinforce_clips_nothing[torch]",
    ),
    "the policy term's default normalizer used for KL, in torch": (
        "_kl_share",
        "if normalizer is None and aggregation == objective.aggregation:\n    normalizer = policy.normalizer",
        "if normalizer is None and aggregation == objective.aggregation:\n"
        "    normalizer = policy.normalizer\n"
        "if normalizer is None:\n"
        '    of_tokens = objective.aggregation == "token-mean"\n'
        "    normalizer = (lengths.sum() if of_tokens else (lengths > 0).sum()).clamp(min=1)",
        "parity::test_every_objective_equals_the_oracle_in_float64[torch-padded-k3-token-mean]",
    ),
    "an infinite logit of the target has a finite log-prob": (
        "torch/forward:forward_and_keep",
        "torch.where(target_logit == math.inf, math.nan, over_top)",
        "over_top",
        "loss_faults::test_the_log_prob_of_an_infinite_target_logit_is_nan[torch]",
    ),
    "entropy gradient of an impossible target": (
        "LogitGradients.__init__",
        "log_p = self.log_probs.clamp(min=LOG_OF_NOTHING)",
        "log_p = self.log_probs",
        "edges::test_a_banned_target_has_log_prob_minus_infinity_and_a_finite_gradient[torch]",
    ),
    "copies of the head not counted as workspace": (
        "Tiles._threads",
        "fit = (self.head.workspace - _SLAB_BYTES) // (tiles + copies)",
        "fit = (self.head.workspace - _SLAB_BYTES) // tiles",
        "workers::test_copies_of_a_half_precision_head_count_as_workspace",
    ),
    "a NaN KL has a gradient of 0": (
        "torch/surrogates:kl_and_slope",
        "torch.where(d.isnan(), d, d.sign())",
        "d.sign()",
        "loss_faults::test_the_slope_of_a_nan_kl_is_nan",
    ),
    "a worker's error hidden by errors of waiting workers": (
        "workers:run",
        "sorted(errors, key=lambda error: isinstance(error, Stopped))",
        "sorted(errors, key=lambda error: not isinstance(error, Stopped))",
        "workers::test_the_first_error_is_raised_and_errors_of_waiting_threads_are_not",
    ),
    "threads leave the caller's inference mode": (
        "take_tasks",
        "torch.inference_mode(inference)",
        "torch.no_grad()",
        "workers::test_inference_mode_gives_the_same_bits",
    ),
    "a graph for batches that fit the cache of the torch backend": (
        "kept_tile:cache_rows",
        "torch.sym_min(fit, n)",
        "n if fit >= n else fit",
        "default_cache::test_batches_that_fit_the_cache_and_larger_ones_share_a_graph[True-torch-0.07]",
    ),
    "sums of a slab on a GPU beyond the workspace": (
        "tiling",
        "columns = min(columns, _columns_beside_sums(head, rows, dtype, operands))",
        "pass",
        "memory::test_the_torch_backend_on_a_gpu_stays_within_the_formula[2048-8192-32000-bf16-CUDA]",
    ),
    "copies of operands on ROCm beyond the workspace": (
        "_columns_beside_sums",
        "operands != head.hidden.dtype",
        "False",
        "memory::test_the_torch_backend_on_a_gpu_stays_within_the_formula[700-8192-128256-bf16-ROCm]",
    ),
    "the host waits for every kept tile": (
        "KeptTiles.tile",
        "first, last, adjacent = self.places[rows.start]",
        "first, last, adjacent = int(place[0]), int(place[-1]), bool((place.diff() == 1).all())",
        "host_reads::test_the_torch_backend_reads_the_places_of_kept_rows_once",
    ),
    "any number of products wait for their turn": (
        "Tiles.kept_products",
        "max(_SLAB_BYTES // (self.tile_rows * self.hidden.shape[1] * self.dtype.itemsize), 1)",
        "2**60",
        "workers::test_products_that_wait_for_their_turn_take_at_most_16_mib",
    ),
}
