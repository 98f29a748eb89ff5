"""Faults in code that both backends share."""

from __future__ import annotations

from faults.table import ROW, Fault

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
    "the budget spent twice": (
        "_lightest",
        "int({+2 * +}budget * MARGIN * _UNITS)",
        f"{ROW}[gradient_budget=0.3 tiles=many policy=peaked]",
    ),
    "the mass of the target's entry left out": (
        "live_tiles:choose",
        "[-mass.scatter_(0, target_tile, at_target_tile)-]{+pass+}",
        f"{ROW}[gradient_budget=0.3 tiles=many policy=peaked]",
    ),
    "a sum of masses overflows its integer": (
        "live_tiles:_lightest",
        "units.ceil()[-.clamp(max=limit + 1)-]",
        "live_tiles::test_cells_heavier_than_the_total_and_overflowing_sums_are_not_dropped",
    ),
    "matrix products in autocast's dtype": (
        "exact_products",
        "[-without_autocast(device)-]{+nullcontext()+}",
        f"{ROW}[autocast=bf16]",
    ),
    "exponentials of other rows": (
        "CachedTiles.tile",
        "columns[-.index_select(0, place)-]{+[: len(place)]+}",
        f"{ROW}[cache_mib=all_rows tiles=many]",
    ),
    "fp16 exponentials not divided by their factor": (
        "CachedTiles.__init__",
        "[-log_scale -= math.log(CACHED_FACTOR)-]{+pass+}",
        f"{ROW}[cache_mib=all_rows dtype=fp16]",
    ),
    "a kernel's slope of a soft-cap at the target from its missing exponential": (
        "cached_tile",
        "[-tl.where(is_target, target_log_p[:, None], log_p)-]{+log_p+}",
        f"{ROW}[backend=triton cache_mib=all_rows logit_softcap=5.0]",
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
}
