"""`policy_loss` behind the signatures that five trainers call for their loss. They exchange log-probs.

    prime-rl   [trainer.loss] type = "custom", import_path = "gspo_kernels.integrations.seams.prime_rl"
    slime      --loss-type custom_loss --custom-loss-function-path gspo_kernels.integrations.seams.slime
    SkyRL      PolicyLossRegistry.register("gspo_kernels", skyrl)
    ms-swift   _compute_loss_and_metrics = ms_swift, in a subclass of its GRPOTrainer
    OpenRLHF   openrlhf.models.PolicyLoss = OpenRLHFPolicyLoss, in every worker

docs/integrations.md has the complete lines, and the versions whose sources were read. No trainer is imported here.

`objective` says what is optimised: GSPO as in its paper, unless `functools.partial` (in a class `partialmethod`) sets
another. Settings that the trainer's own loss reads must agree with it; if one does not, a ValueError names it and its
value. Except for prime-rl, Objective.aggregation must be "seq-mean-token-mean": every answer has the same weight.
"""

from .losses import OpenRLHFPolicyLoss, PrimeRLInputs, PrimeRLOutputs, prime_rl, skyrl
from .trainer_methods import ms_swift, ms_swift_log_probs, slime

__all__ = [
    "OpenRLHFPolicyLoss",
    "PrimeRLInputs",
    "PrimeRLOutputs",
    "ms_swift",
    "ms_swift_log_probs",
    "prime_rl",
    "skyrl",
    "slime",
]
