"""`policy_loss` with the signatures of five other trainers' loss functions. These trainers pass log-probs.

    prime-rl   [trainer.loss] type = "custom", import_path = "gspo_kernels.integrations.seams.prime_rl"
    slime      --loss-type custom_loss --custom-loss-function-path gspo_kernels.integrations.seams.slime
    SkyRL      PolicyLossRegistry.register("gspo_kernels", skyrl)
    ms-swift   _compute_loss_and_metrics = ms_swift, in a subclass of its GRPOTrainer
    OpenRLHF   openrlhf.models.PolicyLoss = OpenRLHFPolicyLoss, in every worker

docs/integrations.md has the complete lines, and the versions whose sources were read. This package imports no trainer.

The argument `objective` defaults to GSPO as in its paper. To change it, use `functools.partial`, or `partialmethod` in
a class. The trainer's own settings of the loss must agree with it, otherwise a ValueError names the setting and its
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
