"""Selects attention layers of a model: `last 4`, `[0, 1, 2]`, or what a function says."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from vicinal.errors import VicinalError
from vicinal.inspection.sites import AttentionSite

__all__ = ["Layers", "select_layers"]

Layers = str | Sequence[int] | Callable[[int, str], bool]


def select_layers(
    sites: list[AttentionSite], layers: Layers | None, exclude: str | Iterable[str] | None = None
) -> list[AttentionSite]:
    """Returns the sites that are asked for.

    Args:
        sites: attention layers, in the order in which they run.
        layers: `last 4`, `first 2`, indices, or a function of index and module name; None for all.
        exclude: patterns of module names to leave out.

    Raises:
        VicinalError: for a layer that does not exist, or if none is left.
    """
    patterns = [exclude] if isinstance(exclude, str) else list(exclude or ())
    chosen = sites
    if callable(layers):
        chosen = [site for number, site in enumerate(sites) if layers(number, site.name)]
    elif isinstance(layers, str):
        words = re.fullmatch(r"(first|last)(?:\s+(\d+))?", layers.strip())
        count = int(words[2] or 1) if words else 0
        if words is None or not 1 <= count <= len(sites):
            raise VicinalError(f"layers must be 'first N' or 'last N' with N from 1 to {len(sites)}, got {layers!r}")
        chosen = sites[:count] if words[1] == "first" else sites[-count:]
    elif layers is not None:
        wrong = [number for number in layers if not -len(sites) <= number < len(sites)]
        if wrong:
            raise VicinalError(f"unknown layer {wrong[0]}: the model has {len(sites)} to choose from")
        wanted = {number % len(sites) for number in layers}
        chosen = [site for number, site in enumerate(sites) if number in wanted]
    chosen = [site for site in chosen if not any(fnmatch.fnmatch(site.name, pattern) for pattern in patterns)]
    if not chosen:
        raise VicinalError(f"layers={layers!r} and exclude={exclude!r} leave none of {len(sites)} attention layers")
    return chosen
