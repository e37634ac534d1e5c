"""Arms of a report whose runs take a second, on the embedded digits or on noise in folders of classes."""

import numpy as np
from PIL import Image

from vicinal.report.source import ReportArm, ReportSource
from vicinal.training.config import TrainConfig
from vicinal.training.train import train

SMALL = {"train_size": 64, "val_size": 20, "batch_size": 32, "steps": 6, "checkpoint_minutes": 0}


def trained_source(folder, priors=("none", "gmm:kernels=2"), **options):
    """A source with one arm for each prior, each of one trained run."""
    arms = []
    for number, prior in enumerate(priors):
        run = train(TrainConfig(prior=prior, out=folder / f"run-{number}", **{**SMALL, **options}))
        arms.append(ReportArm("", f"arm <{prior}>", (run,)))
    return source_of(arms, folder)


def source_of(arms, folder):
    """A source of given arms."""
    return ReportSource("small", "", None, tuple(arms), (), folder)


def noise_folder(folder, splits, count=12):
    """The name of a dataset of two classes whose images of 8 x 8 pixels are noise."""
    rng = np.random.default_rng(0)
    for split in splits:
        for name in "ab":
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return f"folder:{folder}"


NOISE = {"img_size": (8, 8), "train_size": None, "val_size": 4, "batch_size": 8, "steps": 2}
"""Options of runs on `noise_folder`."""
