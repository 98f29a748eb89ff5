"""Read the settings of other trainers into an `Objective` and everything else that their loss needs.

    reading = from_roll("gspo.yaml")
    policy_loss(..., objective=reading.objective, ...)  # the other fields of `Reading` say what else to pass

`from_trl` and `from_ms_swift` (`grpo.py`), `from_verl` (`verl.py`), `from_roll` (`roll.py`), `from_stateset`
(`stateset.py`). `tables.py` lists the settings that they know, `keys.py` accounts for every setting of a caller.

A reader raises a ValueError that names the setting, its value and the values that can be read: where no Objective
computes what the trainer does, and where it does not know the setting (it then names the nearest one that it knows).
Settings that the trainer itself ignores are in `reading.ignored`, with a warning. docs/parity.md has the formulas. No
trainer needs to be installed, but for `from_trl`, which reads settings as the installed release of TRL does.
"""

from .grpo import from_ms_swift, from_trl
from .keys import Normalizer, Reading, Step
from .roll import from_roll
from .stateset import from_stateset
from .verl import from_verl

__all__ = ["Normalizer", "Reading", "Step", "from_ms_swift", "from_roll", "from_stateset", "from_trl", "from_verl"]
