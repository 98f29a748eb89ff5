"""Compute the GSPO loss and its gradients from hidden states, without materialising the logits."""

import os.path
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import advantages as advantages
    from . import reference as reference
    from . import sampler_mismatch as sampler_mismatch
    from .fused_loss import gspo_fused_loss
    from .log_probs import linear_log_probs
    from .objective import Objective
    from .outputs import LogProbOutput, LossOutput
    from .policy import policy_loss

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
# The module that defines each public name. It is imported when the name is first used, so that `gspo --help` works
# without PyTorch.
_MODULES = {
    "LogProbOutput": "outputs",
    "LossOutput": "outputs",
    "Objective": "objective",
    "gspo_fused_loss": "fused_loss",
    "linear_log_probs": "log_probs",
    "policy_loss": "policy",
}


_SUBMODULES = ("advantages", "reference", "sampler_mismatch")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


class _Package(ModuleType):
    """The class of this package. It keeps `gspo_kernels.policy_loss` the function.

    Without it, an import of the module `gspo_kernels.policy_loss` would replace the function by the module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = name == "policy_loss" and isinstance(value, ModuleType)
        super().__setattr__(name, value.policy_loss if is_module else value)


sys.modules[__name__].__class__ = _Package

# In a checkout that is not installed, integrations/ and benchmarks/ lie next to this folder, so submodules are also
# searched in the parent folder. An installed package contains both.
_CHECKOUT = os.path.dirname(os.path.dirname(__file__))
if all(
    os.path.isfile(os.path.join(_CHECKOUT, *file)) for file in (["pyproject.toml"], ["integrations", "__init__.py"])
):
    __path__.append(_CHECKOUT)
