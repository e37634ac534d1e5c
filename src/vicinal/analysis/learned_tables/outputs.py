"""Fits tables and reads masks of models, and writes figures and plots to a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vicinal.analysis.learned_tables.fit_plot import draw_fits, draw_mixture_r2
from vicinal.analysis.learned_tables.fit_report import FitReport, View
from vicinal.analysis.learned_tables.fit_tables import fit_model
from vicinal.analysis.learned_tables.mask_plot import draw_convolutions, draw_masks
from vicinal.analysis.learned_tables.mask_result import Masks
from vicinal.analysis.learned_tables.masks import masks_of
from vicinal.analysis.learned_tables.mixture_plot import draw_history, draw_mixture
from vicinal.analysis.opened_model import OpenedModel
from vicinal.analysis.output_files import file_stem, folder_per_model, replace_outputs
from vicinal.analysis.plot_style import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_fits", "write_masks"]

FIT_OUTPUTS = ("fit.json", "fit.csv", "fit.png", "kernels.png")
MASK_TABLES = ("masks.csv", "options.csv", "masks.json")
MASK_FIGURES = ("masks.png", "convolution.png", "mixture-*.png", "history.png")


def write_fits(
    models: Sequence[OpenedModel],
    folder: Path,
    *,
    kernels: int | None = None,
    per_head: bool = True,
    view: View = "center",
    layers: Sequence[int | str] | None = None,
) -> tuple[list[FitReport], list[Path]]:
    """Fits the tables of each model, and writes `fit.json`, `fit.csv` and `fit.png`; with `kernels`, `kernels.png`.

    Args:
        models: as `open_models` returns them.
        folder: where to write, several models in a folder each; files of an earlier call are replaced.
        kernels: as for `fit_model`.
        per_head: as for `fit_model`.
        view: as for `fit_model`.
        layers: as for `fit_model`.

    Returns:
        The fits of each model, and the folder that has its files.

    Raises:
        VicinalError: if a model has no table, or a file cannot be written.
    """
    reports = [
        fit_model(
            opened.model,
            name=opened.name,
            kernels=kernels,
            per_head=per_head,
            view=view,
            layers=layers,
            img_size=opened.img_size,
        )
        for opened in models
    ]
    figures = [{"fit": draw_fits(each), **({"kernels": draw_mixture_r2(each)} if kernels else {})} for each in reports]
    folders = folder_per_model(models, folder)
    with replace_outputs([folder, *folders], *FIT_OUTPUTS):
        for report, drawn, place in zip(reports, figures, folders, strict=True):
            report.save(place / "fit.json")
            report.save(place / "fit.csv")
            for stem, figure in drawn.items():
                save_figure(figure, place / f"{stem}.png")
    return reports, folders


def write_masks(
    opened: OpenedModel, folder: Path, *, logit: float = 1.0, layers: Sequence[int | str] = ()
) -> tuple[Masks, list[str]]:
    """Reads the masks of a model, and writes them as tables and plots.

    The files are `masks.csv`, `masks.json`, `options.csv`, `masks.png`, `convolution.png`, `mixture-LAYER.png` for
    layers with `gmm`, and `history.png` for a run that logged its priors.

    Args:
        opened: as `open_models` returns it.
        folder: where to write; files of an earlier call are replaced.
        logit: as for `masks_of`.
        layers: names or indices of the layers whose mixtures are drawn; by default the first and the last of those
            whose amplitudes are not zero.

    Returns:
        The masks, and the names of the files.

    Raises:
        VicinalError: if the model has no prior, or a file cannot be written.
    """
    masks = masks_of(opened.model, name=opened.name, logit=logit)
    figures = {"masks": draw_masks(masks), "convolution": draw_convolutions(masks), **_draw_mixtures(masks, layers)}
    history = opened.run.priors if opened.run is not None else None
    if history is not None:
        figures["history"] = draw_history(history, model=opened.name)
    with replace_outputs([folder], *MASK_TABLES, *MASK_FIGURES):
        for stem, figure in figures.items():
            save_figure(figure, folder / f"{stem}.png")
        masks.save(folder / "masks.csv")
        masks.save(folder / "masks.json")
        masks.save_options(folder / "options.csv")
    return masks, [*(f"{stem}.png" for stem in figures), *MASK_TABLES]


def _draw_mixtures(masks: Masks, layers: Sequence[int | str]) -> "dict[str, Figure]":
    """Returns plots of mixtures, by the stems of their files."""
    if layers:
        chosen = [masks.index(layer) for layer in layers]
    else:
        nonzero = [
            number
            for number, layer in enumerate(masks.layers)
            if any(mixture.alpha.any() for mixture in layer.mixtures.values())
        ]
        chosen = nonzero[:1] + nonzero[-1:]
    figures = {}
    for index in dict.fromkeys(chosen):
        layer = masks.layers[index]
        for part in layer.mixtures or [None]:
            name = layer.name if len(layer.mixtures) < 2 else f"{layer.name}-{part}"
            figures[f"mixture-{file_stem(name)}"] = draw_mixture(masks, index, part)
    return figures
