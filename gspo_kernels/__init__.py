"""Compute the GSPO loss and its gradients from hidden states, without materializing the logits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import advantages as advantages
    from . import distillation as distillation
    from . import reference as reference
    from . import sampler_mismatch as sampler_mismatch
    from .fused_loss import gspo_fused_loss
    from .kept_sets import KeptSets
    from .log_probs import linear_log_probs
    from .objective import Objective
    from .outputs import LogProbOutput, LossOutput
    from .policy import policy_loss

__version__ = "0.1.0"
# Modules are imported when one of their names is first used, so that `gspo --help` works without PyTorch.
_MODULES = {
    "KeptSets": "kept_sets",
    "LogProbOutput": "outputs",
    "LossOutput": "outputs",
    "Objective": "objective",
    "gspo_fused_loss": "fused_loss",
    "linear_log_probs": "log_probs",
    "policy_loss": "policy",
}
_SUBMODULES = ("advantages", "distillation", "reference", "sampler_mismatch")
__all__ = ["KeptSets", "LogProbOutput", "LossOutput", "Objective", "gspo_fused_loss", "linear_log_probs", "policy_loss"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
