"""The images that a run is evaluated on: its own splits, or other data with its classes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vicinal.cache_folder import cache_folder
from vicinal.data import DataRecord, ImageSplit, split
from vicinal.data.image_dataset import OwnSplits
from vicinal.data.open_dataset import divide, open_own_splits
from vicinal.data.split_names import SplitRole
from vicinal.data.unreadable import without_unreadable
from vicinal.errors import VicinalError
from vicinal.training.run_folder import Run

__all__ = ["EvaluationData", "NoImagesError", "open_evaluation_data"]

MAX_EXAMPLES = 10


class NoImagesError(VicinalError):
    """There are no images of a split."""


@dataclass(frozen=True)
class EvaluationData:
    """Images, with labels in the order of a run's classes."""

    images: ImageSplit
    missing_classes: list[str] = field(default_factory=list)
    """Classes of the run without images."""
    unknown_classes: list[str] = field(default_factory=list)
    """Classes that the run does not know; their images are left out."""
    left_out: int = 0
    """Number of images of unknown classes."""
    trained_on: int = 0
    """Number of images of other data with name and size of an image that the run was trained or validated on."""

    def notes(self, dataset: str, run: Run) -> list[str]:
        """Returns sentences about missing and unknown classes, and about images that the run was trained on."""
        notes = []
        if self.unknown_classes:
            notes.append(
                f"{self.left_out} images of {dataset} are left out: {run.folder} does not know their classes "
                f"{_examples(self.unknown_classes)}"
            )
        if self.missing_classes:
            notes.append(f"{dataset} has no images of {_examples(self.missing_classes)}")
        if self.trained_on:
            notes.append(
                f"{self.trained_on} of {len(self.images)} images have name and size of images that {run.folder} was "
                "trained or validated on"
            )
        return notes


def open_evaluation_data(
    run: Run, role: SplitRole, class_names: Sequence[str], dataset: str | None = None, data_dir: Path | None = None
) -> EvaluationData:
    """Returns the images of a split of a run's own data, wherever it is now, or of other data.

    Other data has the classes of the run, by name. Its test images are its test split, else its validation split, else
    all its images.

    Args:
        run: the run.
        role: the split.
        class_names: classes that the model of the run knows.
        dataset: where the run's data is now, or other data; by default where it was in training.
        data_dir: folder of a Parquet copy of a named dataset; by default that of the run.

    Raises:
        VicinalError: if the run's own data changed, there are no such images, or none of the classes are known.
    """
    config = run.config
    name = config.dataset if dataset is None else dataset
    if data_dir is None and name == config.dataset:
        data_dir = config.data_dir
    try:
        own = open_own_splits(name, data_dir=data_dir, cache_dir=config.cache_dir)
    except VicinalError as error:
        if dataset is not None:
            raise
        raise VicinalError(
            f"{error}. If the data of {run.folder} moved, dataset (--dataset) says where it is"
        ) from None
    if config.skip_unreadable:
        own = without_unreadable(own, cache_folder(config.cache_dir))
    recorded = run.data
    try:
        splits = split(divide(name, own), val_size=config.val_size, train_size=config.train_size, seed=config.seed)
    except VicinalError:
        if dataset is None:
            raise  # other data can have too few images, or no training split
    else:
        found = {"train": splits.train, "val": splits.val, "test": splits.test}
        data = DataRecord.of(found, own.class_names)
        if dataset is None:
            run.check_data(data, name)
        if own.class_names == list(class_names) and (recorded is None or recorded.text == data.text):
            return EvaluationData(_not_empty(found[role], role, str(run.folder)))
        if dataset is None:
            raise VicinalError(f"the classes of {name} are not those that {run.folder} was trained on")
    return _map_classes(_choose_other(own, role, name), own.class_names, class_names, name, recorded)


def _choose_other(own: OwnSplits, role: SplitRole, name: str) -> ImageSplit:
    candidates: dict[SplitRole, tuple[SplitRole, ...]] = {"train": ("train",), "val": ("val",)}
    for each in candidates.get(role, ("test", "val", "train")):
        if each in own.splits and len(own.splits[each]):
            return own.splits[each]
    raise NoImagesError(f"{name} has no {role} images; it has {', '.join(own.splits)}")


def _not_empty(images: ImageSplit, role: str, where: str) -> ImageSplit:
    if not len(images):
        raise NoImagesError(f"{where} has no {role} images; evaluate another split")
    return images


def _map_classes(
    images: ImageSplit, names: Sequence[str], class_names: Sequence[str], where: str, recorded: DataRecord | None
) -> EvaluationData:
    index = {name: number for number, name in enumerate(class_names)}
    table = np.array([index.get(name, -1) for name in names])
    labels = table[images.labels]
    known = images.take(np.flatnonzero(labels >= 0))
    present = set(labels.tolist())
    if not len(known):
        raise VicinalError(
            f"{where} must have classes of the run ({_examples(list(class_names))}), got {_examples(list(names))}"
        )
    known = replace(known, labels=labels[labels >= 0])
    used = {names[label] for label in np.unique(images.labels)}
    return EvaluationData(
        known,
        missing_classes=[name for name, number in index.items() if number not in present],
        unknown_classes=sorted(name for name in used if name not in index),
        left_out=len(images) - len(known),
        trained_on=0 if recorded is None else recorded.count_known(known, ("train", "val")),
    )


def _examples(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_EXAMPLES], *(["..."] if len(names) > MAX_EXAMPLES else [])])
