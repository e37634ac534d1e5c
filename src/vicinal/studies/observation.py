"""What a finished run contributes to a comparison: its metric, and which test images it classifies correctly."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass

from vicinal.errors import VicinalError
from vicinal.studies.spec import Metric
from vicinal.studies.statistics import McNemar, mcnemar
from vicinal.training.predictions_file import PREDICTIONS_FILE
from vicinal.training.run_folder import Run

__all__ = ["Observation", "choose_split", "image_test", "metric_value"]


@dataclass(frozen=True)
class Observation:
    """A finished run with its place in a comparison."""

    arm: str
    condition: str
    seed: int
    run: Run


def choose_split(observations: Sequence[Observation]) -> str:
    """Returns `test` if all runs have test figures, else `val`.

    Raises:
        VicinalError: if a run has neither.
    """
    for split in ("test", "val"):
        if all(split in (each.run.results or {}) for each in observations):
            return split
    folder = next(each.run.folder for each in observations if "val" not in (each.run.results or {}))
    raise VicinalError(f"{folder} has neither test nor validation figures, which a comparison needs")


def metric_value(run: Run, split: str, metric: Metric) -> float:
    """Returns a metric of a finished run in points, from 0 to 100.

    Raises:
        VicinalError: if the run is of a version that did not compute the metric.
    """
    value = (run.results or {})[split].get(metric)
    if value is None:
        raise VicinalError(f"{run.folder} has no {metric}; `vicinal eval` computes it for runs of earlier versions")
    return 100 * float(value)


def image_test(first: Run, second: Run, split: str) -> McNemar | None:
    """Returns the exact McNemar test of two models on the images of a split.

    None if a run has no predictions, or their images differ.

    Args:
        first: a finished run.
        second: a finished run.
        split: `test` or `val`.
    """
    found = _correct(first, split), _correct(second, split)
    if found[0] is None or found[1] is None or found[0].keys() != found[1].keys():
        return None
    images = sorted(found[0])
    return mcnemar([found[0][image] for image in images], [found[1][image] for image in images])


def _correct(run: Run, split: str) -> dict[str, bool] | None:
    """Returns whether each image of a split is classified correctly, by its name; None without predictions."""
    file = run.folder / PREDICTIONS_FILE
    if not file.is_file():
        return None
    with open(file, newline="", encoding="utf-8") as lines:
        return {
            row["image"]: row["label"] == row["prediction"] for row in csv.DictReader(lines) if row["split"] == split
        }
