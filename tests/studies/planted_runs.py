"""Run folders with planted figures and predictions, without any training."""

import json

import vicinal
from vicinal.files import write_csv
from vicinal.training.predictions_file import COLUMNS, PREDICTIONS_FILE

ENVIRONMENT = {
    "threads": 1,
    "device": "cpu",
    "device_name": "a processor",
    "attention": "torch",
    "versions": {"vicinal": "0.1.0", "torch": "2.13.0"},
}


def planted_run(folder, correct, *, split="test", environment=(), finished=True, **settings):
    """A run that classifies the given images correctly.

    Args:
        folder: of the run.
        correct: whether each image of the split is classified correctly.
        split: that the run has figures of.
        environment: what differs from `ENVIRONMENT`.
        finished: whether the run has its results.
        **settings: fields of its configuration.
    """
    config = vicinal.TrainConfig(**settings, out=folder)
    run = vicinal.Run.create(config, {**ENVIRONMENT, **dict(environment)})
    top1 = sum(correct) / len(correct)
    figures = {"top1": top1, "balanced_accuracy": top1 / 2, "f1": top1 / 4, "images": len(correct)}
    rows = [(split, f"image {index}", "a", "a" if each else "b", 0.9) for index, each in enumerate(correct)]
    write_csv(run.folder / PREDICTIONS_FILE, COLUMNS, rows)
    if finished:
        (run.folder / "results.json").write_text(json.dumps({split: figures}))
    return run


def planted_arm(folder, prior, accuracies, images=1000, **settings):
    """Runs of an arm with one accuracy per seed, in images of `images`."""
    return [
        planted_run(
            folder / f"{prior}-s{seed}",
            [index < right for index in range(images)],
            prior=prior,
            seed=seed,
            **settings,
        )
        for seed, right in enumerate(accuracies)
    ]
