"""`vicinal predict`: classes of a user's own images."""

import json as json_
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vicinal.errors import VicinalError
from vicinal.training.model_path import model_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vicinal.data import Preprocessing
    from vicinal.inspection.model_inspection import Inspection

__all__ = ["run"]


def predict(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...")],
    /,
    top: int = 5,
    json: bool = False,
    explain: Path | None = None,
    batch_size: int = 32,
    device: str = "auto",
) -> None:
    """Predicts the classes of images: the most probable ones, with probabilities.

    Args:
        run: Folder of a run or of a saved model, or hf-hub:owner/name.
        images: Images of any size, or folders of them.
        top: Number of classes to print.
        json: Print one JSON document, and nothing else.
        explain: Folder for a plot of each image, as the model takes it, with the attention of the last layer.
        batch_size: Number of images in a batch.
        device: cpu, cuda, cuda:1, mps; auto: a GPU if there is one.
    """
    if top < 1 or batch_size < 1:
        raise VicinalError(f"--top and --batch-size must be at least 1, got {top} and {batch_size}")
    source = model_folder(run)

    from vicinal.analysis.image_selection import find_image_files, read_images

    files, problems = find_image_files(images)
    if not files:
        raise VicinalError("there are no images: " + "; ".join(problems or ["none was given"]))
    if explain is not None:
        _make_folder(explain)

    from vicinal.data import Preprocessing
    from vicinal.models import load
    from vicinal.training.device import find_device

    model = load(source)
    declared: Any = model.pretrained_cfg
    model.to(find_device(device))
    preprocessing = Preprocessing.of_model(declared)
    names = declared.get("label_names")
    documents = []
    inspection = None
    for group, tensors in read_images(files, preprocessing, batch_size, problems):
        found = _predict(model, tensors, names, top)
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


def _predict(
    model: "nn.Module", tensors: "Tensor", names: Sequence[str] | None, top: int
) -> list[list[dict[str, Any]]]:
    import torch

    like = next(model.parameters())
    with torch.inference_mode():
        probabilities = model(tensors.to(like.device, like.dtype)).float().softmax(-1)
    best = probabilities.topk(min(top, probabilities.shape[-1]))
    return [
        [
            {"class": number, **({"name": names[number]} if names else {}), "probability": probability}
            for number, probability in zip(numbers, values, strict=True)
        ]
        for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


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
    tyro.cli(predict, prog="vicinal predict", args=args)
