"""Folders of small images of two classes, and runs on them."""

import numpy as np
from PIL import Image

import vicinal

SMALL = {"model": "vit-micro", "img_size": 8, "batch_size": 8, "epochs": 2, "warmup": 0, "val_size": 10}


def paint(folder, count=30, classes=("cat", "dog"), first=0):
    """Writes `count` images of each class, bright cats and dark dogs; returns the folder."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            pixels = np.random.default_rng(1000 * label + number).integers(0, 120, (8, 8, 3)) + 130 * (label == 0)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03}.png")
    return folder


def config(photos, out, **changes):
    settings = {**SMALL, "dataset": f"folder:{photos}", "cache_dir": out.parent / "cache", "out": out, **changes}
    return vicinal.TrainConfig(**settings)


def interrupted(monkeypatch, settings, step=5):
    """Trains until an error at a step; returns the run folder."""
    from vicinal.training import train as loop

    real = loop.train_step

    def dying(state, config, number, images, labels):
        if number == step:
            raise MemoryError
        return real(state, config, number, images, labels)

    monkeypatch.setattr(loop, "train_step", dying)
    try:
        vicinal.train(settings)
    except MemoryError:
        pass
    else:
        raise AssertionError("the run was not interrupted")
    monkeypatch.setattr(loop, "train_step", real)
    return settings.folder
