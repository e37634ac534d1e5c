"""The model of an arm that is shown, and images of its data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.analysis.image_selection import ImageSelection
from vicinal.analysis.opened_model import OpenedModel, open_models
from vicinal.errors import VicinalError
from vicinal.report.source import ReportArm

__all__ = ["ShownModel", "open_shown"]


@dataclass(frozen=True, eq=False)
class ShownModel:
    """The model of an arm's shown run, with images."""

    arm: ReportArm
    opened: OpenedModel
    split: str
    """Of the images: `test`, or `val` if there are no test images."""
    names: tuple[str, ...]
    images: Tensor
    """As the model takes them, `(n, channels, height, width)`; none if none were asked for."""


def open_shown(arm: ReportArm, images: int = 0) -> ShownModel:
    """Returns the model of an arm's shown run, and images that are drawn from its data, the same in every call.

    Args:
        arm: one of the report.
        images: maximum number of images.

    Raises:
        VicinalError: if no run is finished, or the model or its data cannot be opened.
    """
    run = arm.shown
    if run is None:
        raise VicinalError("no run is finished")
    (opened,) = open_models([run.folder], device="cpu")
    if not images:
        return ShownModel(arm, opened, "", (), torch.empty(0))
    selection = ImageSelection(count=images)
    names, tensors = selection.first(opened, images)
    return ShownModel(arm, opened, selection.split or "", tuple(names), tensors)
