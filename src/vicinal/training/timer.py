"""The clocks of the training loop."""

import time

__all__ = ["Timer"]


class Timer:
    """Measures, in seconds, the run, its training steps, and the age of the last checkpoint.

    Args:
        seconds: time of the run before it was interrupted.
    """

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic() - seconds
        self.restart()

    def restart(self) -> None:
        """Begins a lap, right after a checkpoint or before the first step."""
        self.lap_started = self.checkpoint_saved = time.monotonic()

    def lap(self) -> float:
        """Returns the time since the last lap or restart, and begins the next lap."""
        before, self.lap_started = self.lap_started, time.monotonic()
        return self.lap_started - before

    def checkpoint_age(self) -> float:
        """Returns the time since the last restart."""
        return time.monotonic() - self.checkpoint_saved

    def total(self) -> float:
        """Returns the time of the run, interruptions not counted."""
        return time.monotonic() - self.started
