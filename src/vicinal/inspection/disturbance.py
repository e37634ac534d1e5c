"""How disturbances of an image pass through operations that mix places: in place.

A batch is a base image, disturbed copies of it, and the base image again. Each function returns the result of an
operation as if it had not mixed places.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from vicinal.inspection.kernel_places import KernelPlaces, Resampling, spread_evenly
from vicinal.pooled_tokens import TokenPooling

__all__ = ["AMPLITUDE", "keep_in_place", "keep_maxima_in_place", "norm_by_first", "take_first", "unfold_in_place"]

AMPLITUDE = 0.002  # of a map's spread: maxima hardly switch, responses grow as its square, far above rounding
PATTERNS = 1024  # of signs over channels; few places that are pooled together share one
MIN_SPREAD = 1e-12  # a map whose values differ by less is taken to be constant
UNFOLD_DEFAULTS = (("dilation", 1), ("padding", 0), ("stride", 1))


def keep_in_place(
    x: Tensor, out: Tensor, images: int, kernels: KernelPlaces | Resampling | TokenPooling | None = None
) -> Tensor:
    """Returns a map `out` as if the operation that made it from the map `x` had not mixed places.

    How far an image differs from the first one, in a place of `x`, is how far it differs in that place of `out`. What
    is computed from all places at once, as before a squeeze-and-excitation, is the first image's.
    """
    if x.dim() != 4 or out.dim() != 4 or len(x) != len(out) or len(x) % images:
        return out
    was, now = x.unflatten(0, (images, -1)), out.unflatten(0, (images, -1))
    if out[0, 0].numel() == 1:
        return take_first(out, images)
    apart = (was - was[:1]).nan_to_num()  # padding for a maximum is -inf
    rows, columns = out.shape[2:]
    squared = apart.square().mean(2)
    if kernels is None:
        differs = spread_evenly(squared, (rows, columns)).sqrt()
    else:
        # Places that respond more strongly must not draw the center of a kernel to them.
        total = squared.sum(0, keepdim=True)
        shares = squared / total.clamp(min=torch.finfo(total.dtype).tiny)
        strength = spread_evenly(total, (rows, columns))
        differs = (kernels.carry(shares, (rows, columns)).clamp(min=0) * strength).sqrt()
    most, spread = float(differs.max()), float(now[0].std())
    differs = differs * ((AMPLITUDE / most if most else 1) * (spread if spread > MIN_SPREAD else 1))
    signs = _signs(out.shape[1], rows * columns).view(out.shape[1:]).to(out)
    kept: Tensor = now[:1] + differs[:, :, None] * signs
    return kept.flatten(0, 1)


def keep_maxima_in_place(x: Tensor, out: Tensor, images: int, dim: Any) -> Tensor:
    """Returns maxima over an axis of tokens `(images, ..., channels)` as if they were means of places."""
    if not isinstance(dim, int) or not 0 < dim % x.dim() < x.dim() - 1 or len(x) % images or x.dim() == out.dim():
        return out
    was, now = x.unflatten(0, (images, -1)), out.unflatten(0, (images, -1))
    axis = dim % x.dim() + 1
    squared = (was - was[:1]).square().mean(-1)
    total = squared.sum(0, keepdim=True)
    shares = squared / total.clamp(min=torch.finfo(total.dtype).tiny)
    differs = (shares.mean(axis) * total.mean(axis)).sqrt()
    signs = _signs(out.shape[-1], 1).view(-1).to(out)
    kept: Tensor = now[:1] + differs[..., None] * signs
    return kept.flatten(0, 1)


def _signs(channels: int, places: int) -> Tensor:
    """Returns the direction of the disturbance in each place, `(channels, places)`: one of a few patterns by chance."""
    patterns, state = _patterns(channels)
    generator = torch.Generator().set_state(state)
    return patterns[:, torch.randint(PATTERNS, (places,), generator=generator, device="cpu")]


@functools.lru_cache(maxsize=64)  # drawing the patterns takes longer than the convolution
@torch.inference_mode(False)  # what is kept must serve calls in any mode
def _patterns(channels: int) -> tuple[Tensor, Tensor]:
    """Returns patterns of signs, `(channels, PATTERNS)`, and the state of the generator that drew them.

    As many channels go up as down, because a normalization over channels removes what all of them share.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(channels, PATTERNS, generator=generator, device="cpu").T.contiguous()  # selects along rows
    up = drawn.topk((channels + 1) // 2, largest=False, sorted=False).indices
    return torch.full_like(drawn, -1.0).scatter_(1, up, 1.0).T.contiguous(), generator.get_state()


def unfold_in_place(out: Tensor, images: int, input: Tensor, kernel_size: Any, *rest: Any, **more: Any) -> Tensor:
    """Returns the result of `F.unfold`, `(images, channels * kernel, places)`, as if it had not mixed places.

    Where it cuts a map into pieces that do not overlap, it mixes nothing, and a piece may be a window.
    """
    settings = dict(zip(("dilation", "padding", "stride"), rest, strict=False)) | more
    size, overlaps = [], False
    for axis in (0, 1):
        kernel, dilation, padding, stride = (
            value if isinstance(value, int) else value[axis]
            for value in (kernel_size, *(settings.get(name, least) for name, least in UNFOLD_DEFAULTS))
        )
        overlaps |= stride < kernel
        size.append((input.shape[axis - 2] + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)
    return keep_in_place(input, out.unflatten(-1, size), images).flatten(-2) if overlaps else out


def take_first(out: Tensor, images: int) -> Tensor:
    """Returns the result of the first image for all images."""
    if len(out) % images:
        return out
    now: Tensor = out.unflatten(0, (images, -1))
    return now[:1].expand_as(now).flatten(0, 1).clone()


def norm_by_first(
    out: Tensor,
    images: int,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Returns `F.group_norm` with the mean and deviation of the first image, which are taken over all places."""
    if len(input) % images or input.dim() < 3:
        return out
    groups = input.unflatten(0, (images, -1)).unflatten(2, (num_groups, -1))
    axes = tuple(range(3, groups.dim()))
    variance, mean = torch.var_mean(groups[:1], axes, correction=0, keepdim=True)
    normed: Tensor = ((groups - mean) / (variance + eps).sqrt()).reshape(input.shape)
    shape = (1, -1, *[1] * (input.dim() - 2))
    normed = normed if weight is None else normed * weight.view(shape)
    return normed if bias is None else normed + bias.view(shape)
