"""`vicinal eval`: evaluates a finished run on one of its splits."""

import json as json_
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from vicinal.training.evaluate import Evaluation

__all__ = ["run"]


def evaluate_run(
    run: Annotated[str, tyro.conf.Positional],
    /,
    split: Literal["test", "val", "train"] = "test",
    batch_size: int = 128,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Evaluates a finished run on a split of its own dataset, without augmentation.

    Args:
        run: Run folder.
        split: Images to evaluate on.
        batch_size: Number of images in a batch.
        device: cpu, cuda, cuda:1, mps; auto: a GPU if there is one.
        json: Print all metrics as JSON, with the confusion matrix.
    """
    from vicinal.training.evaluate import evaluate_split
    from vicinal.training.run_folder import Run

    evaluation, class_names = evaluate_split(Run(run), split, batch_size=batch_size, device=device)
    if json:
        print(json_.dumps({"split": split, "class_names": class_names, **evaluation.as_dict()}))
    else:
        print(format_evaluation(evaluation, split, class_names))


def format_evaluation(evaluation: "Evaluation", split: str, class_names: Sequence[str]) -> str:
    """Returns the metrics as text, with a table of accuracies and most frequent confusions by class."""
    width = max(len("class"), *map(len, class_names))
    top5 = f"top-5 {100 * evaluation.top5:.2f}%   " if len(class_names) > 5 else ""
    lines = [
        f"{split}: {evaluation.images:,} images",
        f"top-1 {100 * evaluation.top1:.2f}%   {top5}loss {evaluation.loss:.4f}",
        f"balanced accuracy {100 * evaluation.balanced_accuracy:.2f}%   macro F1 {100 * evaluation.f1:.2f}%   "
        f"calibration error {100 * evaluation.calibration_error:.2f}%\n",
        f"{'class':{width}}  {'images':>6}  {'right':>6}  most often taken for",
    ]
    for index, name in enumerate(class_names):
        row, accuracy = evaluation.confusion[index], evaluation.per_class[index]
        errors = sorted(((count, other) for other, count in enumerate(row) if other != index and count), reverse=True)
        confusions = ", ".join(f"{class_names[other]} {count}" for count, other in errors[:3])
        percent = "-" if accuracy is None else f"{100 * accuracy:.1f}%"
        lines.append(f"{name:{width}}  {sum(row):6}  {percent:>6}  {confusions}")
    return "\n".join(lines)


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal eval`, evaluates and prints the metrics."""
    tyro.cli(evaluate_run, prog="vicinal eval", args=args)
