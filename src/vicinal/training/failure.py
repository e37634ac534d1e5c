"""failure.json: why a run ended before its last epoch and cannot go on."""

import json
from pathlib import Path

from vicinal.files import write_json

__all__ = ["read_failure", "write_failure"]

FAILURE_FILE = "failure.json"


def write_failure(folder: Path, step: int, message: str) -> None:
    """Writes failure.json to a run folder.

    Args:
        folder: run folder.
        step: number of steps done.
        message: what happened, and what to do instead.
    """
    write_json(folder / FAILURE_FILE, {"step": step, "message": message})


def read_failure(folder: Path) -> str | None:
    """Returns the message in failure.json; None if the run has no such file."""
    file = folder / FAILURE_FILE
    return str(json.loads(file.read_text(encoding="utf-8"))["message"]) if file.is_file() else None
