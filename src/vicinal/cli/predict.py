"""`vicinal predict`: what a trained model makes of a user's own pictures."""

import json as json_
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vicinal.cli._images import as_seen, batches, search
from vicinal.errors import VicinalError
from vicinal.training.model_path import model_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vicinal.data import Preprocessing

__all__ = ["run"]


def predict(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...")],
    /,
    top: int = 5,
    json: bool = False,
    explain: Path | None = None,
    batch_size: int = 32,
    device: Literal["auto", "cpu"] = "auto",
) -> None:
    """What a trained model takes pictures for: the likeliest classes, with probabilities.

    Args:
        run: a run's folder, a saved model's folder, or hf-hub:owner/name.
        images: pictures of any size, or folders of them.
        top: number of classes to name.
        json: print one JSON document, and nothing else.
        explain: draw each picture, as the model sees it, with the last layer's attention, into this folder.
        batch_size: pictures at a time.
        device: auto is a GPU where there is one.
    """
    if top < 1 or batch_size < 1:
        raise VicinalError(f"--top and --batch-size are at least 1, given {top} and {batch_size}")
    source = model_folder(run)
    files, problems = search(images)
    if not files:
        raise VicinalError("no pictures to look at: " + "; ".join(problems or ["none was given"]))
    if explain is not None:
        _make(explain)

    import torch

    from vicinal.data import Preprocessing
    from vicinal.models import load

    model = load(source)
    declared: Any = model.pretrained_cfg
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device == "auto" else None
    model.to(accelerator or "cpu")
    preprocessing = Preprocessing.of_model(declared)
    names = declared.get("label_names")
    documents = []
    for group, tensors in batches(files, preprocessing, batch_size, problems):
        found = _predict(model, tensors, names, top)
        if explain is not None:
            _explain(model, tensors, preprocessing, group, found, explain)
        for file, predictions in zip(group, found, strict=True):
            documents.append({"image": file, "predictions": predictions})
            if not json:
                print(f"{file}\n{_lines(predictions)}", flush=True)
    if json:
        print(json_.dumps(documents, indent=2, ensure_ascii=False))
    if explain is not None and documents:
        print(f"drew {len(documents)} into {explain}", file=sys.stderr)
    if problems:
        raise VicinalError("without what could not be read:\n  " + "\n  ".join(problems))


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
) -> None:
    from vicinal.analysis.attention_maps.overlay import attention_map, draw_overlay

    like = next(model.parameters())
    maps = attention_map(model, tensors.to(like.device, like.dtype))
    pictures = as_seen(tensors, preprocessing)
    for file, picture, attention, predictions in zip(files, pictures, maps, found, strict=True):
        title = f"{_name(predictions[0])}, {predictions[0]['probability']:.1%}"
        draw_overlay(picture, attention, title).savefig(_unused(folder, Path(file).stem), dpi=130)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VicinalError(f"--explain cannot make the folder {folder}: {error.strerror}") from None


def _unused(folder: Path, stem: str) -> Path:
    """A file for a picture that is there for no other one, neither of this run nor of another."""
    names = (f"{stem}.png" if number == 1 else f"{stem}-{number}.png" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    tyro.cli(predict, prog="vicinal predict", args=words)
