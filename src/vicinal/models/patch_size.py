"""Patch sizes: which image sizes a model takes."""

from typing import Any

from torch import nn

from vicinal.errors import VicinalError
from vicinal.models.t2t import TokensToToken

__all__ = ["required_divisor", "validate_patch_size"]


def validate_patch_size(name: str, size: tuple[int, int], patch: int) -> int:
    """Returns the patch size if it divides height and width of the images.

    Args:
        name: of the model, for the error message.
        size: height and width of the images.
        patch: side of a patch in pixels.

    Raises:
        VicinalError: the patch size does not divide the image size; the message suggests sizes that work.
    """
    if not isinstance(patch, int) or patch < 1:
        raise VicinalError(f"patch_size of {name} must be a whole number of pixels >= 1, got {patch!r}")
    wrong = [side for side in size if side % patch]
    if wrong:
        below, above = wrong[0] // patch * patch, -(-wrong[0] // patch) * patch
        sides = f"{below} or {above}" if below else f"{above}"
        divisors = [n for n in range(2, min(size) // 2 + 1) if size[0] % n == size[1] % n == 0]
        other = f", or patch_size={min(divisors, key=lambda n: abs(n - patch))}" if divisors else ""
        raise VicinalError(
            f"img_size of {name} must be divisible by its patches of {patch} x {patch} pixels, got {size[0]} x "
            f"{size[1]}; use {sides} in place of {wrong[0]}{other}"
        )
    return patch


def required_divisor(model: nn.Module) -> int:
    """Returns the number that must divide height and width of a model's images: the patch size.

    1 if patches overlap or the model pads its images.
    """
    patches: Any = getattr(model, "patch_embed", None)
    if isinstance(patches, TokensToToken):
        return max(patches.patch_size)
    projection = getattr(patches, "proj", None)
    if not isinstance(projection, nn.Conv2d) or getattr(patches, "dynamic_img_pad", False):
        return 1
    disjoint = projection.kernel_size == projection.stride and projection.padding == (0, 0)
    return max(projection.stride) if disjoint else 1
