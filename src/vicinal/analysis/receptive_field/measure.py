"""Measures the effective receptive field (ERF): which pixels a patch of a feature map depends on, and how much.

    E(p) = mean over images of max(0, mean over colors of d(mean channel of the patch) / d(pixel p)),   sum_p E(p) = 1

Luo et al., "Understanding the Effective Receptive Field in Deep Convolutional Neural Networks", arXiv:1701.04128; with
the mean over colors taken before the negative part is clipped, and the clipping image by image, as Kim et al.,
arXiv:2305.04722, do for vision transformers. One backward pass serves a batch: no image's patch depends on another
image's pixels, so the gradient of the sum over images contains the gradient of each.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.analysis.inputs import check_batch_size, check_same_shape, iterate_batches, model_name
from vicinal.analysis.receptive_field.position_change import Positions, changed_positions, is_rotary
from vicinal.analysis.receptive_field.result import Mode, ReceptiveField
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.feature_maps import find_map
from vicinal.inspection.model_runner import ModelRunner, eval_without_side_effects, make_runner, uncompiled
from vicinal.inspection.module_outputs import FeatureMap

__all__ = ["receptive_field"]


def receptive_field(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layer: int | str | None = None,
    at: tuple[int, int] | None = None,
    mode: Mode = "clip",
    positions: Positions = "trained",
    seed: int = 0,
    name: str | None = None,
    batch_size: int = 32,
) -> ReceptiveField:
    """Returns which pixels a patch of a layer depends on, and how much.

    >>> import torch, vicinal
    >>> from vicinal.analysis.receptive_field import receptive_field
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> found = receptive_field(model, torch.randn(4, 3, 32, 48), layer=0)
    >>> found.layer, found.at, found.grid, found.field.shape
    ('blocks.0', (4, 6), (8, 12), (32, 48))

    The model runs up to the layer once for a batch; before, a few times on noise, to find layer and patch.

    Args:
        model: any vision model; it runs in evaluation mode, and its mode, buffers and random state are restored.
        images: `(n, channels, height, width)` as the model takes them; or batches, alone or first in a tuple, as
            DataLoaders give them.
        layer: index of a block, from the end if below zero, or any module's name; by default the last block. That is
            before a final norm, whose output has a mean over channels that hardly depends on the image.
        at: row and column of the patch; by default `(rows // 2, columns // 2)`.
        mode: how negative gradients count: `clip`, as zero; `abs`, by their absolute value.
        positions: `trained`, `random` or `zero`, see `changed_positions`.
        seed: of random positions.
        name: display name of the model; by default its architecture.
        batch_size: number of images in a backward pass, which bounds the memory.

    Raises:
        VicinalError: if the layer or the patch cannot be found, or no pixel has an influence on it.
    """
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise VicinalError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if mode not in get_args(Mode):
        raise unknown_name("mode", mode, get_args(Mode))
    check_batch_size(batch_size)
    with torch.inference_mode(False), torch.enable_grad(), changed_positions(model, positions, seed=seed) as changed:
        chosen, field, count = _mean_energy(model, iterate_batches(images, batch_size), layer, at, mode)
    return ReceptiveField(
        field=_normalized(field, chosen, mode),
        model=name or model_name(model),
        layer=chosen.name,
        at=chosen.at,
        grid=(chosen.grid.height, chosen.grid.width),
        stem=chosen.stem,
        images=count,
        mode=mode,
        positions=positions,
        changed=tuple(changed),
        rotary_stay=bool(changed) and is_rotary(model),
    )


def _mean_energy(
    model: nn.Module, batches: Iterator[Tensor], layer: int | str | None, at: tuple[int, int] | None, mode: Mode
) -> tuple[FeatureMap, NDArray[np.float64], int]:
    """Returns the feature map with its patch, the mean energy `(height, width)`, and the number of images."""
    first = next(batches, None)
    if first is None:
        raise VicinalError("there are no images; give at least one")
    with eval_without_side_effects(model), _without_parameter_gradients(model):
        run = make_runner(model, example=first)
        chosen = find_map(run, layer, at)
        total, count = torch.zeros(run.image, dtype=torch.float64), 0
        for batch in itertools.chain([first], batches):
            check_same_shape(batch, run.shape)
            total += _energy(run, chosen, batch, mode)
            count += len(batch)
    return chosen, total.numpy() / count, count


def _normalized(field: NDArray[np.float64], chosen: FeatureMap, mode: Mode) -> NDArray[np.float64]:
    """Returns a field divided by its sum. Raises VicinalError if it is not finite, or zero."""
    if not np.isfinite(field).all():
        raise VicinalError(f"the gradient of {chosen.name} is not finite; check the images and the weights")
    if not field.sum() > 0:
        raise VicinalError(
            f"no pixel has {'a positive' if mode == 'clip' else 'an'} influence on {chosen.name} at {chosen.at[0]} "
            f"{chosen.at[1]}; choose another layer or patch" + (", or mode='abs'" if mode == "clip" else "")
        )
    normalized: NDArray[np.float64] = field / field.sum()
    return normalized


def _energy(run: ModelRunner, chosen: FeatureMap, batch: Tensor, mode: Mode) -> Tensor:
    """Returns the sum over a batch of the energy of each image, `(height, width)`."""
    # A single image is repeated: on CPUs, torch 2.13 returns a wrong gradient of BatchNorm in evaluation mode for a
    # batch of one if tokens follow it, as in XCiT and LeViT.
    like = next(run.model.parameters(), batch)
    pixels = batch.repeat(2, 1, 1, 1) if len(batch) == 1 else batch
    pixels = pixels.detach().to(like.device, like.dtype, copy=True).requires_grad_()
    patch = chosen.of_patch(chosen.output(run, pixels))
    (gradient,) = torch.autograd.grad(patch.mean(1).sum(), pixels)
    by_image = gradient[: len(batch)].cpu().double().mean(1)
    return (by_image.clamp(min=0) if mode == "clip" else by_image.abs()).sum(0)


@contextlib.contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Turns off gradients of parameters inside `with`, which saves memory and half of the backward pass."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()
