"""The README, its code blocks, and the folder of examples."""

from __future__ import annotations

from pathlib import Path

from helpers.pages import code_blocks

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
EXAMPLES = ROOT / "examples"
TRL_EXAMPLE = EXAMPLES / "trl_gspo.py"


WITH_TRL, QUICK_START = code_blocks(README, "python")
(WITH_VERL,) = code_blocks(README, "bash")
