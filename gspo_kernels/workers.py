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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Task = TypeVar("Task")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


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
    if threads == 1:
        for task in tasks:
            function(task)
        return
    remaining, taking, failed = iter(tasks), threading.Lock(), threading.Event()

    def work() -> None:
        with torch.no_grad():
            while not failed.is_set():
                with taking:
                    task = next(remaining, None)
                if task is None:
                    return
                try:
                    function(task)
                except BaseException:
                    failed.set()
                    if sums is not None:
                        sums.stop()
                    raise

    futures: list[Future[None]] = []
    try:
        pool = _threads(threads)
        futures += [pool.submit(work) for _ in range(min(threads, len(tasks)))]
        wait(futures)
    finally:  # Ctrl-C ends the wait: leave nothing behind that still writes
        failed.set()
        if sums is not None:
            sums.stop()
        wait(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def _threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of at least `count` threads in which PyTorch's operations use one thread each."""
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < count:
            pool = ThreadPoolExecutor(count, thread_name_prefix="gspo_kernels")
            starter = threading.Thread(target=_start, args=(pool, count))
            starter.start()
            starter.join()
            _pool, _pool_size = pool, count
        return _pool


def _start(pool: ThreadPoolExecutor, count: int) -> None:
    """Start all threads of the pool and set each to one thread per operation.

    `torch.set_num_threads` applies to the calling thread and to threads that compute for the first time later. A new
    thread reads the latter and sets it back, so that nobody else's setting changes.
    """
    before = torch.get_num_threads()
    started = threading.Barrier(count)

    def alone() -> None:
        torch.get_num_threads()  # a thread's first use sets its number, and would undo the next line if it came later
        torch.set_num_threads(1)
        started.wait()

    for future in [pool.submit(alone) for _ in range(count)]:
        future.result()
    torch.set_num_threads(before)


def _forget() -> None:
    """Drop the pool in a forked process, which has none of its threads."""
    global _pool, _pool_size, _lock
    _lock, _pool, _pool_size = threading.Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
