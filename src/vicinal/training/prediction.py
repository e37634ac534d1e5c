"""Classes of a user's own images, by a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from vicinal.data import Preprocessing
from vicinal.data.image_files import find_image_files, read_images
from vicinal.errors import VicinalError
from vicinal.training.model_path import load

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["most_probable", "predict"]


def predict(
    run: str | Path,
    images: "str | Path | Image.Image | NDArray[Any] | Sequence[str | Path | Image.Image | NDArray[Any]]",
    *,
    top: int = 5,
    batch_size: int = 32,
    device: Literal["auto", "cpu"] = "auto",
) -> list[dict[str, Any]]:
    """Returns the most probable classes of images, as `vicinal predict --json` prints them.

    >>> import tempfile, vicinal
    >>> from PIL import Image
    >>> model = vicinal.create_model("vit-micro", img_size=8, depth=1, num_classes=2)
    >>> folder = vicinal.save(model, tempfile.mkdtemp() + "/model", class_names=["cat", "dog"])
    >>> (found,) = vicinal.predict(folder, Image.new("RGB", (40, 30)), top=2)
    >>> sorted(each["name"] for each in found["predictions"])
    ['cat', 'dog']
    >>> round(sum(each["probability"] for each in found["predictions"]), 4)
    1.0

    Args:
        run: the folder of a run or of a saved model, or `hf-hub:owner/name`.
        images: one or several of: files, folders, patterns such as `photos/*.jpg`, Pillow images, arrays
            `(height, width, channels)` of uint8.
        top: number of classes.
        batch_size: number of images in a batch.
        device: `cpu`, or `auto` for a GPU if there is one.

    Returns:
        For each image `image`, its path, or an empty text for an image that is not a file, and `predictions`, most
        probable first: `class`, the index, `name` if the model has names, and `probability`.

    Raises:
        VicinalError: there is no such model, or an image cannot be read.
    """
    if top < 1 or batch_size < 1:
        raise VicinalError(f"top and batch_size must be at least 1, got {top} and {batch_size}")
    one = isinstance(images, str | Path | Image.Image) or hasattr(images, "__array_interface__")
    files: list[Path | Image.Image] = []
    for image in [images] if one else images:  # type: ignore[union-attr]
        if isinstance(image, str | Path):
            found, problems = find_image_files([image])
            if problems:
                raise VicinalError(problems[0])
            files += found
        else:
            files.append(image if isinstance(image, Image.Image) else Image.fromarray(image))  # type: ignore[arg-type]
    model: Any = load(run)
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device == "auto" else None
    model.to(accelerator or "cpu")
    documents, unreadable = [], list[str]()
    for names, tensors in read_images(files, Preprocessing.of_model(model.pretrained_cfg), batch_size, unreadable):
        for name, predictions in zip(names, most_probable(model, tensors, top), strict=True):
            documents.append({"image": name, "predictions": predictions})
    if unreadable:
        raise VicinalError(unreadable[0])
    return documents


def most_probable(model: nn.Module, images: Tensor, top: int) -> list[list[dict[str, Any]]]:
    """Returns the most probable classes of each image, with names if the model declares them.

    Args:
        model: in evaluation mode.
        images: as the model takes them, `(n, channels, height, width)`.
        top: maximum number of classes.
    """
    declared: Any = model.pretrained_cfg
    names, like = declared.get("label_names"), next(model.parameters())
    with torch.inference_mode():
        probabilities = model(images.to(like.device, like.dtype)).float().softmax(-1)
    best = probabilities.topk(min(top, probabilities.shape[-1]))
    return [
        [
            {"class": number, **({"name": names[number]} if names else {}), "probability": probability}
            for number, probability in zip(numbers, values, strict=True)
        ]
        for numbers, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
