"""Code blocks of docs/integrations.md, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

INTEGRATIONS = (Path(__file__).parent.parent.parent / "docs" / "integrations.md").read_text()


def code_blocks(language: str, text: str = "") -> list[str]:
    """Return the page's code blocks in `language` that contain `text`, in the order of the page."""
    blocks = re.findall(rf"```{language}\n(.*?)```", INTEGRATIONS, re.DOTALL)
    return [block for block in blocks if text in block]


(TRL_LINES,) = code_blocks("python", "gspo_kernels.integrations.trl")
(HUGGINGFACE_LINES,) = code_blocks("python", "gspo_kernels.integrations.huggingface")
(VERL_LINES,) = code_blocks("bash", "gspo_kernels.integrations.verl")
OTHER_PYTHON = [block for block in code_blocks("python") if block not in (TRL_LINES, HUGGINGFACE_LINES)]
