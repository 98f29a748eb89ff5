"""Faults in the torch backend."""

from __future__ import annotations

from faults.table import Fault

PARITY = "parity::test_every_head_and_layout_equals_the_oracle"
OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
FAULTS: dict[str, Fault] = {
    "pairs of ids of other ranks are read": (
        "backends/pairs:_own",
        "live = pairs.live & (pairs.ids >= 0) & (pairs.ids < head.vocab_size)",
        "live = pairs.live",
        "sharded::test_case[tp 2 torch kept sets]",
    ),
    "slope of the soft-cap missing at pairs": (
        "backends/pairs:logits_at",
        "slope * (1 - tanh.square())",
        "slope",
        "kept_sets::test_the_loss_over_kept_sets_equals_the_oracle[torch-vocabulary-True-all-bf16]",
    ),
    "the target counted among the others of its set": (
        "kept_log_probs",
        "torch.where(pairs.live & ~kept.is_target, z, -torch.inf)",
        "torch.where(pairs.live, z, -torch.inf)",
        "kept_sets::test_the_loss_over_kept_sets_equals_the_oracle[torch-vocabulary-True-plain-bf16]",
    ),
    "extra log-probs without the difference of logits": (
        "extra_log_probs",
        "z[:, 1:] - z[:, :1]",
        "z[:, 1:]",
        "kept_sets::test_extra_log_probs_equal_those_of_full_logits[torch-plain-bf16]",
    ),
    "log-ratio not divided by the length": (
        "torch/sequence:policy_forward",
        "total / lengths.clamp(min=1)",
        "total",
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
        "negative & (u < log_low)",
        "(advantages > 0) & (u < log_low)",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "dual clip ignored": (
        "_clip",
        "if math.isfinite(objective.ceiling):\n    high |= negative & (u > math.log(objective.ceiling))",
        "if False:\n    high |= negative & (u > math.log(objective.ceiling))",
        f"{OBJECTIVE}[torch-padded-dual-clip]",
    ),
    "token weights also multiply the KL": (
        "torch/sequence:policy_forward",
        "objective.kl_coef * _kl_share(mask, sequence, lengths, policy, objective)",
        "(1 if policy.token_weights is None else policy.token_weights) * objective.kl_coef * _kl_share(mask, "
        "sequence, lengths, policy, objective)",
        f"{OBJECTIVE}[torch-packed-per-token-weights-cispo-sequence]",
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
    "dppo: a gradient outside the trust region": (
        "torch/surrogates:dppo",
        "slope = torch.where(free, -s * advantages, 0)",
        "slope = -s * advantages",
        "decisions::test_tokens_that_leave_the_trust_region_of_dppo_are_those_of_float64[torch-dppo_tv-fp32]",
    ),
    "dppo: KL without the other tokens": (
        "torch/surrogates:_divergence",
        "sampled + torch.where(other_q == 0, 0, other_q * (other_q.log() - other_p.log()))",
        "sampled",
        "presets::test_a_preset_is_the_formula_of_its_source[torch-dppo_kl]",
    ),
    "vespo: log-ratios of tokens not bounded": (
        "torch/sequence:_log_ratios",
        "summed = token_log_ratio.clamp(-VESPO_TOKEN_BOUND, VESPO_TOKEN_BOUND)",
        "summed = token_log_ratio",
        "presets::test_a_preset_is_the_formula_of_its_source[torch-vespo]",
    ),
    "topr: positive advantages tapered": (
        "_topr",
        "torch.where(negative & ~high, u, 0)",
        "torch.where(~high, u.clamp(max=0), 0)",
        "presets::test_a_preset_is_the_formula_of_its_source[torch-topr]",
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
    "several threads make the first call of an MKL function": (
        "_call_mkl_functions",
        "getattr(torch, name)(half)",
        "pass",
        "workers::test_importing_the_loss_calls_each_mkl_function_on_one_number",
    ),
    "terms added out of order": (
        "Sums._next",
        "self._added[index]",
        "min(self._kept[index], default=None)",
        "workers::test_terms_are_added_in_order",
    ),
    "the policy normalizer used for KL, in torch": (
        "_kl_share",
        "aggregation == objective.aggregation",
        "True",
        "loss_faults::test_a_kl_term_with_another_aggregation_has_its_own_divisor[torch-sequence]",
    ),
    "KL's ratio factor not masked": (
        "torch/sequence:policy_forward",
        "kl_share = torch.where(mask, kl_share * log_ratio.exp(), 0)",
        "kl_share = kl_share * log_ratio.exp()",
        "loss_faults::test_an_infinite_ratio_times_kl_does_not_change_masked_tokens[torch-True]",
    ),
    "cispo: a ratio equal to its bound counted as clipped": (
        "_cispo",
        "nonzero & (u < log_low), nonzero & (u > log_high)",
        "nonzero & (u <= log_low), nonzero & (u >= log_high)",
        "loss_faults::test_a_ratio_on_a_bound_is_not_clipped[torch-cispo, top]",
    ),
    "reinforce counted as clipped": (
        "_reinforce",
        "return Term(-advantages, -advantages, never, never)",
        "return Term(-advantages, -advantages, advantages < 0, never)",
        "loss_faults::test_reinforce_clips_nothing[torch]",
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
    "sums of a slab on a GPU beyond the workspace": (
        "tiling",
        "columns = min(columns, _columns_beside_sums(head, rows, dtype, operands))",
        "pass",
        "memory::test_the_torch_backend_on_a_gpu_stays_within_the_formula[2048-8192-32000-bf16-CUDA]",
    ),
    "the host waits for every kept tile": (
        "KeptTiles.tile",
        "first, last, adjacent = self.places[rows.start]",
        "first, last, adjacent = int(place[0]), int(place[-1]), bool((place.diff() == 1).all())",
        "host_reads::test_the_torch_backend_reads_the_places_of_kept_rows_once",
    ),
}
