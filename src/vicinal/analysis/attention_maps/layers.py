"""Attention layers that can be read as maps of the image, with the cells of their tokens.

Tokens can be in any order, and some have no cell: class tokens, registers, padding. Everything here is indexed by
`Cells`, so that shifted, padded and dilated windows need no case of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.cells import Cells, PairLayout
from vicinal.errors import VicinalError
from vicinal.inspection.layer_selection import Layers, select_layers
from vicinal.inspection.model_inspection import Inspection
from vicinal.inspection.patch_attention import check_has_map, reads_image
from vicinal.inspection.sites import AttentionSite

__all__ = ["AttentionLayer", "find_layers"]


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer that has a map, with the cells of its tokens."""

    index: int
    """Index among the model's attention layers, from 0."""
    site: AttentionSite
    cells: Cells
    """Cells of the keys: those of the map."""
    single: bool
    """Whether one query reads the image, as in CaiT's class layers and attention pooling; else all tokens do."""
    image: tuple[int, int]
    """Height and width of the images, in pixels."""

    @property
    def query_cells(self) -> Cells:
        """Cells of the queries; those of the keys, if a single query reads the image."""
        queries = self.site.queries
        return queries if isinstance(queries, Cells) and not self.single else self.cells

    @property
    def pooled(self) -> bool:
        """Whether queries and keys are in different cells, as with pooled keys and halos."""
        return not self.query_cells.same_as(self.cells)

    @property
    def name(self) -> str:
        """Name of the site."""
        return self.site.name

    @property
    def heads(self) -> int:
        """Number of attention maps that a tap reads here: one for each head of each softmax."""
        combined = self.site.softmaxes > 1 and not self.site.fused  # read where they meet the values, as one
        return self.site.head_layout.logit_heads * (1 if combined else len(self.site.steps))

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the map."""
        return self.cells.rows, self.cells.columns

    @property
    def query_size(self) -> tuple[int, int]:
        """Rows and columns of the queries' cells."""
        return self.query_cells.rows, self.query_cells.columns

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches: of the finer of queries and keys."""
        return max(self.size[0], self.query_size[0]), max(self.size[1], self.query_size[1])

    @property
    def patch(self) -> tuple[float, float]:
        """Height and width of a patch, in pixels."""
        return self.image[0] / self.grid[0], self.image[1] / self.grid[1]

    @property
    def windows(self) -> int:
        """Number of windows that the map is divided into; 1 if attention is global."""
        return self.cells.windows

    @property
    def keys(self) -> int:
        """Number of tokens that a query can attend to, those without a place included."""
        return self.cells.tokens

    @property
    def placed(self) -> Tensor:
        """Returns which keys of each window have a place in the image, bool `(windows, keys)`."""
        return self.cells.index >= 0

    @property
    def placed_queries(self) -> Tensor:
        """Returns which queries of each window have a place in the image, bool `(windows, queries)`."""
        return self.query_cells.index >= 0

    @property
    def offsets(self) -> Tensor:
        """Returns rows and columns from each query to each key in patches, `(windows or 1, queries, keys, 2)`.

        They are meaningless if one of the two has no place.

        Raises:
            VicinalError: if queries and keys are in different cells whose distance is not known.
        """
        if not self.pooled:
            places = self.cells.coordinates.double()
            return places[:, None] - places[:, :, None]
        if not isinstance(self.site.layout, PairLayout):
            raise VicinalError(f"{self.name} has no distances: {self.site.reason}")
        return self.site.layout.offsets.double().nan_to_num()[None]

    @property
    def prefix(self) -> int:
        """Number of tokens that have no place in any window: class, distillation, registers."""
        return int((~self.placed).all(0).sum())

    @property
    def padding(self) -> Tensor:
        """Returns which tokens are patches in other windows and have no place in theirs, bool `(windows, tokens)`."""
        return ~self.placed & self.placed.any(0)

    @property
    def wrapped(self) -> Tensor:
        """Returns which pairs of tokens came into one window across the image's edge, bool `(windows, tokens, tokens)`.

        Rows, or columns, of a window that are farther apart than those of other windows are on two sides of the edge.
        None are returned if keys are pooled.
        """
        if self.pooled:
            return torch.zeros(self.windows, self.query_cells.tokens, self.keys, dtype=torch.bool)
        pairs = torch.zeros(self.windows, self.keys, self.keys, dtype=torch.bool)
        for axis in (0, 1):
            lines = self.cells.coordinates[..., axis].contiguous()
            used = [each[each >= 0].unique() for each in lines]
            step = min((int(each.diff().min()) for each in used if len(each) > 1), default=1)
            for window, (line, own) in enumerate(zip(lines, used, strict=True)):
                starts = own[1:][own.diff() > step]  # first line after each gap
                side = torch.bucketize(line, starts, right=True)
                pairs[window] |= side[:, None] != side
        both = self.placed[:, :, None] & self.placed[:, None]
        return pairs & both

    @property
    def order(self) -> Tensor:
        """Returns the token at each position of the map's sequence, `(tokens,)`, where attention is global.

        Tokens without a place come first, then the cells, row by row.
        """
        return self.cells.index[0].argsort(stable=True)

    def over_all_tokens(self, weights: Tensor) -> Tensor:
        """Returns weights of all windows, `(n, windows, queries, keys)`, as one matrix each: `(n, tokens, tokens)`.

        Tokens are in the order of the map, those without a place first. Padding is left out. A copy is returned.
        """
        if self.windows == 1:
            order = self.order.to(weights.device)
            return weights[:, 0].index_select(1, order).index_select(2, order)
        cells = self.size[0] * self.size[1]
        index = torch.where(self.placed, self.cells.index, cells).to(weights.device)
        pairs = (index[:, :, None] * (cells + 1) + index[:, None]).flatten()
        whole = weights.new_zeros(len(weights), (cells + 1) ** 2).index_add(1, pairs, weights.flatten(1))
        square: Tensor = whole.unflatten(1, (cells + 1, cells + 1))
        times = index.flatten().bincount(minlength=cells + 1)[:cells, None].clamp(min=1)  # windows can overlap
        return square[:, :cells, :cells] / times


def find_layers(
    inspection: Inspection, layers: Layers | None, check: Callable[[AttentionLayer], object]
) -> tuple[list[AttentionLayer], dict[str, str]]:
    """Returns the layers that are asked for, in the order in which they run; and why others are left out, by name.

    Args:
        inspection: that of the model.
        layers: as for `tap`. All by default; those that have no map are then left out.
        check: raises VicinalError for a layer that cannot be used for another reason.

    Raises:
        VicinalError: if a layer is asked for and has no map, or if no layer is left.
    """
    sites = inspection.sites
    chosen = select_layers(sites, layers)
    found, left_out = [], {}
    for index, site in enumerate(sites):
        if site not in chosen:
            continue
        try:
            check_has_map(site)
            assert isinstance(site.keys, Cells)
            layer = AttentionLayer(index, site, site.keys, reads_image(site), inspection.runner.image)
            check(layer)
            found.append(layer)
        except VicinalError as error:
            if layers is not None:
                raise
            left_out[site.name] = str(error)
    if not found:
        kind = type(inspection.runner.model).__name__
        raise VicinalError(f"{kind} has no attention layer to read: {left_out[sites[-1].name]}")
    return found, left_out
