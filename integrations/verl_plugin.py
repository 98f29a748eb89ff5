"""verl's entry point (`verl.plugins`), imported by every `import verl`: does nothing unless our engine is asked for.

    export VERL_ENGINE_VENDOR=gspo

verl passes over a plug-in that fails without a word; this one says so first. (`model.external_lib` and
VERL_USE_EXTERNAL_MODULES, which name `gspo_kernels.integrations.verl` itself, raise.)
"""

from __future__ import annotations

import os
import warnings

if os.environ.get("VERL_ENGINE_VENDOR") == "gspo":
    try:
        from . import verl  # noqa: F401
    except Exception as error:
        warnings.warn(f"gspo_kernels: VERL_ENGINE_VENDOR=gspo has no effect, {error!r}", stacklevel=2)
        raise
