"""Read the code blocks of Markdown pages, and provide the blocks of docs/integrations.md that tests run."""

from __future__ import annotations

import re
from pathlib import Path

INTEGRATIONS = (Path(__file__).parent.parent.parent / "docs" / "integrations.md").read_text()


def code_blocks(page: str, language: str, text: str = "") -> list[str]:
    """Return the code blocks in `language` that contain `text`, in the order of the page."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return [block for block in blocks if text in block]


(TRL_LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.trl")
(HUGGINGFACE_LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.huggingface")
(MEGATRON_LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.megatron")
(VERL_LINES,) = code_blocks(INTEGRATIONS, "bash", "gspo_kernels.integrations.verl")
(VERL_BUDGET,) = code_blocks(INTEGRATIONS, "bash", "fused_kernel_options")  # overrides only
_TESTED_ELSEWHERE = (TRL_LINES, HUGGINGFACE_LINES, MEGATRON_LINES)
OTHER_PYTHON = [block for block in code_blocks(INTEGRATIONS, "python") if block not in _TESTED_ELSEWHERE]
