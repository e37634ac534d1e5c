"""Which models of segmentation_models_pytorch take a prior: a survey of decoders over small transformers."""

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vicinal.attachment.dry_run import inspect
from vicinal.attachment.survey import Finding, Limits, Survey, finding_of, finding_or_skip
from vicinal.errors import VicinalError

__all__ = ["SEGMENTATION_MODELS", "SegmentationModel", "inspect_segmentation_model", "smp_survey"]


@dataclass(frozen=True)
class SegmentationModel:
    """A decoder of the library over one of its encoders, with random weights."""

    decoder: str
    """Class of the model, such as `Unet`."""
    encoder: str
    """Name of the encoder; `tu-` in front of it takes timm's."""
    size: tuple[int, int]
    """Height and width of the images."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments, such as those of the encoder."""

    def build(self) -> nn.Module:
        """Returns the model, with random weights."""
        import segmentation_models_pytorch as smp

        model: nn.Module = getattr(smp, self.decoder)(self.encoder, encoder_weights=None, **self.options)
        return model


SEGMENTATION_MODELS: dict[str, SegmentationModel] = {
    "unet_mit": SegmentationModel("Unet", "mit_b0", (128, 192)),
    "unet_swin": SegmentationModel("Unet", "tu-swinv2_cr_tiny_ns_224", (128, 128), {"img_size": 128}),
    "upernet_mit": SegmentationModel("UPerNet", "mit_b0", (128, 192)),
    # Windows that divide the maps: timm rolls others before it pads them, so that opposite edges of the image meet.
    "upernet_swin": SegmentationModel(
        "UPerNet", "tu-swin_tiny_patch4_window7_224", (128, 128), {"img_size": 128, "window_size": 4}
    ),
    "dpt_vit": SegmentationModel("DPT", "tu-vit_tiny_patch16_224", (64, 96), {"dynamic_img_size": True}),
}
"""Decoders over encoders with attention, by name."""


def inspect_segmentation_model(name: str, family: str) -> Finding:
    """Returns the finding of one model; if it fails, a finding that says why it was skipped.

    Args:
        name: of a model of `SEGMENTATION_MODELS`.
        family: class of the model.
    """
    return finding_or_skip(name, family, lambda: _inspect(name, family))


def _inspect(name: str, family: str) -> Finding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SEGMENTATION_MODELS[name].build()
    return finding_of(inspect(model, img_size=SEGMENTATION_MODELS[name].size), name, family)


def smp_survey(pattern: str, notes: Path, *, memory: int, seconds: float) -> Survey:
    """Returns a survey of every model of `SEGMENTATION_MODELS` whose name fits.

    Args:
        pattern: of names, such as `unet*`.
        notes: file of findings, one per line; models found there are not inspected again.
        memory: bytes that the inspecting process can use.
        seconds: time for one model.
    """
    try:
        import segmentation_models_pytorch as smp
    except ImportError as error:
        raise VicinalError(
            "segmentation_models_pytorch is not installed; pip install segmentation-models-pytorch brings it"
        ) from error
    fitting = {name: each.decoder for name, each in SEGMENTATION_MODELS.items() if fnmatch.fnmatch(name, pattern)}
    if not fitting:
        raise VicinalError(f"no segmentation model is named {pattern!r}, expected one of {sorted(SEGMENTATION_MODELS)}")
    return Survey(fitting, inspect_segmentation_model, notes, Limits(memory, seconds), smp.__version__)
