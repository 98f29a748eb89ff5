"""Read code blocks from the docs. The constants are the blocks that tests run."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
INTEGRATIONS = "".join(path.read_text() for path in (DOCS / "integrations.md", *sorted(DOCS.glob("trainers/*.md"))))
SHARDING = (DOCS / "concepts" / "sharding.md").read_text()


def blocks_in_order(page: str) -> list[tuple[str, str]]:
    """Return (language, code) of each code block with a language, except `text`, which marks output and formulas.

    A script of examples/ is included by a block of {.python}, because ruff would format a block of python.
    """
    found = re.findall(r"^( *)```{?\.?(\w+)}?\n(.*?)^\1```", page, re.DOTALL | re.MULTILINE)
    return [(language, textwrap.dedent(code)) for _, language, code in found if language != "text"]


def code_blocks(page: str, language: str, text: str = "") -> list[str]:
    """Return the code blocks in `language` that contain `text`, in the order of the page."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return [block for block in blocks if text in block]


TRL_LINES, TRL_EXISTING_LINES = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.trl")
(HUGGINGFACE_LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.huggingface")
(MEGATRON_LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.megatron import")
(VERL_MEGATRON_LINES,) = code_blocks(INTEGRATIONS, "python", "gspo_kernels.integrations.verl.megatron")
(VERL_LINES,) = code_blocks(INTEGRATIONS, "bash", "gspo_kernels.integrations.verl")
(VERL_BUDGET,) = code_blocks(INTEGRATIONS, "bash", "fused_kernel_options")  # overrides only
_TESTED_ELSEWHERE = (TRL_LINES, TRL_EXISTING_LINES, HUGGINGFACE_LINES, MEGATRON_LINES, VERL_MEGATRON_LINES)
OTHER_PYTHON = [block for block in code_blocks(INTEGRATIONS, "python") if block not in _TESTED_ELSEWHERE]
(FSDP_TP_LINES,) = code_blocks(SHARDING, "python", "fully_shard")
(CP_LINES,) = code_blocks(SHARDING, "python", "import linear_log_probs, policy_loss")
