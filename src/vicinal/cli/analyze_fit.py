"""`vicinal analyze fit`: learned tables fitted by Gaussians."""

import json as json_
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vicinal.cli._models import folder_for, layer_of, places_for, subjects_of, writing

__all__ = ["run"]


def fit(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = (),
    /,
    timm: tuple[str, ...] = (),
    random_weights: bool = False,
    kernels: int | None = None,
    heads: Literal["each", "mean"] = "each",
    view: Literal["centre", "offsets"] = "centre",
    layers: tuple[str, ...] = (),
    img_size: tuple[int, ...] = (),
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Fit the tables of a model, of priors or relative positions, by 2-D Gaussians: how wide are they, how Gaussian?

    Writes fit.json, fit.csv and fit.png; with --kernels also kernels.png. Of several models, each in a folder.

    Args:
        runs: folders of runs or of saved models, or hf-hub:owner/name.
        timm: models of timm's, with its weights: Swin, BEiT and others with relative positions.
        random_weights: models of timm's as they start, without its weights.
        kernels: also fit mixtures of 1, 2, ... up to so many Gaussians, as the prior gmm has them.
        heads: fit each, or their mean.
        view: around the centre patch, or all offsets up to those from corner to corner.
        layers: indices, negative from the end, or names; all by default.
        img_size: pixels, or height and width, for a model at another size than its own.
        out: folder to write to; the run's folder analysis by default. What an earlier call wrote there is replaced.
        json: print everything as JSON.
    """
    subjects = subjects_of(runs, timm, img_size, random_weights, "cpu")
    folder = folder_for(subjects, out)

    from vicinal.analysis.learned_tables.fit_plot import draw_fits, draw_kernels
    from vicinal.analysis.learned_tables.fit_report import fit_model

    reports = [
        fit_model(
            subject.model,
            name=subject.name,
            kernels=kernels,
            per_head=heads == "each",
            view=view,
            layers=[layer_of(each) for each in layers] or None,
            img_size=subject.size,
        )
        for subject in subjects
    ]
    figures = [{"fit": draw_fits(each), **({"kernels": draw_kernels(each)} if kernels else {})} for each in reports]
    places = places_for(subjects, folder)
    with writing([folder, *places], "fit.json", "fit.csv", "fit.png", "kernels.png"):
        for report, drawn, place in zip(reports, figures, places, strict=True):
            report.write_json(place / "fit.json")
            report.write_csv(place / "fit.csv")
            for name, figure in drawn.items():
                figure.savefig(place / f"{name}.png", dpi=130)
    if json:
        print(json_.dumps([report.as_dict() for report in reports]))
        return
    for report, place in zip(reports, places, strict=True):
        print(f"{report.table()}\n\nwrote {place}/fit.png, .csv and .json{' and kernels.png' if kernels else ''}")


def run(words: Sequence[str]) -> None:
    """Parse the words behind the instrument and act."""
    tyro.cli(fit, prog="vicinal analyze fit", args=words)
