"""Measures the attention of several models, and writes figures, maps and plots to a folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vicinal.analysis.attention_maps.measure import attention_maps
from vicinal.analysis.attention_maps.plot import draw_maps, draw_rollout
from vicinal.analysis.attention_maps.query import Query
from vicinal.analysis.attention_maps.reader import inspect_images
from vicinal.analysis.attention_maps.result import AttentionMap, save_maps
from vicinal.analysis.attention_maps.rollout import rollout
from vicinal.analysis.attention_maps.statistics import attention_statistics
from vicinal.analysis.attention_maps.statistics_plot import draw_statistics
from vicinal.analysis.attention_maps.statistics_result import AttentionStatistics
from vicinal.analysis.image_selection import ImageSelection, denormalize
from vicinal.analysis.opened_model import OpenedModel
from vicinal.analysis.output_files import file_stem, folder_per_model, replace_outputs
from vicinal.analysis.plot_style import save_figure
from vicinal.errors import VicinalError
from vicinal.inspection.model_inspection import Inspection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AttentionOutputs", "write_attention"]

OUTPUTS = (
    *("attention.csv", "attention.json", "maps.csv", "rollout.csv"),
    *("attention.png", "maps-*.png", "rollout.png"),
)


@dataclass
class AttentionOutputs:
    """Maps and rollout of one model, with their plots."""

    inspection: Inspection
    names: list[str]
    """Names of the images that maps are drawn of."""
    tables: dict[str, Sequence[AttentionMap]] = field(default_factory=dict)
    """Maps and rollout, by the stems of their files."""
    figures: "dict[str, Figure]" = field(default_factory=dict)
    """Plots of maps and rollout, by the stems of their files."""
    no_rollout: str | None = None
    """Why there is no rollout."""


def write_attention(
    models: Sequence[OpenedModel],
    images: ImageSelection,
    folder: Path,
    *,
    pictures: int = 4,
    layers: Sequence[int | str] = (),
    heads: Sequence[int] = (),
    query: Query | None = None,
) -> tuple[list[AttentionStatistics], list[str]]:
    """Measures distance and entropy of the heads of each model, draws maps and a rollout, and writes all to a folder.

    Each model has `attention.csv` and `.json`, `maps.csv`, `maps-IMAGE.png`, `rollout.csv` and `.png`, several models
    in a folder each; `attention.png` compares distance and entropy.

    Args:
        models: as `open_models` returns them.
        images: images for each model.
        folder: where to write; files of an earlier call are replaced.
        pictures: number of images that maps are drawn of.
        layers: layers to draw maps of and to roll out; all by default, with maps that are means over heads.
        heads: indices of heads to draw; all by default, if `layers` is given.
        query: as for `attention_maps`.

    Returns:
        The statistics of each model; and for models without a rollout, the reason.

    Raises:
        VicinalError: if something cannot be measured or a file not be written.
    """
    if pictures < 0:
        raise VicinalError(f"pictures must be a whole number >= 0, got {pictures}")
    # Maps of few images come first: a wrong layer, head or query raises before all images are measured.
    asked: dict[str, Any] = {"layers": list(layers) or None, "query": query}
    chosen: Any = list(heads) or (None if layers else "mean")
    found = [_draw(opened, images, pictures, chosen, asked) for opened in models]
    statistics = []
    for opened, outputs in zip(models, found, strict=True):
        measured = attention_statistics(
            opened.model,
            images.tensors(opened),
            name=opened.name,
            batch_size=images.batch_size,
            inspection=outputs.inspection,
        )
        statistics.append(measured)
    _write(models, found, statistics, folder)
    return statistics, [outputs.no_rollout for outputs in found if outputs.no_rollout is not None]


def _draw(
    opened: OpenedModel, images: ImageSelection, count: int, heads: Any, asked: dict[str, Any]
) -> AttentionOutputs:
    """Returns maps and a rollout of the first images, with their plots; neither if `count` is 0."""
    names, tensors = images.first(opened, max(count, 1))
    outputs = AttentionOutputs(inspect_images(opened.model, tensors), names)
    if count:
        options = {**asked, "name": opened.name, "batch_size": images.batch_size, "inspection": outputs.inspection}
        _draw_maps(opened, tensors, outputs, heads, options)
    return outputs


def _draw_maps(
    opened: OpenedModel, images: Tensor, outputs: AttentionOutputs, heads: Any, options: dict[str, Any]
) -> None:
    """Adds maps and a rollout, if the layers can be rolled out."""
    pixels = denormalize(images, opened.preprocessing)
    maps = attention_maps(opened.model, images, heads=heads, **options)
    outputs.tables["maps"] = maps
    for number, (name, picture) in enumerate(zip(outputs.names, pixels, strict=True)):
        outputs.figures[f"maps-{file_stem(name)}"] = draw_maps(maps, picture, image=number)
    try:
        rolled = rollout(opened.model, images, **options)
    except VicinalError as error:
        outputs.no_rollout = f"no rollout of {opened.name}: {error}"
        return
    outputs.tables["rollout"] = [rolled]
    outputs.figures["rollout"] = draw_rollout(rolled, pixels, outputs.names)


def _write(
    models: Sequence[OpenedModel],
    found: Sequence[AttentionOutputs],
    statistics: Sequence[AttentionStatistics],
    folder: Path,
) -> None:
    """Draws the comparison first, then replaces the files."""
    compared = draw_statistics(*statistics)
    folders = folder_per_model(models, folder)
    with replace_outputs([folder, *folders], *OUTPUTS):
        save_figure(compared, folder / "attention.png")
        for measured, outputs, place in zip(statistics, found, folders, strict=True):
            measured.save(place / "attention.csv")
            measured.save(place / "attention.json")
            for stem, maps in outputs.tables.items():
                save_maps(maps, place / f"{stem}.csv", outputs.names)
            for stem, figure in outputs.figures.items():
                save_figure(figure, place / f"{stem}.png")
