"""Plots of priors: the factor of the logits or of the attention weights, per head and offset."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior
from vicinal.priors.registry import build_prior

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_priors", "example_priors", "main"]

# Layer by spec. Most priors are constant with their default init `identity`, so these use another one.
EXAMPLES = {
    "gmm:init=spread": 0,
    "elm": 0,
    "gab": 0,
    "rpe:init=normal": 0,
    "rpe-mlp:init=normal": 0,
    "decay": 0,
    "conv": 0,
    "conv:growth=0.4": 5,
    "none": 0,
}


def example_priors(*, heads: int, grid: Grid, seed: int = 0) -> dict[str, Prior]:
    """Returns every built-in prior by title, as `draw_priors` takes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {
            f"{spec} in layer {layer + 1}" if layer else spec: build_prior(spec, heads=heads, grid=grid, layer=layer)
            for spec, layer in EXAMPLES.items()
        }


def draw_priors(priors: Mapping[str, Prior], path: str | Path) -> Path:
    """Draws priors into an image file: one row per prior, two if it multiplies and adds, and one plot per head.

    Args:
        priors: by title, all with the same number of heads.
        path: file to write; its extension determines the format.

    Returns:
        The path.

    Raises:
        VicinalError: the folder does not exist, or the format is unknown.
    """
    from matplotlib.figure import Figure

    path = Path(path)
    if not path.parent.is_dir():
        raise VicinalError(f"cannot write {path}: there is no folder {path.parent}")
    rows = [row for title, prior in priors.items() for row in _rows(title, prior)]
    heads = max(len(factors) for _, factors in rows)
    figure = Figure(figsize=(1.4 * heads + 2.6, 1.75 * len(rows) + 0.5), layout="constrained")
    for (label, factors), line in zip(rows, figure.subplots(len(rows), heads, squeeze=False), strict=True):
        _draw_row(figure, list(line), label, factors)
    for head, axes in enumerate(figure.axes[:heads]):
        axes.set_title(f"head {head + 1}", fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise VicinalError(f"cannot draw into {path}: {error}") from None
    return path


def _rows(title: str, prior: Prior) -> list[tuple[str, Tensor]]:
    """Returns labels and factors, `(heads, rows, columns)`, of a prior; a factor of 1 changes nothing."""
    scale, bias = prior.values()
    found = []
    if scale is not None:
        found.append(("logits times", scale))
    if bias is not None:
        found.append(("attention times", bias.exp()))  # adding b to a logit multiplies its weight by exp(b)
    if not found:
        found.append(("changes nothing", torch.ones(prior.heads, *prior.grid.table_shape)))
    where = "" if prior.per_offset else "\n(center query)"
    return [
        (
            f"{title.replace(':', ':' + chr(10))}\n{verb}{where}",
            values.detach() if prior.per_offset else _from_center(values.detach(), prior.grid),
        )
        for verb, values in found
    ]


def _draw_row(figure: "Figure", line: list["Axes"], label: str, factors: Tensor) -> None:
    low, high = float(factors.min()), float(factors.max())
    if low < 1 < high or low == high:
        reach = max(high - 1, 1 - low) or 1.0
        limits, colors = (1 - reach, 1 + reach), "RdBu_r"  # white changes nothing
    else:
        limits, colors = (low, high), "viridis"
    half_height, half_width = factors.shape[1] / 2, factors.shape[2] / 2
    extent = (-half_width, half_width, half_height, -half_height)  # offsets from the query, in patches
    for head, axes in enumerate(line):
        image = axes.imshow(factors[head].numpy(force=True), vmin=limits[0], vmax=limits[1], cmap=colors, extent=extent)
        axes.tick_params(labelsize=6)
        if head:
            axes.set_yticklabels([])
    line[0].set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center", labelpad=14)
    bar = figure.colorbar(image, ax=line, fraction=0.03, pad=0.01)
    bar.ax.tick_params(labelsize=6)


def _from_center(values: Tensor, grid: Grid) -> Tensor:
    """Returns the values of the center query, `(heads, height, width)`, of `(heads, patches, patches)`."""
    center = (grid.height // 2) * grid.width + grid.width // 2
    return values[:, center].view(-1, grid.height, grid.width)


def main(spec: str | None = None) -> None:
    """Draws one prior, or all, into a PNG file; the entry point of `python -m vicinal.priors.FILE`."""
    name = spec.split(":")[0] if spec else "all"
    parser = argparse.ArgumentParser(description=f"Draw {spec or 'every prior'} with initial parameters.")
    parser.add_argument("--out", type=Path, default=Path(f"prior-{name}.png"), help="file to write (%(default)s)")
    parser.add_argument("--heads", type=int, default=6, help="number of heads (%(default)s)")
    parser.add_argument("--grid", type=int, nargs=2, default=(8, 8), metavar=("HEIGHT", "WIDTH"), help="patches (8 8)")
    arguments = parser.parse_args()
    try:
        grid = Grid(*arguments.grid)
        priors = (
            {spec: build_prior(spec, heads=arguments.heads, grid=grid)}
            if spec
            else example_priors(heads=arguments.heads, grid=grid)
        )
        print(f"wrote {draw_priors(priors, arguments.out)}")
    except VicinalError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
