"""`vicinal cost`: parameters, operations, depth and memory of models with and without priors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.cli._models import image_size

__all__ = ["run"]


def cost(
    models: Annotated[tuple[str, ...], tyro.conf.Positional] = ("vit", "swin", "cait", "pit", "t2t"),
    /,
    prior: tuple[str, ...] = ("none", "gmm"),
    img_size: tuple[int, ...] = (),
    num_classes: int = 10,
    pool: Literal["token", "avg"] | None = None,
    batch_size: int = 128,
    format: Literal["md", "csv", "json"] = "md",
    out: Path | None = None,
) -> None:
    """Measures the cost of models, with and without priors, beside the figures of their papers.

    Args:
        models: Names of models, ours or timm's.
        prior: Priors for each of them.
        img_size: Pixels, or height and width; by default 32, and a timm model's own size.
        num_classes: Number of outputs.
        pool: Pooling of features; each model's default if not given.
        batch_size: Number of images to compute the memory of activations for.
        format: A Markdown table, or all figures in full as CSV or JSON.
        out: File to write to, instead of printing.
    """
    size = image_size(img_size)

    from vicinal.analysis.cost import costs_of, format_costs, save_costs

    costs = costs_of(models, prior, img_size=size, num_classes=num_classes, global_pool=pool, batch_size=batch_size)
    if out is None:
        print(format_costs(costs, format))
    else:
        save_costs(costs, out, format)
        print(f"wrote {out}")


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal cost`, measures, and prints or writes."""
    call_with_flags(cost, "vicinal cost", args)
