"""How good a model is on a split: exact over any number of processes, because only sums travel between them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from vicinal.data import Loader, Preprocessing, TransformedImages, open_dataset, split
from vicinal.errors import VicinalError
from vicinal.training.environment import new_accelerator
from vicinal.training.run_folder import Run

__all__ = ["Evaluation", "evaluate", "evaluate_split"]

BINS = 15


@dataclass(frozen=True)
class Evaluation:
    """What was found. Shares are from 0 to 1."""

    images: int
    loss: float
    top1: float
    top5: float
    calibration_error: float
    """Expected calibration error: how far confidence is from accuracy, over 15 bins of equal width."""
    per_class: list[float | None]
    """Share of each class's images that is recognised; None where there are none."""
    confusion: list[list[int]]
    """Images of a class (row) that were taken for a class (column)."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def evaluate_split(
    run: Run, name: Literal["train", "val", "test"], *, batch_size: int = 128, device: str = "auto"
) -> tuple[Evaluation, list[str]]:
    """A finished run on one of its splits, without augmentation; and its class names."""
    if batch_size < 1:
        raise VicinalError(f"--batch-size is a number of images, at least 1; given {batch_size}")
    config, model = run.config, run.model()
    source = open_dataset(config.dataset, data_dir=config.data_dir, cache_dir=config.cache_dir)
    pictures = getattr(split(source, val_size=config.val_size, train_size=config.train_size, seed=config.seed), name)
    if not len(pictures):
        raise VicinalError(f"{run.folder} has no {name} images; it was trained with --val-size 0")
    declared: Any = model.pretrained_cfg
    if source.class_names != declared["label_names"]:
        raise VicinalError(f"the classes of {config.dataset} are not those that {run.folder} was trained on")
    images = TransformedImages(pictures, Preprocessing.of_model(declared), cache_dir=config.cache_dir)
    loader = Loader(images, batch_size=batch_size, shuffle=False)
    accelerator = new_accelerator(device == "cpu")
    model.to(accelerator.device)
    return evaluate(model, loader, len(source.class_names), accelerator), source.class_names


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Loader, classes: int, accelerator: Accelerator) -> Evaluation:
    """Look at every image of a split once.

    Args:
        model: not wrapped for several processes.
        loader: in order, each process its share of the images.
        classes: number of classes.
        accelerator: adds up the processes.
    """
    device, dtype = accelerator.device, next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64)  # loss, first, among the first five
    bins = torch.zeros(2, BINS, dtype=torch.float64)  # confidence, hits
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    training = model.training
    model.eval()
    for images, labels in loader.batches(0):
        with accelerator.autocast():
            logits = model(images.to(device, dtype)).cpu().double()
        best = logits.topk(min(5, classes)).indices
        hit = best[:, 0] == labels
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, hit.sum(), (best == labels[:, None]).sum()])
        confidence = logits.softmax(1).amax(1)
        bin_of = (confidence * BINS).long().clamp(max=BINS - 1)
        bins.index_add_(1, bin_of, torch.stack([confidence, hit.double()]))
        confusion += torch.bincount(labels * classes + best[:, 0], minlength=classes**2)
    model.train(training)
    if accelerator.num_processes > 1:
        sums, bins, confusion = (accelerator.reduce(x.to(device), "sum").cpu() for x in (sums, bins, confusion))
    table = confusion.view(classes, classes)
    total = int(table.sum())
    mean_loss, first, among = (sums / max(total, 1)).tolist()
    per_class = [int(table[k, k]) / int(table[k].sum()) if table[k].sum() else None for k in range(classes)]
    return Evaluation(
        images=total,
        loss=mean_loss,
        top1=first,
        top5=among,
        calibration_error=float((bins[0] - bins[1]).abs().sum()) / max(total, 1),
        per_class=per_class,
        confusion=table.tolist(),
    )
