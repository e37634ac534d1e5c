"""Stop at the end of a step when the machine, or a person, asks for it."""

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "Stopping"]


class Interrupted(Exception):  # noqa: N818 - it is no error
    """A run was asked to stop, and has saved a checkpoint; `signal` is the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class Stopping:
    """Inside of `with`, SIGTERM and SIGINT are noted in `asked`; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
