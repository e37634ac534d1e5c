"""`vicinal analyze masks`: what a prior has learned."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.cli._models import ModelArgs, layer_name_or_index
from vicinal.cli._output import OutputArgs

__all__ = ["run"]


def masks(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    output: OutputArgs,
    layers: tuple[str, ...] = (),
    logit: float = 1.0,
    img_size: tuple[int, ...] = (),
) -> None:
    """Draws what a prior has learned: its tables over offsets, by layer and head, on one scale.

    Writes masks.png, masks.csv and masks.json; options.csv, the learned parameters; convolution.png, the attention of
    the central patch to the others for uniform content; for gmm a mixture-LAYER.png with the kernels, one for each gmm
    of a composition; and history.png, the parameters over epochs of training.

    Args:
        run: Folder of a run or of a saved model, or hf-hub:owner/name.
        layers: Layers whose mixtures are drawn, as indices, negative from the end, or names; by default the first and
            the last of those that are not zero.
        logit: Logit of uniform content, for convolution.png: a prior multiplies it.
        img_size: Pixels, or height and width; by default what the model declares.
    """
    (opened,) = ModelArgs(runs=(run,), img_size=img_size).open()
    folder = output.folder([opened])

    from vicinal.analysis.learned_tables import write_masks

    found, files = write_masks(opened, folder, logit=logit, layers=[layer_name_or_index(each) for each in layers])
    output.print(found.as_dict(), f"wrote {folder}/{', '.join(files)}")
    if opened.run is not None and "history.png" not in files:
        print(_no_history(opened.run.folder), file=sys.stderr)


def _no_history(folder: Path) -> str:
    from vicinal.training.prior_history import PRIORS_FILE

    why = f"{folder / PRIORS_FILE} has no rows" if (folder / PRIORS_FILE).is_file() else f"the run has no {PRIORS_FILE}"
    return f"{why}, so there is no history to draw"


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal analyze masks`, draws, writes and prints."""
    call_with_flags(masks, "vicinal analyze masks", args)
