"""Faults in the torch backend."""

from __future__ import annotations

from helpers.faults.table import Fault

PARITY = "parity::test_every_head_and_layout_equals_the_oracle"
OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
FAULTS: dict[str, Fault] = {
    "log-ratio not divided by the length": (
        "backends/torch/sequence",
        "u = total / lengths.clamp(min=1)",
        "u = total",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "gradient of the log-ratio not divided by the length": (
        "backends/torch/sequence",
        "(d_total / lengths.clamp(min=1))[sequence]",
        "d_total[sequence]",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "aggregation weight not divided by the length": (
        "backends/torch/sequence",
        "share = share / lengths.clamp(min=1)",
        "pass",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "lower clip bound applied to positive advantages": (
        "backends/torch/surrogates",
        "low = (advantages < 0) & (u <",
        "low = (advantages > 0) & (u <",
        f"{OBJECTIVE}[torch-padded-gspo]",
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
        "edges::test_empty_and_masked_sequences_do_not_change_the_others[torch-gspo]",
    ),
    "token weights not in the gradient": (
        "backends/torch/sequence",
        "multiply_no_nan(policy.token_weights, value), multiply_no_nan(policy.token_weights, slope)",
        "multiply_no_nan(policy.token_weights, value), slope",
        f"{OBJECTIVE}[torch-packed-per-token-weights-gspo]",
    ),
    "token weights also multiply the KL": (
        "backends/torch/sequence",
        "kl_share = objective.kl_coef *",
        "kl_share = (1 if policy.token_weights is None else policy.token_weights) * objective.kl_coef *",
        f"{OBJECTIVE}[torch-packed-per-token-weights-cispo-sequence]",
    ),
    "gmpo: gradient through a clipped token": (
        "backends/torch/sequence",
        "torch.where(free, (d_total",
        "torch.where(mask, (d_total",
        f"{OBJECTIVE}[torch-padded-gmpo]",
    ),
    "cispo: no gradient where the clip binds": (
        "backends/torch/surrogates",
        "slope = torch.where(nonzero, -weight * advantages, 0)",
        "slope = torch.where(nonzero & ~low & ~high, -weight * advantages, 0)",
        f"{OBJECTIVE}[torch-padded-cispo]",
    ),
    "sapo: the ratio left out of the gradient": (
        "backends/torch/surrogates",
        "* s * advantages",
        "* advantages",
        f"{OBJECTIVE}[torch-padded-sapo]",
    ),
    "k3+ with the gradient of k3": (
        "backends/torch/surrogates",
        'd if estimator.endswith("+") else slope',
        "slope",
        f"{OBJECTIVE}[torch-padded-k1+]",
    ),
    "k3 gradient with the wrong sign": (
        "backends/torch/surrogates",
        "value, slope = decay + d, -decay",
        "value, slope = decay + d, decay",
        f"{OBJECTIVE}[torch-padded-cispo-sequence]",
    ),
    "ratio factor without its gradient": (
        "backends/torch/sequence",
        "d_log_ratio = d_log_ratio + divergence_times(kl, kl_share)",
        "pass",
        f"{OBJECTIVE}[torch-padded-cispo-sequence]",
    ),
    "masked old log-probs multiplied by 0": (
        "backends/torch/sequence",
        "torch.where(mask, log_probs - old, 0)",
        "mask * (log_probs - old)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "mask off by one": (
        "backends/torch/forward",
        "index = head.mask.nonzero()[:, 0]",
        "index = head.mask.roll(1).nonzero()[:, 0]",
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
    "1 - p computed by subtraction": (
        "backends/torch/backward",
        "self.d_log_probs * -torch.expm1(self.log_probs)",
        "self.d_log_probs * (1 - self.log_probs.exp())",
        "edges::test_gradients_of_peaked_rows_keep_their_relative_precision[torch-fp64]",
    ),
    "bias gradient dropped": (
        "backends/torch/backward",
        "self.d_bias[first:end] += d_z.sum(0)",
        "pass",
        f"{PARITY}[torch-bias-padded-fp64]",
    ),
    "last rows of the batch dropped": (
        "backends/torch/tiles",
        "for low in range(0, self.padded, self.tile_rows))",
        "for low in range(0, max(self.padded - self.tile_rows, min(self.padded, 1)), self.tile_rows))",
        "parity::test_several_tiles_of_rows_and_columns[torch]",
    ),
    "fp16 gradients not lifted out of underflow": (
        "backends/torch/backward",
        "if tiles.operand_dtype == torch.float16:",
        "if False:",
        "parity::test_small_fp16_gradients_survive_the_product",
    ),
    "a NaN ratio hidden by a KL of 0": (
        "backends/torch/surrogates",
        "(kl == 0) & ratio.isinf()",
        "kl == 0",
        "presets::test_a_nan_ratio_reaches_the_loss_where_the_kl_is_zero[torch-unbiased]",
    ),
    "NaN log-probs hidden without old log-probs": (
        "backends/torch/sequence",
        "torch.where(mask, log_probs - old, 0)",
        "torch.zeros_like(lp) if policy.old_log_probs is None else torch.where(mask, log_probs - old, 0)",
        "edges::test_a_nan_hidden_state_reaches_only_dependent_outputs[torch-nan-sequence-True]",
    ),
    "rows not in the order of their cells": (
        "backends/torch/backward",
        "index, cells = live_tiles.order[:count],",
        "index, cells = live_tiles.order[:count].sort().values,",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "the last, narrower cell of a slab left out": (
        "backends/torch/tiles",
        "for computed, group in itertools.groupby(cells[begin : -(-high // columns)]):",
        "for computed, group in itertools.groupby(cells[begin : high // columns]):",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "worker threads split operations over further threads": (
        "backends/torch/workers",
        "torch.set_num_threads(1)\n    ready",
        "ready",
        "workers::test_every_tile_is_computed_by_a_single_thread",
    ),
    "terms added out of order": (
        "backends/torch/workers",
        "pop(self._added[index], None)",
        "pop(min(self._kept[index], default=None), None)",
        "workers::test_terms_are_added_in_order",
    ),
    "rounding error of a difference not added back": (
        "backends/torch/forward",
        "correction = (over_top_error + margin_error) * F",
        "correction = over_top_error * F",
        "loss_faults::test_log_probs_are_rounded_once[torch]",
    ),
    "power-of-two scale without the soft-cap's slope": (
        "backends/torch/backward",
        "self.boost = power_of_two(self.at_target, self.d_entropy, is_row, slope)",
        "self.boost = power_of_two(self.at_target, self.d_entropy, is_row, 1.0)",
        "loss_faults::test_fp16_gradients_of_a_small_slope_do_not_underflow[torch-1.0-1e-06]",
    ),
    "half-precision operands multiplied on ROCm": (
        "backends/torch/tiles",
        'tensor_cores = device.type == "cuda" and torch.version.hip is None',
        'tensor_cores = device.type == "cuda"',
        "loss_faults::test_operands_are_half_precision_only_if_products_are_fp32",
    ),
    "the policy normalizer used for KL, in torch": (
        "backends/torch/sequence",
        "if normalizer is None and aggregation == objective.aggregation:",
        "if normalizer is None:",
        "loss_faults::test_a_kl_term_with_another_aggregation_has_its_default_normalizer[torch-sequence]",
    ),
    "length_norm ignored for KL": (
        "backends/torch/sequence",
        "return _share_of_token(mask",
        "return (objective.length_norm or 1) * _share_of_token(mask",
        "loss_faults::test_length_norm_applies_to_the_aggregation_of_the_kl_term[torch]",
    ),
    "KL's ratio factor not masked": (
        "backends/torch/sequence",
        "kl_share = torch.where(mask, kl_share * log_ratio.exp(), 0)",
        "kl_share = kl_share * log_ratio.exp()",
        "loss_faults::test_an_infinite_ratio_times_kl_does_not_change_masked_tokens[torch-True]",
    ),
    "tokens with only an entropy gradient counted as having none": (
        "backends/torch/sequence",
        "has_gradient = has_gradient | (entropy_coefficient != 0)",
        "pass",
        "loss_faults::test_tokens_with_only_an_entropy_gradient_count_as_having_a_gradient[torch]",
    ),
    "a ratio equal to the upper bound of dual_clip counted as clipped": (
        "backends/torch/surrogates",
        "(u > math.log(objective.ceiling))",
        "(u >= math.log(objective.ceiling))",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-dual clip]",
    ),
    "gmpo: a ratio equal to its bound counted as clipped": (
        "backends/torch/surrogates",
        "low = (advantages < 0) & (log_ratio < -objective.clip_low)",
        "low = (advantages < 0) & (log_ratio <= -objective.clip_low)",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-gmpo, bottom]",
    ),
    "cispo: a ratio equal to its bound counted as clipped": (
        "backends/torch/surrogates",
        "nonzero & (u < log_low), nonzero & (u > log_high)",
        "nonzero & (u <= log_low), nonzero & (u >= log_high)",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-cispo, top]",
    ),
    "sapo: ratio clamped at exp(8), in torch": (
        "backends/torch/surrogates",
        "_FAR = 80.0",
        "_FAR = 8.0",
        "loss_faults::test_a_small_sapo_temperature_has_a_slope_at_far_ratios[torch-1e-12]",
    ),
    "reinforce counted as clipped": (
        "backends/torch/surrogates",
        "return Term(-advantages, -advantages, never, never)",
        "return Term(-advantages, -advantages, advantages < 0, never)",
        "loss_faults::test_reinforce_clips_nothing[torch]",
    ),
    "the policy term's default normalizer used for KL, in torch": (
        "backends/torch/sequence",
        "return _share_of_token(mask, sequence, lengths, policy, objective, aggregation, normalizer)",
        "if normalizer is None:\n        of_tokens = objective.aggregation == 'token-mean'\n"
        "        normalizer = (lengths.sum() if of_tokens else (lengths > 0).sum()).clamp(min=1)\n"
        "    return _share_of_token(mask, sequence, lengths, policy, objective, aggregation, normalizer)",
        "parity::test_every_objective_equals_the_oracle_in_float64[torch-padded-k3-token-mean]",
    ),
    "empty sequences counted in the ratio metrics": (
        "backends/torch/sequence",
        "log_ratio_mask=mask if by_token else lengths > 0,",
        "log_ratio_mask=mask if by_token else lengths >= 0,",
        "loss_faults::test_empty_sequences_do_not_change_the_smallest_and_largest_ratio[torch-0.5-sequence]",
    ),
    "an infinite logit of the target has a finite log-prob": (
        "backends/torch/forward",
        "torch.where(target_logit == math.inf, math.nan, over_top)",
        "over_top",
        "loss_faults::test_the_log_prob_of_an_infinite_target_logit_is_nan[torch]",
    ),
    "entropy gradient of an impossible target": (
        "backends/torch/backward",
        "log_p = self.log_probs.clamp(min=LOG_OF_NOTHING)",
        "log_p = self.log_probs",
        "edges::test_a_banned_target_has_log_prob_minus_infinity_and_a_finite_gradient[torch]",
    ),
    "copies of the head not counted as workspace": (
        "backends/torch/tiles",
        "fit = (workspace_bytes() - _SLAB_BYTES) // (tiles + copies)",
        "fit = (workspace_bytes() - _SLAB_BYTES) // tiles",
        "workers::test_copies_of_a_half_precision_head_count_as_workspace",
    ),
    "a NaN KL has a gradient of 0": (
        "backends/torch/surrogates",
        "torch.where(d.isnan(), d, d.sign())",
        "d.sign()",
        "loss_faults::test_the_slope_of_a_nan_kl_is_nan",
    ),
    "a worker's error hidden by errors of waiting workers": (
        "backends/torch/workers",
        "sorted(errors, key=lambda error: isinstance(error, Stopped))",
        "sorted(errors, key=lambda error: not isinstance(error, Stopped))",
        "workers::test_the_first_error_is_raised_and_errors_of_waiting_threads_are_not",
    ),
    "threads leave the caller's inference mode": (
        "backends/torch/workers",
        "with torch.inference_mode(inference), torch.no_grad():",
        "with torch.no_grad():",
        "workers::test_inference_mode_gives_the_same_bits",
    ),
    "a graph for batches that fit the cache of the torch backend": (
        "backends/torch/kept_tile",
        "torch.sym_min(fit, n)",
        "n if fit >= n else fit",
        "default_cache::test_batches_that_fit_the_cache_and_larger_ones_share_a_graph[True-torch-0.07]",
    ),
}
