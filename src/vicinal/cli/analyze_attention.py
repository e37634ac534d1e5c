"""`vicinal analyze attention`: where a model looks."""

import itertools
import json as json_
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vicinal.cli.pictures import as_seen
from vicinal.cli.subjects import Look, Subject, as_file_name, folder_for, subjects_of
from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["run"]


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
    query: tuple[int, int] | None = None,
    img_size: tuple[int, ...] = (),
    batch_size: int = 32,
    seed: int = 0,
    out: Path | None = None,
    json: bool = False,
    device: Literal["auto", "cpu"] = "auto",
) -> None:
    """Where a model looks: how far and how widely each head does, and maps over pictures.

    Writes attention.png, .csv and .json: mean distance and entropy of every head of every layer; for some pictures
    maps-PICTURE.png and maps.csv; and rollout.png, attention through all layers. Of several models, a folder each,
    and attention.png compares them.

    Args:
        runs: folders of runs or of saved models, or hf-hub:owner/name; several are compared.
        timm: models of timm's, with its weights.
        random_weights: models of timm's as they start, without its weights.
        images: a folder of pictures, a picture, or one of `vicinal datasets`, of which the test split is taken; by
            default the run's own.
        data_dir: where a Parquet copy of the set is, in place of the Hub; by default where the run had it.
        count: how many images to measure distance and entropy on.
        pictures: for how many of them maps are drawn.
        layers: indices of layers to draw maps of, negative from the end; all, as means over heads, by default.
        heads: indices of heads to draw; all of them, where --layers is given, by default.
        query: row and column of the patch whose attention is drawn; by default the class token, or the mean over
            patches.
        img_size: pixels, or height and width, for a model at another size than its own.
        batch_size: images at a time, which bounds the memory.
        seed: of the choice of images.
        out: folder to write to; the run's folder analysis by default. Files there are replaced.
        json: print distance and entropy as JSON.
        device: auto is a GPU where there is one.
    """
    look = Look(images, data_dir, count, batch_size, seed)
    if pictures < 0:
        raise VicinalError(f"--pictures is a number of pictures, at least 0, given {pictures}")
    subjects = subjects_of(runs, timm, img_size, random_weights, device)
    folder = folder_for(subjects, out)

    from vicinal.analysis.attention import attention_statistics
    from vicinal.analysis.attention_drawing import draw_statistics

    found = []
    for subject in subjects:
        place = folder if len(subjects) == 1 else folder / as_file_name(subject.name)
        place.mkdir(exist_ok=True)
        names, shown = _first(look, subject, pictures)
        batches = (tensors for _, tensors in look.batches(subject))
        statistics = attention_statistics(subject.model, batches, name=subject.name, batch_size=batch_size)
        statistics.write_csv(place / "attention.csv")
        statistics.write_json(place / "attention.json")
        found.append(statistics)
        if pictures:
            _draw_maps(subject, names, shown, layers, heads, query, place)
        if not json:
            print(statistics.table() + "\n")
    draw_statistics(*found).savefig(folder / "attention.png", dpi=130)
    print(json_.dumps([each.as_dict() for each in found]) if json else f"wrote to {folder}")
    look.complain()


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
    return names[:count], torch.cat(tensors)[:count]


def _draw_maps(
    subject: Subject,
    names: Sequence[str],
    images: "Tensor",
    layers: Sequence[int],
    heads: Sequence[int],
    query: tuple[int, int] | None,
    folder: Path,
) -> None:
    from vicinal.analysis.attention_drawing import draw_maps, draw_rollout
    from vicinal.analysis.attention_maps import attention_maps, write_maps
    from vicinal.analysis.rollout import rollout

    chosen: Any = list(heads) or (None if layers else "mean")
    wanted: Any = list(layers) or (lambda *_: True)
    maps = attention_maps(subject.model, images, layers=wanted, heads=chosen, query=query, name=subject.name)
    write_maps(maps, folder / "maps.csv")
    seen = as_seen(images, subject.preprocessing)
    taken = set()
    for number, (name, picture) in enumerate(zip(names, seen, strict=True)):
        stems = (as_file_name(Path(name).stem) + ("" if n == 1 else f"-{n}") for n in itertools.count(1))
        stem = next(each for each in stems if each not in taken)
        taken.add(stem)
        draw_maps(maps, picture, image=number).savefig(folder / f"maps-{stem}.png", dpi=130)
    try:
        rolled = rollout(subject.model, images, query=query, name=subject.name)
    except VicinalError as error:
        print(f"no rollout of {subject.name}: {error}")
        return
    draw_rollout(rolled, seen, [Path(name).name for name in names]).savefig(folder / "rollout.png", dpi=130)


def run(words: Sequence[str]) -> None:
    """Parse the words behind the instrument and act."""
    tyro.cli(attention, prog="vicinal analyze attention", args=words)
