"""A measured attention map of one layer, or of a rollout through several; its text table and files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vicinal.analysis.attention_maps.query import Query
from vicinal.analysis.result import AnalysisResult, save_result
from vicinal.deprecation import RenamedAttribute
from vicinal.errors import VicinalError
from vicinal.text_table import text_table

__all__ = ["AttentionMap", "save_maps"]


@dataclass(frozen=True, eq=False)
class AttentionMap(AnalysisResult):
    """Attention of one query to the patches of the image, in one layer or rolled out through several."""

    model: str
    layer: str
    """Name of the module, or which layers were rolled out."""
    query: Query
    heads: tuple[int, ...] | None
    """Indices of the heads, from 0; None for their mean."""
    values: Tensor
    """Attention to each patch, `(n, heads, rows, columns)`; for the mean over heads, `heads` is 1. Attention to tokens
    without a place in the image is left out, so the sum over patches can be below 1. Pooled keys are patches here."""
    query_grid: tuple[int, int] | None = None
    """Rows and columns of the grid that `query` is on; None for that of the map, unless its keys are pooled."""

    whose = RenamedAttribute("query_text")

    @property
    def map(self) -> Tensor:
        """Mean over the heads in it, `(n, rows, columns)`."""
        return self.values.mean(1)

    @property
    def query_text(self) -> str:
        """The query in words."""
        if isinstance(self.query, tuple):
            return f"the patch at row {self.query[0]}, column {self.query[1]}"
        return "the class token" if self.query == "class" else "all patches (mean)"

    @property
    def head_labels(self) -> list[str]:
        """Numbers of the heads, from 1, or `mean`."""
        return ["mean"] if self.heads is None else [str(head + 1) for head in self.heads]

    def as_dict(self) -> dict[str, Any]:
        """Returns the map, ready for JSON; heads count from 1."""
        heads = None if self.heads is None else [head + 1 for head in self.heads]
        about = {"model": self.model, "layer": self.layer, "query": self.query, "heads": heads}
        return {**about, "attention": self.values.tolist()}

    def csv_rows(self, image_names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yields a line for each image, head and patch; heads count from 1.

        Args:
            image_names: by default images count from 0.
        """
        query = self.query if isinstance(self.query, str) else f"{self.query[0]} {self.query[1]}"
        labels = self.head_labels
        for index, value in zip(np.ndindex(*self.values.shape), self.values.flatten().tolist(), strict=True):
            image, head, row, column = index
            yield {
                "model": self.model,
                "layer": self.layer,
                "query": query,
                "image": image if image_names is None else image_names[image],
                "head": labels[head],
                "row": row,
                "column": column,
                "attention": value,
            }

    def table(self) -> str:
        """Returns, as text, the attention to all patches and the patch with the most, for each image and head."""
        header = ["image", "head", "on patches", "row", "column", "largest"]
        rows = [header]
        for image, heads in enumerate(self.values):
            for label, values in zip(self.head_labels, heads, strict=True):
                row, column = divmod(int(values.argmax()), values.shape[1])
                figures = [f"{float(values.sum()):.3f}", str(row), str(column), f"{float(values.max()):.3f}"]
                rows.append([str(image), label, *figures])
        title = f"{self.model}, {self.layer}: attention of {self.query_text}"
        return f"{title}\n{text_table(rows, right=range(len(header)))}"


def save_maps(maps: Sequence[AttentionMap], path: str | Path, image_names: Sequence[str] | None = None) -> None:
    """Writes maps to one file. Heads count from 1.

    Args:
        maps: of the same images.
        path: ends in `.json`, or in `.csv`, for a line for each patch.
        image_names: by default images count from 0.

    Raises:
        VicinalError: for another ending, or another number of names.
    """
    counts = {len(each.values) for each in maps}
    if image_names is not None and counts - {len(image_names)}:
        raise VicinalError(f"image_names must be one for each of {max(counts)} images, got {len(image_names)}")
    images = {} if image_names is None else {"images": list(image_names)}
    save_result(
        path,
        lambda: [{**each.as_dict(), **images} for each in maps],
        lambda: (row for each in maps for row in each.csv_rows(image_names)),
    )
