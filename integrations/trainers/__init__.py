"""`policy_loss` with the signatures of the loss functions of five trainers that compute the log-probs themselves.

    prime-rl   [trainer.loss] type = "custom", import_path = "gspo_kernels.integrations.trainers.prime_rl"
               FusedOutputLinear.forward = prime_rl_head
    slime      --loss-type custom_loss --custom-loss-function-path gspo_kernels.integrations.trainers.slime
    SkyRL      PolicyLossRegistry.register("gspo_kernels", skyrl)
    ms-swift   _compute_loss_and_metrics = ms_swift, in a subclass of its GRPOTrainer
    OpenRLHF   openrlhf.trainer.ray.ppo_actor.PolicyLoss = OpenRLHFPolicyLoss, in every worker of the actor

docs/integrations.md has the complete lines, and the versions of the trainers that these functions were written for.
This package imports no trainer.

The argument `objective` defaults to the settings of GSPO's paper. To change `objective`, use `functools.partial`, or
`partialmethod` in a class. If one of the trainer's own settings contradicts `objective`, a ValueError names the setting
and its value. For all but prime-rl, Objective.aggregation must be "seq-mean-token-mean", which gives every answer the
same weight. `prime_rl` accepts every aggregation; its docstring says how prime-rl divides the loss.
"""

from .losses import OpenRLHFPolicyLoss, PrimeRLInputs, PrimeRLOutputs, prime_rl, skyrl
from .trainer_methods import ms_swift, ms_swift_log_probs, prime_rl_head, slime

__all__ = [
    "OpenRLHFPolicyLoss",
    "PrimeRLInputs",
    "PrimeRLOutputs",
    "ms_swift",
    "ms_swift_log_probs",
    "prime_rl",
    "prime_rl_head",
    "skyrl",
    "slime",
]
