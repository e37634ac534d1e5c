"""The folder for files that can be made again: decoded images, and the native library."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(given: Path | None = None) -> Path:
    """Returns the cache folder: `given`, else `$VICINAL_CACHE`, else `vicinal` in the user's cache folder."""
    if given is not None:
        return given
    if own := os.environ.get("VICINAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vicinal"
