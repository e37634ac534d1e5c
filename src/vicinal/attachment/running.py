"""How to run a model that somebody else wrote: on which images, and with what around it."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError

__all__ = ["Example", "ImageSize", "Runner", "quietly", "runner_for"]

ImageSize = int | tuple[int, int]
Example = Tensor | Mapping[str, Any]


@dataclass(frozen=True)
class Runner:
    """A model, and the images that it takes."""

    model: nn.Module
    shape: tuple[int, int, int]
    """Channels, height and width."""
    keyword: str | None = None
    """Name of the argument for the images, if it is no positional one."""

    @property
    def image(self) -> tuple[int, int]:
        """Height and width."""
        return self.shape[1:]

    def noise(self, batch: int, seed: int = 0) -> Tensor:
        """Images of noise, of the model's type and on its device."""
        images = torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))
        parameter = next(self.model.parameters(), images)
        return images.to(parameter.device, parameter.dtype)

    def __call__(self, images: Tensor) -> object:
        """The output for a batch of images."""
        try:
            return self.model(images) if self.keyword is None else self.model(**{self.keyword: images})
        except VicinalError:
            raise
        except Exception as error:
            size = " x ".join(map(str, images.shape[1:]))
            raise VicinalError(
                f"the model does not run on images of {size}: {type(error).__name__}: {error}. "
                "Give the img_size it was made for, or an example= of its input"
            ) from error


def runner_for(model: nn.Module, img_size: ImageSize | None = None, example: Example | None = None) -> Runner:
    """How to run a model: as the example says, or on images of the given size, or of the size that it declares."""
    if example is None:
        return Runner(model, _image_shape(model, img_size))
    keyword: str | None = None
    if isinstance(example, Mapping):
        images = {name: value for name, value in example.items() if isinstance(value, Tensor) and value.dim() == 4}
        if len(images) != 1 or len(example) != 1:
            raise VicinalError(f"example needs one image tensor and nothing else, given {sorted(example)}")
        ((keyword, example),) = images.items()
    elif not isinstance(example, Tensor):
        raise VicinalError(f"example is a tensor or a mapping of keyword arguments, given {type(example).__name__}")
    if example.dim() != 4:
        raise VicinalError(f"images are (batch, channels, height, width), given an example of {example.dim()} axes")
    _, channels, height, width = example.shape
    return Runner(model, (channels, height, width), keyword)


def _image_shape(model: nn.Module, img_size: ImageSize | None) -> tuple[int, int, int]:
    declared = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    input_size = declared.get("input_size") if isinstance(declared, Mapping) else None
    stem = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = input_size[0] if input_size else stem.in_channels if stem is not None else 3
    if stem is not None and stem.in_channels < channels:  # made with in_chans=1
        channels = stem.in_channels
    if img_size is None:
        sizes = (
            getattr(getattr(model, "patch_embed", None), "img_size", None),
            getattr(getattr(model, "config", None), "image_size", None),
            getattr(model, "image_size", None),
            input_size[1:] if input_size else None,
        )
        img_size = next((size for size in sizes if size), None)
    if img_size is None:
        raise VicinalError("the model does not say the size of its images; give img_size= or example=")
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    return channels, int(height), int(width)


@contextlib.contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; training modes, buffers and random numbers as they were outside."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = list({parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in model.named_buffers():
            if name in buffers and not torch.equal(buffer, buffers[name]):
                buffer.copy_(buffers[name])
