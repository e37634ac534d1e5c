"""A measured receptive field: its figures, the Gaussian that is nearest to it, a text table and files."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.fit_note import FitNote, NoteKind
from vicinal.analysis.gaussian_fit import NARROW_SIGMA, GaussianFit, fit_gaussian
from vicinal.analysis.output_files import temporary_file
from vicinal.analysis.receptive_field.position_change import Positions
from vicinal.analysis.result import AnalysisResult, without_nan
from vicinal.deprecation import RenamedAttribute
from vicinal.errors import VicinalError
from vicinal.text_table import text_table

__all__ = ["SHARES", "Mode", "ReceptiveField", "fields_table"]

Mode = Literal["clip", "abs"]
SHARES = (0.2, 0.3, 0.5, 0.99)
"""Shares of the energy for which `ReceptiveField.as_dict` has the centered square."""
MAX_FITTED_SIDE = 64  # cells: fits of larger tables take seconds
MAX_CONSTANT_SHARE = 0.5  # of the energy, above which a note says that the constant has most of it


@dataclass(frozen=True, eq=False)
class ReceptiveField(AnalysisResult):
    """The pixels on which one patch of a layer depends. Lengths are in pixels, unless they say patches.

    A patch is a cell of the layer's grid, laid over the image. The field's center is the center of the patch, also
    where the grid is even, so that no patch is in the middle of the image, and where the padding of convolutions shifts
    the receptive field by a part of a patch, which `fit` measures.
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
    """Number of images that the field is the mean of."""
    mode: Mode
    positions: Positions
    changed: tuple[str, ...] = ()
    """Names of the positions that were made random or zero."""
    rotary_stay: bool = False
    """Whether the model has rotary positions, which were kept while others were replaced."""

    centre = RenamedAttribute("center")
    outside_centre_patch = RenamedAttribute("outside_center_patch")

    @property
    def patch(self) -> tuple[float, float]:
        """Height and width of a patch."""
        return self.field.shape[0] / self.grid[0], self.field.shape[1] / self.grid[1]

    @property
    def center(self) -> tuple[float, float]:
        """Center of the patch, down and to the right from the image's upper left corner."""
        return (self.at[0] + 0.5) * self.patch[0], (self.at[1] + 0.5) * self.patch[1]

    @property
    def outside_center_patch(self) -> float:
        """Share of the energy outside the patch."""
        return float(1 - self.by_patch[self.at])

    def square(self, share: float) -> float:
        """Returns the side of the smallest square of whole pixels, centered on the patch, with a share of the energy.

        The square can extend beyond the image, the more the farther the patch is from the image's center.

        Args:
            share: above 0 and at most 1.

        Raises:
            VicinalError: for another share.
        """
        if not 0 < share <= 1:
            raise VicinalError(f"share must be above 0 and at most 1, got {share}")
        sides, shares = self.within
        return float(sides[min(int(np.searchsorted(shares, share - 1e-9)), len(sides) - 1)])

    @cached_property
    def within(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sides of centered squares, and the share of the energy in each, `(n,)` both, in rising order."""
        down, right = (
            2 * np.abs(np.arange(n) + 0.5 - c) + 1 for n, c in zip(self.field.shape, self.center, strict=True)
        )
        # Rounded: with patches of a fractional number of pixels, sides differ in the last digit.
        sides, index = np.unique(np.maximum(down[:, None], right).round(9), return_inverse=True)
        return sides, np.bincount(index.ravel(), self.field.ravel()).cumsum()

    @property
    def across(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Distance of each column of the stem's grid to the right of the patch, and its energy (mean column = 1)."""
        columns = self.stem[1]
        distances = (np.arange(columns) + 0.5) * self.field.shape[1] / columns - self.center[1]
        return distances, self.by_cell(self.stem)[0].sum(0) * columns

    @property
    def by_patch(self) -> NDArray[np.float64]:
        """Energy of each patch, `(rows, columns)`, of sum 1."""
        return self.by_cell(self.grid)[0]

    def by_cell(self, grid: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the energy of each cell of a grid laid over the image, and its number of pixels.

        Both are `(rows, columns)`.
        """
        down, right = (_overlap(n, count) for n, count in zip(self.field.shape, grid, strict=True))
        return down @ self.field @ right.T, np.outer(down.sum(1), right.sum(1))

    @cached_property
    def fit(self) -> GaussianFit:
        """The 2-D Gaussian that is nearest to the field, in pixels; its center is relative to that of the patch.

        It is fitted to the cells of the stem's grid, at most 64 x 64, because inside a cell the field shows the weights
        of the patch embedding. The variance of a cell is subtracted, unless the Gaussian is too narrow: see `narrow`.
        A note says if the constant has most of the energy.
        """
        fit, high, wide = self._fit_by_cell
        notes, share = fit.notes, fit.offset * self.field.size
        if fit.fits and fit.amplitude > 0 and share > MAX_CONSTANT_SHARE:
            text = f"over a constant that has {share:.0%} of the energy"
            notes = (*notes, FitNote(NoteKind.MOSTLY_CONSTANT, text))
        return replace(
            fit,
            sigma_x=_without_cell(fit.sigma_x, wide),
            sigma_y=_without_cell(fit.sigma_y, high),
            center_x=(fit.center_x + 0.5) * wide - self.center[1],
            center_y=(fit.center_y + 0.5) * high - self.center[0],
            notes=notes,
        )

    @property
    def narrow(self) -> dict[str, bool]:
        """Whether `sigma_x` and `sigma_y` of the fit are upper bounds only."""
        fit, _, _ = self._fit_by_cell
        return {"sigma_x": fit.sigma_x < NARROW_SIGMA, "sigma_y": fit.sigma_y < NARROW_SIGMA}

    @cached_property
    def _fit_by_cell(self) -> tuple[GaussianFit, float, float]:
        """The Gaussian in cells, and height and width of a cell in pixels."""
        rows, columns = (min(MAX_FITTED_SIDE, count) for count in self.stem)
        energy, pixels = self.by_cell((rows, columns))
        fit = fit_gaussian(energy / pixels, center=(0, 0))
        return fit, self.field.shape[0] / rows, self.field.shape[1] / columns

    @property
    def constant_share(self) -> float:
        """Share of the energy that is in the fit's constant."""
        return self.fit.offset * self.field.size

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures and the two profiles, ready for JSON. `save` writes the field itself."""
        side = math.sqrt(math.prod(self.patch))
        squares = {share: self.square(share) for share in SHARES}
        about = {name: _as_list(value) for name, value in vars(self).items() if name in METADATA_FIELDS}
        return {
            **about,
            "patch": list(self.patch),
            "image": list(self.field.shape),
            "outside_center_patch": self.outside_center_patch,
            "squares": [
                {"share": share, "pixels": pixels, "patches": pixels / side} for share, pixels in squares.items()
            ],
            "fit": self._fit_as_dict(),
            "across": {name: each.tolist() for name, each in zip(("pixels", "energy"), self.across, strict=True)},
            "within": {name: each.tolist() for name, each in zip(("pixels", "share"), self.within, strict=True)},
        }

    def _fit_as_dict(self) -> dict[str, Any]:
        """Returns the fit, ready for JSON: lengths in pixels and in patches."""
        (high, wide), fit = self.patch, self.fit
        lengths = {
            name: {
                "pixels": without_nan(getattr(fit, name)),
                "patches": without_nan(getattr(fit, name) / (wide if name.endswith("_x") else high)),
            }
            for name in ("sigma_x", "sigma_y", "center_x", "center_y")
        }
        constant_share = without_nan(self.constant_share)
        return {**fit.as_dict(), **lengths, "constant_share": constant_share, "at_most": self.narrow}

    def csv_rows(self) -> Iterator[dict[str, Any]]:
        """Yields a line for each pixel."""
        for (row, column), energy in np.ndenumerate(self.field):
            yield {"row": row, "column": column, "energy": float(energy)}

    def table(self) -> str:
        """Returns the main figures as text."""
        return fields_table({self.model: self})

    def save(self, path: str | Path) -> None:
        """Writes the field with its metadata, as `.npz` without pickles; or figures as `.json`, or pixels as `.csv`.

        Args:
            path: the file; its ending chooses the format.

        Raises:
            VicinalError: for another ending.
        """
        if Path(path).suffix != ".npz":
            return super().save(path)
        about = {name: value for name, value in vars(self).items() if name in METADATA_FIELDS}
        with temporary_file(Path(path)) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, field=self.field, about=np.array(json.dumps(about)))

    @classmethod
    def load(cls, path: str | Path) -> "ReceptiveField":
        """Returns the field that `save` wrote as `.npz`.

        Raises:
            VicinalError: if the file has none.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                about = {name: tuple(value) if isinstance(value, list) else value for name, value in about.items()}
                return cls(field=stored["field"], **about)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise VicinalError(f"{path} is not a receptive field: {error}") from error


METADATA_FIELDS = tuple(name for name in ReceptiveField.__dataclass_fields__ if name != "field")


def fields_table(fields: Mapping[str, ReceptiveField]) -> str:
    """Returns the main figures of fields as text, a line for each.

    Args:
        fields: by label; at least one.
    """
    first = next(iter(fields.values()))
    about = (
        f"patch {first.at[0]} {first.at[1]} of {first.grid[0]} x {first.grid[1]}, "
        f"mean of {first.images} images; lengths in pixels (patches)"
    )
    squares = [f"{round(100 * share)}% in" for share in SHARES]
    header = ["model", "layer", "sigma_x", "sigma_y", "R^2", *squares, "outside patch", ""]
    rows = [header, *([label, *_cells(field)] for label, field in fields.items())]
    return f"{about}\n{text_table(rows, right=range(2, len(header) - 1))}"


def _cells(field: ReceptiveField) -> list[str]:
    (high, wide), fit = field.patch, field.fit
    side = math.sqrt(high * wide)
    widths = (("sigma_x", fit.sigma_x, wide), ("sigma_y", fit.sigma_y, high))
    notes = [note.text for note in fit.notes] + ["rotary positions are kept"] * field.rotary_stay
    return [
        field.layer,
        *("< " * field.narrow[name] + _length(sigma, unit) for name, sigma, unit in widths),
        f"{fit.r2:.3f}" if math.isfinite(fit.r2) else "-",
        *(_length(field.square(share), side) for share in SHARES),
        f"{field.outside_center_patch:.1%}",
        "; ".join(notes),
    ]


def _length(pixels: float, patch: float) -> str:
    return f"{pixels:.1f} ({pixels / patch:.2f})" if math.isfinite(pixels) else "-"


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _overlap(pixels: int, cells: int) -> NDArray[np.float64]:
    """Returns the part of each pixel along an axis that is in each cell, `(cells, pixels)`."""
    edges = np.arange(cells + 1)[:, None] * (pixels / cells)
    return np.diff(np.clip(np.arange(pixels + 1), edges[:-1], edges[1:]), axis=1)


def _without_cell(sigma: float, cell: float) -> float:
    """Returns a width in pixels without that of the cells over which the field was averaged.

    Args:
        sigma: fitted width, in cells.
        cell: side of a cell, in pixels. Its variance is subtracted; if `sigma` is at its lower bound, that is returned.
    """
    if sigma < NARROW_SIGMA:
        return NARROW_SIGMA * cell
    return math.sqrt(max((sigma * cell) ** 2 - (cell**2 - 1) / 12, 0.0))
