"""Faults outside the backends: operators, objective, layout, inputs, advantages, sampler corrections."""

from __future__ import annotations

from helpers.faults.table import Fault

OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
FAULTS: dict[str, Fault] = {
    "gradient x 1.01": (
        "_differentiate_fused_loss",
        "d_log_probs = multiply_no_nan(coefficient, d_loss)",
        "d_log_probs = multiply_no_nan(coefficient, 1.01 * d_loss)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "upstream gradient ignored": (
        "scale",
        "multiply_no_nan(coefficient, d_loss)",
        "coefficient",
        "parity::test_log_probs_and_policy_loss_chained_equal_the_fused_loss_bitwise[torch-False-gspo]",
    ),
    "upper clip bound taken from clip_low": (
        "Objective.log_window",
        "math.log1p(self.clip_high)",
        "math.log1p(self.clip_low)",
        f"{OBJECTIVE}[torch-padded-grpo-narrow]",
    ),
    "fp64 products in fp32": (
        "accumulator",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "gradients of masked log-probs reach the head": (
        "_differentiate_linear_log_probs",
        "d_log_probs = torch.where(head.mask, d_log_probs, 0)",
        "pass",
        "edges::test_gradients_of_masked_log_probs_and_entropies_have_exactly_zero_influence[triton-0.0]",
    ),
    "gradients of masked entropies reach the head": (
        "_differentiate_linear_log_probs",
        "d_entropy = torch.where(head.mask, d_entropy, 0)",
        "pass",
        "edges::test_gradients_of_masked_log_probs_and_entropies_have_exactly_zero_influence[triton-0.0]",
    ),
    "entropy gradient dropped": (
        "_differentiate_fused_loss",
        "d_entropy = multiply_no_nan(entropy_coefficient, d_loss) if entropy_coefficient.numel() else None",
        "d_entropy = None",
        f"{OBJECTIVE}[torch-padded-entropy-bonus]",
    ),
    "sequence sums in fp32": (
        "_segment_sum",
        "x.double()",
        "x",
        "edges::test_long_sequences_meet_the_tolerance[torch-sequence-False-256]",
    ),
    "sampler correction left out": (
        "policy_rows",
        "rollout if weights is None else multiply_no_nan(weights, rollout)",
        "weights if weights is None else multiply_no_nan(weights, rollout)",
        "sampler_mismatch::test_nan_and_infinite_weights_add_nothing_where_the_policy_term_is_zero[torch-token]",
    ),
    "LoRA on the head ignored": (
        "resolve",
        "return Head(weight, bias, *_low_rank_term(check, lora, hidden, mask, tp_group))",
        "return Head(weight, bias)",
        "heads::test_lora_on_the_head_equals_peft[torch-False-False-1]",
    ),
    "hooks on modules of an adapter ignored": (
        "take_apart",
        "called += [lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]]",
        "pass",
        "bad_inputs::test_an_unsupported_adapter_is_named[hook-on-lora-a]",
    ),
    "rows of the head that PEFT trains ignored": (
        "resolve",
        "tokens is not None and _adapts(check, tokens)",
        "False",
        "heads::test_rows_that_peft_trains_are_in_the_weight[torch]",
    ),
    "offsets of importance_weights not checked": (
        "_layout",
        "check.offsets(cu_seqlens, mask.shape[0], mask.device)",
        "pass",
        "sampler_mismatch::test_invalid_offsets_are_rejected",
    ),
    "a normalizer tensor not checked": (
        "TensorChecks.normalizer",
        "self.flag(name, ~is_valid & ((x != 0) | mask.any()), expected, value.item)",
        "pass",
        "bad_inputs::test_a_bad_input_is_named_and_nothing_is_written[normalizer-tensor-zero-gspo_fused_loss]",
    ),
    "a weight equal to its bound counted as outside": (
        "_weight",
        "raw > high",
        "raw >= high",
        "sampler_mismatch::test_a_weight_on_a_bound_is_not_changed[token-mask]",
    ),
    "only the first of several corrections is applied": (
        "_weigh",
        "weight = torch.where((weight == 0) | (other_weight == 0), 0, weight * other_weight)",
        "pass",
        "sampler_mismatch::test_the_weights_of_several_corrections_are_multiplied",
    ),
    "metrics of micro-batches weighted equally": (
        "metrics:_combined",
        "ones if divisor is None else columns[divisor]",
        "ones if divisor is None else (columns[divisor] > 0).double()",
        "combined_metrics::test_every_metric_of_every_division_equals_its_formula[torch-sequence]",
    ),
    "ratios of tokens weighted by sequences": (
        "DIVISORS",
        'dict.fromkeys(("ratio_mean", "ratio_min", "ratio_max"), "ratios")',
        'dict.fromkeys(("ratio_mean", "ratio_min", "ratio_max"), "sequences")',
        "combined_metrics::test_every_metric_of_every_division_equals_its_formula[torch-token]",
    ),
    "dropped mass weighted by tokens": (
        "DIVISORS",
        '{"dropped_gradient_mass": "gradient_mass"}',
        '{"dropped_gradient_mass": "tokens"}',
        "combined_metrics::test_dropped_mass_is_weighted_by_the_mass_of_each_micro_batch[fused loss]",
    ),
    "extremes of empty micro-batches": (
        "metrics:_combined",
        "torch.where(empty, torch.inf, table)",
        "table",
        "combined_metrics::test_a_batch_without_tokens_has_the_metrics_of_its_parts",
    ),
    "effective sample size averaged": (
        "metrics:_combined",
        "filter(_components, names)",
        "()",
        "combined_metrics::test_every_metric_of_every_division_equals_its_formula[torch-sequence]",
    ),
    "a dropped token with an infinite weight": (
        "_weigh",
        "torch.where((weight == 0) | (other_weight == 0), 0, weight * other_weight)",
        "weight * other_weight",
        "sampler_mismatch::test_a_dropped_token_has_weight_zero_even_if_another_weight_is_nan_or_infinite",
    ),
    "bound_share of several corrections is the share of the first": (
        "_weigh",
        "outside = outside | other_outside",
        "pass",
        "sampler_mismatch::test_metrics_of_several_corrections_describe_the_product_and_each_correction",
    ),
    "a gate keeps the weight": (
        "_weight",
        'torch.where(raw.isnan(), raw, 1) if correction.mode == "gate" else raw',
        "raw",
        "sampler_mismatch::test_weights_and_metrics_match_plain_python",
    ),
    "a gate on NaN is open": (
        "_weight",
        "torch.where(raw.isnan(), raw, 1)",
        "torch.ones_like(raw)",
        "sampler_mismatch::test_a_dropped_token_has_weight_zero_even_if_another_weight_is_nan_or_infinite",
    ),
    "sampler weights with a gradient": (
        "_difference",
        "(x.detach().reshape(-1) for x in log_probs.values())",
        "(x.reshape(-1) for x in log_probs.values())",
        "sampler_mismatch::test_weights_and_masks_have_no_gradient",
    ),
    "a sequence at the threshold masked": (
        "off_policy_mask",
        "-_reduce_sequences(difference, unmasked, layout, mean=True) > threshold",
        "-_reduce_sequences(difference, unmasked, layout, mean=True) >= threshold",
        "sampler_mismatch::test_a_sequence_at_the_threshold_is_not_masked",
    ),
    "the first token's advantage used for the sequence": (
        "off_policy_mask",
        "per_row = layout.per_row(advantages.detach())",
        "per_row = layout.per_row(advantages.detach() if advantages.ndim == 1 else advantages.detach()[:, :1])",
        "sampler_mismatch::test_per_token_advantages_are_masked_per_token",
    ),
    "ddof ignored for the standard deviation of the batch": (
        "_of_groups",
        "variance = variance_of(groups.rewards, ddof)",
        "variance = variance_of(groups.rewards, 1)",
        "advantages::test_ddof_applies_to_the_deviation_of_the_batch[0]",
    ),
    "equal rewards of the others have a variance above 0": (
        "Groups.variance_of_others",
        "torch.where(others_are_equal, 0, variance)",
        "variance",
        "advantages::test_equal_rewards_of_the_others_are_not_divided",
    ),
    "the variance of the others divided by the number of all": (
        "Groups.variance_of_others",
        "(n - 1 - ddof).clamp(min=1)",
        "(n - ddof).clamp(min=1)",
        "advantages::test_uneven_groups_in_any_order_follow_the_formula[NeMo RL]",
    ),
    "gdpo: sums of advantages not normalized": (
        "gdpo_advantages",
        'normalize_rewards(total, "batch", eps=eps)',
        "total",
        "advantages::test_several_rewards_are_normalized_then_added",
    ),
    "whitening in fp32": (
        "whiten",
        "centred = torch.where(unmasked, x, 0).double()",
        "centred = torch.where(unmasked, x, 0)",
        "advantages::test_deviations_of_large_fp32_values_match_fp64",
    ),
    "batch variance in fp32": (
        "normalize_rewards",
        "x = checked.double()",
        "x = checked",
        "advantages::test_rewards_with_a_large_common_part_keep_their_differences",
    ),
    "equal rewards have a variance above 0": (
        "variance_of",
        "torch.where(x.amin() == x.amax(), 0, variance)",
        "variance",
        "advantages::test_equal_rewards_of_a_batch_are_not_divided",
    ),
    "a second backward of the head names the other function": (
        "ops/head:",
        '"gspo_fused_loss" if gradient_budget is None else "linear_log_probs"',
        '"linear_log_probs" if gradient_budget is None else "gspo_fused_loss"',
        "derivatives::test_a_second_backward_raises_an_error_that_says_what_to_use",
    ),
    "a second backward of an adapter meets PyTorch's error": (
        "adapter:",
        "_adapter_backward.register_autograd",
        "lambda function: None",
        "derivatives::test_a_second_backward_of_an_adapter_raises[torch]",
    ),
    "torch.func.grad of a mapped tensor meets PyTorch's error": (
        "_is_tracked",
        "x = get_unwrapped(x)",
        "return False",
        "derivatives::test_reverse_mode_of_torch_func_is_refused",
    ),
    "values of mapped tensors are read": (
        "TensorChecks.flag",
        "is_functorch_wrapped_tensor(wrong)",
        "False",
        "derivatives::test_under_vmap_invalid_values_are_counted",
    ),
    "positive log-probs accepted": (
        "TensorChecks.sign",
        "x > ROUNDING",
        "x > 1e9",
        "bad_inputs::test_a_bad_input_is_named_and_nothing_is_written[old-log-probs-positive-policy_loss]",
    ),
    "negative entropies are not counted": (
        "policy_loss",
        'check.sign("entropy", entropy.detach(), unmasked, positive=True)',
        "pass",
        "unchecked_values::test_values_of_the_wrong_sign_are_counted_once_per_token[torch-entropy]",
    ),
    "positive log-probs of masked tokens refused": (
        "TensorChecks.sign",
        "wrong = unmasked & (x < -ROUNDING if positive else x > ROUNDING)",
        "wrong = x < -ROUNDING if positive else x > ROUNDING",
        "bad_inputs::test_rounded_and_masked_log_probs_and_entropies_are_accepted",
    ),
    "a group of infinite rewards has advantages 0": (
        "finite",
        "return torch.where(wrong, torch.nan, x)",
        "return x",
        "advantages::test_a_value_that_is_not_checked_becomes_nan",
    ),
    "a divisor of a missing KL term is ignored": (
        "policy_rows",
        "arguments.kl_normalizer is not None and objective.kl_coef == 0",
        "False",
        "bad_inputs::test_a_bad_input_is_named_and_nothing_is_written[kl-normalizer-without-kl-policy_loss]",
    ),
    "tokens of weight 0 are not clipped": (
        "torch/sequence:policy_forward",
        "value, slope, low, high = surrogate(log_ratio, advantages, objective)",
        "value, slope, low, high = surrogate(log_ratio, advantages, objective)\n"
        "if policy.token_weights is not None:\n"
        "    low = low & (policy.token_weights != 0)",
        "presets::test_the_clip_fractions_are_those_of_the_surrogate",
    ),
    "operators have the same namespace in every copy of the package": (
        "Operator.__init__",
        "f'{NAMESPACE}::{name}'",
        "f'gspo_kernels::{name}'",
        "house::test_a_copy_under_another_name_works_next_to_the_package",
    ),
    "a version outside of the supported range has no remark": (
        "packages:packages",
        "required[name].contains(installed, prereleases=True)",
        "True",
        "doctor::test_versions_are_listed_as_installed_tested_and_supported",
    ),
}
