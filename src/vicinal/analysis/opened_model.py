"""Models opened for analysis: from runs, saved models and timm, each with a name and its preprocessing."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vicinal.analysis.output_files import distinct_names
from vicinal.data import Preprocessing
from vicinal.errors import VicinalError
from vicinal.inspection.model_runner import ImageSize
from vicinal.models.factory import make_timm_model
from vicinal.training.device import find_device
from vicinal.training.model_path import check_model, open_model
from vicinal.training.run_folder import Run

__all__ = ["Device", "OpenedModel", "open_models"]

Device = str
"""As in `vicinal.training.device.find_device`."""


@dataclass
class OpenedModel:
    """A model in evaluation mode, with its name and preprocessing."""

    name: str
    """Display name; no other model that was opened with it has the same."""
    model: nn.Module
    preprocessing: Preprocessing
    run: Run | None = None
    """The run that trained it, if it was opened from a run folder."""
    note: str | None = None
    """A sentence about the checkpoint that is used, if the run is not finished."""

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width of its images."""
        return self.preprocessing.height, self.preprocessing.width


def open_models(
    runs: Sequence[str | Path] = (),
    timm: Sequence[str] = (),
    *,
    img_size: ImageSize | None = None,
    random_weights: bool = False,
    device: Device = "auto",
) -> list[OpenedModel]:
    """Returns models from runs, saved models and timm, in evaluation mode; of unfinished runs, the last checkpoint.

    Args:
        runs: run folders, folders of saved models, or `hf-hub:owner/name`.
        timm: names of timm's models.
        img_size: height and width of the images; by default what each model declares.
        random_weights: create timm's models without pretrained weights.
        device: such as `cpu` or `cuda:1`; `auto` is an accelerator if there is one.

    Raises:
        VicinalError: if no model is given, or one cannot be opened.
    """
    if not runs and not timm:
        raise VicinalError("no model is given: give a run folder, such as runs/x, or the name of a timm model")
    paths = [str(run) for run in runs]
    for path in paths:  # all of them, before any is opened
        check_model(path)
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    found: list[tuple[str, Any, Run | None, str | None]] = []
    for path, short in zip(paths, _short_names(paths), strict=True):
        training = Run(path) if (Path(path) / "config.yaml").is_file() else None
        model, note = open_model(path, img_size=size)
        found.append((_display_name(short, model), model, training, note))
    options: dict[str, Any] = {"img_size": size} if size else {}
    for name in timm:
        found.append((name, make_timm_model(name, pretrained=not random_weights, **options), None, None))
    for _, model, _, _ in found:
        model.to(find_device(device)).eval()
    names = distinct_names(name for name, *_ in found)
    return [
        OpenedModel(name, model, _preprocessing(model, size), training, note)
        for name, (_, model, training, note) in zip(names, found, strict=True)
    ]


def _short_names(runs: Sequence[str]) -> list[str]:
    """Returns the last folder of each path, with as many parent folders as distinguish it from the others."""
    paths = [Path(run if run.startswith("hf-hub:") else os.path.abspath(run)).parts for run in runs]
    found = []
    for path in paths:
        length = 1
        while any(other[-length:] == path[-length:] for other in paths if other != path):
            length += 1
        found.append(str(Path(*path[-length:])))
    return found


def _display_name(folder: str, model: Any) -> str:
    """Returns the folder's name, with the architecture in parentheses unless the name contains it."""
    architecture = model.pretrained_cfg["architecture"].removeprefix("vicinal_").replace("_", "-")
    return folder if architecture in folder else f"{folder} ({architecture})"


def _preprocessing(model: Any, size: tuple[int, int] | None) -> Preprocessing:
    """Returns the preprocessing that the model declares, at the size for which it was created."""
    declared = dict(model.pretrained_cfg)
    channels, *own = declared["input_size"]
    return Preprocessing.of_model({**declared, "input_size": (channels, *(size or own))})
