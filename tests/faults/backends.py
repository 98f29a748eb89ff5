"""Faults in code that both backends share."""

from __future__ import annotations

from faults.table import Fault

FAULTS: dict[str, Fault] = {
    "matrix products in the precision that the process has set": (
        "exact_products",
        '_request_ieee("cuda" if device.type == "cuda" else "cpu")',
        "pass",
        "foreign_inputs::test_products_are_exact_inside_and_the_setting_is_restored[medium]",
    ),
    "a thread restores the precision while another thread computes": (
        "exact_products",
        "not _calls",
        "True",
        "foreign_inputs::test_a_thread_that_leaves_first_does_not_restore_the_setting_of_another",
    ),
    "a weight of 0 times an infinite ratio is NaN": (
        "precision:multiply_no_nan",
        "torch.where(torch.logical_and(x, y), x * y, 0)",
        "x * y",
        "edges::test_a_token_weight_of_zero_silences_an_infinite_ratio[torch-sequence]",
    ),
    "the budget spent twice": (
        "_lightest",
        "int(budget * MARGIN * _UNITS)",
        "int(2 * budget * MARGIN * _UNITS)",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "the heaviest cells dropped": (
        "live_tiles:_lightest",
        "units.ceil().clamp(max=limit + 1).to(torch.int64).flatten().sort(stable=True)",
        "units.ceil().clamp(max=limit + 1).to(torch.int64).flatten().sort(stable=True, descending=True)",
        "live_tiles::test_the_torch_backend_drops_cells_of_a_head_with_a_bias",
    ),
    "the mass of the target's entry left out": (
        "live_tiles:choose",
        "mass.scatter_(0, target_tile, at_target_tile)",
        "pass",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "a slope of 1 for every soft-cap": (
        "_least_mass",
        "head.logit_softcap is None",
        "True",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "a sum of masses overflows its integer": (
        "live_tiles:_lightest",
        "units.ceil().clamp(max=limit + 1)",
        "units.ceil()",
        "live_tiles::test_cells_heavier_than_the_total_and_overflowing_sums_are_not_dropped",
    ),
    "matrix products in autocast's dtype": (
        "exact_products",
        "without_autocast(device)",
        "nullcontext()",
        "heads::test_autocast_computes_on_operands_cast_to_bf16_and_rounds_nothing_else[torch-False]",
    ),
    "a negative scale makes a negative mass": (
        "_mass_at_target",
        "abs(head.logit_scale)",
        "head.logit_scale",
        "loss_faults::test_a_negative_scale_drops_as_much_as_a_positive_one[torch]",
    ),
    "cells dropped while a graph is captured": (
        "break_even",
        "is_captured(device)",
        "False",
        "loss_faults::test_nothing_is_dropped_while_a_graph_is_captured[torch]",
    ),
    "an explicitly named backend falls back to another backend": (
        "pick_backend",
        'backend == "triton" and obstacle',
        "False",
        "kernels::test_auto_selects_triton_on_a_gpu_and_torch_on_a_cpu",
    ),
    "rows without a gradient but with an entropy bonus not kept": (
        "may_have_gradient",
        "objective.kl_coef != 0 or objective.entropy_coef != 0",
        "objective.kl_coef != 0",
        "cache::test_only_rows_that_may_have_a_gradient_are_kept[torch]",
    ),
    "the budget of log-probs spent twice": (
        "head_backward_op",
        "kernels.choose(head, result, d_log_probs, kept, cell, gradient_budget)",
        "kernels.choose(head, result, d_log_probs, kept, cell, 2 * gradient_budget)",
        "cache::test_log_probs_drop_at_most_the_budget",
    ),
    "exponentials of other rows": (
        "KeptTiles.tile",
        "columns.index_select(0, place)",
        "columns[: len(place)]",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[torch-fp32-plain]",
    ),
    "fp16 exponentials not divided by their factor": (
        "KeptTiles.__init__",
        "log_scale -= math.log(KEPT_FACTOR)",
        "pass",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[torch-fp16-tail]",
    ),
    "a NaN row has finite gradients if its exponentials are kept": (
        "kept_tile",
        "at_most((tile_top - shift_of_row) - log_total_of_row, 0.0)",
        "tl.minimum((tile_top - shift_of_row) - log_total_of_row, 0.0)",
        "cache::test_a_nan_column_makes_kept_and_recomputed_gradients_nan[triton]",
    ),
    "a kernel's slope of a soft-cap at the target from its missing exponential": (
        "kept_tile",
        "tl.where(is_target, target_log_p[:, None], log_p)",
        "log_p",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[triton-fp32-soft-cap]",
    ),
    "a chunk's rows counted from its own start": (
        "gradient_of_tiles",
        "chunk.start",
        "0",
        "cache::test_a_cached_backward_in_many_parts_has_the_gradients_of_one[triton-0.0]",
    ),
    "a default cache that takes more memory than TRL's head": (
        "cache_limit",
        "torch.sym_min(size, largest_default())",
        "size",
        "default_cache::test_the_public_functions_keep_the_default_if_there_is_a_backward",
    ),
    "a default cache of the free memory": (
        "cache_of_device",
        "torch.cuda.get_device_properties(device).total_memory",
        "torch.cuda.mem_get_info(device)[0]",
        "default_cache::test_the_default_is_a_64th_of_the_total_memory_of_the_operands_device",
    ),
    "the first product of copies forgotten": (
        "_add_product_of_copies",
        "beta if start == 0 else 1",
        "beta",
        "amd::test_products_of_copies_are_complete[True-bf16]",
    ),
    "the self-check runs while a CUDA graph is captured": (
        "_can_run",
        "is_captured(device)",
        "False",
        "self_check::test_nothing_runs_during_capture_and_compilation[captured]",
    ),
    "torch.compile traces the self-check": (
        "self_check/verdict:",
        "obstacle._dynamo_marked_constant = True",
        "obstacle._not_marked = True",
        "self_check::test_nothing_runs_during_capture_and_compilation[compiled]",
    ),
    "auto trusts kernels that were not checked": (
        "obstacle",
        'unchecked = failure is None and backend == "auto"',
        "unchecked = False",
        "self_check::test_nothing_runs_during_capture_and_compilation[captured]",
    ),
    "the self-check is not remembered": (
        "_remember",
        "os.replace(temporary, file)",
        "os.unlink(temporary)",
        "self_check::test_a_check_that_passed_is_remembered_on_disk",
    ),
    "the self-check of other kernels is trusted": (
        "_hash_of_sources",
        'folder.rglob("*.py")',
        'folder.glob("*.py")',
        "self_check::test_a_changed_kernel_changes_the_hash",
    ),
    "every process runs the self-check": (
        "_locked",
        "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "self_check::test_processes_that_start_together_run_one_check",
    ),
    "the self-check runs in the caller's thread": (
        "run_check",
        "thread.start()\nthread.join()",
        "thread.run()",
        "self_check::test_the_check_neither_sees_nor_changes_the_state_of_its_caller",
    ),
    "NaN passes the self-check": (
        "_limit",
        "not error <= allowed",
        "error > allowed",
        "self_check::test_an_error_above_the_limit_or_nan_is_wrong[nan]",
    ),
    "the kernels are checked in a dtype other than autocast's": (
        "head_rows",
        "pick_backend(check, arguments.backend, device, rows.dtype)",
        "pick_backend(check, arguments.backend, device, hidden.dtype)",
        "self_check::test_the_kernels_are_checked_in_the_dtype_that_they_compute_with",
    ),
}
