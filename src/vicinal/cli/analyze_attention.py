"""`vicinal analyze attention`: where a model looks."""

import json as json_
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vicinal.cli._images import as_seen
from vicinal.cli._models import Look, Subject, as_file_name, distinct, folder_for, places_for, subjects_of, writing
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from vicinal.analysis.attention_maps.measure import AttentionMap

__all__ = ["run"]

TABLES = ("attention.csv", "attention.json", "maps.csv", "rollout.csv")
PICTURES = ("attention.png", "maps-*.png", "rollout.png")


@dataclass
class _Maps:
    """What is drawn over some pictures."""

    names: list[str] = field(default_factory=list)
    """Of the pictures."""
    tables: "dict[str, Sequence[AttentionMap]]" = field(default_factory=dict)
    """By the names of their files, as are the figures."""
    figures: "dict[str, Figure]" = field(default_factory=dict)


def attention(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")] = (),
    /,
    timm: tuple[str, ...] = (),
    random_weights: bool = False,
    images: str | None = None,
    data_dir: Path | None = None,
    count: int = 64,
    pictures: int = 4,
    layers: tuple[int, ...] = (),
    heads: tuple[int, ...] = (),
    query: Annotated[
        Literal["class", "mean"] | tuple[int, int] | None, tyro.conf.arg(metavar="class|mean|ROW COL")
    ] = None,
    img_size: tuple[int, ...] = (),
    batch_size: int = 32,
    seed: int = 0,
    out: Path | None = None,
    json: bool = False,
    device: Literal["auto", "cpu"] = "auto",
) -> None:
    """Where a model looks: how far and how widely each head does, and maps over pictures.

    Writes attention.png, .csv and .json: mean distance and entropy of every head of every layer; for some pictures
    maps-PICTURE.png and maps.csv; and rollout.png and .csv, attention through all layers. Of several models, a folder
    each, and attention.png compares them.

    Args:
        runs: folders of runs or of saved models, or hf-hub:owner/name; several are compared.
        timm: models of timm's, with its weights.
        random_weights: models of timm's as they start, without its weights.
        images: a folder of pictures, a picture, or one of `vicinal datasets`, of which the test split is taken; by
            default the run's own.
        data_dir: where a Parquet copy of the set is, in place of the Hub; by default where the run had it.
        count: how many images to measure distance and entropy on.
        pictures: for how many of them maps are drawn.
        layers: indices of layers to draw maps of and to roll out, negative from the end; all, with maps as means over
            heads, by default. In a model of several grids, a rollout takes layers of one.
        heads: indices of heads to draw; all of them, where --layers is given, by default.
        query: whose attention is drawn: class, for the class token's; mean, for that of all patches; or row and column
            of a patch, from 0. By default what the model classifies by.
        img_size: pixels, or height and width, for a model at another size than its own.
        batch_size: images at a time, which bounds the memory.
        seed: of the choice of images.
        out: folder to write to; the run's folder analysis by default. What an earlier call wrote there is replaced.
        json: print distance and entropy as JSON.
        device: auto is a GPU where there is one.
    """
    look = Look(images, data_dir, count, batch_size, seed)
    if pictures < 0:
        raise VicinalError(f"--pictures is a number of pictures, at least 0, given {pictures}")
    subjects = subjects_of(runs, timm, img_size, random_weights, device)
    folder = folder_for(subjects, out)

    from vicinal.analysis.attention_maps.measure import write_maps
    from vicinal.analysis.attention_maps.plot import draw_statistics
    from vicinal.analysis.attention_maps.statistics import attention_statistics

    # Maps are of few images: what is wrong with layers, heads or the query shows before all of them are measured.
    drawn = [_maps(subject, look, pictures, layers, heads, query) if pictures else _Maps() for subject in subjects]
    found = []
    for subject in subjects:
        batches = (tensors for _, tensors in look.batches(subject))
        found.append(attention_statistics(subject.model, batches, name=subject.name, batch_size=batch_size))
    compared = draw_statistics(*found)
    places = places_for(subjects, folder)
    with writing([folder, *places], *TABLES, *PICTURES):
        compared.savefig(folder / "attention.png", dpi=130)
        for statistics, maps, place in zip(found, drawn, places, strict=True):
            statistics.write_csv(place / "attention.csv")
            statistics.write_json(place / "attention.json")
            for stem, table in maps.tables.items():
                write_maps(table, place / f"{stem}.csv", maps.names)
            for stem, figure in maps.figures.items():
                figure.savefig(place / f"{stem}.png", dpi=130)
    if json:
        print(json_.dumps([each.as_dict() for each in found]))
    else:
        print("\n\n".join([*(each.table() for each in found), f"wrote to {folder}"]))
    look.complain()


def _maps(
    subject: Subject,
    look: Look,
    count: int,
    layers: Sequence[int],
    heads: Sequence[int],
    query: Literal["class", "mean"] | tuple[int, int] | None,
) -> _Maps:
    """Maps and a rollout of the first images."""
    from vicinal.analysis.attention_maps.measure import attention_maps
    from vicinal.analysis.attention_maps.plot import draw_maps, draw_rollout
    from vicinal.analysis.attention_maps.rollout import rollout

    names, images = _first(look, subject, count)
    asked: dict[str, Any] = {"layers": list(layers) or None, "query": query, "name": subject.name}
    chosen: Any = list(heads) or (None if layers else "mean")
    maps = attention_maps(subject.model, images, heads=chosen, batch_size=look.batch_size, **asked)
    seen = as_seen(images, subject.preprocessing)
    found = _Maps(names, {"maps": maps})
    for number, (name, picture) in enumerate(zip(names, seen, strict=True)):
        found.figures[f"maps-{as_file_name(name)}"] = draw_maps(maps, picture, image=number)
    try:
        rolled = rollout(subject.model, images, batch_size=look.batch_size, **asked)
    except VicinalError as error:
        print(f"no rollout of {subject.name}: {error}", file=sys.stderr)
        return found
    found.tables["rollout"] = [rolled]
    found.figures["rollout"] = draw_rollout(rolled, seen, names)
    return found


def _first(look: Look, subject: Subject, count: int) -> "tuple[list[str], Tensor]":
    """The first images and their names."""
    import torch

    names: list[str] = []
    tensors = []
    for some, images in look.batches(subject):
        names += some
        tensors.append(images)
        if len(names) >= count:
            break
    return distinct(names[:count]), torch.cat(tensors)[:count]


def run(words: Sequence[str]) -> None:
    """Parse the words behind the instrument and act."""
    tyro.cli(attention, prog="vicinal analyze attention", args=words)
