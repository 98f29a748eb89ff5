"""Stop training on Ctrl-C and SIGTERM, but never between the advantages of a step and its line in the metrics."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopSignals:
    """A context in which SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143).

    Inside `postponed`, and always if `together`, a first signal only sets `received`, and `check` raises the exception
    later. A second signal raises it at once. Handlers are installed in the main thread only. They replace only Python's
    default handlers, so signals that the caller handles or that this process ignores keep their effect. The previous
    handlers are restored at the end.
    """

    def __init__(self, together: bool = False) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}
        self._together = together  # with other processes, which would wait for this one
        self._postponed = together

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone a first signal to the end of the block."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = self._together
        if not self._together:
            self.check()

    def check(self, received: bool = False) -> None:
        """Raise the exception of a signal, if one has arrived. `received`: one has arrived in another process."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None or received:
            raise SystemExit(128 + (self.received or signal.SIGTERM))

    def _handle(self, number: int, _: FrameType | None) -> None:
        is_second = self.received is not None
        self.received = number
        if is_second or not self._postponed:
            self.check()
