"""The cost of a model beside the figures of its paper: the result, tables and files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vicinal.analysis.result import AnalysisResult
from vicinal.files import csv_text, write_text
from vicinal.text_table import markdown_table

__all__ = ["Cost", "Published", "format_costs", "published", "save_costs"]

Format = Literal["md", "csv", "json"]


@dataclass(frozen=True)
class Published:
    """Figures of a backbone in the paper's table, the same with and without its mask (arXiv:2309.05375)."""

    parameters: str
    macs: str
    depth: int


PUBLISHED_FIGURES = {
    "vit": Published("2.7M", "170.9M", 9),
    "swin": Published("7.1M", "236.9M", 12),
    "cait": Published("5.1M", "305.9M", 26),
    "pit": Published("7.0M", "239.1M", 12),
    "t2t": Published("6.5M", "417.4M", 13),
}


@dataclass(frozen=True)
class Cost(AnalysisResult):
    """The cost of one model, for images of one size."""

    model: str
    prior: str
    img_size: tuple[int, int]
    parameters: int
    """Number of trainable parameters, those of the prior included."""
    prior_parameters: int
    layer_macs: int
    """Multiply-accumulate operations (MACs) of one more image in linear and convolution layers, which is what the paper
    counts. Operations once for a batch, such as for the table of a prior, are not included."""
    all_macs: int
    """MACs in all products, so with Q K^T, A V and the mixing of talking heads."""
    depth: int
    """Number of attention layers."""
    batch_size: int
    activation_bytes: int
    """Memory that is saved for the backward pass of a batch, in training, with no image dropped by drop path."""
    published: Published | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        return asdict(self) | {"img_size": list(self.img_size)}

    def csv_rows(self) -> list[dict[str, Any]]:
        """Returns one line with all figures."""
        row = asdict(self) | {"img_size": "x".join(map(str, self.img_size))}
        paper = row.pop("published") or {}
        return [row | {f"published_{name}": paper.get(name, "") for name in ("parameters", "macs", "depth")}]

    def table(self) -> str:
        """Returns the figures as a Markdown table."""
        return format_costs([self], "md")


def published(name: str, prior: str, img_size: tuple[int, int]) -> Published | None:
    """Returns the paper's figures; None for other images than of 32 pixels, and other priors than none and gmm.

    Args:
        name: of the backbone.
        prior: its spec.
        img_size: height and width of the images.
    """
    in_paper = img_size == (32, 32) and prior.split(":")[0] in ("none", "gmm") and "+" not in prior
    return PUBLISHED_FIGURES.get(name) if in_paper else None


def format_costs(costs: Sequence[Cost], style: Format) -> str:
    """Returns costs as text: a table for reading (`md`), or all figures in full (`csv`, `json`).

    Args:
        costs: at least one.
        style: the format.
    """
    if style == "json":
        return json.dumps([cost.as_dict() for cost in costs], indent=2)
    if style == "csv":
        rows = [row for cost in costs for row in cost.csv_rows()]
        return csv_text([list(rows[0]), *(row.values() for row in rows)]).rstrip("\n")
    header = ["model", "prior", "pixels", "parameters", "of the prior", "MACs, layers", "MACs, all", "depth"]
    header += [f"memory, batch {costs[0].batch_size}", "published parameters", "MACs", "depth"]
    return markdown_table([header, *map(_cells, costs)], right=range(2, len(header)))


def save_costs(costs: Sequence[Cost], path: str | Path, style: Format) -> None:
    """Writes `format_costs` to a file, whole or not at all; its folder is created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, format_costs(costs, style) + "\n")


def _cells(cost: Cost) -> list[str]:
    paper = cost.published
    return [
        cost.model,
        cost.prior,
        " x ".join(map(str, cost.img_size)),
        f"{cost.parameters:,}",
        f"{cost.prior_parameters:,}",
        f"{cost.layer_macs / 1e6:.1f}M",
        f"{cost.all_macs / 1e6:.1f}M",
        str(cost.depth),
        f"{cost.activation_bytes / 1e6:,.0f} MB",
        *([paper.parameters, paper.macs, str(paper.depth)] if paper else ["", "", ""]),
    ]
