"""From the evidence of a probe to the cell of every token, or a refusal: pure functions that need no model.

There is no tolerance for misfits: every cell of a lattice holds exactly one token, and no token lies far from its cell.
Whatever does not fit is refused.
"""

import itertools
import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.cells import Cells, PairLayout
from vicinal.inspection.head_layout import Factor, HeadLayout, split_heads
from vicinal.inspection.lattice import PROBE_LIMITS, all_near, full_lattice, overlapping_lattice
from vicinal.inspection.probe import Evidence
from vicinal.inspection.refusal import Refusal, RefusalKind

__all__ = ["Placement", "decide", "measured_centers", "place_side"]

MIN_RESPONSE = 1e-12  # of a token's squared length; less is rounding
MIN_RELATIVE_RESPONSE = 1e-4  # of the mean response; most tokens may be padding or have no place
MIN_CENTER_STD = 0.02  # parts of the image: tokens whose centers differ by less all follow the whole image
MIN_LATTICE_STD = 0.1  # parts of the image: no lattice over an image has less along both axes
# In cells:
MAX_HEAD_SHIFT = 0.16  # rms distance of the mean centers of different heads
MAX_HEAD_DISTANCE = 0.3  # rms distance of a token's centers in different heads


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the heads of an attention are in its logits, and where its queries and keys sit."""

    layout: HeadLayout
    queries: Cells | Refusal
    keys: Cells | Refusal
    pairs: PairLayout | Refusal | None = None
    """Offsets between queries and keys, if the pooling is known that made one side from the patches of the other; or
    why they are not clear."""


def decide(evidence: Evidence, aspect: float) -> Placement:
    """Decides where tokens sit.

    Args:
        evidence: responses of one attention.
        aspect: height / width of the image.

    Returns:
        The layout of the heads, and the cells of queries and keys, each or why there are none.
    """
    if evidence.image_axis is None:
        shape = " x ".join(map(str, evidence.call.logits))
        refusal = Refusal(
            RefusalKind.UNREAD, f"no axis of its logits {shape} counts images, so tokens cannot be traced to the image"
        )
        return Placement(HeadLayout(()), refusal, refusal)
    sides = [torch.stack(each) for each in (evidence.queries, evidence.keys)]
    layout = _find_heads([side.sum(0) for side in sides], evidence, aspect)
    queries, keys = (
        place_side(torch.stack([split_heads(layout, probe).sum(2) for probe in side]), aspect, what)
        for side, what in zip(sides, ("queries", "keys"), strict=True)
    )
    return Placement(layout, queries, keys)


def measured_centers(responses: Tensor) -> tuple[Tensor, Tensor]:
    """Returns centers `(..., 2)` as parts of the image, and which tokens respond `(...)`, from `(RAMPS, ...)`."""
    responses = responses.nan_to_num(0.0, 0.0, 0.0)
    strength = responses.sum(0)
    audible = strength[strength > MIN_RESPONSE]
    least = max(MIN_RESPONSE, MIN_RELATIVE_RESPONSE * float(audible.mean())) if len(audible) else math.inf
    down, up, right, left = responses.unbind(0)
    centers = torch.stack([down / (down + up), right / (right + left)], -1).nan_to_num(0.5)
    return centers, strength > least


def _find_heads(sides: list[Tensor], evidence: Evidence, aspect: float) -> HeadLayout:
    """Returns which axes count heads: as many as tokens keep their centers along, all of them taken together.

    Args:
        sides: responses of queries and keys, `(RAMPS, *leading, tokens)`.
        evidence: says which axis counts images.
        aspect: height / width of the image.
    """
    assert evidence.image_axis is not None
    image_axis, fastest = evidence.image_axis
    options: list[list[tuple[tuple[Factor, int], ...]]] = []
    for axis, size in enumerate(sides[0].shape[1:-1]):
        if axis == image_axis:
            images = ((Factor.IMAGES, evidence.images),)
            options.append([others + images if fastest else images + others for others in _splits(size)])
        else:
            options.append([((Factor.WINDOWS, size),), *([((Factor.HEADS, size),)] if size > 1 else [])])
    # Where heads have an axis of their own, what is alike beside images are windows, such as frames of a video.
    layouts = [
        HeadLayout(axes)
        for axes in itertools.product(*options)
        if not _counts_heads(axes[image_axis]) or sum(map(_counts_heads, axes)) == 1
    ]
    layouts.sort(key=lambda each: (each.logit_heads == 1, _counts_heads(each.axes[image_axis]), -each.logit_heads))
    # The last one has no heads, so its indices always agree.
    return next(each for each in layouts if all(_agree(split_heads(each, side), aspect) for side in sides))


def _counts_heads(axis: tuple[tuple[Factor, int], ...]) -> bool:
    return any(factor is Factor.HEADS for factor, _ in axis)


def _splits(size: int) -> list[tuple[tuple[Factor, int], ...]]:
    """Returns the factors that an axis may have which counts heads and windows together with images."""
    splits: list[tuple[tuple[Factor, int], ...]] = [((Factor.WINDOWS, size),), ((Factor.HEADS, size),)]
    if size == 1:
        return [()]
    for heads in (n for n in range(2, size) if size % n == 0):
        pair = (Factor.WINDOWS, size // heads), (Factor.HEADS, heads)
        splits += [pair, pair[::-1]]
    return splits


def _agree(responses: Tensor, aspect: float) -> bool:
    """Returns whether tokens have the same centers in all heads, from responses `(RAMPS, windows, heads, tokens)`.

    If the heads were windows instead, all tokens of one would be shifted from those of another, by at least a quarter
    of the distance of neighbors, rms.
    """
    if responses.shape[2] == 1:
        return True
    centers, heard = measured_centers(responses.movedim(2, 1))
    if not bool((heard == heard[:1]).all()):
        return False
    everywhere = heard.all(0)
    if not bool(everywhere.any()):
        return True
    centers = centers * centers.new_tensor([aspect, 1.0])  # the same unit along both axes
    mean = centers.mean(0)  # (windows, tokens, 2)
    windows = [(centers - mean)[:, window, mask] for window, mask in enumerate(everywhere) if bool(mask.any())]
    shift = torch.stack([apart.mean(1) for apart in windows]).square().mean((0, 1)).sqrt().max()
    distance = torch.cat(windows, 1).square().mean((0, 1)).sqrt().max()
    spacing = _spacing(mean[everywhere])
    # Where windows overlap, tokens are closer than neighbors in a window are.
    # The median, since a window that wraps around an edge is torn apart.
    own = statistics.median(
        _spacing(points[mask]) for points, mask in zip(mean, everywhere, strict=True) if bool(mask.any())
    )
    return bool(shift <= MAX_HEAD_SHIFT * spacing and distance <= MAX_HEAD_DISTANCE * max(own, spacing))


def _spacing(points: Tensor) -> float:
    """Returns the distance of neighbors, if points `(n, 2)` fill a rectangle evenly."""
    extent = points.std(0, correction=0) * math.sqrt(12)
    return max(math.sqrt(float(extent.prod()) / len(points)), float(extent.max()) / len(points))


def place_side(probes: Tensor, aspect: float, what: str) -> Cells | Refusal:
    """Returns the cells of one side, from responses `(probes, RAMPS, windows, tokens)`."""
    windows = probes.shape[2]
    centers, heard = measured_centers(probes.sum(0))
    if not bool(heard.any()):
        return Refusal(RefusalKind.SILENT, f"its {what} follow no place of the image")
    if windows > 1 and _agree(probes.sum(0)[:, None], aspect):  # every window has the same tokens
        probes = probes.sum(2, keepdim=True)
        centers, heard = measured_centers(probes.sum(0))
    points = centers[heard]
    if len(points) == 1 or float(points.std(0, correction=0).max()) < MIN_CENTER_STD:
        return Refusal(RefusalKind.SPREAD, f"each of its {what} follows the whole image")
    lattice = full_lattice(points, aspect) or overlapping_lattice(points, heard, aspect)
    in_each = [measured_centers(one)[0][heard].std(0, correction=0) for one in probes]
    if lattice is None and float(torch.stack(in_each).max()) < MIN_LATTICE_STD:
        return Refusal(RefusalKind.SPREAD, f"each of its {what} follows the whole image")
    if lattice is None:
        return Refusal(RefusalKind.IRREGULAR, f"its {len(points)} {what} that follow the image form no lattice over it")
    pitch = torch.tensor(lattice.pitch, dtype=points.dtype)
    apart = torch.stack([(measured_centers(one)[0][heard] - lattice.centers) / pitch for one in probes]).abs().amax(2)
    if not all_near(apart.amax(0), lattice, PROBE_LIMITS):
        return Refusal(RefusalKind.CONTENT, f"the places of its {what} depend on the content of the image")
    index = torch.full(heard.shape, -1)
    index[heard] = lattice.cells
    return Cells(lattice.rows, lattice.columns, index.expand(windows, -1), lattice.origin, lattice.pitch)
