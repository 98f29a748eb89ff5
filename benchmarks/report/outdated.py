"""Find results that were measured before the code behind them changed.

A result is outdated if the statements of a file behind it differ from those at the commit where it was measured.
Comments, docstrings and layout do not count. A file that was moved counts as changed.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

LOSS = (
    "gspo_kernels/backends/*.py",
    "gspo_kernels/backends/torch/*.py",
    "gspo_kernels/inputs/*.py",
    "gspo_kernels/ops/*.py",
    "gspo_kernels/fused_loss.py",
    "gspo_kernels/log_probs.py",
    "gspo_kernels/policy.py",
)
KERNELS = ("gspo_kernels/backends/triton/*.py", "gspo_kernels/backends/triton/cells/*.py")
TIMED = ("benchmarks/candidates.py", "benchmarks/measure.py", "benchmarks/workloads.py")
TRAINING = (
    "gspo_kernels/advantages.py",
    "gspo_kernels/objective.py",
    "integrations/reference_trainer/advantages.py",
    "integrations/reference_trainer/measures.py",
    "integrations/reference_trainer/optimizer.py",
    "integrations/reference_trainer/policy.py",
    "integrations/reference_trainer/sampling.py",
    "integrations/reference_trainer/trainer.py",
    "integrations/reference_trainer/update.py",
    "integrations/tasks/*.py",
    "benchmarks/studies/compare.py",
)
# For every suite with results: the files whose changes can change them.
MOVED_BY = {
    "compare": TRAINING,
    "gpu": (*KERNELS, *LOSS, *TIMED, "benchmarks/gpu/times.py", "benchmarks/peaked.py", "benchmarks/peers.py"),
    "kept_sets": (
        "gspo_kernels/*/pairs.py",
        "benchmarks/suites/kept_sets.py",
    ),
    "long": TRAINING,
    "operands": (*LOSS, "benchmarks/candidates.py", "benchmarks/studies/operands.py"),
    "precision": (*LOSS, "benchmarks/studies/precision.py"),
    "rounding": (*TRAINING, "gspo_kernels/sampler_mismatch.py"),
    "skip": (
        *LOSS,
        "integrations/trl/trainer.py",
        "integrations/trl/zero_advantage.py",
        "integrations/trl/row_checkpoint.py",
        "integrations/huggingface/row_checkpoint.py",
        "benchmarks/suites/skip.py",
    ),
    "step": (*LOSS, *TIMED, "benchmarks/suites/step.py"),
    "teachers": (*TRAINING, "gspo_kernels/distillation.py"),
    "vocab": (*LOSS, *TIMED, "benchmarks/suites/step.py"),
}


def outdated(root: Path) -> list[str]:
    """Return a line for every outdated result of the repository in `root`.

    Raises:
        subprocess.CalledProcessError: git fails, for example because a shallow clone lacks a commit.
    """
    lines = []
    for path in sorted(root.glob("benchmarks/results/*.json")):
        result = json.loads(path.read_text())
        parts = [x for x in result.get("results", {}).values() if isinstance(x, dict) and "measured" in x]
        commits = {part["measured"]["commit"] for part in parts} or {result["commit"]}
        for commit in sorted(commits):
            names = _git(root, "diff", "--name-only", commit, "--", *MOVED_BY[path.stem.partition("-")[0]]).split()
            changed = [name for name in names if _statements(root, commit, name) != _statements(root, None, name)]
            if changed:
                files = f"{changed[0]}{f' and {len(changed) - 1} more' if changed[1:] else ''}"
                lines.append(f"{path.name}: measured at {commit[:7]}, before changes of {files}")
    return lines


def _statements(root: Path, commit: str | None, name: str) -> str | None:
    """Return the statements of a file at a commit or, without one, in the working tree. None: there is no such file."""
    if commit is None:
        text = (root / name).read_text() if (root / name).exists() else None
    else:
        text = _git(root, "show", f"{commit}:{name}") if _git(root, "ls-tree", commit, name) else None
    if text is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout
