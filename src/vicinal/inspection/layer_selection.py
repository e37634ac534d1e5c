"""Selects layers of a model: `last 4`, indices, names, or by a function."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.sites import AttentionSite

__all__ = ["Layers", "layer_index", "select_layers"]

Layers = str | Sequence[int | str] | Callable[[int, str], bool]


def layer_index(names: Sequence[str], layer: int | str) -> int:
    """Returns the index of a layer among `names`, from 0.

    Args:
        names: of all layers, in their order.
        layer: name, or index from 0 or, below 0, from the end.

    Raises:
        VicinalError: if there is no such layer.
    """
    if isinstance(layer, str):
        if layer not in names:
            raise unknown_name("layer", layer, names)
        return list(names).index(layer)
    if not -len(names) <= layer < len(names):
        raise VicinalError(f"unknown layer {layer}: there are {len(names)} layers, 0 to {len(names) - 1}")
    return layer % len(names)


def select_layers(
    sites: list[AttentionSite], layers: Layers | None, exclude: str | Iterable[str] | None = None
) -> list[AttentionSite]:
    """Returns the sites that are asked for.

    Args:
        sites: attention layers, in the order in which they run.
        layers: `last 4`, `first 2`, indices or names, or a function of index and module name; None for all.
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
        wanted = {layer_index([site.name for site in sites], layer) for layer in layers}
        chosen = [site for number, site in enumerate(sites) if number in wanted]
    chosen = [site for site in chosen if not any(fnmatch.fnmatch(site.name, pattern) for pattern in patterns)]
    if not chosen:
        raise VicinalError(f"layers={layers!r} and exclude={exclude!r} leave none of {len(sites)} attention layers")
    return chosen
