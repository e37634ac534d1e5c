"""The size of the image that a model is running on, noted where the image enters it.

The root's forward is not the place: `forward_features`, `forward_intermediates` and feature extraction bypass it. A
hook of the first modules that are given the image notes its height and width for this thread, and attention looks it
up. `threading.local` is traced by Dynamo; `ContextVar.set` is not.
"""

import threading
import uuid
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.inspection.model_runner import ModelRunner

__all__ = ["UNKNOWN", "ImageModules", "ImageSizeHook", "is_tracing", "noted_size"]

UNKNOWN = (0, 0)
"""Noted where the module was given no image, such as patches cut by somebody else."""

_notes = threading.local()


class ImageSizeHook:
    """A forward pre-hook that notes the size of the image that its module is given.

    Args:
        axes: number of axes of a batch of images.
        channels: size of the second axis.
    """

    def __init__(self, axes: int, channels: int) -> None:
        self.axes, self.channels = axes, channels
        self.key = f"size_{uuid.uuid4().hex}"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the size."""
        if is_tracing():  # sizes are tensors then
            return
        shapes = [x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        maps = [shape for shape in shapes if len(shape) == self.axes]
        images = [shape for shape in maps if shape[1] == self.channels]
        if maps and not images:  # the module is used again, on features
            return
        size = (images[0][-2], images[0][-1]) if images else UNKNOWN
        setattr(_notes, self.key, size)

    def register(self, modules: list[nn.Module]) -> None:
        """Registers itself with modules."""
        for module in modules:
            module.register_forward_pre_hook(self, with_kwargs=True)

    def remove(self, model: nn.Module) -> None:
        """Removes itself from all modules of a model."""
        for module in model.modules():
            for number, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, ImageSizeHook) and hook.key == self.key:
                    del module._forward_pre_hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)


def is_tracing() -> bool:
    """Returns whether `torch.jit.trace` runs the model."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def noted_size(key: str) -> tuple[int, int] | None:
    """Returns height and width of the image that a hook last saw in this thread; None if it has not run here."""
    return getattr(_notes, key, None)


class ImageModules:
    """Finds the innermost modules that are given the image, up to the first that turns it into something else.

    A context manager around one run of the model; `found` holds the modules after it.

    Args:
        runner: the model, and its images.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.model = runner.model
        self._axes, self._channels = len(runner.shape) + 1, runner.shape[0]
        self._given: dict[nn.Module, tuple[int, int]] = {}
        self._done = False
        self._hooks: list[Any] = []

    @property
    def found(self) -> dict[nn.Module, tuple[int, int]]:
        """The innermost modules, and height and width of the image that each was given."""
        given = self._given
        return {
            module: size
            for module, size in given.items()
            if not any(other in given for other in list(module.modules())[1:])
        }

    def __enter__(self) -> "ImageModules":
        for module in self.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        size = self._image_size((*args, *kwargs.values()))
        if not self._done and module not in self._given and size is not None:
            self._given[module] = size

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._done = self._done or (module in self._given and self._image_size([output]) is None)

    def _image_size(self, values: Iterable[Any]) -> tuple[int, int] | None:
        for x in values:
            if isinstance(x, Tensor) and x.dim() == self._axes and x.shape[1] == self._channels:
                return x.shape[-2], x.shape[-1]
        return None
