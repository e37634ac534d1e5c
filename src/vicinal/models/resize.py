"""Changes the image size of a model: interpolates position embeddings and resizes priors."""

from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from vicinal.attachment import detach, get_priors
from vicinal.attachment.attached_priors import priors_to_config
from vicinal.attachment.subclass import WithPrior
from vicinal.errors import VicinalError
from vicinal.image_size import ImageSize, height_and_width
from vicinal.models.patch_size import required_divisor, validate_patch_size
from vicinal.models.prior_config import attach_priors

__all__ = ["resize"]


def resize(model: nn.Module, img_size: ImageSize, *, rescale: bool = True) -> None:
    """Changes the image size of a model in place; the patch size stays the same.

    >>> import torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=32)
    >>> vicinal.resize(model, 48)
    >>> model(torch.zeros(1, 3, 48, 48)).shape
    torch.Size([1, 10])

    Args:
        model: a model of `create_model`, or any timm model with `set_input_size`.
        img_size: the new side, or height and width.
        rescale: scale the widths of a prior with the grid, as position embeddings; otherwise they stay the same in
            patches.

    Raises:
        VicinalError: the model cannot change its image size, or the patch size does not divide it.
    """
    size = height_and_width(img_size)
    declared: Any = getattr(model, "pretrained_cfg", None) or {}
    if "input_size" not in declared or not hasattr(model, "set_input_size"):
        raise VicinalError(f"{type(model).__name__} cannot change its image size; create it with img_size={size}")
    channels = declared["input_size"][0]
    # What timm declares is the size of the pretrained weights, whatever the img_size that the model was made with.
    before = getattr(getattr(model, "patch_embed", None), "img_size", None) or declared["input_size"][1:]
    if tuple(before) == size:
        return
    validate_patch_size(declared.get("architecture", type(model).__name__), size, required_divisor(model))
    config, trained = priors_to_config(model), get_priors(model)
    modes = {name: module.training for name, module in model.named_modules()}
    detach(model)
    _set_input_size(model, size)
    with torch.random.fork_rng():  # the initial parameters are overwritten
        attach_priors(model, config, (channels, *size))
    for name, module in model.named_modules():
        if isinstance(module, WithPrior):
            module.prior = trained[name].resize(module.prior.grid, rescale=rescale)
    for name, module in model.named_modules():
        module.training = modes[name]
    declared["input_size"] = (channels, *size)
    arguments: Any = getattr(model, "model_args", None)
    if arguments is not None and "img_size" in arguments:
        arguments["img_size"] = size


def _set_input_size(model: Any, size: tuple[int, int]) -> None:
    """Sets the size of a model's images, and interpolates its positions.

    timm leaves positions as they are where the new grid has as many patches, though in other rows and columns.
    """
    positions = getattr(model, "pos_embed", None)
    before = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    model.set_input_size(img_size=size)
    if not isinstance(positions, nn.Parameter) or model.pos_embed is not positions or before is None:
        return
    after = model.patch_embed.grid_size
    prefix = positions.shape[1] - before[0] * before[1]
    if tuple(after) != tuple(before) and positions.dim() == 3 and prefix >= 0:
        resampled = resample_abs_pos_embed(positions.detach(), after, before, num_prefix_tokens=prefix)
        model.pos_embed = nn.Parameter(resampled, requires_grad=positions.requires_grad)
