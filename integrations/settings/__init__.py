"""Settings of other trainers, read into an `Objective` with everything else that their loss needs.

    reading = from_roll("gspo.yaml")
    policy_loss(..., objective=reading.objective, ...)  # what else to pass: the other fields of `Reading`

A reader raises a ValueError that names the setting, what came and what can be read. It raises where no Objective
computes what the trainer does, and where it does not know a setting (then it names the nearest one it knows). Settings
that the trainer itself ignores are in `reading.ignored`, with a warning. The formulas are those of docs/parity.md. No
trainer has to be installed.
"""

from .grpo import from_ms_swift, from_trl
from .keys import Normalizer, Reading, Step
from .roll_stateset import from_roll, from_stateset
from .verl import from_verl

__all__ = ["Normalizer", "Reading", "Step", "from_ms_swift", "from_roll", "from_stateset", "from_trl", "from_verl"]
