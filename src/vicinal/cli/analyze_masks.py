"""`vicinal analyze masks`: what a prior has learned."""

import json as json_
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vicinal.cli._models import as_file_name, folder_for, layer_of, subjects_of, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vicinal.analysis.learned_tables.masks import Masks

__all__ = ["run"]


def masks(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    layers: tuple[str, ...] = (),
    logit: float = 1.0,
    img_size: tuple[int, ...] = (),
    out: Path | None = None,
    json: bool = False,
) -> None:
    """What a prior has learned: its masks over offsets, layer by layer and head by head, on one scale.

    Writes masks.png, masks.csv and masks.json; convolution.png, the attention that the centre patch would pay to its
    neighbours if all patches looked alike; for gmm a mixture-LAYER.png with the kernels, one for each gmm where several
    are composed; and history.png, how the prior's options moved during training.

    Args:
        run: folder of a run or of a saved model, or hf-hub:owner/name.
        layers: whose mixtures are drawn, as indices, negative from the end, or names; by default the first and the last
            of those that are not zero.
        logit: the logit of equal content, for convolution.png: what a prior multiplies.
        img_size: pixels, or height and width, for a model at another size than its own.
        out: folder to write to; the run's folder analysis by default. What an earlier call wrote there is replaced.
        json: print everything as JSON.
    """
    (subject,) = subjects_of([run], [], img_size, False, "cpu")
    folder = folder_for([subject], out)

    from vicinal.analysis.learned_tables.mask_plot import draw_history, draw_kernels, draw_masks
    from vicinal.analysis.learned_tables.masks import masks_of

    found = masks_of(subject.model, name=subject.name, logit=logit)
    figures = {"masks": draw_masks(found), "convolution": draw_kernels(found), **_mixtures(found, layers)}
    history = subject.run.priors if subject.run is not None else None
    if history is not None:
        figures["history"] = draw_history(history, model=subject.name)
    tables = ("masks.csv", "options.csv", "masks.json")
    with writing([folder], *tables, "masks.png", "convolution.png", "mixture-*.png", "history.png"):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=130)
        found.write_csv(folder / "masks.csv")
        found.write_options_csv(folder / "options.csv")
        found.write_json(folder / "masks.json")
    if json:
        print(json_.dumps(found.as_dict()))
    else:
        print(f"wrote {folder}/{', '.join((*(f'{name}.png' for name in figures), *tables))}")
    if history is None and subject.run is not None:
        print(_no_history(subject.run.folder), file=sys.stderr)


def _mixtures(found: "Masks", layers: Sequence[str]) -> "dict[str, Figure]":
    """Pictures of mixtures, by the names of their files."""
    from vicinal.analysis.learned_tables.mask_plot import draw_mixture

    if layers:
        chosen = [found.index(layer_of(each)) for each in layers]
    else:  # where all amplitudes are zero, there is nothing to see
        seen = [n for n, layer in enumerate(found.layers) if any(each.alpha.any() for each in layer.mixtures.values())]
        chosen = seen[:1] + seen[-1:]
    figures = {}
    for index in dict.fromkeys(chosen):
        layer = found.layers[index]
        for part in layer.mixtures or [None]:
            name = layer.name if len(layer.mixtures) < 2 else f"{layer.name}-{part}"
            figures[f"mixture-{as_file_name(name)}"] = draw_mixture(found, index, part)
    return figures


def _no_history(folder: Path) -> str:
    from vicinal.training.prior_history import PRIORS_FILE

    why = f"{folder / PRIORS_FILE} has no rows" if (folder / PRIORS_FILE).is_file() else f"the run has no {PRIORS_FILE}"
    return f"{why}, so there is no history to draw"


def run(words: Sequence[str]) -> None:
    """Parse the words behind the instrument and act."""
    tyro.cli(masks, prog="vicinal analyze masks", args=words)
