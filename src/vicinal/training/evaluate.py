"""Evaluation of a classifier on a split. Processes exchange sums, so the result is exact for any number of them."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.data import Loader, Preprocessing, TransformedImages
from vicinal.errors import VicinalError
from vicinal.training.accelerator import reset_accelerator
from vicinal.training.evaluation_data import open_evaluation_data
from vicinal.training.model_path import open_model
from vicinal.training.run_folder import Run

__all__ = ["Evaluation", "evaluate", "evaluate_split"]

CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a classifier on a split. Accuracies and errors are fractions from 0 to 1."""

    images: int
    """Number of images."""
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Accuracy."""
    top5: float
    """Fraction of images whose class is among the five with the highest logits."""
    balanced_accuracy: float
    """Mean of the accuracies of the classes that have images."""
    f1: float
    """Macro F1: mean of 2 hits / (images + predictions) over classes that have images or predictions."""
    calibration_error: float
    """Expected calibration error: mean gap between confidence and accuracy, over 15 bins of equal width."""
    per_class: list[float | None]
    """Accuracy for each class; None for a class without images."""
    confusion: list[list[int]]
    """Confusion matrix: number of images by true class (row) and predicted class (column)."""
    predicted: list[int] = field(repr=False)
    """Predicted class of each image, in the order of the split."""
    confidence: list[float] = field(repr=False)
    """Probability of the predicted class, for each image."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the metrics as a dict that JSON can hold, without the predictions."""
        return {name: value for name, value in asdict(self).items() if name not in ("predicted", "confidence")}


def evaluate_split(
    run: Run,
    name: Literal["train", "val", "test"],
    *,
    dataset: str | None = None,
    data_dir: Path | None = None,
    batch_size: int = 128,
    device: str = "auto",
    notes: list[str] | None = None,
) -> tuple[Evaluation, list[str]]:
    """Evaluates a run on one of its splits, or on other data, without augmentation.

    Args:
        run: a run; of one that is not finished, the last checkpoint is evaluated.
        name: of the split.
        dataset: where the run's data is now, or other data, see `open_evaluation_data`.
        data_dir: folder of a Parquet copy of a named dataset; by default that of the run.
        batch_size: number of images in a batch.
        device: `cpu`, `cuda:1` or another device; `auto` for a GPU if there is one.
        notes: sentences about an unfinished run and about other data are appended to this list.

    Returns:
        The metrics, and the names of the classes.

    Raises:
        VicinalError: if the run has no checkpoint, the split is empty, or the data of the run changed.
    """
    if batch_size < 1:
        raise VicinalError(f"batch_size must be a number of images, at least 1, got {batch_size}")
    model, note = open_model(run.folder)
    pretrained_cfg: Any = model.pretrained_cfg
    class_names: list[str] = pretrained_cfg["label_names"]
    data = open_evaluation_data(run, name, class_names, dataset, data_dir)
    if notes is not None:
        notes += [*([] if note is None else [note]), *data.notes(dataset or run.config.dataset, run)]
    images = TransformedImages(data.images, Preprocessing.of_model(pretrained_cfg), cache_dir=run.config.cache_dir)
    loader = Loader(images, batch_size=batch_size, shuffle=False)
    accelerator = reset_accelerator(device)
    model.to(accelerator.device)
    return evaluate(model, loader, len(class_names), accelerator), class_names


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Loader, classes: int, accelerator: Accelerator) -> Evaluation:
    """Returns the metrics of a model over all images of a split.

    Args:
        model: the model itself, not wrapped by Accelerate.
        loader: without shuffling; each process loads its part of the images.
        classes: number of classes.
        accelerator: sums over processes.
    """
    device, dtype = accelerator.device, next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64)  # loss, top-1 hits, top-5 hits
    bins = torch.zeros(2, CALIBRATION_BINS, dtype=torch.float64)  # confidence, hits
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    # Predicted class and its probability: of this process's images, which are every `world`-th one; else 0.
    predictions, position = torch.zeros(2, len(loader.images), dtype=torch.float64), loader.rank
    was_training = model.training
    model.eval()
    for images, labels in loader.batches(0):
        with accelerator.autocast():
            logits = model(images.to(device, dtype)).cpu().double()
        top5 = logits.topk(min(5, classes)).indices
        hits = top5[:, 0] == labels
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, hits.sum(), (top5 == labels[:, None]).sum()])
        confidence = logits.softmax(1).amax(1).nan_to_num()  # of logits that are not finite: 0
        bin_index = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
        bins.index_add_(1, bin_index, torch.stack([confidence, hits.double()]))
        confusion += torch.bincount(labels * classes + top5[:, 0], minlength=classes**2)
        end = position + len(labels) * loader.world
        predictions[:, position : end : loader.world] = torch.stack([top5[:, 0].double(), confidence])
        position = end
    model.train(was_training)
    if accelerator.num_processes > 1:
        parts = (sums, bins, confusion, predictions)
        sums, bins, confusion, predictions = (accelerator.reduce(x.to(device), "sum").cpu() for x in parts)
    return _summarize(sums, bins, confusion.view(classes, classes), predictions)


def _summarize(sums: Tensor, bins: Tensor, confusion: Tensor, predictions: Tensor) -> Evaluation:
    """Returns the metrics from the sums over all images of a split."""
    total = int(confusion.sum())
    loss, top1, top5 = (sums / max(total, 1)).tolist()
    hits, images, predicted = confusion.diagonal().double(), confusion.sum(1), confusion.sum(0)
    accuracy = hits / images  # NaN for a class without images
    f1 = 2 * hits / (images + predicted)
    return Evaluation(
        images=total,
        loss=loss,
        top1=top1,
        top5=top5,
        balanced_accuracy=float(accuracy.nanmean()),
        f1=float(f1.nanmean()),
        calibration_error=float((bins[0] - bins[1]).abs().sum()) / max(total, 1),
        per_class=[None if math.isnan(value) else value for value in accuracy.tolist()],
        confusion=confusion.tolist(),
        predicted=predictions[0].long().tolist(),
        confidence=predictions[1].tolist(),
    )
