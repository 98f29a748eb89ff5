"""Read the settings of other trainers into an `Objective` and the other inputs of their loss.

    reading = from_roll("gspo.yaml")
    policy_loss(..., objective=reading.objective, ...)  # the other fields of `Reading` say what else to pass

The readers are `from_trl` and `from_ms_swift` (`grpo.py`), `from_verl` (`verl.py`), `from_roll` (`roll.py`) and
`from_stateset` (`stateset.py`). `tables.py` lists the settings that the readers know. `keys.py` makes sure that every
setting of the caller is used, reported or refused.

A reader raises a ValueError in two cases. If no Objective computes what the trainer does, the message names the
setting, its value and the accepted values. If the reader does not know a setting, the message names the most similar
known name. Settings that the trainer itself ignores are in `reading.ignored`, and a warning names them. docs/parity.md
has the formulas.

Only `from_trl` needs an installed trainer: it interprets settings like the installed release of TRL.
"""

from .grpo import from_ms_swift, from_trl
from .keys import Normalizer, Reading, Step
from .roll import from_roll
from .stateset import from_stateset
from .verl import from_verl

__all__ = ["Normalizer", "Reading", "Step", "from_ms_swift", "from_roll", "from_stateset", "from_trl", "from_verl"]
