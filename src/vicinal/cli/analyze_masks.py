"""`vicinal analyze masks`: what a prior has learned."""

import json as json_
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from vicinal.cli.subjects import as_file_name, folder_for, subjects_of

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
    neighbours if all patches looked alike; for gmm a mixture-LAYER.png with the kernels; and history.png, how the
    prior's options moved during training.

    Args:
        run: folder of a run or of a saved model, or hf-hub:owner/name.
        layers: whose mixtures are drawn, as indices, negative from the end, or names; the first and the last by
            default.
        logit: the logit of equal content, for convolution.png: what a prior multiplies.
        img_size: pixels, or height and width, for a model at another size than its own.
        out: folder to write to; the run's folder analysis by default. Files there are replaced.
        json: print everything as JSON.
    """
    (subject,) = subjects_of([run], [], img_size, False, "cpu")
    folder = folder_for([subject], out)

    from vicinal.analysis.mask_drawing import draw_history, draw_kernels, draw_masks, draw_mixture
    from vicinal.analysis.masks import masks_of

    found = masks_of(subject.model, name=subject.name, logit=logit)
    chosen = [found.index(int(each) if each.lstrip("-").isdigit() else each) for each in layers or ("0", "-1")]
    figures = {"masks": draw_masks(found), "convolution": draw_kernels(found)}
    for index in dict.fromkeys(chosen):
        if found.layers[index].mixture is not None:
            name = f"mixture-{as_file_name(found.layers[index].name)}"
            figures[name] = draw_mixture(found, index)
    history = subject.run.priors if subject.run is not None else None
    if history is not None:
        figures["history"] = draw_history(history, model=subject.name)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=130)
    found.write_json(folder / "masks.json")
    found.write_csv(folder / "masks.csv")
    found.write_options_csv(folder / "options.csv")
    if json:
        print(json_.dumps(found.as_dict()))
        return
    print(f"wrote {folder}/{', '.join(f'{name}.png' for name in figures)}, masks.csv, options.csv and masks.json")
    if history is None and subject.run is not None:
        print("the run has no priors.csv, so there is no history to draw")


def run(words: Sequence[str]) -> None:
    """Parse the words behind the instrument and act."""
    tyro.cli(masks, prog="vicinal analyze masks", args=words)
