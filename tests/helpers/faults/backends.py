"""Faults in code that both backends share."""

from __future__ import annotations

from helpers.faults.table import Fault

DEFAULT = "default_cache"
FAULTS: dict[str, Fault] = {
    "matrix products in the precision that the process has set": (
        "backends/precision",
        '_request_ieee("cuda" if device.type == "cuda" else "cpu")',
        "pass",
        "heads::test_exact_products_are_requested_on_every_processor[medium]",
    ),
    "a thread restores the precision while another thread computes": (
        "backends/precision",
        "if not _calls:\n                _restore",
        "if True:\n                _restore",
        "heads::test_two_threads_keep_exact_products_and_restore_the_setting[torch]",
    ),
    "a weight of 0 times an infinite ratio is NaN": (
        "backends/precision",
        "torch.where(torch.logical_and(x, y), x * y, 0)",
        "x * y",
        "edges::test_a_token_weight_of_zero_silences_an_infinite_ratio[torch-sequence]",
    ),
    "the budget spent twice": (
        "backends/live_tiles",
        "int(budget * MARGIN * _UNITS)",
        "int(2 * budget * MARGIN * _UNITS)",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "the heaviest cells dropped": (
        "backends/live_tiles",
        "flatten().sort(stable=True)",
        "flatten().sort(stable=True, descending=True)",
        "live_tiles::test_the_torch_backend_drops_cells_of_a_head_with_a_bias",
    ),
    "the mass of the target's entry left out": (
        "backends/live_tiles",
        "mass[at] += torch.where(has_mass, at_target[padded_order], 0)",
        "pass",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "a slope of 1 for every soft-cap": (
        "backends/live_tiles",
        "if head.logit_softcap is None:",
        "if True:",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "a sum of masses overflows its integer": (
        "backends/live_tiles",
        "over.cumsum(0) == 0",
        "~over",
        "live_tiles::test_cells_heavier_than_the_total_and_overflowing_sums_are_not_dropped",
    ),
    "too few passes reported": (
        "backends/live_tiles",
        "(size * cells).sum(1) / (unmasked * vocab)",
        "(size * cells).sum(1) / (unmasked * vocab) / 2",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "matrix products in autocast's dtype": (
        "backends/precision",
        "with torch.autocast(device.type, enabled=False) if device.type in AUTOCAST_DEVICES else nullcontext():\n"
        "            yield",
        "yield",
        "heads::test_autocast_computes_on_operands_cast_to_bf16_and_rounds_nothing_else[torch-False]",
    ),
    "interpreted kernels chosen by backend='auto'": (
        "backends/dispatch",
        'or (backend == "auto" and device.type == "cpu")',
        "",
        "kernels::test_auto_selects_triton_on_a_gpu_and_torch_on_a_cpu",
    ),
    "power-of-two scale of an infinite gradient": (
        "backends/precision",
        "(largest > 0) & largest.isfinite()",
        "largest > 0",
        "loss_faults::test_the_power_of_two_brings_the_largest_of_both_gradients_near_one",
    ),
    "power-of-two scale without the entropy gradient": (
        "backends/precision",
        "size = gradients.abs() if entropy_gradients is None else torch.maximum("
        "gradients.abs(), entropy_gradients.abs())",
        "size = gradients.abs()",
        "loss_faults::test_the_power_of_two_brings_the_largest_of_both_gradients_near_one",
    ),
    "a negative scale makes a negative mass": (
        "backends/live_tiles",
        "abs(head.logit_scale)",
        "head.logit_scale",
        "loss_faults::test_a_negative_scale_drops_as_much_as_a_positive_one[torch]",
    ),
    "cells dropped while a graph is captured": (
        "backends/live_tiles",
        "if _captured(device):",
        "if False:",
        "loss_faults::test_nothing_is_dropped_while_a_graph_is_captured[torch]",
    ),
    "a budget spent without a margin for rounding": (
        "backends/live_tiles",
        "MARGIN = 1 - 1e-4",
        "MARGIN = 1",
        "loss_faults::test_a_cell_that_fits_the_budget_by_less_than_fp32_resolves_is_kept",
    ),
    "temperature missing in the mass with a soft-cap": (
        "backends/live_tiles",
        "* (1 if head.temperature is None else head.temperature)",
        "* 1",
        "loss_faults::test_a_budget_holds_under_a_soft_cap_that_binds_at_a_high_temperature",
    ),
    "power-of-two scale beyond fp32": (
        "backends/precision",
        ".clamp(-126, 126)",
        "",
        "loss_faults::test_the_power_of_two_for_subnormal_gradients_is_within_fp32",
    ),
    "rows without a gradient counted in the size of cells": (
        "backends/live_tiles",
        "height = (rows - torch.arange(",
        "height = (n - torch.arange(",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "a workspace of 0 MiB accepted": (
        "backends/workspace",
        "least <= int(text)",
        "least - 1 <= int(text)",
        "bad_inputs::test_a_bad_workspace_limit_is_named[0]",
    ),
    "the adapter's product in autocast's dtype": (
        "backends/adapter",
        "    with exact_products(x.device):\n        for rows",
        "    if True:\n        for rows",
        "heads::test_autocast_leaves_an_fp32_adapter_unrounded[torch]",
    ),
    "an explicitly named backend falls back to another backend": (
        "backends/dispatch",
        'if backend == "triton" and obstacle:',
        "if False:",
        "kernels::test_auto_selects_triton_on_a_gpu_and_torch_on_a_cpu",
    ),
    "rows without a gradient kept": (
        "ops",
        "return mask & (size != 0)",
        "return mask | (size != 0)",
        "cache::test_only_rows_that_may_have_a_gradient_are_kept[torch]",
    ),
    "the budget of log-probs spent twice": (
        "head_ops",
        "d_log_probs, kept, cell, gradient_budget)",
        "d_log_probs, kept, cell, 2 * gradient_budget)",
        "cache::test_log_probs_drop_at_most_the_budget",
    ),
    "kept exponentials read although the head needs no gradient": (
        "inputs/memory",
        "return size if any(needed_by_autograd(head)) else 0",
        "return size",
        "cache::test_the_cache_is_free_after_the_backward_and_absent_without_autograd[torch]",
    ),
    "exponentials of other rows": (
        "backends/torch/kept_tile",
        "columns.index_select(0, place)",
        "columns[: len(place)]",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[torch-fp32-plain]",
    ),
    "fp16 exponentials not divided by their factor": (
        "backends/torch/kept_tile",
        "log_scale -= math.log(KEPT_FACTOR)",
        "pass",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[torch-fp16-tail]",
    ),
    "slope of a soft-cap at the target from its missing exponential": (
        "backends/torch/backward",
        "torch.where(in_slab[:, None], target_logit, z.gather(1, column))",
        "z.gather(1, column)",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[torch-fp32-soft-cap]",
    ),
    "a kernel's exponentials without the tile's largest logit": (
        "backends/triton/kept_tile",
        "tl.minimum((tile_top - shift_of_row)",
        "tl.minimum((0.0 - shift_of_row)",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[triton-fp32-plain]",
    ),
    "a kernel's slope of a soft-cap at the target from its missing exponential": (
        "backends/triton/kept_tile",
        "tl.where(is_target, target_log_p[:, None], log_p)",
        "log_p",
        "cache::test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients[triton-fp32-soft-cap]",
    ),
    "a chunk's rows counted from its own start": (
        "backends/triton/gradient_rows",
        "first_row=chunk.start",
        "first_row=0",
        "cache::test_a_cached_backward_in_many_parts_has_the_gradients_of_one[triton-0.0]",
    ),
    "a default cache of the free memory": (
        "backends/workspace",
        "torch.cuda.get_device_properties(device).total_memory",
        "torch.cuda.mem_get_info(device)[0]",
        f"{DEFAULT}::test_the_default_is_a_64th_of_the_total_memory_of_the_operands_device",
    ),
    "a default cache of a 32nd of the memory": (
        "backends/workspace",
        "CACHE_SHARE = 64",
        "CACHE_SHARE = 32",
        f"{DEFAULT}::test_the_default_is_a_64th_of_the_total_memory_of_the_operands_device",
    ),
    "a default cache on a CPU": (
        "backends/workspace",
        'device.type != "cuda" or not torch',
        "not torch",
        f"{DEFAULT}::test_the_default_is_a_64th_of_the_total_memory_of_the_operands_device",
    ),
    "a default cache of the current device": (
        "backends/workspace",
        "get_device_properties(device)",
        'get_device_properties(torch.device("cuda"))',
        f"{DEFAULT}::test_the_default_is_a_64th_of_the_total_memory_of_the_operands_device",
    ),
    "fake tensors need a GPU": (
        "backends/workspace",
        "or not torch.cuda.is_available()",
        "",
        f"{DEFAULT}::test_fake_tensors_on_a_gpu_that_does_not_exist_have_no_cache",
    ),
    "the compiler traces the default cache": (
        "backends/workspace",
        "cache_of_device._dynamo_marked_constant = True",
        "pass",
        f"{DEFAULT}::test_a_compiled_call_takes_the_default_as_a_constant",
    ),
    "a cache of 0 replaced by the default": (
        "backends/workspace",
        "(cache_of_device(device) if mib is None else mib)",
        "(mib or cache_of_device(device))",
        f"{DEFAULT}::test_the_variable_replaces_the_default_and_the_argument_replaces_both[0-None-0]",
    ),
    "a cache without a backward": (
        "inputs/memory",
        "return size if any(needed_by_autograd(head)) else 0",
        "return size",
        "cache::test_the_cache_is_free_after_the_backward_and_absent_without_autograd[torch]",
    ),
    "operands copied as a whole": (
        "backends/precision",
        "size = max(bytes_of_copies() // ((a.shape[0] + b.shape[1]) * out.itemsize), 1)",
        "size = a.shape[1]",
        "amd::test_products_of_copies_are_complete[False-bf16]",
    ),
    "the first product of copies forgotten": (
        "backends/precision",
        "beta=beta if start == 0 else 1",
        "beta=beta",
        "amd::test_products_of_copies_are_complete[True-bf16]",
    ),
}
