"""The GSPO loss from hidden states to gradients, exact enough for its clip window, without holding the logits."""

from .fused_loss import gspo_fused_loss
from .log_probs import LogProbOutput, linear_log_probs
from .objective import Objective
from .policy_loss import LossOutput, policy_loss

__version__ = "0.1.0"
__all__ = [
    "LogProbOutput",
    "LossOutput",
    "Objective",
    "__version__",
    "gspo_fused_loss",
    "linear_log_probs",
    "policy_loss",
]
