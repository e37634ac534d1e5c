"""predictions.csv: the final model's prediction for each validation and test image."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vicinal.data import Loader
from vicinal.files import write_csv
from vicinal.training.evaluate import Evaluation

__all__ = ["write_predictions"]

PREDICTIONS_FILE = "predictions.csv"
COLUMNS = ("split", "image", "label", "prediction", "confidence")


def write_predictions(
    folder: Path, evaluated: Mapping[str, tuple[Loader, Evaluation]], class_names: Sequence[str]
) -> None:
    """Writes predictions.csv to a run folder: a row for each image, by its name.

    Args:
        folder: run folder.
        evaluated: loader and metrics of each split, by its name.
        class_names: of the classes.
    """
    rows = (
        (split, name, class_names[label], class_names[prediction], round(confidence, 6))
        for split, (loader, found) in evaluated.items()
        for name, label, prediction, confidence in zip(
            loader.images.split.files()[0],
            loader.images.labels.tolist(),
            found.predicted,
            found.confidence,
            strict=True,
        )
    )
    write_csv(folder / PREDICTIONS_FILE, COLUMNS, rows)
