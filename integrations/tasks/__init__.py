"""Tasks: prompts, and rewards that a program can compute.

`task_by_name` makes the tasks of this folder: "sorting" for the demo's random model, and "long-sorting" for a model
that can already sort a little. The reference trainer trains on them, or on a `Task` of your own
(docs/tasks.md). Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Task, batches
from .rewards import Example, InputError, RewardBatch, RewardComponent, Rewards, answer_found, letters_in_place, nearest
from .sorting import long_sorting_task, sorting_task

__all__ = ["TASKS", "Example", "InputError", "RewardBatch", "RewardComponent", "Rewards", "Task", "answer_found"]
__all__ += ["batches", "letters_in_place", "nearest", "task_by_name"]

TASKS = {
    "sorting": sorting_task,
    "long-sorting": long_sorting_task,
}


def task_by_name(name: str, held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make a task of `TASKS`. `held_out` prompts are kept for evaluation; `rewards` replace the task's own rewards.

    Raises:
        InputError: there is no such task, or it has too few prompts.
    """
    if name not in TASKS:
        raise InputError(f"task: expected one of {', '.join(TASKS)}, got {name!r}{nearest(name, TASKS)}")
    return TASKS[name](held_out, rewards)
