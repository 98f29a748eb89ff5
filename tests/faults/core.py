"""Faults outside the backends: operators, objective, layout, inputs, advantages, sampler corrections."""

from __future__ import annotations

from faults.table import Fault

OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
FAULTS: dict[str, Fault] = {
    "gradient x 1.01": (
        "_differentiate_fused_loss",
        "d_log_probs = multiply_no_nan(of_loss.log_probs, d_loss)",
        "d_log_probs = multiply_no_nan(of_loss.log_probs, 1.01 * d_loss)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "upstream gradient ignored": (
        "scale_op",
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
        "_differentiate_log_probs",
        "d_log_probs = torch.where(head.mask, d_log_probs, 0)",
        "pass",
        "edges::test_gradients_of_masked_log_probs_and_entropies_have_exactly_zero_influence[triton-0.0]",
    ),
    "entropy gradient dropped": (
        "_differentiate_fused_loss",
        "d_entropy = multiply_no_nan(of_loss.entropy, d_loss) if of_loss.entropy.numel() else None",
        "d_entropy = None",
        f"{OBJECTIVE}[torch-padded-entropy-bonus]",
    ),
    "sequence sums in fp32": (
        "_segment_sum",
        "x.double()",
        "x",
        "edges::test_long_sequences_meet_the_tolerance[torch-sequence-256]",
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
    "rows of the head that PEFT trains ignored": (
        "resolve",
        "tokens is not None and _adapts(check, tokens)",
        "False",
        "heads::test_rows_that_peft_trains_are_in_the_weight[torch]",
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
    "a gate keeps the weight": (
        "_weight",
        'torch.where(raw.isnan(), raw, 1) if correction.mode == "gate" else raw',
        "raw",
        "sampler_mismatch::test_weights_and_metrics_match_plain_python",
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
    "equal rewards have a variance above 0": (
        "variance_of",
        "torch.where(x.amin() == x.amax(), 0, variance)",
        "variance",
        "advantages::test_equal_rewards_of_a_batch_are_not_divided",
    ),
    "a second backward of an adapter meets PyTorch's error": (
        "adapter:",
        "_adapter_backward.register_autograd",
        "lambda function: None",
        "derivatives::test_a_second_backward_of_an_adapter_raises[torch]",
    ),
    "positive log-probs of masked tokens refused": (
        "TensorChecks.sign",
        "wrong = unmasked & (x < -ROUNDING if positive else x > ROUNDING)",
        "wrong = x < -ROUNDING if positive else x > ROUNDING",
        "bad_inputs::test_rounded_and_masked_log_probs_and_entropies_are_accepted",
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
}
