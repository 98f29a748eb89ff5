"""Read the settings of ROLL and StateSet Agents into an `Objective` and the other inputs of their loss.

    reading = from_roll("gspo.yaml")
    policy_loss(..., objective=reading.objective, ...)  # the other fields of `Reading` say what else to pass

A reader raises a ValueError in two cases. If no Objective computes what the trainer does, the message names the
setting, its value and the accepted values. If the reader does not know a setting, the message names the most similar
known name. docs/parity.md has the formulas.

No trainer needs to be installed.
"""

from .keys import Reading, Step
from .roll import from_roll
from .stateset import from_stateset

__all__ = ["Reading", "Step", "from_roll", "from_stateset"]
