"""SIGTERM and SIGINT: training ends after the current step, with a checkpoint."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "StopSignals", "raise_on_sigterm"]


class Interrupted(Exception):  # noqa: N818 - the run was asked to stop: this is not an error
    """A run stopped because of a signal, after it saved a checkpoint.

    Args:
        message: where the run stopped and how to continue it.
        number: the signal, kept in `signal`.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class StopSignals:
    """Stores the last SIGTERM or SIGINT in `received`, inside of `with`; 0 before the first.

    A second SIGINT raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.received = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in the main thread only
            self._handlers = {number: signal.signal(number, self._store) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _store(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raise_on_sigterm(message: str) -> Iterator[None]:
    """Raises Interrupted at once when SIGTERM arrives, inside of `with`.

    Args:
        message: of the exception.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(message, number)

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
