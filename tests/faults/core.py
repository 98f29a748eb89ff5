"""Faults outside the backends: operators, objective, layout, inputs, advantages, sampler corrections."""

from __future__ import annotations

from faults.table import ROW, Fault

FAULTS: dict[str, Fault] = {
    "autocast rounds an fp32 head": (
        "head_rows",
        "[-precision is None-]{+True+}",
        "decisions::test_autocast_does_not_round_an_fp32_head[torch-fp32-fp32]",
    ),
    "gradient x 1.01": (
        "_differentiate_fused_loss",
        "d_log_probs = multiply_no_nan(of_loss.log_probs, {+1.01 * +}d_loss)",
        f"{ROW}[]",
    ),
    "gradients of masked log-probs reach the head": (
        "_differentiate_log_probs",
        "[-d_log_probs = torch.where(head.mask, d_log_probs, 0)-]{+pass+}",
        "edges::test_gradients_of_masked_log_probs_and_entropies_have_exactly_zero_influence[triton-0.0]",
    ),
    "sequence sums in fp32": (
        "_segment_sum",
        "[-x.double()-]{+x+}",
        "kernels::test_sums_of_equal_tokens_are_exact[torch]",
    ),
    "sampler correction left out": (
        "policy_rows",
        "[-rollout-]{+weights+} if weights is None else multiply_no_nan(weights, rollout)",
        "sampler_mismatch::test_nan_and_infinite_weights_add_nothing_where_the_policy_term_is_zero[torch-token]",
    ),
    "rows of the head that PEFT trains ignored": (
        "resolve",
        "[-tokens is not None and _adapts(check, tokens)-]{+False+}",
        "heads::test_rows_that_peft_trains_are_in_the_weight[torch]",
    ),
    "sampler weights with a gradient": (
        "_difference",
        "(x.[-detach().-]reshape(-1) for x in log_probs.values())",
        "sampler_mismatch::test_weights_and_masks_have_no_gradient",
    ),
    "the variance of the others divided by the number of all": (
        "Groups.variance_of_others",
        "(n - [-1 - -]ddof).clamp(min=1)",
        "advantages::test_uneven_groups_in_any_order_follow_the_formula[NeMo RL]",
    ),
    "equal rewards have a variance above 0": (
        "variance_of",
        "[-torch.where(x.amin() == x.amax(), 0, variance)-]{+variance+}",
        "advantages::test_equal_rewards_of_a_batch_are_not_divided",
    ),
    "the tail of a divergence as a difference from 1": (
        "distillation:_rest",
        "[--log_p.gather(-1, top).expm1() - others.exp().sum(-1, keepdim=True)-]"
        "{+1 - log_p.exp().sum(-1, keepdim=True)+}",
        "distillation::test_a_confident_student_keeps_the_digits_of_its_tail",
    ),
}
