"""`vicinal eval`: a finished run on one of its splits."""

import json as json_
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

__all__ = ["run"]


def evaluate_run(
    run: Annotated[str, tyro.conf.Positional],
    /,
    split: Literal["test", "val", "train"] = "test",
    batch_size: int = 128,
    device: Literal["auto", "cpu"] = "auto",
    json: bool = False,
) -> None:
    """Evaluate a finished run on a split of its own data, without augmentation.

    Args:
        run: folder of the run.
        split: which images.
        batch_size: images at a time.
        device: auto is a GPU where there is one.
        json: print everything, with the confusion matrix, as JSON.
    """
    from vicinal.training.evaluate import evaluate_split
    from vicinal.training.run_folder import Run

    found, class_names = evaluate_split(Run(run), split, batch_size=batch_size, device=device)
    if json:
        print(json_.dumps({"split": split, "class_names": class_names, **found.as_dict()}))
        return
    print(f"{split}: {found.images:,} images")
    print(f"top-1 {100 * found.top1:.2f}%   top-5 {100 * found.top5:.2f}%   loss {found.loss:.4f}")
    print(f"calibration error {100 * found.calibration_error:.2f}%\n")
    width = max(len("class"), *map(len, class_names))
    print(f"{'class':{width}}  {'images':>6}  {'right':>6}  most often taken for")
    for number, name in enumerate(class_names):
        row = found.confusion[number]
        right = found.per_class[number]
        others = sorted(((count, other) for other, count in enumerate(row) if other != number and count), reverse=True)
        taken = ", ".join(f"{class_names[other]} {count}" for count, other in others[:3])
        print(f"{name:{width}}  {sum(row):6}  {'-' if right is None else f'{100 * right:.1f}%':>6}  {taken}")


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    tyro.cli(evaluate_run, prog="vicinal eval", args=words)
