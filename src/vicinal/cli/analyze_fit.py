"""`vicinal analyze fit`: learned tables fitted by Gaussians."""

from collections.abc import Sequence
from typing import Literal

from vicinal.cli._flags import call_with_flags
from vicinal.cli._models import ModelArgs, layer_name_or_index
from vicinal.cli._output import OutputArgs

__all__ = ["run"]


def fit(
    models: ModelArgs,
    output: OutputArgs,
    kernels: int | None = None,
    heads: Literal["each", "mean"] = "each",
    view: Literal["center", "centre", "offsets"] = "center",
    layers: tuple[str, ...] = (),
) -> None:
    """Fits the tables of a model, of priors or relative positions, by 2-D Gaussians.

    Writes fit.json, fit.csv and fit.png; with --kernels also kernels.png. Several models have a folder each.

    Args:
        kernels: Also fit mixtures of 1, 2, ... up to this many Gaussians of the distance, as the prior gmm has them.
        heads: Fit each head, or their mean.
        view: The table around the central patch, or all offsets up to those from corner to corner. centre is an old
            spelling of center.
        layers: Indices, negative from the end, or names; all by default.
    """
    opened = models.open()
    folder = output.folder(opened)

    from vicinal.analysis.learned_tables import write_fits

    reports, folders = write_fits(
        opened,
        folder,
        kernels=kernels,
        per_head=heads == "each",
        view="offsets" if view == "offsets" else "center",
        layers=[layer_name_or_index(each) for each in layers] or None,
    )
    more = " and kernels.png" if kernels else ""
    texts = (
        f"{report.table()}\n\nwrote {place}/fit.png, .csv and .json{more}"
        for report, place in zip(reports, folders, strict=True)
    )
    output.print([report.as_dict() for report in reports], "\n".join(texts))


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal analyze fit`, fits, writes and prints."""
    call_with_flags(fit, "vicinal analyze fit", args)
