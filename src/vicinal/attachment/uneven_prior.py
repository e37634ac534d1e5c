"""A prior with another number at every offset, and its values looked up pair by pair of tokens."""

import torch
from torch import Tensor

from vicinal.cells import Cells, Layout, PairLayout
from vicinal.grid import Grid
from vicinal.inspection.sites import AttentionSite
from vicinal.priors.base import Prior

__all__ = ["uneven_prior", "values_by_pair", "wraps"]

OUTSIDE = (3.0, 5.0)  # scale and bias for pairs that no window of the prior's grid holds, such as those of a wrap


def uneven_prior(heads: int, layout: Layout) -> Prior:
    """Returns a prior with another scale and bias at every offset of a layout and every head."""
    return UnevenFormula(heads, layout.grid) if isinstance(layout, PairLayout) else Uneven(heads, layout.grid)


class Uneven(Prior):
    """Another scale and bias at every offset and head."""

    def __init__(self, heads: int, grid: Grid) -> None:
        super().__init__(heads, grid)
        generator = torch.Generator().manual_seed(0)
        shape = (heads, *grid.table_shape)
        self.register_buffer("times", 0.5 + torch.rand(shape, generator=generator))
        self.register_buffer("plus", torch.randn(shape, generator=generator))

    def scale(self) -> Tensor:
        """Returns numbers between 0.5 and 1.5, `(heads, 2h-1, 2w-1)`."""
        return self.times  # type: ignore[return-value]

    def bias(self) -> Tensor:
        """Returns normal numbers, `(heads, 2h-1, 2w-1)`."""
        return self.plus  # type: ignore[return-value]


class UnevenFormula(Prior):
    """Another scale and bias at every offset, whole or fractional, and head."""

    def scale_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns numbers between 0.6 and 1.4, `(heads, *shape)`."""
        return 1 + 0.4 * torch.sin(0.9 * rows + 2.3 * columns + self._phase(rows))

    def bias_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns numbers between -1 and 1, `(heads, *shape)`."""
        return torch.cos(1.7 * rows - 0.7 * columns + 2 * self._phase(rows))

    def _phase(self, rows: Tensor) -> Tensor:
        return torch.arange(self.heads, device=rows.device, dtype=rows.dtype)[:, None, None]


def values_by_pair(prior: Prior, site: AttentionSite) -> tuple[Tensor, Tensor]:
    """Returns scale and bias of every pair of tokens, each `(windows or 1, heads, queries, keys)`."""
    layout = site.layout
    assert layout is not None
    if isinstance(layout, PairLayout):
        neutral = layout.offsets.isnan().any(-1)
        rows, columns = layout.offsets.nan_to_num().float().flatten(0, 1)[:, None].unbind(-1)
        pair = [x.view(1, -1, *neutral.shape) for x in (prior.scale_at(rows, columns), prior.bias_at(rows, columns))]  # type: ignore[union-attr]
        return pair[0].masked_fill(neutral, 1.0), pair[1].masked_fill(neutral, 0.0)
    assert isinstance(site.queries, Cells)
    index = _offset_index(site.queries, layout).to(prior.device or "cpu")
    neutral_and_outside = zip((1.0, 0.0), OUTSIDE, strict=True)
    scale, bias = (
        torch.cat([x.flatten(1), x.new_tensor(more).expand(len(x), 2)], 1)[:, index].movedim(0, 1)  # type: ignore[union-attr, arg-type]
        for x, more in zip((prior.scale(), prior.bias()), neutral_and_outside, strict=True)
    )
    return scale, bias


def _offset_index(cells: Cells, layout: Layout) -> Tensor:
    """Returns where each pair of tokens finds its offset in a flattened table, `(windows, queries, keys)`.

    Offsets are differences of cells, in steps of a window. One past the table's end stands for a pair with a token
    without a place; two past it for a pair whose offset the table does not hold.
    """
    height, width = layout.grid.height, layout.grid.width
    coordinates, placed = cells.coordinates, cells.index >= 0
    step = torch.tensor([_least_step(coordinates, placed, axis) for axis in (0, 1)])
    offset = coordinates[:, None] - coordinates[:, :, None]  # (windows, queries, keys, 2): key - query
    whole = (offset % step == 0).all(-1)
    offset = offset.div(step, rounding_mode="floor")
    # Padding has no cell: it continues the window.
    position = torch.arange(cells.tokens) if layout.position is None else layout.position
    patch = position - layout.grid.prefix
    local = torch.stack([patch.div(width, rounding_mode="floor"), patch % width], -1)
    in_window = local[None] - local[:, None]
    both = placed[:, :, None] & placed[:, None]
    offset = torch.where(both[..., None], offset, in_window)
    inside = (offset[..., 0].abs() < height) & (offset[..., 1].abs() < width) & (whole | ~both)
    index = (offset[..., 0] + height - 1) * (2 * width - 1) + offset[..., 1] + width - 1
    end = (2 * height - 1) * (2 * width - 1)
    index = torch.where(inside, index, end + 1)
    patches = patch >= 0
    return torch.where(patches[:, None] & patches, index, end)


def _least_step(coordinates: Tensor, placed: Tensor, axis: int) -> int:
    """Returns the distance of neighboring rows, or columns, of a window."""
    steps = [window[mask, axis].unique().diff() for window, mask in zip(coordinates, placed, strict=True)]
    return min((int(each.min()) for each in steps if len(each)), default=1)


def wraps(cells: Cells, layout: Layout) -> bool:
    """Returns whether some pairs of a window are farther apart than its grid."""
    return bool((_offset_index(cells, layout) > layout.grid.table_shape[0] * layout.grid.table_shape[1]).any())
