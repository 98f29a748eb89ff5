"""The README, its code blocks, and the example script whose code it shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
TRL_EXAMPLE = ROOT / "examples" / "trl_gspo.py"


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


WITH_TRL, QUICK_START = _blocks(README, "python")
(WITH_VERL,) = _blocks(README, "bash")
