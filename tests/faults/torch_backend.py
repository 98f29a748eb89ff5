"""Faults in the torch backend."""

from __future__ import annotations

from faults.table import ROW, Fault

FAULTS: dict[str, Fault] = {
    "pairs of ids of other ranks are read": (
        "backends/pairs:_own",
        "live = pairs.live[- & (pairs.ids >= 0) & (pairs.ids < head.vocab_size)-]",
        "distributed/sharded::test_case[row tp=2 kept_sets=offsets]",
    ),
    "the target counted among the others of its set": (
        "kept_log_probs",
        "torch.where(pairs.live[- & ~kept.is_target-], z, -torch.inf)",
        f"{ROW}[kept_sets=offsets entropy=True]",
    ),
    "extra log-probs without the difference of logits": (
        "extra_log_probs",
        "z[:, 1:][- - z[:, :1]-]",
        f"{ROW}[entry=chained extra_ids=3]",
    ),
    "the first logit of other slabs missing in a top k": (
        "top_k:_merged",
        "torch.where([-is_first-]{+tops > -math.inf+}, -math.inf, tops)",
        f"{ROW}[top_k=3 tiles=many]",
    ),
    "any of several equal logits in a top k": (
        "top_k:_largest",
        "(z == least).sum(1) > [-(values == least).sum(1)-]{+z.shape[1]+}",
        "distillation::test_equal_logits_are_in_the_order_of_ids_and_confident_log_probs_keep_their_digits",
    ),
    "aggregation weight not divided by the length": (
        "_weight_of_token",
        "[-weight = weight / lengths.clamp(min=1)-]{+pass+}",
        f"{ROW}[]",
    ),
    "token weights also multiply the KL": (
        "torch/sequence:policy_forward",
        "{+(1 if policy.token_weights is None else policy.token_weights) * +}objective.kl_coef * _kl_weight(mask, "
        "sequence, lengths, policy, objective)",
        f"{ROW}[token_weights=per_token kl=term]",
    ),
    "last vocabulary slab dropped": (
        "Tiles.__init__",
        "[(low, min(low + width, vocab)) for low in range(0, vocab, width)]{+[: max(1, (vocab - 1) // width)]+}",
        f"{ROW}[cache_mib=all_rows tiles=many]",
    ),
    "logits rounded to bf16": (
        "Tiles.logits",
        "_product(self.hidden[rows].to(self.operand_dtype), weight.t()){+.bfloat16().to(self.dtype)+}",
        f"{ROW}[]",
    ),
    "fp16 gradients not lifted out of underflow": (
        "LogitGradients.__init__",
        "[-tiles.operand_dtype == torch.float16-]{+False+}",
        f"{ROW}[products=half dtype=fp16 logit_scale=0.015625 aggregation=token-mean tiles=parts]",
    ),
    "the last, narrower cell of a slab left out": (
        "WorkList._columns",
        "[--(-high // columns)-]{+high // columns+}",
        f"{ROW}[gradient_budget=0.001 tiles=many policy=flat]",
    ),
    "terms added out of order": (
        "Sums._next",
        "[-self._added[index]-]{+min(self._kept[index], default=None)+}",
        "workers::test_terms_are_added_in_order",
    ),
    "the policy normalizer used for KL, in torch": (
        "_kl_weight",
        "[-aggregation == objective.aggregation-]{+True+}",
        f"{ROW}[kl=term kl_aggregation=token-mean normalizer=number]",
    ),
}
