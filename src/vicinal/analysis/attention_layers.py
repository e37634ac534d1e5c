"""Where the tokens of each attention layer sit: patches are cells of a map of the image.

Windows are traced back to the cells that they were cut from, so that shifted, padded and dilated ones are no special
case for those who read attention.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vicinal.attachment.choosing import Layers, choose
from vicinal.attachment.examining import disturbed
from vicinal.attachment.mapping import grid_of_one_query
from vicinal.attachment.ordering import check_order, folding
from vicinal.attachment.placing import LeftAlone, Site
from vicinal.attachment.running import Runner
from vicinal.attachment.tapping import tap
from vicinal.errors import VicinalError
from vicinal.grid import Grid

__all__ = ["AttentionLayer", "find_layers"]


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer, and where its tokens sit."""

    index: int
    """Among the model's attention layers, from 0."""
    name: str
    heads: int
    size: tuple[int, int]
    """Rows and columns of the map that its patches are cells of."""
    prefix: int
    """Tokens without a place: class, distillation, registers."""
    cells: Tensor
    """Cell of each patch, row by row, `(windows, patches)`; one past the last cell for padding."""
    window: tuple[int, int]
    """Rows and columns of a window; all of them where attention is global."""
    single: bool
    """Whether one query reads the image, as in CaiT's class layers and attention pooling; else all tokens do."""
    image: tuple[int, int]
    """Height and width of the images, in pixels."""

    @property
    def patch(self) -> tuple[float, float]:
        """Height and width of a patch, in pixels."""
        return self.image[0] / self.size[0], self.image[1] / self.size[1]

    @property
    def windows(self) -> int:
        """Into how many the map is cut; 1 where attention is global."""
        return self.cells.shape[0]

    @property
    def keys(self) -> int:
        """Tokens that a query may look at."""
        return self.prefix + self.cells.shape[1]

    @property
    def padding(self) -> Tensor:
        """Which patches of each window are none of the image: `(windows, patches)`."""
        return self.cells == self.size[0] * self.size[1]

    @property
    def rolled(self) -> Tensor:
        """Which pairs of patches came into one window over the image's edge: `(windows, patches, patches)`.

        One is above or to the left of the other in the window, and not so in the image.
        """
        in_image = torch.stack([self.cells // self.size[1], self.cells % self.size[1]], -1)
        in_window = Grid(*self.window).coordinates().expand_as(in_image)
        order = [(at[:, :, None] - at[:, None]).sign() for at in (in_image, in_window)]
        return (order[0] != order[1]).any(-1)

    def laid(self, seen: Tensor) -> Tensor:
        """Attention to each patch of each window, `(n, windows, heads, patches)`, on the map: `(n, heads, cells)`."""
        laid = seen.new_zeros(seen.shape[0], seen.shape[2], self.size[0] * self.size[1] + 1)
        laid[:, :, self.cells.flatten()] = seen.transpose(1, 2).flatten(2)
        return laid[..., :-1]

    def whole(self, weights: Tensor) -> Tensor:
        """Weights of each window, `(n, windows, queries, keys)`, over all tokens: `(n, tokens, tokens)`, as a copy.

        What goes to padding is left out, as is what padding looks at.
        """
        if self.windows == 1:
            return weights[:, 0].clone()
        cells = self.size[0] * self.size[1]
        whole = weights.new_zeros(len(weights), cells + 1, cells + 1)
        whole[:, self.cells[:, :, None], self.cells[:, None]] = weights
        return whole[:, :-1, :-1].contiguous()


def find_layers(
    run: Runner, layers: Layers | None, check: Callable[[AttentionLayer], object]
) -> tuple[list[AttentionLayer], dict[str, str]]:
    """The layers asked for, in the order in which they run; and why others are left out, by name.

    Args:
        run: the model, in evaluation mode, and the images that it takes; it runs on noise.
        layers: as for `tap`. All by default, and then those that have no map are left out; one that is asked for and
            has none is an error.
        check: raises for a layer that is of no use for other reasons.
    """
    sites = tap(run.model, None, example=run.noise(1)).layers
    chosen = {site.name for site in choose(sites, layers)}
    out_of_order = _out_of_order(sites, chosen, run)
    found, left_out = [], {}
    for index, site in enumerate(sites):
        if site.name not in chosen:
            continue
        try:
            if site.name in out_of_order:
                raise VicinalError(f"the attention of {site.name} has no map: {out_of_order[site.name]}")
            layer = _layer(index, site, run)
            check(layer)
            found.append(layer)
        except VicinalError as error:
            if layers is not None:
                raise
            left_out[site.name] = str(error)
    if not found:
        raise VicinalError(f"nothing to look at in {type(run.model).__name__}: {left_out[sites[-1].name]}")
    return found, left_out


def _out_of_order(sites: list[Site | LeftAlone], chosen: set[str], run: Runner) -> dict[str, str]:
    """Why the tokens of some global layers are not where they should be, by name; `folding` asks windows.

    Asked of the first layer of each shape, which has mixed the image least. A class that holds its tokens in order in
    one of them is trusted with others that cannot be told, so its windows are asked too.
    """
    wanted = [site for site in sites if isinstance(site, Site) and site.windows == 1 and site.name in chosen]
    classes, first = {type(site.module) for site in wanted}, dict[tuple[Any, ...], Site]()
    for site in sites:
        if isinstance(site, Site) and type(site.module) in classes:
            first.setdefault((type(site.module), site.call.logits), site)
    wrong = check_order(list(first.values()), run.image, functools.partial(disturbed, run))
    firsts = {site.name: first[type(site.module), site.call.logits].name for site in wanted}
    return {name: wrong[asked] for name, asked in firsts.items() if asked in wrong}


def _layer(index: int, site: Site | LeftAlone, run: Runner) -> AttentionLayer:
    if isinstance(site, LeftAlone):
        if not (len(site.logits) == 4 and site.logits[-2] == 1 < site.logits[-1]):
            raise VicinalError(f"the attention of {site.name} has no map: {site.reason}")
        grid, heads, cells = grid_of_one_query(site, run.image), site.logits[-3], None
    else:
        grid, heads, cells = site.grid, site.heads, _cells(site, run) if site.windows > 1 else None
    if cells is None:
        size, places = (grid.height, grid.width), torch.arange(grid.patches)[None]
    else:
        size, places = cells
    return AttentionLayer(
        index=index,
        name=site.name,
        heads=heads,
        size=size,
        prefix=grid.prefix,
        cells=places,
        window=(grid.height, grid.width),
        single=isinstance(site, LeftAlone),
        image=run.image,
    )


def _cells(site: Site, run: Runner) -> tuple[tuple[int, int], Tensor]:
    """Size of the map that windows were cut from, and the cell of each patch in each window."""
    fold = folding(site, run.image, functools.partial(disturbed, run))
    tokens = torch.arange(site.windows * site.grid.patches)
    laid = fold(tokens.view(1, site.windows, -1))[0]
    cells = torch.full_like(tokens, laid.numel())
    cells[laid.flatten()] = torch.arange(laid.numel())
    return (laid.shape[0], laid.shape[1]), cells.view(site.windows, -1)
