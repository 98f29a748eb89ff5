"""The README and the code blocks in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


README = (ROOT / "README.md").read_text()


CONSTRAINTS = (ROOT / "constraints.txt").read_text()


QUICK_START, REAL_MODEL, WITH_TRL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


(WITH_VERL,) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
