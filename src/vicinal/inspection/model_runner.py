"""Runs a model that somebody else wrote on noise, and leaves it as it was."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.image_size import ImageSize, height_and_width

__all__ = [
    "Example",
    "ImageSize",
    "ModelRunner",
    "eval_without_side_effects",
    "in_full_precision",
    "make_runner",
    "restored_attributes",
    "uncompiled",
    "unwrapped",
]

Example = Tensor | Mapping[str, Any]


@dataclass(frozen=True)
class ModelRunner:
    """A model, and the shape of the images that it takes."""

    model: nn.Module
    shape: tuple[int, ...]
    """Shape of one input; the last two axes are height and width."""
    keyword: str | None = None
    """Name of the argument for the images; None if it is the first positional one."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments; tensors hold one example and are repeated for a batch."""

    @property
    def image(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.shape[-2:]
        return height, width

    def noise(self, batch: int, seed: int = 0) -> Tensor:
        """Returns `batch` images of noise, of the model's dtype and on its device."""
        images = torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))
        return self.like_model(images)

    def like_model(self, images: Tensor) -> Tensor:
        """Returns images in the dtype and on the device of the model's first floating-point parameter."""
        parameter = next((x for x in self.model.parameters() if x.is_floating_point()), images)
        return images.to(parameter.device, parameter.dtype)

    def __call__(self, images: Tensor) -> object:
        """Returns the model's output for a batch of images. Raises VicinalError if the model fails on them."""
        others = {
            name: value.expand(len(images), *value.shape[1:]) if isinstance(value, Tensor) else value
            for name, value in self.others.items()
        }
        try:
            if self.keyword is None:
                return self.model(images, **others)
            return self.model(**{self.keyword: images}, **others)
        except VicinalError:
            raise
        except Exception as error:
            size = " x ".join(map(str, images.shape[1:]))
            raise VicinalError(
                f"the model does not run on images of {size}: {type(error).__name__}: {error}. "
                "Give the img_size it was made for, or an example= of its input"
            ) from error


@dataclass(frozen=True)
class PatchRunner(ModelRunner):
    """A model that takes flattened patches and `spatial_shapes`, as SigLIP 2 does, run on images that are cut here."""

    patch: int = 1
    """Height and width of a patch."""

    def __call__(self, images: Tensor) -> object:
        """Returns the model's output for a batch of images, cut into patches with their channels last."""
        cut = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        rows, columns = cut.shape[2:4]
        patches = cut.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        others = {
            **self.others,
            "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.int64, device=images.device),
            "spatial_shapes": torch.tensor([[rows, columns]], device=images.device),
        }
        return ModelRunner(self.model, tuple(patches.shape[1:]), self.keyword, others)(patches)


def uncompiled(model: nn.Module) -> nn.Module:
    """Returns the model inside the result of `torch.compile`; any other model as it is."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside `torch.compile`, DataParallel and DistributedDataParallel, in any order."""
    while True:
        inner = uncompiled(model)
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def make_runner(model: nn.Module, img_size: ImageSize | None = None, example: Example | None = None) -> ModelRunner:
    """Returns how to run a model: as the example shows, or on images of `img_size`, or of the size that it declares.

    A compiled model is run as it was before `torch.compile`.

    Raises:
        VicinalError: if the size is not known, the example has no image, or the model is on the meta device.
    """
    model = uncompiled(model)
    if any(x.is_meta for x in model.parameters()):
        raise VicinalError(
            f"{type(model).__name__} is on the meta device and has no weights to run with; "
            "give it weights first, such as model.to_empty(device='cpu') and load_state_dict"
        )
    if example is None:
        return ModelRunner(model, _image_shape(model, img_size))
    keyword: str | None = None
    others: dict[str, Any] = {}
    if isinstance(example, Mapping) and {"pixel_values", "spatial_shapes"} <= example.keys():
        return _patch_runner(model, example)
    if isinstance(example, Mapping):
        images = [name for name, value in example.items() if isinstance(value, Tensor) and value.dim() >= 4]
        if len(images) != 1:
            raise VicinalError(f"example must hold one tensor of images, got {sorted(example)}")
        keyword = images[0]
        others = {name: value for name, value in example.items() if name != keyword}
        others = {name: value[:1] if isinstance(value, Tensor) else value for name, value in others.items()}
        example = example[keyword]
    if not isinstance(example, Tensor):
        raise VicinalError(f"example must be a tensor or a mapping of keyword arguments, got {type(example).__name__}")
    if example.dim() < 4:
        raise VicinalError(f"images are (batch, channels, height, width), got an example of {example.dim()} axes")
    return ModelRunner(model, tuple(example.shape[1:]), keyword, others)


def _patch_runner(model: nn.Module, example: Mapping[str, Any]) -> PatchRunner:
    """Returns how to run a model on patches `pixel_values`, of as many rows and columns as the first image has."""
    numbers = example["pixel_values"].shape[-1]
    rows, columns = example["spatial_shapes"][0].tolist()
    patch = math.isqrt(numbers // 3)
    if example["pixel_values"].dim() != 3 or 3 * patch**2 != numbers:
        raise VicinalError(
            "pixel_values with spatial_shapes must be (images, patches, 3 * patch * patch), got "
            f"{tuple(example['pixel_values'].shape)}"
        )
    made_here = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    others = {
        name: value[:1] if isinstance(value, Tensor) else value
        for name, value in example.items()
        if name not in made_here
    }
    return PatchRunner(model, (3, rows * patch, columns * patch), "pixel_values", others, patch)


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
        raise VicinalError("the model does not declare the size of its images; give img_size= or example=")
    height, width = height_and_width(img_size)
    return channels, height, width


@contextlib.contextmanager
def eval_without_side_effects(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode inside; restores training modes, buffers and random numbers after."""
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


@contextlib.contextmanager
def restored_attributes(model: nn.Module) -> Iterator[None]:
    """Gives every module its attributes back after: some adapt them to the image, as Swin of transformers its shift."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            now = vars(module)
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update(attributes)


@contextlib.contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Runs a half-precision model in float32 inside: a small disturbance is below the rounding of bf16.

    The tensors themselves are put aside and back, so nothing is rounded twice.
    """
    halves = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point() and x.dtype.itemsize < 4]
    before = [x.data for x in halves]
    for x in halves:
        x.data = x.data.float()
    try:
        yield
    finally:
        for x, data in zip(halves, before, strict=True):
            x.data = data
