"""Faults in the integrations that change a loss or its gradient."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "sign of a scale ignored": (
        "measure",
        "slope, plateau = [-from_small[0].item(-]{+abs(from_small[0].item()+}) / 2.0**-10, abs(from_large[0].item())",
        "huggingface::test_negative_and_unlisted_scales_are_measured",
    ),
    "prime-rl's soft-cap ignored": (
        "trainers/prime_rl:head",
        '[-getattr(layer, "softcap", None)-]{+None+}',
        "seams::test_prime_rls_head_equals_its_logits[4.0-False]",
    ),
    "packed sequences attend to each other": (
        "_check_packed",
        "[-begins.any().item()-]{+False+}",
        "huggingface::test_packed_sequences_are_kept_apart_or_refused",
    ),
    "a sum over answers instead of their mean": (
        "trainers/openrlhf:PolicyLoss.forward",
        "[-None-]{+1.0+} if global_batch_size is None else global_batch_size / dp_size",
        "seams::test_openrlhfs_loss_without_a_batch_size_is_a_mean_over_answers",
    ),
    "TRL's hidden states shifted by one token": (
        "ModelLogProbs.__call__",
        "hidden if shift_labels is not None else hidden[:, [-:-1-]{+1:+}]",
        "trainers/trl::test_policy_and_reference_model_return_a_mean_loss_over_labels",
    ),
    "a changed scale of logits not noticed": (
        "FusedHead._identity",
        "[-return *identity(self.head), *numbers, *((name, x, x._version) for name, x in tensors)-]{+return "
        "identity(self.head)+}",
        "huggingface::test_a_changed_number_is_noticed_by_the_next_call[scale of the model]",
    ),
    "an answer that did not run gets the log-prob 0": (
        "LiveAnswers._run_live_rows",
        "[-batch.get(_OLD, torch.zeros(mask.shape, device=mask.device))-]{+torch.zeros(mask.shape, "
        "device=mask.device)+}",
        "trainers/trl_zero_advantage::test_old_log_probs_far_below_the_new_ones_make_no_nan[1]",
    ),
    "a KL term does not switch skipping off": (
        "_has_gradient",
        "[-trainer.beta != 0-]{+False+}",
        "trainers/trl_zero_advantage::test_settings_that_make_skipping_inexact_are_named",
    ),
    "answers with advantage 0 do not learn from a teacher": (
        "_has_gradient",
        '[-return f"distillation_coef={coef}"-]{+pass+}',
        "trainers/trl_teacher::test_gradients_and_logs_equal_those_of_full_logits[aligned]",
    ),
}
