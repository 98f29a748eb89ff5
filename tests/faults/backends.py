"""Faults in the torch backend, and in code that both backends share."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "matrix products in the precision that the process has set": (
        "exact_products",
        '[-_request_ieee("cuda" if device.type == "cuda" else "cpu")-]{+pass+}',
        "precision_settings::test_products_are_exact_inside_and_the_setting_is_restored[medium]",
    ),
    "a thread restores the precision while another thread computes": (
        "exact_products",
        "[-not _calls-]{+True+}",
        "precision_settings::test_a_thread_that_leaves_first_does_not_restore_the_setting_of_another",
    ),
    "a weight of 0 times an infinite ratio is NaN": (
        "precision:multiply_no_nan",
        "[-torch.where(torch.logical_and(x, y), x * y, 0)-]{+x * y+}",
        "edges::test_a_token_weight_of_zero_silences_an_infinite_ratio[torch-sequence]",
    ),
    "a sum of masses overflows its integer": (
        "live_tiles:_lightest",
        "units.ceil()[-.clamp(max=limit + 1)-]",
        "live_tiles::test_cells_heavier_than_the_total_and_overflowing_sums_are_not_dropped",
    ),
    "the first product of copies forgotten": (
        "_add_product_of_copies",
        "beta[- if start == 0 else 1-]",
        "amd::test_products_of_copies_are_complete[True-bf16]",
    ),
    "NaN passes the self-check": (
        "_limit",
        "[-not error <=-]{+error >+} allowed",
        "self_check::test_an_error_above_the_limit_or_nan_is_wrong[nan]",
    ),
    "any of several equal logits in a top k": (
        "top_k:_largest",
        "(z == least).sum(1) > [-(values == least).sum(1)-]{+z.shape[1]+}",
        "distillation::test_equal_logits_are_in_the_order_of_ids_and_confident_log_probs_keep_their_digits",
    ),
    "terms added out of order": (
        "Sums._next",
        "[-self._added[index]-]{+min(self._kept[index], default=None)+}",
        "workers::test_terms_are_added_in_order",
    ),
}
