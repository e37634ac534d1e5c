"""The one error this package raises for bad input."""

import difflib
from collections.abc import Iterable

__all__ = ["VicinalError", "unknown"]


class VicinalError(ValueError):
    """Bad input: the message says what was wrong, what was expected and what to do.

    The command line prints it as it is and exits with 2.

    >>> import vicinal
    >>> try:
    ...     vicinal.Grid(0, 8)
    ... except vicinal.VicinalError as error:
    ...     print(error)
    Grid height must be a whole number >= 1, given 0
    """


def unknown(kind: str, given: str, known: Iterable[str]) -> VicinalError:
    """The error for a mistyped name: it suggests the nearest and lists all."""
    names = sorted(known)
    nearest = difflib.get_close_matches(given, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return VicinalError(f"unknown {kind} {given!r}{hint} Known: {', '.join(names) or 'none'}")
