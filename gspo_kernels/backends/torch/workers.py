"""Run tasks in threads that do not wait for each other inside an operation.

PyTorch splits each operation over its threads, which meet at the end of it. An operation on a tile takes 0.1 ms. If
another process holds one of the cores, each meeting takes a time slice of several ms, and a loss has thousands of them.
Here each thread runs all operations of its task alone and then takes the next task, so a delayed thread delays only
its own task. A task also runs the same operations in the same order whatever the number of threads.
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
    """Raised in a task whose addition waits for a task that failed."""


class Sums:
    """Add up terms that tasks compute in any order, each sum in a fixed order of its terms.

    A term that comes early is kept until those before it are added. At most `most_kept` terms are kept: then the task
    that brings another one waits. Tasks must be taken up in the order of their terms, or all threads could be waiting.
    """

    def __init__(self, sums: int, most_kept: int) -> None:
        self._added, self._adding = [0] * sums, [False] * sums
        self._kept: list[dict[int, Callable[[], None]]] = [{} for _ in range(sums)]
        self._room, self._moved, self._stopped = most_kept, threading.Condition(), False

    def add(self, index: int, number: int, add_term: Callable[[], None]) -> None:
        """Call `add_term`, which adds term `number` to sum `index`, after those of all lower numbers."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._room > 0 or self._added[index] == number)
            if self._stopped:
                raise Stopped
            self._kept[index][number] = add_term
            self._room -= 1
            if self._adding[index]:  # another thread adds to this sum and will find the term
                return
            self._adding[index] = True
        while next_term := self._next(index):
            next_term()
            with self._moved:
                self._added[index] += 1
                self._room += 1
                self._moved.notify_all()

    def _next(self, index: int) -> Callable[[], None] | None:
        """Take out the term whose turn it is; None if it has not come yet, and this thread is done adding."""
        with self._moved:
            term = self._kept[index].pop(self._added[index], None)
            self._adding[index] = term is not None
            return term

    def stop(self) -> None:
        """Raise `Stopped` in every task that waits or will add."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()


def run(function: Callable[[Task], None], tasks: Sequence[Task], threads: int, sums: Sums | None = None) -> None:
    """Call `function` once per task, in up to `threads` threads; with 1, in the caller's.

    Threads take up tasks in their order, without autograd. The first exception ends all threads and is raised here.
    """
    jobs = min(_start_threads(threads), len(tasks)) if threads > 1 else 0
    if not jobs:
        for task in tasks:
            function(task)
        return
    remaining, taking, stop, ended = iter(tasks), threading.Lock(), threading.Event(), threading.Semaphore(0)
    inference, errors = torch.is_inference_mode_enabled(), list[BaseException]()

    def work() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while not stop.is_set():
                    with taking:
                        task = next(remaining, None)
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
        _jobs.put(work)
    waited = 0
    try:
        while waited < jobs:
            ended.acquire()
            waited += 1
    finally:  # Ctrl-C ends the wait: leave nothing behind that still writes
        end()
        for _ in range(jobs - waited):
            ended.acquire()
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


_lock = threading.Lock()
_jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
_started = 0


def _start_threads(count: int) -> int:
    """Have `count` threads take jobs, or as many as the system allows; return how many there are."""
    with _lock:
        if _started < count:
            with suppress(RuntimeError):  # no room for another thread, or the interpreter is shutting down
                starter = threading.Thread(target=_start, args=(count,), daemon=True)
                starter.start()
                starter.join()
        return min(_started, count)


def _start(count: int) -> None:
    """Start the missing threads, each with one thread per operation of PyTorch.

    `torch.set_num_threads` applies to the calling thread and to threads that compute for the first time later. This
    thread reads the latter number and sets it back, so that nobody else's setting changes.
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
    torch.get_num_threads()  # a thread's first use sets its number, and would undo the next line if it came later
    torch.set_num_threads(1)
    ready.set()
    while True:
        job = _jobs.get()
        job()
        del job  # or it would hold its tensors until the next one


def _forget() -> None:
    """Forget the threads in a forked process, which has none of them."""
    global _lock, _jobs, _started
    _lock, _jobs, _started = threading.Lock(), SimpleQueue(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
