"""Run verl 0.9.1 with `gspo_kernels`: an engine for its FSDP workers, and a policy loss for any engine.

    export VERL_ENGINE_VENDOR=gspo  # selects the engine, on every node
    actor_rollout_ref.model.external_lib=gspo_kernels.integrations.verl
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo_kernels  # optional: selects the policy loss
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean

With the environment variable set, you may omit external_lib: verl finds the engine by the package's entry point.

The engine is verl's FSDP engine with two differences. At the model's head, `linear_log_probs` computes the log-probs of
the responses, and the entropies on request, without making logits. New, old and reference log-probs all come from this
one kernel. And answers with advantage 0 do not run in updates, wherever gradients stay the same. verl's policy losses
and KL terms do not change.

The policy loss is GSPO's token form (`Objective(ratio="sequence-token")`) in one operator. Unlike verl's `gspo`, it
does not clamp the log-ratio, and ignores values where the mask is 0, even NaN. To use it with one of verl's own
engines, set `external_lib` and `loss_mode`, but not the environment variable.

`verl.megatron` has log-probs for verl's Megatron engine, which also does not need the variable.
"""

from __future__ import annotations

import logging
import os

from gspo_kernels.extras import needs

with needs(__name__, "verl", "verl", "transformers"):
    from .engine import GSPOEngine
    from .policy_loss import gspo_policy_loss

__all__ = ["GSPOEngine", "gspo_policy_loss"]

if os.environ.get("VERL_ENGINE_VENDOR") != "gspo":
    logging.getLogger(__name__).warning(
        "VERL_ENGINE_VENDOR is %r, not 'gspo', so verl's own FSDP engine computes the log-probs. The policy loss of "
        "gspo_kernels and its functions for verl's Megatron engine do not need the variable",
        os.environ.get("VERL_ENGINE_VENDOR"),
    )
