"""Entry point of the group `verl.plugins`, imported by every `import verl`: loads the engine if it is asked for.

    export VERL_ENGINE_VENDOR=gspo

verl silently skips a plug-in whose import fails, so this one warns first. (`model.external_lib` and
VERL_USE_EXTERNAL_MODULES name `gspo_kernels.integrations.verl` itself; with them a failing import raises.)
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
