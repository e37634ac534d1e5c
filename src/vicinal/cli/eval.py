"""`vicinal eval`: evaluates a run on one of its splits, or on other data."""

import json as json_
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError
from vicinal.text_table import text_table

if TYPE_CHECKING:
    from vicinal.training.evaluate import Evaluation

__all__ = ["run"]


def evaluate_run(
    run: Annotated[str, tyro.conf.Positional],
    /,
    split: Literal["test", "val", "train"] = "test",
    dataset: str | None = None,
    data_dir: Path | None = None,
    batch_size: int = 128,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Evaluates a run on a split of its own dataset, or on other data, without augmentation.

    Of a run that is not finished, the last checkpoint is evaluated.

    Other data (--dataset) is evaluated with the classes of the run, by name; images of other classes are left out. Its
    test images are its test split, else its validation split, else all its images.

    Args:
        run: Run folder.
        split: Images to evaluate on.
        dataset: Where the data of the run is now, or other data; by default where it was in training.
        data_dir: Folder with a Parquet copy of a named dataset; by default that of the run.
        batch_size: Number of images in a batch.
        device: cpu, cuda, cuda:1, mps; auto: a GPU if there is one.
        json: Print all metrics as JSON, with the confusion matrix.
    """
    from vicinal.training.config_error import ConfigError
    from vicinal.training.evaluate import evaluate_split
    from vicinal.training.run_folder import Run

    notes: list[str] = []
    try:
        evaluation, class_names = evaluate_split(
            Run(run), split, dataset=dataset, data_dir=data_dir, batch_size=batch_size, device=device, notes=notes
        )
    except ConfigError as error:
        raise VicinalError(error.flag_message) from error
    for note in notes:
        print(f"vicinal: {note}", file=sys.stderr)
    if json:
        print(json_.dumps({"split": split, "class_names": class_names, **evaluation.as_dict()}))
    else:
        print(format_evaluation(evaluation, split, class_names))


def format_evaluation(evaluation: "Evaluation", split: str, class_names: Sequence[str]) -> str:
    """Returns the metrics as text, with a table of accuracies and most frequent confusions by class."""
    top5 = f"top-5 {100 * evaluation.top5:.2f}%   " if len(class_names) > 5 else ""
    lines = [
        f"{split}: {evaluation.images:,} images",
        f"top-1 {100 * evaluation.top1:.2f}%   {top5}loss {evaluation.loss:.4f}",
        f"balanced accuracy {100 * evaluation.balanced_accuracy:.2f}%   macro F1 {100 * evaluation.f1:.2f}%   "
        f"calibration error {100 * evaluation.calibration_error:.2f}%\n",
    ]
    rows = [["class", "images", "correct", "most often predicted instead"]]
    for index, name in enumerate(class_names):
        row, accuracy = evaluation.confusion[index], evaluation.per_class[index]
        errors = sorted(((count, other) for other, count in enumerate(row) if other != index and count), reverse=True)
        confusions = ", ".join(f"{class_names[other]} {count}" for count, other in errors[:3])
        percent = "-" if accuracy is None else f"{100 * accuracy:.1f}%"
        rows.append([name, str(sum(row)), percent, confusions])
    return "\n".join([*lines, text_table(rows, right=[1, 2])])


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal eval`, evaluates and prints the metrics."""
    call_with_flags(evaluate_run, "vicinal eval", args)
