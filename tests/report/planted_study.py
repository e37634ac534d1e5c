"""Studies with planted figures, without any training."""

import json
from pathlib import Path

import vicinal
from planted_runs import ENVIRONMENT
from vicinal.files import write_csv
from vicinal.studies.run_environment import RunEnvironment
from vicinal.studies.spec_reader import read_spec
from vicinal.studies.study_folder import StudyFolder, StudyRecord
from vicinal.training.predictions_file import COLUMNS, PREDICTIONS_FILE

METRICS = ("epoch", "step", "train_loss", "val_loss", "val_top1", "images_per_second")


def planted_metrics(run, offset=0.0, *, validation=True):
    """Writes metrics.csv of three epochs."""
    rows = [
        (epoch, 10 * epoch, 2 / epoch + offset, *((3 / epoch, 0.2 * epoch) if validation else (None, None)), 500)
        for epoch in (1, 2, 3)
    ]
    write_csv(run.folder / "metrics.csv", METRICS, rows)


def planted_study(folder, values, *, unfinished=(), not_started=(), images=200, classes=2):
    """A study in its folder, whose runs classify one image more for every seed, and five more for every arm.

    Args:
        folder: of the study.
        values: its definition.
        unfinished: names of runs without results.
        not_started: names of runs without a folder.
        images: of the test split.
        classes: of the dataset.
    """
    spec = read_spec(values)
    study = StudyFolder(folder)
    study.write(spec, StudyRecord(Path.cwd(), "auto", RunEnvironment.of_record(ENVIRONMENT), {}))
    arms = list(spec.arms)
    for planned in spec.runs(Path(folder), Path.cwd()):
        if planned.name in not_started:
            continue
        run = vicinal.Run.create(planned.config, ENVIRONMENT)
        planted_metrics(run, 0.1 * planned.seed, validation=planned.config.val_size != 0)
        if planned.name in unfinished:
            continue
        right = images // 2 + planned.seed + 5 * arms.index(planned.arm)
        top1 = right / images
        figures = {"images": images, "top1": top1, "balanced_accuracy": top1, "f1": top1}
        figures |= {"per_class": [top1] * classes, "confusion": [[1] * classes] * classes}
        (run.folder / "results.json").write_text(json.dumps({"test": figures}))
        rows = [("test", f"image {index}", "a", "a" if index < right else "b", 0.9) for index in range(images)]
        write_csv(run.folder / PREDICTIONS_FILE, COLUMNS, rows)
    return study
