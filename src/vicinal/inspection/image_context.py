"""The size of the image that a model is running on, noted where the image enters it.

The root's forward is not the place: `forward_features`, `forward_intermediates` and feature extraction bypass it. A
hook of the first modules that are given the image notes its height and width for this thread, and attention looks it
up. `threading.local` is traced by Dynamo; `ContextVar.set` is not.
"""

import collections
import threading
import uuid
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.errors import VicinalError
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.patch_coordinates import PatchCoordinates, given_coordinates

__all__ = [
    "UNKNOWN",
    "ImageModules",
    "ImageSizeHook",
    "NotedSize",
    "SizeRecords",
    "in_backward",
    "is_tracing",
    "noted_size",
    "size_text",
]

UNKNOWN = (0, 0)
"""Noted where the module was given neither images nor patches with coordinates."""

NotedSize = tuple[int, int] | PatchCoordinates
"""Height and width of images, or where the patches of each image sit, if they were cut before."""

MAX_CALLS = 256  # of a module between forward and backward
SAMPLE_TOLERANCE = 1e-3  # relative distance of the samples of one call

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
            given_coordinates(module, args, kwargs)
            return
        shapes = [x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        maps = [shape for shape in shapes if len(shape) == self.axes]
        images = [shape for shape in maps if shape[1] == self.channels]
        if maps and not images:  # the module is used again, on features
            return
        size = (images[0][-2], images[0][-1]) if images else given_coordinates(module, args, kwargs) or UNKNOWN
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


class SizeRecords:
    """The image sizes that an attention module ran on, for when its activations are recomputed in backward.

    Checkpointing runs a part of the model again, without the module that is given the image, maybe in another thread.
    The size is then that of the call with as many tokens. If there were such calls on images of several sizes, some
    numbers of the queries tell which one is repeated.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, list[NotedSize]] = {}
        """Different sizes by number of tokens."""
        self._calls: collections.deque[tuple[NotedSize, torch.Size, Tensor]] = collections.deque(maxlen=MAX_CALLS)

    def __deepcopy__(self, memo: object) -> "SizeRecords":
        return SizeRecords()

    def __reduce__(self) -> Any:
        return SizeRecords, ()

    def note(self, size: NotedSize, queries: Tensor) -> None:
        """Notes a call in forward, on an image of `size`.

        Args:
            size: height and width, or coordinates of patches.
            queries: `(..., tokens, dim)`.
        """
        sizes = self._sizes.setdefault(queries.shape[-2], [])
        if size not in sizes:
            sizes.append(size)
            del sizes[:-MAX_CALLS]
        self._calls.append((size, queries.shape, _sample(queries)))

    def find(self, queries: Tensor) -> NotedSize | None:
        """Returns the size of the call that is repeated; None if there was none with as many tokens.

        Raises VicinalError if it could be one of several.
        """
        sizes = self._sizes.get(queries.shape[-2], [])
        if len(sizes) <= 1:
            return sizes[0] if sizes else None
        sample = _sample(queries)
        calls = [(size, known) for size, shape, known in self._calls if shape == queries.shape and size in sizes]
        found = {size for size, known in calls if _alike(known, sample)}
        if len(found) == 1:
            return found.pop()
        text = ", ".join(map(size_text, sizes))
        raise VicinalError(
            f"a recomputed attention has {queries.shape[-2]} tokens, as images of {text} have, and it cannot be told "
            "which one is repeated; run backward for each size on its own, or do without checkpointing"
        )


def _sample(queries: Tensor) -> Tensor:
    """Returns some numbers of queries `(..., tokens, dim)`, of the first and the last image and head."""
    rows, columns = (max(1, size // 8) for size in queries.shape[-2:])
    ends = [queries.detach()[(end,) * (queries.dim() - 2)][::rows, ::columns] for end in (0, -1)]
    return torch.stack(ends)


def _alike(known: Tensor, sample: Tensor) -> bool:
    """Returns whether two samples are of the same call, up to what recomputation on a GPU may change."""
    if known.shape != sample.shape:
        return False
    distance = torch.linalg.vector_norm((known - sample).float())
    return bool(distance <= SAMPLE_TOLERANCE * torch.linalg.vector_norm(known.float()))


def in_backward() -> bool:
    """Returns whether autograd runs backward in this thread, which recomputes checkpointed activations."""
    return torch._C._current_graph_task_id() != -1


def is_tracing() -> bool:
    """Returns whether `torch.jit.trace` runs the model."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def noted_size(key: str) -> NotedSize | None:
    """Returns the size of the images that a hook last saw in this thread; None if it has not run here."""
    return getattr(_notes, key, None)


def size_text(size: NotedSize) -> str:
    """Returns a size as text, such as `128 x 64`."""
    return str(size) if isinstance(size, PatchCoordinates) else f"{size[0]} x {size[1]}"


class ImageModules:
    """Finds the innermost modules that are given the image, up to the first that turns it into something else.

    A context manager around one run of the model; `found` holds the modules after it.

    Args:
        runner: the model, and its images.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.model = runner.model
        self._axes, self._channels = len(runner.shape) + 1, runner.shape[0]
        self._image = runner.image
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
        if size is None and given_coordinates(module, args, kwargs) is not None:
            size = self._image
        if not self._done and module not in self._given and size is not None:
            self._given[module] = size

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._done = self._done or (module in self._given and self._image_size([output]) is None)

    def _image_size(self, values: Iterable[Any]) -> tuple[int, int] | None:
        for x in values:
            if isinstance(x, Tensor) and x.dim() == self._axes and x.shape[1] == self._channels:
                return x.shape[-2], x.shape[-1]
        return None
