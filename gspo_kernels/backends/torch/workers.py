"""Threads that run independent tasks. All operations of a task run in the same thread.

PyTorch instead splits each operation among its threads, and waits for all of them before the next operation. An
operation on a tile takes 0.1 ms. If another process occupies one of the cores, each wait takes a time slice of several
ms, and a loss has thousands of operations. Here, a delayed thread delays only its own task. Also, a task runs the same
operations in the same order for any number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import torch

Task = TypeVar("Task")


class Stopped(RuntimeError):
    """Raised by `Sums.add` after another task failed or was interrupted."""


class Sums:
    """Sums of terms that tasks compute in any order. The terms of each sum are added in a fixed order.

    A term that arrives early waits until the earlier terms are added. While `most_waiting` terms wait, a task with
    another early term waits. Tasks must start in the order of their terms, otherwise all threads could wait forever.
    """

    def __init__(self, sums: int, most_waiting: int) -> None:
        self._added, self._adding = [0] * sums, [False] * sums
        self._waiting: list[dict[int, Callable[[], None]]] = [{} for _ in range(sums)]
        self._room = most_waiting
        self._moved = threading.Condition()
        self._stopped = False

    def add(self, index: int, number: int, add_term: Callable[[], None]) -> None:
        """Call `add_term`, which adds term `number` to sum `index`, once all terms with lower numbers are added."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._room > 0 or self._added[index] == number)
            if self._stopped:
                raise Stopped
            self._waiting[index][number] = add_term
            self._room -= 1
            if self._adding[index]:  # another thread is adding to this sum, and will add this term in its turn
                return
            self._adding[index] = True
        while next_term := self._next(index):
            next_term()
            with self._moved:
                self._added[index] += 1
                self._room += 1
                self._moved.notify_all()

    def _next(self, index: int) -> Callable[[], None] | None:
        """Pop the next term of a sum. If it has not arrived, return None, and this thread stops adding."""
        with self._moved:
            term = self._waiting[index].pop(self._added[index], None)
            self._adding[index] = term is not None
            return term

    def stop(self) -> None:
        """Make every waiting or later call of `add` raise `Stopped`."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()


def run(function: Callable[[Task], None], tasks: Sequence[Task], threads: int, sums: Sums | None = None) -> None:
    """Call `function` once per task, in up to `threads` threads. If `threads` is 1, use the calling thread.

    Tasks start in order and run without autograd. After an exception no more tasks start, and the first exception is
    raised here.
    """
    jobs = min(_start_threads(threads), len(tasks)) if threads > 1 else 0
    if not jobs:
        for task in tasks:
            function(task)
        return
    iterator = iter(tasks)
    iterator_lock = threading.Lock()
    stop = threading.Event()
    ended = threading.Semaphore(0)
    inference = torch.is_inference_mode_enabled()
    errors = list[BaseException]()

    def take_tasks() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while not stop.is_set():
                    with iterator_lock:
                        task = next(iterator, None)
                    if task is None:
                        return
                    function(task)
        except BaseException as error:
            errors.append(error)
            end()
        finally:
            ended.release()

    def end() -> None:
        stop.set()
        if sums is not None:
            sums.stop()

    for _ in range(jobs):
        _jobs.put(take_tasks)
    waited = 0
    try:
        while waited < jobs:
            ended.acquire()
            waited += 1
    finally:  # also after Ctrl-C: no thread may still write when this function returns
        end()
        for _ in range(jobs - waited):
            ended.acquire()
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


_lock = threading.Lock()
_jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
_started = 0


def _start_threads(count: int) -> int:
    """Make sure that `count` threads run, or as many as the system allows. Return their number, at most `count`."""
    with _lock:
        if _started < count:
            with suppress(RuntimeError):  # the system allows no more threads, or the interpreter is shutting down
                starter = threading.Thread(target=_start, args=(count,), daemon=True)
                starter.start()
                starter.join()
        return min(_started, count)


def _start(count: int) -> None:
    """Start the missing threads, each with one PyTorch thread per operation.

    `torch.set_num_threads` changes the calling thread and the default of threads that have not computed yet. So this
    function runs in a new thread, reads the default first, and restores it at the end.
    """
    global _started
    before = torch.get_num_threads()
    try:
        for number in range(_started, count):
            ready = threading.Event()
            name = f"gspo_kernels_{number}"
            with suppress(RuntimeError):
                threading.Thread(target=_take_jobs, args=(ready,), name=name, daemon=True).start()
                ready.wait()
                _started += 1
    finally:
        torch.set_num_threads(before)


def _take_jobs(ready: threading.Event) -> None:
    """Run jobs forever, with one PyTorch thread per operation."""
    torch.get_num_threads()  # the first use initializes this thread's setting; done later, it would undo the next line
    torch.set_num_threads(1)
    ready.set()
    while True:
        job = _jobs.get()
        job()
        del job  # otherwise its tensors live until the next job


def _forget() -> None:
    """Reset this module in a forked process, which lacks the threads."""
    global _lock, _jobs, _started
    _lock = threading.Lock()
    _jobs = SimpleQueue()
    _started = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
