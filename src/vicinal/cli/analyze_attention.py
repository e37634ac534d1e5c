"""`vicinal analyze attention`: attention maps, rollout, and distance and entropy of heads."""

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.cli._images import ImageArgs
from vicinal.cli._models import ModelArgs
from vicinal.cli._output import OutputArgs

__all__ = ["run"]


def attention(
    models: ModelArgs,
    images: ImageArgs,
    output: OutputArgs,
    pictures: int = 4,
    layers: tuple[int, ...] = (),
    heads: tuple[int, ...] = (),
    query: Annotated[
        Literal["class", "mean"] | tuple[int, int] | None, tyro.conf.arg(metavar="class|mean|ROW COL")
    ] = None,
) -> None:
    """Measures mean attention distance and entropy of each head, and draws attention maps over images.

    Writes attention.png, .csv and .json: distance and entropy of every head of every layer; for some images
    maps-IMAGE.png and maps.csv; and rollout.png and .csv, attention through all layers. Several models have a folder
    each, and attention.png compares them.

    Args:
        pictures: Number of images for which maps are drawn.
        layers: Indices of layers to draw maps of and to roll out, negative from the end; by default all, with maps that
            are means over heads. In a model of several grids, a rollout needs layers on one of them.
        heads: Indices of heads to draw; by default all, if --layers is given.
        query: Whose attention is drawn: class, of the class token; mean, of all patches; or row and column of a patch,
            from 0. By default the one that the model classifies by.
    """
    selection = images.select()
    opened = models.open(images.device)
    folder = output.folder(opened)

    from vicinal.analysis.attention_maps import write_attention

    statistics, no_rollouts = write_attention(
        opened, selection, folder, pictures=pictures, layers=layers, heads=heads, query=query
    )
    for reason in no_rollouts:
        print(reason, file=sys.stderr)
    text = "\n\n".join([*(each.table() for each in statistics), f"wrote to {folder}"])
    output.print([each.as_dict() for each in statistics], text)
    selection.check_all_read()


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal analyze attention`, measures, writes and prints."""
    call_with_flags(attention, "vicinal analyze attention", args)
