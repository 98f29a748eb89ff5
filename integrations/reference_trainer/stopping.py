"""Stop training on Ctrl-C and SIGTERM, but never in the middle of an optimizer step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch


class StopSignals:
    """A context in which SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143).

    If a signal arrives during a step of the watched optimizer, the exception is raised after the step. Handlers are
    installed in the main thread only. They replace only Python's default handlers, so signals that the caller handles
    or that this process ignores keep their effect. The previous handlers are restored at the end.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._received: int | None = None
        self._stepping = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Postpone signals during the steps of `optimizer`."""
        optimizer.register_step_pre_hook(self._step_begins)
        optimizer.register_step_post_hook(self._step_ends)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._received = number
        if not self._stepping:
            self._stop()

    def _step_begins(self, *_: object) -> None:
        self._stepping = True

    def _step_ends(self, *_: object) -> None:
        self._stepping = False
        self._stop()  # raises again if the first exception was lost, for example in a finalizer

    def _stop(self) -> None:
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)
