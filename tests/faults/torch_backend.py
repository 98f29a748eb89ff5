"""Faults in the torch backend."""

from __future__ import annotations

from faults.table import Fault

PARITY = "parity::test_every_head_and_layout_equals_the_oracle"
OBJECTIVE = "parity::test_every_objective_equals_the_oracle_in_float64"
FAULTS: dict[str, Fault] = {
    "pairs of ids of other ranks are read": (
        "backends/pairs:_own",
        "live = pairs.live[- & (pairs.ids >= 0) & (pairs.ids < head.vocab_size)-]",
        "sharded::test_case[tp 2 torch kept sets]",
    ),
    "the target counted among the others of its set": (
        "kept_log_probs",
        "torch.where(pairs.live[- & ~kept.is_target-], z, -torch.inf)",
        "kept_sets::test_the_loss_over_kept_sets_equals_the_oracle[torch-vocabulary-True-plain-bf16]",
    ),
    "extra log-probs without the difference of logits": (
        "extra_log_probs",
        "z[:, 1:][- - z[:, :1]-]",
        "kept_sets::test_extra_log_probs_equal_those_of_full_logits[torch-plain-bf16]",
    ),
    "the first logit of other slabs missing in a top k": (
        "top_k:_merged",
        "torch.where([-is_first-]{+tops > -math.inf+}, -math.inf, tops)",
        "distillation::test_the_top_k_are_those_of_full_logits[5-plain-fp64]",
    ),
    "any of several equal logits in a top k": (
        "top_k:_largest",
        "(z == least).sum(1) > [-(values == least).sum(1)-]{+z.shape[1]+}",
        "sharded::test_case[tp 2 top k]",
    ),
    "aggregation weight not divided by the length": (
        "_weight_of_token",
        "[-weight = weight / lengths.clamp(min=1)-]{+pass+}",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "token weights also multiply the KL": (
        "torch/sequence:policy_forward",
        "{+(1 if policy.token_weights is None else policy.token_weights) * +}objective.kl_coef * _kl_weight(mask, "
        "sequence, lengths, policy, objective)",
        f"{OBJECTIVE}[torch-packed-per-token-weights-cispo-sequence]",
    ),
    "last vocabulary slab dropped": (
        "Tiles.__init__",
        "[(low, min(low + width, vocab)) for low in range(0, vocab, width)]{+[: max(1, (vocab - 1) // width)]+}",
        "parity::test_several_tiles_of_rows_and_columns[torch]",
    ),
    "logits rounded to bf16": (
        "Tiles.logits",
        "_product(self.hidden[rows].to(self.operand_dtype), weight.t()){+.bfloat16().to(self.dtype)+}",
        f"{OBJECTIVE}[torch-padded-gspo]",
    ),
    "fp16 gradients not lifted out of underflow": (
        "LogitGradients.__init__",
        "[-tiles.operand_dtype == torch.float16-]{+False+}",
        "parity::test_small_fp16_gradients_survive_the_product",
    ),
    "the last, narrower cell of a slab left out": (
        "WorkList._columns",
        "[--(-high // columns)-]{+high // columns+}",
        "live_tiles::test_torch_reports_the_dropped_mass_and_stays_within_the_budget",
    ),
    "terms added out of order": (
        "Sums._next",
        "[-self._added[index]-]{+min(self._kept[index], default=None)+}",
        "workers::test_terms_are_added_in_order",
    ),
    "the policy normalizer used for KL, in torch": (
        "_kl_weight",
        "[-aggregation == objective.aggregation-]{+True+}",
        "loss_faults::test_a_kl_term_with_another_aggregation_has_its_own_divisor[torch-sequence]",
    ),
}
