"""Tasks: prompts, rewards that a program can compute, and for dialogues the environment's replies.

`task_by_name` makes the tasks of this folder: "sorting" and "format" for the demo's random model, "calculator"
and "arithmetic" for a model that can already copy and add. `jsonl_task` reads the user's own prompts.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ..config import InputError
from ..rewards import Example, RewardComponent
from .arithmetic import arithmetic_task
from .base import Task, batches
from .calculator import calculator_task
from .format import format_task
from .jsonl import jsonl_task
from .sorting import sorting_task

__all__ = ["TASKS", "Example", "Task", "batches", "jsonl_task", "task_by_name"]

TASKS = {
    "sorting": sorting_task,
    "arithmetic": arithmetic_task,
    "calculator": calculator_task,
    "format": format_task,
}


def task_by_name(name: str, held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make a task of `TASKS`. `held_out` prompts are kept for evaluation; `rewards` replace the task's own rewards.

    Raises:
        InputError: there is no such task, or it has too few prompts.
    """
    if name not in TASKS:
        nearest = difflib.get_close_matches(name, TASKS, 1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise InputError(f"task: expected one of {', '.join(TASKS)}, got {name!r}{hint}")
    return TASKS[name](held_out, rewards)
