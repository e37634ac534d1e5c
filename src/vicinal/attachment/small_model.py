"""Models of transformers with small configurations and random weights, described by data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.inspection.model_runner import ModelRunner

__all__ = ["Config", "Options", "PatchifiedImages", "SmallModel", "small"]

Options = dict[str, Any]
"""Arguments of a configuration."""


@dataclass(frozen=True)
class Config:
    """A configuration of transformers that is not built yet."""

    name: str
    """Class of the configuration."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments; those that are a `Config` are built first."""

    def build(self) -> Any:
        """Returns the configuration."""
        import transformers

        options = {name: x.build() if isinstance(x, Config) else x for name, x in self.options.items()}
        return getattr(transformers, self.name)(**options)


@dataclass(frozen=True)
class SmallModel:
    """A model of transformers: its class, its configuration, and the images that it takes."""

    model: str
    """Class of the model."""
    shape: tuple[int, ...]
    """Shape of one input; the last two axes are height and width."""
    config: Config
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Further keyword arguments, for a batch of one."""
    patch: int | None = None
    """Size of patches that images are cut into before they are given to the model; None if it takes images."""

    def with_options(self, **options: Any) -> "SmallModel":
        """Returns this model with other options in its configuration."""
        return replace(self, config=replace(self.config, options={**self.config.options, **options}))

    def build(self) -> nn.Module:
        """Returns the model, with random weights."""
        import transformers

        model: nn.Module = getattr(transformers, self.model)(self.config.build())
        return model if self.patch is None else PatchifiedImages(model, self.patch)

    def runner(self) -> ModelRunner:
        """Returns the model and how it is run."""
        return ModelRunner(self.build(), self.shape, others=self.inputs)


def small(
    model: str,
    shape: tuple[int, ...],
    config: str | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    patch: int | None = None,
    **options: Any,
) -> SmallModel:
    """Returns a small model; `config` is the class of its configuration, by default named as the model."""
    made = Config(config or model.removesuffix("Model") + "Config", options)
    return SmallModel(model, shape, made, inputs or {}, patch)


class PatchifiedImages(nn.Module):
    """A model of images for one that takes flattened patches, with their mask and numbers of rows and columns.

    `Siglip2VisionModel` is such a model: its image processor cuts images into patches.
    """

    def __init__(self, model: nn.Module, patch: int) -> None:
        super().__init__()
        self.model, self.patch = model, patch

    def forward(self, images: Tensor) -> Any:
        """Returns the model's output for images `(batch, channels, height, width)`."""
        patches = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        count, rows, columns = len(images), *patches.shape[2:4]
        # pixels of a patch row by row, channels last: (batch, patches, patch * patch * channels)
        patches = patches.permute(0, 2, 3, 4, 5, 1).reshape(count, rows * columns, -1)
        mask = torch.ones(count, rows * columns, dtype=torch.int64, device=images.device)
        sizes = torch.tensor([[rows, columns]] * count, device=images.device)
        return self.model(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=sizes)
