"""ERF, the effective receptive field: which pixels a patch of a feature map depends on, and how much.

    E(p) = mean over images of max(0, mean over colours of d(mean channel of the patch) / d(pixel p)),   sum_p E(p) = 1

Luo et al., "Understanding the Effective Receptive Field in Deep Convolutional Neural Networks", arXiv:1701.04128; with
the mean over colours taken before the negative part is clipped, and the clipping image by image, as Kim et al.,
arXiv:2305.04722, do for vision transformers. One backward pass serves a batch: no image's patch depends on another
image's pixels, so the gradient of a sum over images holds each image's own.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vicinal.analysis.inputs import in_batches, name_of
from vicinal.analysis.receptive_field.position_change import Positions, changed_positions, is_rotary
from vicinal.analysis.receptive_field.result import Mode, ReceptiveField
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.feature_maps import find_map
from vicinal.inspection.model_runner import ModelRunner, eval_without_side_effects, make_runner, uncompiled
from vicinal.inspection.module_outputs import FeatureMap

__all__ = ["ReceptiveField", "receptive_field"]


def receptive_field(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layer: int | str | None = None,
    at: tuple[int, int] | None = None,
    mode: Mode = "clip",
    positions: Positions = "trained",
    seed: int = 0,
    batch_size: int = 32,
) -> ReceptiveField:
    """Measure which pixels a patch of a layer depends on.

    >>> import torch, vicinal
    >>> from vicinal.analysis.receptive_field.measure import receptive_field
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> found = receptive_field(model, torch.randn(4, 3, 32, 48), layer=0)
    >>> found.layer, found.at, found.grid, found.field.shape
    ('blocks.0', (4, 6), (8, 12), (32, 48))

    The model runs as in evaluation, up to the layer, once for a batch; before, a few times on noise, to find
    the layer and the patch in it. It is left as it was.

    Args:
        model: any vision model of timm, transformers or torchvision, or a network of convolutions.
        images: `(n, channels, height, width)` as the model takes them; or batches of them, alone or, as loaders give
            them, with labels behind.
        layer: index of a block, from the end if below zero, or any module's name; by default the last block. That is
            before a last norm, behind which the mean over channels hardly depends on the image.
        at: row and column of the patch; by default `(rows // 2, columns // 2)`.
        mode: what becomes of an image's gradient where it is negative: `clip`, zero; `abs`, its absolute value.
        positions: as they are, or see `changed_positions`.
        seed: of random positions.
        batch_size: images in a backward pass, which bounds the memory.
    """
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise VicinalError(f"receptive_field takes a torch.nn.Module, given {type(model).__name__}")
    if mode not in get_args(Mode):
        raise unknown_name("mode", mode, get_args(Mode))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise VicinalError(f"batch_size is a whole number of images, at least 1; given {batch_size}")
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        changed_positions(model, positions, seed=seed) as changed,
        eval_without_side_effects(model),
        _without_parameter_gradients(model),
    ):
        run, chosen, total, count = None, None, None, 0
        for batch in in_batches(images, batch_size):
            if run is None or chosen is None or total is None:
                run = make_runner(model, example=batch)
                chosen = find_map(run, layer, at)
                total = torch.zeros(run.image, dtype=torch.float64)
            if batch.shape[1:] != run.shape:
                raise VicinalError(
                    f"all images have one shape; given {_sizes(run.shape)} and {_sizes(batch.shape[1:])}"
                )
            total += _energy(run, chosen, batch, mode)
            count += len(batch)
    if chosen is None or total is None:
        raise VicinalError("there are no images; give at least one")
    field = total.numpy() / count
    if not np.isfinite(field).all():
        raise VicinalError(f"the gradient of {chosen.name} is not finite; are the images and the weights?")
    if not field.sum() > 0:
        raise VicinalError(
            f"no pixel has {'a positive' if mode == 'clip' else 'an'} influence on {chosen.name} at {chosen.at[0]} "
            f"{chosen.at[1]}; look at another layer or patch" + (", or use mode abs" if mode == "clip" else "")
        )
    return ReceptiveField(
        field=field / field.sum(),
        model=name_of(model),
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


def _energy(run: ModelRunner, chosen: FeatureMap, batch: Tensor, mode: Mode) -> Tensor:
    """Sum over a batch of each image's energy: `(height, width)`."""
    # One image is taken twice: on the CPU, torch 2.13 gives a wrong gradient of BatchNorm in evaluation for a batch of
    # one where tokens come behind it, as in XCiT and LeViT.
    like = next(run.model.parameters(), batch)
    pixels = batch.repeat(2, 1, 1, 1) if len(batch) == 1 else batch
    pixels = pixels.detach().to(like.device, like.dtype, copy=True).requires_grad_()
    patch = chosen.of_patch(chosen.output(run, pixels))
    (gradient,) = torch.autograd.grad(patch.mean(1).sum(), pixels)
    by_image = gradient[: len(batch)].cpu().double().mean(1)
    return (by_image.clamp(min=0) if mode == "clip" else by_image.abs()).sum(0)


@contextlib.contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Only pixels get a gradient inside, which spares memory and half of the backward pass."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))
