"""Stop on Ctrl-C and SIGTERM while training, but never halfway through an optimizer step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch


class StopSignals:
    """Within this context SIGINT raises KeyboardInterrupt, and SIGTERM raises SystemExit(143).

    A signal that arrives during a step of the watched optimizer raises when the step is complete. Handlers are
    installed in the main thread only, and only over Python's defaults: a signal that the caller handles, or that this
    process was started to ignore, is left alone. Leaving the context restores them.
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
        self._stop()  # also after a signal whose exception was lost, as in a finalizer

    def _stop(self) -> None:
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)
