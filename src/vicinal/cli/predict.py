"""`vicinal predict`: classes of a user's own images."""

import json as json_
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError
from vicinal.training.model_path import check_model, open_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vicinal.data import Preprocessing
    from vicinal.inspection.model_inspection import Inspection

__all__ = ["run"]


def predict(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...")],
    /,
    top: int = 5,
    json: bool = False,
    explain: Path | None = None,
    batch_size: int = 32,
    device: str = "auto",
) -> None:
    """Predicts the classes of images: the most probable ones, with probabilities.

    Of a run that is not finished, the last checkpoint is used.

    Args:
        run: Folder of a run or of a saved model, or hf-hub:owner/name.
        images: Images of any size, folders of them, patterns such as 'photos/*.jpg', or - for paths from standard
            input, one per line.
        top: Number of classes to print.
        json: Print one JSON document, and nothing else.
        explain: Folder for a plot of each image, as the model takes it, with the attention of the last layer.
        batch_size: Number of images in a batch.
        device: cpu, cuda, cuda:1, mps; auto: a GPU if there is one.
    """
    if top < 1 or batch_size < 1:
        raise VicinalError(f"--top and --batch-size must be at least 1, got {top} and {batch_size}")
    check_model(run)

    from vicinal.data.image_files import find_image_files, read_images

    files, problems = find_image_files(_paths(images))
    if not files:
        raise VicinalError("there are no images: " + "; ".join(problems or ["none was given"]))
    if explain is not None:
        _make_folder(explain)

    from vicinal.data import Preprocessing
    from vicinal.training.device import find_device
    from vicinal.training.prediction import most_probable

    model, note = open_model(run)
    if note is not None:
        print(f"vicinal: {note}", file=sys.stderr)
    model.to(find_device(device))
    preprocessing = Preprocessing.of_model(model.pretrained_cfg)  # type: ignore[arg-type]
    documents, inspection = [], None
    for group, tensors in read_images(files, preprocessing, batch_size, problems):
        found = most_probable(model, tensors, top)
        if explain is not None:
            inspection = _explain(model, tensors, preprocessing, group, found, explain, inspection)
        for file, predictions in zip(group, found, strict=True):
            documents.append({"image": file, "predictions": predictions})
            if not json:
                print(f"{file}\n{_lines(predictions)}", flush=True)
    if json:
        print(json_.dumps(documents, indent=2, ensure_ascii=False))
    if explain is not None and documents:
        print(f"drew {len(documents)} into {explain}", file=sys.stderr)
    if problems:
        raise VicinalError("some images could not be read and are left out:\n  " + "\n  ".join(problems))


def _paths(images: Sequence[str]) -> list[str]:
    """Returns the paths, with `-` replaced by the lines of standard input."""
    lines = [line.rstrip("\r\n") for line in sys.stdin] if "-" in images else []
    return [path for image in images for path in (filter(None, lines) if image == "-" else [image])]


def _name(prediction: dict[str, Any]) -> str:
    return str(prediction.get("name", f"class {prediction['class']}"))


def _lines(predictions: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"  {each['probability']:7.2%}  {_name(each)}" for each in predictions)


def _explain(
    model: "nn.Module",
    tensors: "Tensor",
    preprocessing: "Preprocessing",
    files: Sequence[str],
    found: Sequence[Sequence[dict[str, Any]]],
    folder: Path,
    inspection: "Inspection | None",
) -> "Inspection":
    """Draws attention maps into a folder, and returns the inspection of the model for the next batch."""
    from vicinal.analysis.attention_maps import attention_map, draw_overlay, inspect_images
    from vicinal.analysis.image_selection import denormalize
    from vicinal.analysis.plot_style import save_figure

    like = next(model.parameters())
    inspection = inspection or inspect_images(model, tensors)
    maps = attention_map(model, tensors.to(like.device, like.dtype), inspection=inspection)
    pictures = denormalize(tensors, preprocessing)
    for file, picture, attention, predictions in zip(files, pictures, maps, found, strict=True):
        title = f"{_name(predictions[0])}, {predictions[0]['probability']:.1%}"
        save_figure(draw_overlay(picture, attention, title), _unused(folder, Path(file).stem))
    return inspection


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VicinalError(f"--explain must be a folder that can be created, got {folder}: {error.strerror}") from None


def _unused(folder: Path, stem: str) -> Path:
    """Returns a file name for a plot that does not exist yet."""
    names = (f"{stem}.png" if number == 1 else f"{stem}-{number}.png" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal predict`, predicts and prints."""
    call_with_flags(predict, "vicinal predict", args)
