"""Where the tokens of an attention sit on the image of the current call, which can have another size than inspected."""

import torch
from torch import Tensor

from vicinal.cells import Cells, Layout, PairLayout, TokenLines
from vicinal.errors import VicinalError
from vicinal.inspection.image_context import UNKNOWN, ImageSizeHook, NotedSize, noted_size, size_text
from vicinal.inspection.model_inspection import Inspection, without_priors
from vicinal.inspection.model_runner import eval_without_side_effects, in_full_precision
from vicinal.inspection.sites import AttentionSite
from vicinal.inspection.size_rule import KnownSize, SizeRule, grid_at, lines_at, probe_other_size, size_rule

__all__ = ["ImageWatch", "cells_at", "disable_fast_path", "find_size_rule", "patch_queries"]


class ImageWatch:
    """Notes the size of the images that an inspected model runs on, between `open` and `close`.

    Args:
        inspection: of the model.
    """

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        shape = inspection.runner.shape
        self._hook = ImageSizeHook(len(shape) + 1, shape[0])

    def open(self) -> None:
        """Starts to note."""
        self._hook.register(list(self._inspection.image_modules))

    def close(self) -> None:
        """Stops to note; the last size stays known."""
        self._hook.remove(self._inspection.runner.model)

    @property
    def inspected(self) -> tuple[int, int]:
        """Height and width of the images that the model was inspected on, where the size is noted."""
        return next(iter(self._inspection.image_modules.values()), self._inspection.runner.image)

    @property
    def other(self) -> NotedSize | None:
        """Size of the last image, if the model was inspected on none of that size; else None."""
        noted, sizes = noted_size(self._hook.key), self._inspection.image_modules.values()
        return noted if noted is not None and sizes and noted not in sizes else None

    def unknown_places(self, name: str) -> VicinalError:
        """Returns an error: tokens of a site, by name, sit in unknown places on the last image."""
        size, (height, width) = self.other or UNKNOWN, self._inspection.runner.image
        if size == UNKNOWN:
            return VicinalError(f"this call gave the model no image, so the places of tokens in {name} are not known")
        return VicinalError(
            f"the model was inspected on images of {height} x {width}, got {size_text(size)}, and where tokens of "
            f"{name} sit there is not known: give the img_size in use"
        )


def find_size_rule(inspection: Inspection, site: AttentionSite) -> SizeRule:
    """Returns how the grid of a site changes with the image; the model runs at another size, if that is not known."""
    if site.layout is None or site.name in inspection.size_rules:
        return inspection.size_rules.get(site.name, SizeRule.UNKNOWN)
    runner = inspection.runner
    with eval_without_side_effects(runner.model), without_priors(runner.model), in_full_precision(runner.model):
        other = probe_other_size(runner, inspection.sites)
    if other is None:
        return SizeRule.UNTRIED
    other_runner, found = other
    there = next((each for each in found if each.name == site.name), None)
    return size_rule(site, runner.image, there, other_runner.image, verified=True)


def cells_at(
    site: AttentionSite,
    rule: SizeRule,
    before: tuple[int, int],
    image: tuple[int, int],
    queries: int,
    keys: int,
) -> tuple[Cells, Cells] | None:
    """Returns the cells of queries and keys on images of another size; None if they are not known.

    They are known where tokens stand row by row on even lines over the whole image, and their grid follows it.

    Args:
        site: on images of the size `before`.
        rule: how its grid changes.
        before: height and width.
        image: height and width now.
        queries: number of queries now.
        keys: number of keys now.
    """
    layout = site.layout
    if layout is None or site.windows > 1 or image == UNKNOWN:
        return None
    if rule not in (SizeRule.FOLLOWS, SizeRule.UNTRIED):
        return None
    if isinstance(layout, PairLayout):
        lines = None if layout.lines is None else lines_at(rule, layout.lines, before, image, (queries, keys))
        sides = [] if lines is None else [_cells(side) for side in lines if isinstance(side, TokenLines)]
        return (sides[0], sides[1]) if len(sides) == 2 else None
    if not layout.is_raster or queries != keys:
        return None
    known = KnownSize(before, layout.grid, (layout.grid.height, layout.grid.width))
    grid = grid_at(SizeRule.FOLLOWS, known, image, keys)
    if grid is None:
        return None
    cells = _cells(TokenLines(grid.height, grid.width, (0, 0), (1, 1), layout.prefix, layout.suffix))
    return cells, cells


def patch_queries(site: AttentionSite, count: int) -> Tensor | None:
    """Returns which of a site's queries are patches in some window, `(patches,)`; None if queries have no places.

    Args:
        site: as inspected.
        count: number of queries; another one than inspected is that of an image of another size.
    """
    cells, layout = site.queries, site.layout
    if not isinstance(cells, Cells):
        return None
    if count == cells.tokens:
        return (cells.index >= 0).any(0).nonzero()[:, 0]
    side = layout.lines[0] if isinstance(layout, PairLayout) and layout.lines else layout
    if not isinstance(side, TokenLines) and not (isinstance(side, Layout) and side.is_raster):
        raise VicinalError(
            f"{site.name} has {count} queries, {cells.tokens} when it was inspected: give the img_size in use"
        )
    return torch.arange(side.prefix, count - side.suffix)


def _cells(lines: TokenLines) -> Cells:
    """Returns the cells of tokens that stand row by row."""
    index = torch.full((1, lines.tokens), -1)
    count = lines.rows * lines.columns
    index[0, lines.prefix : lines.prefix + count] = torch.arange(count)
    return Cells(lines.rows, lines.columns, index)


def disable_fast_path(*_: object) -> None:
    """Does nothing. `nn.TransformerEncoderLayer` bypasses `self_attn.forward`, unless a submodule has hooks."""
