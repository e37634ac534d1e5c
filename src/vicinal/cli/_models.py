"""Flags that choose models, shared by the verbs of `vicinal analyze`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from vicinal.analysis.opened_model import OpenedModel

__all__ = ["Device", "ModelArgs", "image_size", "layer_name_or_index"]

Device = str


@dataclass
class ModelArgs:
    """Models to analyze."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")] = ()
    """Folders of runs or of saved models, or hf-hub:owner/name; several are compared. Of a run that is not finished,
    the last checkpoint is used."""
    timm: tuple[str, ...] = ()
    """Names of timm models, with pretrained weights."""
    random_weights: bool = False
    """Create timm models without pretrained weights."""
    img_size: tuple[int, ...] = ()
    """Pixels, or height and width; by default what each model declares."""

    def open(self, device: Device = "cpu") -> "list[OpenedModel]":
        """Returns the models."""
        size = image_size(self.img_size)

        from vicinal.analysis.opened_model import open_models

        opened = open_models(self.runs, self.timm, img_size=size, random_weights=self.random_weights, device=device)
        for each in opened:
            if each.note is not None:
                print(f"vicinal: {each.note}", file=sys.stderr)
        return opened


def image_size(pixels: Sequence[int]) -> tuple[int, int] | None:
    """Returns height and width of the flag `--img-size`; None if it is not given."""
    if len(pixels) > 2:
        raise VicinalError(f"--img-size must be one number of pixels, or height and width, got {tuple(pixels)}")
    return (pixels[0], pixels[-1]) if pixels else None


def layer_name_or_index(text: str) -> int | str:
    """Returns an index if the text is a whole number, else the text, which is a name."""
    try:
        return int(text)
    except ValueError:
        return text
