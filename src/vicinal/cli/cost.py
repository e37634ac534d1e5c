"""`vicinal cost`: parameters, multiplications, depth and memory of models with and without priors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vicinal.errors import VicinalError

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
    """What models cost, with and without priors, next to what their papers say.

    Args:
        models: names of models, ours or timm's.
        prior: priors to give each of them.
        img_size: pixels, or height and width; 32 by default, and a timm model's own size.
        num_classes: outputs.
        pool: how features are pooled; each model's default if not given.
        batch_size: images to compute the memory of activations for.
        format: a Markdown table to read, or every figure in full as CSV or JSON.
        out: write to this file instead.
    """
    from vicinal.analysis.cost.measure import cost_of, format_costs
    from vicinal.models import create_model

    if len(img_size) > 2:
        raise VicinalError(f"--img-size is one number, or height and width; given {len(img_size)} numbers")
    if batch_size < 1 or not models or not prior:
        raise VicinalError("cost needs a model, a prior, and a --batch-size of at least 1")
    size = (img_size[0], img_size[-1]) if img_size else None
    costs = []
    for name in models:
        for each in prior:
            model = create_model(name, prior=each, img_size=size, num_classes=num_classes, global_pool=pool)
            costs.append(cost_of(model, name, each, batch_size=batch_size))
    text = format_costs(costs, format)
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
        print(f"wrote {out}")


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    tyro.cli(cost, prog="vicinal cost", args=words)
