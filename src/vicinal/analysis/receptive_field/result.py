"""A measured receptive field: its figures, the Gaussian that is nearest to it, and its file."""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.gaussian_fit import NARROW, GaussianFit, fit_gaussian
from vicinal.analysis.receptive_field.position_change import Positions
from vicinal.errors import VicinalError

__all__ = ["SHARES", "Mode", "ReceptiveField"]

Mode = Literal["clip", "abs"]
SHARES = (0.2, 0.3, 0.5, 0.99)
"""Of the energy, for which `ReceptiveField.as_dict` gives the centred square."""
FITTED = 64  # cells a side at most that a Gaussian is fitted to: more take seconds


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """What one patch of a layer depends on. Lengths are in pixels, unless they say patches.

    A patch is a cell of the layer's grid when that is laid over the image. The field's centre is the patch's centre,
    also where the grid is even, so that no patch is in the middle of the image, and where the padding of convolutions
    moves what a patch sees by a part of it, which `fit` tells.
    """

    field: NDArray[np.float64]
    """Energy of each pixel, `(height, width)`, of sum 1."""
    model: str
    layer: str
    """Name of the module."""
    at: tuple[int, int]
    """Row and column of the patch."""
    grid: tuple[int, int]
    """Rows and columns of the layer's grid."""
    stem: tuple[int, int]
    """Rows and columns of the finest grid on the way to the layer: the same in a ViT, that of stage one in Swin."""
    images: int
    """How many it is the mean of."""
    mode: Mode
    positions: Positions
    changed: tuple[str, ...] = ()
    """Names of the positions that were made random or zero."""
    rotary_stay: bool = False
    """Whether the model has rotary positions that stayed while others were changed."""

    @property
    def patch(self) -> tuple[float, float]:
        """Height and width of a patch."""
        return self.field.shape[0] / self.grid[0], self.field.shape[1] / self.grid[1]

    @property
    def centre(self) -> tuple[float, float]:
        """The patch's centre, down and to the right from the image's upper left corner."""
        return (self.at[0] + 0.5) * self.patch[0], (self.at[1] + 0.5) * self.patch[1]

    @property
    def outside_centre_patch(self) -> float:
        """Share of the energy that is not in the patch itself."""
        return float(1 - self.by_patch[self.at])

    def square(self, share: float) -> float:
        """Side of the smallest square of whole pixels, centred on the patch, that holds a share of the energy.

        It may stick out of the image, the more so the farther the patch is from the image's centre.
        """
        if not 0 < share <= 1:
            raise VicinalError(f"a share of the energy is above 0 and at most 1, given {share}")
        sides, shares = self.within
        return float(sides[min(int(np.searchsorted(shares, share - 1e-9)), len(sides) - 1)])

    @cached_property
    def within(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sides of centred squares, and the share of the energy in each, both rising."""
        down, right = (
            2 * np.abs(np.arange(n) + 0.5 - c) + 1 for n, c in zip(self.field.shape, self.centre, strict=True)
        )
        # rounded, because patches of no whole number of pixels give sides that differ in the last digit
        sides, index = np.unique(np.maximum(down[:, None], right).round(9), return_inverse=True)
        return sides, np.bincount(index.ravel(), self.field.ravel()).cumsum()

    @property
    def across(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Columns of the stem's grid: their distance to the right of the patch, and their energy (mean column = 1)."""
        columns = self.stem[1]
        places = (np.arange(columns) + 0.5) * self.field.shape[1] / columns - self.centre[1]
        return places, self.by_cell(self.stem)[0].sum(0) * columns

    @property
    def by_patch(self) -> NDArray[np.float64]:
        """Energy of each patch, `(rows, columns)`, of sum 1."""
        return self.by_cell(self.grid)[0]

    def by_cell(self, grid: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Energy of each cell of a grid that is laid over the image, `(rows, columns)`; and the cells' pixels."""
        down, right = (_overlap(n, count) for n, count in zip(self.field.shape, grid, strict=True))
        return down @ self.field @ right.T, np.outer(down.sum(1), right.sum(1))

    @cached_property
    def fit(self) -> GaussianFit:
        """The 2-D Gaussian that is nearest to the field, in pixels; its centre is told from the patch's.

        It is fitted to the cells of the stem's grid, because inside of those one sees the weights of an embedding and
        not how far a layer looks; to 64 x 64 cells at most. Their own width is taken out of the Gaussian's, unless it
        is too narrow to tell: see `narrow`. Where the constant holds most of the energy, the note says so.
        """
        fit, high, wide = self._by_cell
        over = f"over a constant that holds {fit.offset * self.field.size:.0%} of the energy"
        notes = [fit.note, over if fit.fits and fit.amplitude > 0 and fit.offset * self.field.size > 0.5 else None]
        return replace(
            fit,
            sigma_x=_without_cell(fit.sigma_x, wide),
            sigma_y=_without_cell(fit.sigma_y, high),
            centre_x=(fit.centre_x + 0.5) * wide - self.centre[1],
            centre_y=(fit.centre_y + 0.5) * high - self.centre[0],
            note="; ".join(filter(None, notes)) or None,
        )

    @property
    def narrow(self) -> dict[str, bool]:
        """Whether `sigma_x` and `sigma_y` of the fit are only the most that they may be."""
        fit, _, _ = self._by_cell
        return {"sigma_x": fit.sigma_x < NARROW, "sigma_y": fit.sigma_y < NARROW}

    @cached_property
    def _by_cell(self) -> tuple[GaussianFit, float, float]:
        """The Gaussian in cells, and a cell's height and width in pixels."""
        rows, columns = (min(FITTED, count) for count in self.stem)
        energy, pixels = self.by_cell((rows, columns))
        fit = fit_gaussian(energy / pixels, centre=(0, 0))
        return fit, self.field.shape[0] / rows, self.field.shape[1] / columns

    @property
    def constant_share(self) -> float:
        """Share of the energy that is in the fit's constant, and not in its Gaussian."""
        return self.fit.offset * self.field.size

    def as_dict(self) -> dict[str, Any]:
        """All figures and the two profiles, for JSON; NaN is None. The field itself is what `save` is for."""
        (high, wide), fit = self.patch, asdict(self.fit)
        squares = [{"share": share, "pixels": self.square(share)} for share in SHARES]
        figures = {
            "model": self.model,
            "layer": self.layer,
            "at": self.at,
            "grid": self.grid,
            "stem": self.stem,
            "patch": self.patch,
            "image": self.field.shape,
            "images": self.images,
            "mode": self.mode,
            "positions": self.positions,
            "changed": self.changed,
            "rotary_stay": self.rotary_stay,
            "outside_centre_patch": self.outside_centre_patch,
            "squares": [each | {"patches": each["pixels"] / (high * wide) ** 0.5} for each in squares],
            "fit": {key: value for key, value in fit.items() if not key.startswith(("sigma", "centre"))}
            | {"constant_share": self.constant_share}
            | {key: {"pixels": fit[key], "patches": fit[key] / side} for key, side in _axes(high, wide)}
            | {"at_most": self.narrow},
            "across": dict(zip(("pixels", "energy"), map(list, self.across), strict=True)),
            "within": dict(zip(("pixels", "share"), map(list, self.within), strict=True)),
        }
        return dict(json.loads(json.dumps(figures, default=list), parse_constant=lambda _: None))

    def save(self, path: str | Path) -> None:
        """Write the field and what it is of, as `.npz` without pickles."""
        about = {key: value for key, value in vars(self).items() if key in ABOUT}
        with open(path, "wb") as file:
            np.savez_compressed(file, field=self.field, about=np.array(json.dumps(about)))

    @classmethod
    def load(cls, path: str | Path) -> "ReceptiveField":
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                about = {key: tuple(value) if isinstance(value, list) else value for key, value in about.items()}
                return cls(field=stored["field"], **about)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise VicinalError(f"{path} holds no receptive field: {error}") from error


ABOUT = tuple(name for name in ReceptiveField.__dataclass_fields__ if name != "field")


def _axes(high: float, wide: float) -> list[tuple[str, float]]:
    return [("sigma_x", wide), ("sigma_y", high), ("centre_x", wide), ("centre_y", high)]


def _overlap(pixels: int, cells: int) -> NDArray[np.float64]:
    """How much of each pixel along an axis lies in each cell: `(cells, pixels)`."""
    edges = np.arange(cells + 1)[:, None] * (pixels / cells)
    return np.diff(np.clip(np.arange(pixels + 1), edges[:-1], edges[1:]), axis=1)


def _without_cell(sigma: float, cell: float) -> float:
    """The width, in pixels, of what was averaged over cells and then had a width of so many cells.

    Means over cells have a width of their own; where that is nearly all there is, at most the width is known.
    """
    if sigma < NARROW:
        return NARROW * cell
    return math.sqrt(max((sigma * cell) ** 2 - (cell**2 - 1) / 12, 0.0))
