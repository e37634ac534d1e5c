"""Where queries and keys sit that are not the same patches, from a probe that passes centers of kernels on exactly."""

from dataclasses import replace

import torch
from torch import Tensor

from vicinal.cells import Cells
from vicinal.inspection.head_layout import split_heads
from vicinal.inspection.place_tokens import Placement, decide, measured_centers
from vicinal.inspection.pooled_layout import pooled_layout
from vicinal.inspection.probe import Evidence
from vicinal.inspection.refusal import Refusal, RefusalKind

__all__ = ["needs_exact_centers", "with_exact_centers"]

MAX_LINE_ERROR = 0.35  # patches, of a line from even spacing; uneven windows lie half a patch beside even ones


def needs_exact_centers(placement: Placement, evidence: Evidence) -> bool:
    """Returns whether queries and keys have different cells, or one side may be pooled from the other."""
    queries, keys = placement.queries, placement.keys
    if isinstance(queries, Cells) and isinstance(keys, Cells):
        return not queries.same_as(keys)
    return bool(evidence.pools) and (isinstance(queries, Cells) or isinstance(keys, Cells))


def with_exact_centers(placement: Placement, evidence: Evidence, aspect: float) -> Placement:
    """Returns a placement with the exact centers of lines, or with the offsets that a pooling explains.

    Args:
        placement: from probes that spread differences evenly.
        evidence: of the probe that passes them on to the centers of kernels.
        aspect: height / width of the image.
    """
    if not needs_exact_centers(placement, evidence):
        return placement
    exact = decide(evidence, aspect)
    pairs = pooled_layout(exact, evidence, aspect)
    if pairs is not None and (
        _same_patches(placement.queries, exact.queries) or _same_patches(placement.keys, exact.keys)
    ):
        return replace(exact, pairs=pairs)
    queries, keys = placement.queries, placement.keys
    if not isinstance(queries, Cells) or not isinstance(keys, Cells):
        return placement
    lines = _exact_lines(placement, exact, evidence)
    if lines is not None:
        return replace(placement, queries=lines[0], keys=lines[1])
    unclear = f"its {queries.tokens} queries ({queries}) and {keys.tokens} keys ({keys}) do not sit on even lines"
    return replace(placement, pairs=Refusal(RefusalKind.POOLED, unclear))


def _exact_lines(placement: Placement, exact: Placement, evidence: Evidence) -> tuple[Cells, Cells] | None:
    """Returns queries and keys with exact lines, if both probes found the same cells and tokens lie on them."""
    if placement.layout != exact.layout or isinstance(exact.queries, Refusal) or isinstance(exact.keys, Refusal):
        return None
    patch = torch.minimum(exact.queries.distance, exact.keys.distance)
    found = []
    for one, two, responses in (
        (placement.queries, exact.queries, evidence.queries[0]),
        (placement.keys, exact.keys, evidence.keys[0]),
    ):
        same = isinstance(one, Cells) and one.same_as(two)
        if not same or not _on_lines(two, split_heads(exact.layout, responses).sum(2), patch):
            return None
        found.append(two)
    return found[0], found[1]


def _on_lines(cells: Cells, responses: Tensor, patch: Tensor) -> bool:
    """Returns whether rows and columns of tokens lie on the lines of their cells, on average over each line.

    Args:
        cells: with the measured lines.
        responses: `(RAMPS, windows, tokens)`.
        patch: height and width of a patch of the finer side, as parts of the image, `(2,)`.
    """
    placed = cells.index >= 0
    apart = ((measured_centers(responses)[0] - cells.centers) / patch)[placed]
    for axis in (0, 1):
        line = cells.coordinates[placed][:, axis]
        means = torch.zeros(int(line.max()) + 1, dtype=apart.dtype).index_add(0, line, apart[:, axis]) / line.bincount()
        if not bool((means.abs() < MAX_LINE_ERROR).all()):
            return False
    return True


def _same_patches(one: Cells | Refusal, two: Cells | Refusal) -> bool:
    """Returns whether tokens have the same cells, the same in all windows; `one` may count heads as windows."""
    if not isinstance(one, Cells) or not isinstance(two, Cells):
        return False
    same = (one.rows, one.columns, one.tokens) == (two.rows, two.columns, two.tokens)
    return same and bool((one.index == two.index[:1]).all()) and bool((two.index == two.index[:1]).all())
