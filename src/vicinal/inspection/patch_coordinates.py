"""Where the patches of a batch sit that were cut before the model was called, as NaFlex models take them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.cells import Layout, PairLayout
from vicinal.errors import VicinalError
from vicinal.grid import Grid

__all__ = ["PatchCoordinates", "given_coordinates"]


class PatchCoordinates:
    """Row and column of every patch of a batch; equal to others of the same numbers.

    Args:
        coordinates: row and column of each patch, `(images, patches, 2)`.
        valid: False for padding, `(images, patches)`; None if there is none.
    """

    def __init__(self, coordinates: Tensor, valid: Tensor | None = None) -> None:
        if coordinates.dim() != 3 or coordinates.shape[-1] != 2:
            raise VicinalError(f"patch coordinates must be (images, patches, 2), got {tuple(coordinates.shape)}")
        if valid is not None and valid.shape != coordinates.shape[:2]:
            raise VicinalError(
                f"patch validity must be (images, patches) = {tuple(coordinates.shape[:2])}, got {tuple(valid.shape)}"
            )
        places = coordinates.detach().to("cpu", torch.float64)
        padding = torch.zeros(places.shape[:2], dtype=torch.bool) if valid is None else ~valid.detach().cpu().bool()
        if (places[~padding] < 0).any():
            raise VicinalError("patch coordinates must be rows and columns from 0, got negative ones")
        if padding.all(1).any():
            raise VicinalError(f"image {padding.all(1).nonzero()[0, 0]} of the batch has no valid patch")
        self.places = places.masked_fill(padding[..., None], torch.nan)
        """Row and column, `(images, patches, 2)`; NaN for padding."""
        self._numbers = places.masked_fill(padding[..., None], -1).numpy().tobytes(), tuple(places.shape)
        self._hash = hash(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatchCoordinates) and self._hash == other._hash and self._numbers == other._numbers

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"patches cut before ({self.places.shape[1]} of each image)"

    @property
    def patches(self) -> int:
        """Number of patches of each image, padding included."""
        return self.places.shape[1]

    def is_raster(self, rows: int, columns: int) -> bool:
        """Returns whether the patches of every image are those of a grid, row by row and without padding."""
        layouts = [patch_layout(places, 0) for places, _ in self.groups()]
        return all(type(x) is Layout and x.order is None and x.grid == Grid(rows, columns) for x in layouts)

    def groups(self) -> list[tuple[Tensor, list[int]]]:
        """Returns the different places, `(patches, 2)` each, and the indices of the images whose patches sit there."""
        found: dict[bytes, list[int]] = {}
        for image, places in enumerate(self.places.nan_to_num(-1)):
            found.setdefault(places.numpy().tobytes(), []).append(image)
        return [(self.places[images[0]], images) for images in found.values()]


def patch_layout(places: Tensor, prefix: int) -> Layout:
    """Returns where the tokens of an image sit.

    Args:
        places: row and column of each patch, `(patches, 2)`; NaN for padding.
        prefix: number of tokens without a place in front of them.

    Returns:
        A `Layout` with padding among the tokens without a place, if patches fill a grid from row and column 0, in any
        order; else a `PairLayout` with the offsets of all pairs. Its grid ends at the last row and column that a patch
        is in, as that of timm's position embedding does.
    """
    valid = ~places.isnan().any(-1)
    cells = places[valid]
    rows, columns = (int(x) + 1 for x in cells.amax(0))
    index = cells[:, 0] * columns + cells[:, 1]
    whole = len(cells) == rows * columns and bool((cells == cells.round()).all())
    if not whole or not torch.equal(index.sort().values, torch.arange(len(cells), dtype=index.dtype)):
        tokens = F.pad(places, (0, 0, prefix, 0), value=torch.nan)
        return PairLayout(Grid(rows, columns), offsets=tokens[None] - tokens[:, None])
    order = torch.cat(
        [torch.arange(prefix), prefix + (~valid).nonzero()[:, 0], prefix + valid.nonzero()[:, 0][index.argsort()]]
    )
    grid = Grid(rows, columns, prefix + len(places) - len(cells))
    return Layout(grid, None if torch.equal(order, torch.arange(len(order))) else order)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def given_coordinates(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> PatchCoordinates | None:
    """Returns the coordinates of the patches that a module is given; None if it is given none.

    timm's NaFlex embedding takes `patch_coord`, rows and columns of patches, and `patch_valid`. That of SigLIP 2 in
    transformers takes `pixel_values`, patches row by row, and `spatial_shapes`, numbers of rows and columns.

    Args:
        module: whose forward is about to run.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    coordinates, valid = given.get("patch_coord"), given.get("patch_valid")
    shapes, patches = given.get("spatial_shapes"), given.get("pixel_values")
    if isinstance(shapes, Tensor) and isinstance(patches, Tensor) and patches.dim() == 3:
        number, (rows, columns) = torch.arange(patches.shape[1]), shapes.detach().cpu()[..., None].unbind(1)
        coordinates, valid = torch.stack([number // columns, number % columns], -1), number < rows * columns
    if not isinstance(coordinates, Tensor):
        return None
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise VicinalError("coordinates of patches would be constants of a trace: torch.jit.trace takes images only")
    return PatchCoordinates(coordinates, valid if isinstance(valid, Tensor) else None)
