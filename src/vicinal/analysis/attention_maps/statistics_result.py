"""Mean attention distance and entropy of the heads of a model: the result, its text table and files."""

import math
from dataclasses import dataclass
from typing import Any

from vicinal.analysis.result import AnalysisResult, without_nan
from vicinal.text_table import text_table

__all__ = ["AttentionStatistics", "LayerStatistics"]


@dataclass(frozen=True)
class LayerStatistics:
    """Figures of one layer, head by head; NaN if there is nothing to measure."""

    layer: int
    """Number among the model's attention layers, from 1."""
    name: str
    """Name of the module."""
    grid: tuple[int, int]
    """Rows and columns of patches; if keys or queries are pooled, those of the finer side."""
    patch: tuple[float, float]
    """Height and width of a patch, in pixels."""
    windows: int
    """Number of windows that the grid is divided into; 1 if attention is global."""
    keys: int
    """Number of tokens that a query can attend to, those without a place in the image included."""
    distance_patches: tuple[float, ...]
    """Mean attention distance of each head, in patches."""
    distance_pixels: tuple[float, ...]
    """The same in pixels."""
    uniform_patches: float
    """Distance for uniform attention to all patches (of the window)."""
    uniform_pixels: float
    """The same in pixels."""
    entropy: tuple[float, ...]
    """Entropy of each head, in nats."""
    relative_entropy: tuple[float, ...]
    """Entropy of each head over its maximum, log(number of keys): 0 for one key, 1 for uniform attention."""


@dataclass(frozen=True)
class AttentionStatistics(AnalysisResult):
    """Mean attention distance and entropy of the heads of a model."""

    model: str
    images: int
    """Number of images that the figures are the mean of."""
    layers: tuple[LayerStatistics, ...]
    left_out: dict[str, str]
    """Reasons why layers cannot be measured, by name."""

    def csv_rows(self) -> list[dict[str, Any]]:
        """Returns a line for each head of each layer."""
        return [{"model": self.model, "images": self.images, **row} for row in self._rows()]

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON; heads count from 1."""
        return {"model": self.model, "images": self.images, "heads": self._rows(), "left_out": self.left_out}

    def table(self) -> str:
        """Returns the figures as text, a line for each layer: the mean over heads (smallest-largest of a head)."""
        rows = [["layer", "name", "heads", "distance (patches)", "(pixels)", "uniform", "entropy (nats)", "relative"]]
        for layer in self.layers:
            figures = (layer.distance_patches, layer.distance_pixels, layer.entropy, layer.relative_entropy)
            patches, pixels, entropy, relative = (_range(each) for each in figures)
            uniform = "-" if math.isnan(layer.uniform_pixels) else f"{layer.uniform_pixels:.2f}"
            heads = str(len(layer.entropy))
            rows.append([str(layer.layer), layer.name, heads, patches, pixels, uniform, entropy, relative])
        lines = [f"{self.model}: mean over heads (smallest-largest of a head), {_counted(self.images, 'image')}"]
        lines.append(text_table(rows, right=[column for column in range(len(rows[0])) if column != 1]))
        if self.left_out:
            lines.append(f"left out: {_counted(len(self.left_out), 'layer')}. {next(iter(self.left_out.values()))}")
        return "\n".join(lines)

    def _rows(self) -> list[dict[str, Any]]:
        """Returns the figures of each head of each layer, heads from 1; None in place of NaN."""
        found = []
        for layer in self.layers:
            for head, entropy in enumerate(layer.entropy):
                row = {
                    "layer": layer.layer,
                    "name": layer.name,
                    "head": head + 1,
                    "distance_patches": layer.distance_patches[head],
                    "distance_pixels": layer.distance_pixels[head],
                    "uniform_patches": layer.uniform_patches,
                    "uniform_pixels": layer.uniform_pixels,
                    "entropy": entropy,
                    "relative_entropy": layer.relative_entropy[head],
                    "keys": layer.keys,
                    "rows": layer.grid[0],
                    "columns": layer.grid[1],
                    "windows": layer.windows,
                }
                found.append({column: without_nan(value) for column, value in row.items()})
        return found


def _range(values: tuple[float, ...]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{sum(known) / len(known):.2f} ({min(known):.2f}-{max(known):.2f})" if known else "-"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
