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
from vicinal.attachment.ordering import find_places
from vicinal.attachment.placing import LeftAlone, Site
from vicinal.attachment.running import Runner
from vicinal.attachment.tapping import tap
from vicinal.attachment.tiling import Places
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
    places: Places
    """Where its patches are in the image."""
    prefix: int
    """Tokens without a place: class, distillation, registers."""
    window: tuple[int, int]
    """Rows and columns of a window; all of them where attention is global."""
    single: bool
    """Whether one query reads the image, as in CaiT's class layers and attention pooling; else all tokens do."""
    image: tuple[int, int]
    """Height and width of the images, in pixels."""

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the map that its patches are cells of."""
        return self.places.size

    @property
    def cells(self) -> Tensor:
        """Cell of each patch, row by row, `(windows, patches)`; one past the last cell for padding."""
        return self.places.cells

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
        return self.places.padding

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
        return self.places.laid(seen.transpose(1, 2)).flatten(-2)

    def whole(self, weights: Tensor) -> Tensor:
        """Weights of each window, `(n, windows, queries, keys)`, over all tokens: `(n, tokens, tokens)`, as a copy.

        What goes to padding is left out, as is what padding looks at.
        """
        if self.windows == 1 and not bool(self.padding.any()):
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
    places, wrong = _places(sites, chosen, run)
    found, left_out = [], {}
    for index, site in enumerate(sites):
        if site.name not in chosen:
            continue
        try:
            if site.name in wrong:
                raise VicinalError(f"the attention of {site.name} has no map: {wrong[site.name]}")
            layer = _layer(index, site, run, places)
            check(layer)
            found.append(layer)
        except VicinalError as error:
            if layers is not None:
                raise
            left_out[site.name] = str(error)
    if not found:
        raise VicinalError(f"nothing to look at in {type(run.model).__name__}: {left_out[sites[-1].name]}")
    return found, left_out


def _places(sites: list[Site | LeftAlone], chosen: set[str], run: Runner) -> tuple[dict[str, Places], dict[str, str]]:
    """Where the patches of layers are, and why that of others cannot be told; by name.

    All layers of a class are asked if one of them is chosen, since what one shows may help with another; of those with
    global attention the first of each shape, which has mixed the image least.
    """
    own = [site for site in sites if isinstance(site, Site)]
    classes = {type(site.module) for site in own if site.name in chosen}
    asked, first = list[Site](), dict[str, str]()
    shapes: dict[tuple[Any, ...], str] = {}
    for site in own:
        if type(site.module) not in classes:
            continue
        shape = (type(site.module), site.call.logits) if site.windows == 1 else (site.name,)
        first[site.name] = shapes.setdefault(shape, site.name)
        if first[site.name] == site.name:
            asked.append(site)
    places, wrong = find_places(asked, run.image, functools.partial(disturbed, run))
    return (
        {name: places[one] for name, one in first.items() if one in places},
        {name: wrong[one] for name, one in first.items() if one in wrong},
    )


def _layer(index: int, site: Site | LeftAlone, run: Runner, places: dict[str, Places]) -> AttentionLayer:
    if isinstance(site, Site):
        grid, heads, own = site.grid, site.heads, places[site.name]
    else:
        if not (len(site.logits) == 4 and site.logits[-2] == 1 < site.logits[-1]):
            raise VicinalError(f"the attention of {site.name} has no map: {site.reason}")
        grid, heads = grid_of_one_query(site, run.image), site.logits[-3]
        own = Places((grid.height, grid.width), torch.arange(grid.patches)[None])
    return AttentionLayer(
        index=index,
        name=site.name,
        heads=heads,
        places=own,
        prefix=grid.prefix,
        window=(grid.height, grid.width),
        single=isinstance(site, LeftAlone),
        image=run.image,
    )
