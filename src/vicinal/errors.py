"""The one error this package raises for bad input."""

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["VicinalError", "unknown_name"]


class VicinalError(ValueError):
    """Bad input: the message says what was wrong, what was expected and what to do.

    The command line prints the message without a traceback and exits with code 2.

    >>> import vicinal
    >>> try:
    ...     vicinal.Grid(0, 8)
    ... except vicinal.VicinalError as error:
    ...     print(error)
    Grid height must be a whole number >= 1, got 0
    """


def unknown_name(
    kind: str,
    given: str,
    known: Iterable[str],
    *,
    suggestions: Sequence[str] | None = None,
    max_suggestions: int = 1,
    listing: str | None = None,
) -> VicinalError:
    """Returns the error for a mistyped name, which suggests the nearest names and lists all of them.

    >>> print(unknown_name("prior", "gm", ["gmm", "gab"]))
    unknown prior 'gm'; did you mean 'gmm'? Known: gab, gmm

    Args:
        kind: what the name stands for, such as `prior`.
        given: the name as the user wrote it.
        known: all valid names.
        suggestions: what to suggest; the nearest of the known names by default.
        max_suggestions: maximum number of nearest names.
        listing: the sentence about valid names; by default all of them, sorted.
    """
    names = sorted(known)
    if suggestions is None:
        suggestions = difflib.get_close_matches(given, names, n=max_suggestions)
    hint = f"; did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else "."
    return VicinalError(f"unknown {kind} {given!r}{hint} {listing or 'Known: ' + (', '.join(names) or 'none')}")
