"""Load the engine for verl if VERL_ENGINE_VENDOR=gspo. `import verl` imports this module through an entry point.

The module is not in the folder verl/, because importing anything from there registers the engine. verl silently skips
an entry point (`verl.plugins`) that fails to import, so this module warns before it raises. The settings
`model.external_lib` and VERL_USE_EXTERNAL_MODULES name `gspo_kernels.integrations.verl` instead, and verl does not hide
errors of that import.
"""

from __future__ import annotations

import os
import warnings

if os.environ.get("VERL_ENGINE_VENDOR") == "gspo":
    try:
        from . import verl  # noqa: F401
    except Exception as error:
        warnings.warn(f"gspo_kernels: VERL_ENGINE_VENDOR=gspo has no effect because of {error!r}", stacklevel=2)
        raise
