"""`vicinal analyze erf`: effective receptive fields."""

import dataclasses
import json as json_
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vicinal.cli._models import Look, as_file_name, folder_for, layer_of, subjects_of, writing
from vicinal.errors import VicinalError
from vicinal.files import write_json

__all__ = ["run"]


def erf(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")] = (),
    /,
    timm: tuple[str, ...] = (),
    random_weights: bool = False,
    images: str | None = None,
    data_dir: Path | None = None,
    count: int = 64,
    layer: str | None = None,
    at: tuple[int, int] | None = None,
    mode: Literal["clip", "abs"] = "clip",
    positions: tuple[Literal["trained", "random", "zero"], ...] = ("trained",),
    img_size: tuple[int, ...] = (),
    batch_size: int = 32,
    seed: int = 0,
    out: Path | None = None,
    json: bool = False,
    device: Literal["auto", "cpu"] = "auto",
) -> None:
    """Effective receptive fields: which pixels the centre patch of a layer depends on, and how much.

    The gradient of the patch's mean channel with respect to the pixels, negative part clipped, averaged over images.
    Writes erf.npz (the field), erf.png and erf.json; of several models or positions a file each, and a comparison.

    Args:
        runs: folders of runs or of saved models, or hf-hub:owner/name; several are compared.
        timm: models of timm's, with its weights.
        random_weights: models of timm's as they start, without its weights.
        images: a folder of pictures, or one of `vicinal datasets`, of which the test split is taken; by default the
            run's own.
        data_dir: where a Parquet copy of the set is, in place of the Hub; by default where the run had it.
        count: how many images.
        layer: index of a block, negative from the end, or a module's name; the last block by default.
        at: row and column of the patch; the centre by default.
        mode: negative gradients become zero, or their absolute value.
        positions: position embeddings, relative tables and priors as trained, as they start, or none; several are
            compared.
        img_size: pixels, or height and width, for a model at another size than its own.
        batch_size: images in one backward pass, which bounds the memory.
        seed: of the choice of images, and of random positions.
        out: folder to write to; the run's folder analysis by default. What an earlier call wrote there is replaced.
        json: print everything as JSON.
        device: auto is a GPU where there is one.
    """
    look = Look(images, data_dir, count, batch_size, seed)
    if not positions:
        raise VicinalError("--positions is one or more of trained, random and zero")
    subjects = subjects_of(runs, timm, img_size, random_weights, device)
    folder = folder_for(subjects, out)

    from vicinal.analysis.receptive_field.measure import ReceptiveField, receptive_field
    from vicinal.analysis.receptive_field.plot import draw_field, draw_fields

    found: dict[str, ReceptiveField] = {}
    for subject in subjects:
        for each in dict.fromkeys(positions):
            field = receptive_field(
                subject.model,
                (tensors for _, tensors in look.batches(subject)),
                layer=None if layer is None else layer_of(layer),
                at=at,
                mode=mode,
                positions=each,
                seed=seed,
                batch_size=batch_size,
            )
            label = subject.name if len(positions) == 1 else f"{subject.name}, {each} positions"
            found[label] = dataclasses.replace(field, model=subject.name)
    stems = {label: "erf" if len(found) == 1 else f"erf-{as_file_name(label)}" for label in found}
    figures = {stems[label]: draw_field(field) for label, field in found.items()}
    if len(found) > 1:
        figures["erf"] = draw_fields(found)
    documents = [{"label": label, **field.as_dict()} for label, field in found.items()]
    with writing([folder], "erf.png", "erf.npz", "erf.json", "erf-*.png", "erf-*.npz"):
        for label, field in found.items():
            field.save(folder / f"{stems[label]}.npz")
        for stem, figure in figures.items():
            figure.savefig(folder / f"{stem}.png", dpi=130)
        write_json(folder / "erf.json", documents)
    print(json_.dumps(documents) if json else _table(documents))
    if not json:
        fields = "erf.npz" if len(found) == 1 else f"{len(found)} times erf-*.png and .npz"
        print(f"\nwrote erf.png, erf.json and {fields} to {folder}")
    look.complain()


def _table(documents: Sequence[dict[str, Any]]) -> str:
    first = documents[0]
    lines = [
        f"patch {first['at'][0]} {first['at'][1]} of {first['grid'][0]} x {first['grid'][1]}, "
        f"mean of {first['images']} images; lengths in pixels (patches)",
    ]
    width = max(len("model"), *(len(each["label"]) for each in documents))
    squares = [f"{round(100 * each['share'])}% in" for each in first["squares"]]
    head = ["sigma_x", "sigma_y", "R^2", *squares, "outside patch"]
    lines.append(f"{'model':{width}}  {'layer':16}" + "".join(f"{word:>14}" for word in head))
    for each in documents:
        fit = each["fit"]
        cells = ["< " * fit["at_most"][sigma] + _length(fit[sigma]) for sigma in ("sigma_x", "sigma_y")]
        cells.append("-" if fit["r2"] is None else f"{fit['r2']:.3f}")
        cells += [_length(square) for square in each["squares"]]
        cells.append(f"{each['outside_centre_patch']:.1%}")
        notes = [fit["note"]] * bool(fit["note"]) + ["rotary positions stay"] * each["rotary_stay"]
        line = f"{each['label']:{width}}  {each['layer']:16}" + "".join(f"{cell:>14}" for cell in cells)
        lines.append(f"{line}  {'; '.join(notes)}".rstrip())
    return "\n".join(lines)


def _length(value: dict[str, float | None]) -> str:
    if value["pixels"] is None or value["patches"] is None:
        return "-"
    return f"{value['pixels']:.1f} ({value['patches']:.2f})"


def run(words: Sequence[str]) -> None:
    """Parse the words behind the instrument and act."""
    tyro.cli(erf, prog="vicinal analyze erf", args=words)
