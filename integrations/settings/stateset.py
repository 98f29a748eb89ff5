"""Read the settings of StateSet Agents' GSPO trainer."""

from __future__ import annotations

from typing import Any

from . import tables
from .keys import NOT_NEGATIVE, Keys, Normalizer, Reading, Step


def from_stateset(config: Any) -> Reading:
    """Read StateSet Agents' `GSPOConfig`, or a mapping of its fields.

    The trainer's loss does not divide logits by a temperature, so `Reading.temperature` is 1.

    Raises:
        TypeError: `config` has another type.
        ValueError: no Objective can express a field, or this reader does not know the field. The message names it.
    """
    keys = Keys("from_stateset", config, tables.STATESET, tables.STATESET_OTHERS)
    for name in ("objective", "objective_overrides"):
        keys.must(name, None, {}, why="only the default objective of its GSPO trainers is supported")
    token = keys.flag("use_gspo_token")
    if token and "objective" not in keys:
        keys.refuse(
            "use_gspo_token",
            "False, or given together with `objective`: releases without that field computed "
            "Objective(surrogate='cispo', ratio='sequence')",
        )
    if keys.flag("use_reference_model"):
        keys.must("beta", 0.0, why="its KL is k3 of an answer's mean log-probs, ours is the mean of k3")
    fields = {
        "ratio": "sequence-token" if token else "sequence",
        "clip_low": keys.number("clip_range_left", NOT_NEGATIVE),
        "clip_high": keys.number("clip_range_right", NOT_NEGATIVE),
    }
    group = Step("group_advantages", {"group_size": keys.count("num_generations", 4), "ddof": 0, "eps": 0.0})
    return keys.reading(
        fields,
        Normalizer("rows", "step"),
        temperature=1.0,
        advantages=(group,),
        old_log_probs="trainer" if keys.flag("rescore_old_log_probs") else "rollout",
    )
