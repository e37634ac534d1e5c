"""Masks of a model's priors: the result, its text table and files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vicinal.analysis.result import AnalysisResult
from vicinal.deprecation import RenamedAttribute
from vicinal.files import write_csv
from vicinal.grid import Grid
from vicinal.inspection.layer_selection import layer_index
from vicinal.priors.base import EPSILON
from vicinal.priors.parameters import parameter_rows
from vicinal.text_table import text_table

__all__ = ["LayerMask", "Masks", "Mixture"]


@dataclass(frozen=True, eq=False)
class Mixture:
    """The Gaussian mixture of a layer: `M(r) = constant + sum_k alpha_k exp(-r^2 / (2 (sigma_k^2 + 1e-5)))`."""

    constant: float
    alpha: NDArray[np.float64]
    """`(kernels, heads)`."""
    sigma: NDArray[np.float64]
    """In patches, `(kernels, heads)`. A width can be learned with either sign, which has no effect."""

    def kernels_at(self, distance: NDArray[Any]) -> NDArray[np.float64]:
        """Returns each kernel at distances `(n,)` in patches: `(kernels, heads, n)`."""
        spread = 2 * (self.sigma**2 + EPSILON)
        return self.alpha[..., None] * np.exp(-(distance**2) / spread[..., None])


@dataclass(frozen=True, eq=False)
class LayerMask:
    """The mask of one layer: scale and bias of its prior, and the equivalent convolution kernel."""

    name: str
    """Name of the attention module."""
    prior: str
    """Spec, such as `gmm:kernels=3+gab`."""
    grid: Grid
    over: Literal["offsets", "patches"]
    """`offsets` between any two patches; or `patches` of the grid, for the central patch as the query: elm has a number
    for every pair."""
    scale: NDArray[np.float64] | None
    """Factor of the logits: `(heads, 2h-1, 2w-1)` over offsets, `(heads, h, w)` over patches; None for 1."""
    bias: NDArray[np.float64] | None
    """Bias of the logits, of the same shape; None for 0."""
    convolution: NDArray[np.float64]
    """The equivalent convolution kernel over patches: `(heads, h, w)`, of sum 1 for each head."""
    options: Mapping[str, NDArray[Any]]
    """Learned parameters, if the prior is not a free table: `(heads,)` or `(kernels, heads)`."""
    mixtures: Mapping[str, Mixture]
    """Mixtures of `gmm`: alone under the name `""`, in a composition under that of the part, such as `gmm-2`."""

    centre = RenamedAttribute("center")

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.convolution)

    @property
    def center(self) -> tuple[int, int]:
        """Row and column of the central patch, the query of `convolution`."""
        return self.grid.height // 2, self.grid.width // 2

    @property
    def tables(self) -> dict[str, NDArray[np.float64]]:
        """Scale and bias, those that are not None."""
        given = {"scale": self.scale, "bias": self.bias}
        return {role: values for role, values in given.items() if values is not None}

    def as_dict(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        return {
            "name": self.name,
            "prior": self.prior,
            "grid": [self.grid.height, self.grid.width],
            "over": self.over,
            "scale": None if self.scale is None else self.scale.tolist(),
            "bias": None if self.bias is None else self.bias.tolist(),
            "center": list(self.center),
            "convolution": self.convolution.tolist(),
            "constants": {
                f"{part}.constant" if part else "constant": mixture.constant for part, mixture in self.mixtures.items()
            },
            "options": {option: values.tolist() for option, values in self.options.items()},
        }


@dataclass(frozen=True, eq=False)
class Masks(AnalysisResult):
    """The masks of a model, in the order of its layers."""

    model: str
    logit: float
    """c, the logit of uniform content, for the equivalent convolution kernels."""
    layers: tuple[LayerMask, ...]
    """Layers that have a prior."""

    def index(self, layer: int | str) -> int:
        """Returns the index of a layer in `layers`.

        Args:
            layer: name, or index from 0 or, below 0, from the end.

        Raises:
            VicinalError: if there is no such layer.
        """
        return layer_index([each.name for each in self.layers], layer)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        return {"model": self.model, "logit": self.logit, "layers": [layer.as_dict() for layer in self.layers]}

    def csv_rows(self) -> Iterator[dict[str, Any]]:
        """Yields a line for each number of scale, bias and convolution, with its offset in patches; heads from 1."""
        for layer in self.layers:
            for quantity, values in {**layer.tables, "convolution": layer.convolution}.items():
                down, right = values.shape[1] // 2, values.shape[2] // 2
                for (head, row, column), value in np.ndenumerate(values):
                    yield {
                        "layer": layer.name,
                        "prior": layer.prior,
                        "quantity": quantity,
                        "head": head + 1,
                        "row": row - down,
                        "column": column - right,
                        "value": float(value),
                    }

    def table(self) -> str:
        """Returns the range of scale and bias over all heads, as text, a line for each layer."""
        rows = [["layer", "prior", "heads", "grid", "scale", "bias"]]
        for layer in self.layers:
            grid = f"{layer.grid.height} x {layer.grid.width}"
            ranges = [_range(layer.tables.get(role)) for role in ("scale", "bias")]
            rows.append([layer.name, layer.prior, str(layer.heads), grid, *ranges])
        return f"{self.model}: smallest to largest value of each table\n{text_table(rows, right=range(2, 6))}"

    def save_options(self, path: str | Path) -> None:
        """Writes a CSV line for each learned number, in the columns of a run's `priors.csv` without the epoch."""
        rows = [(layer.name, *row) for layer in self.layers for row in parameter_rows(layer.options)]
        write_csv(Path(path), ("layer", "option", "kernel", "head", "value"), rows)

    write_options_csv = RenamedAttribute("save_options")


def _range(values: NDArray[np.float64] | None) -> str:
    return "-" if values is None else f"{values.min():.3g} to {values.max():.3g}"
