"""Where queries and keys sit that are not the same patches, from a probe that passes centers of kernels on exactly."""

from dataclasses import replace

from vicinal.cells import Cells
from vicinal.inspection.place_tokens import Placement, decide
from vicinal.inspection.pooled_layout import pooled_layout
from vicinal.inspection.probe import Evidence
from vicinal.inspection.refusal import Refusal

__all__ = ["needs_exact_centers", "with_exact_centers"]


def needs_exact_centers(placement: Placement, evidence: Evidence) -> bool:
    """Returns whether queries and keys have different cells, or one side may be pooled from the other."""
    queries, keys = placement.queries, placement.keys
    if isinstance(queries, Cells) and isinstance(keys, Cells):
        return not queries.same_as(keys)
    return bool(evidence.pools) and (isinstance(queries, Cells) or isinstance(keys, Cells))


def with_exact_centers(placement: Placement, evidence: Evidence, aspect: float) -> Placement:
    """Returns a placement with the exact centers of lines, or with offsets that a pooling explains.

    Args:
        placement: from probes that spread differences evenly.
        evidence: of the probe that passes them on to the centers of kernels.
        aspect: height / width of the image.
    """
    if not needs_exact_centers(placement, evidence):
        return placement
    exact = decide(evidence, aspect)
    pairs = pooled_layout(exact, evidence, aspect)
    if pairs is not None and any(
        _same_patches(one, two)
        for one, two in ((placement.queries, exact.queries), (placement.keys, exact.keys))
        if isinstance(two, Cells)
    ):
        return replace(exact, pairs=pairs)
    sides = [_with_lines(one, two) for one, two in ((placement.queries, exact.queries), (placement.keys, exact.keys))]
    if placement.layout != exact.layout or sides[0] is None or sides[1] is None:
        return placement
    return replace(placement, queries=sides[0], keys=sides[1])


def _with_lines(one: Cells | Refusal, two: Cells | Refusal) -> Cells | None:
    """Returns the first cells with the lines of the second, if they are the same; else None."""
    if not isinstance(one, Cells) or not isinstance(two, Cells) or not one.same_as(two):
        return None
    return replace(one, origin=two.origin, pitch=two.pitch)


def _same_patches(one: Cells | Refusal, two: Cells | Refusal) -> bool:
    """Returns whether tokens have the same cells, the same in all windows; `one` may count heads as windows."""
    if not isinstance(one, Cells) or not isinstance(two, Cells):
        return False
    same = (one.rows, one.columns, one.tokens) == (two.rows, two.columns, two.tokens)
    return same and bool((one.index == two.index[:1]).all()) and bool((two.index == two.index[:1]).all())
