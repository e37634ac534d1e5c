"""Go on with images of another size: positions are interpolated, priors carried over."""

from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from vicinal.attachment import detach, get_priors
from vicinal.attachment.attached_priors import priors_to_config
from vicinal.attachment.subclass import WithPrior
from vicinal.errors import VicinalError
from vicinal.inspection.model_runner import ImageSize
from vicinal.models.backbones import attach_priors, check_patch, cut_of, image_size

__all__ = ["resize"]


def resize(model: nn.Module, img_size: ImageSize, *, rescale: bool = True) -> None:
    """Make a model take images of another size, in place, with patches of the same size.

    >>> import torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=32)
    >>> vicinal.resize(model, 48)
    >>> model(torch.zeros(1, 3, 48, 48)).shape
    torch.Size([1, 10])

    Args:
        model: one of `create_model`, or any timm model that can change its input size.
        img_size: the new height and width.
        rescale: stretch the widths of a prior with the grid, as positions are; else they stay the same in patches.
    """
    size = image_size(img_size)
    declared: Any = getattr(model, "pretrained_cfg", None) or {}
    if "input_size" not in declared or not hasattr(model, "set_input_size"):
        raise VicinalError(f"{type(model).__name__} cannot change the size of its images; make it with img_size={size}")
    channels = declared["input_size"][0]
    # What timm declares is the size of the pretrained weights, whatever the img_size that the model was made with.
    before = getattr(getattr(model, "patch_embed", None), "img_size", None) or declared["input_size"][1:]
    if tuple(before) == size:
        return
    check_patch(declared.get("architecture", type(model).__name__), size, cut_of(model))
    written, trained = priors_to_config(model), get_priors(model)
    modes = {name: module.training for name, module in model.named_modules()}
    detach(model)
    _set_input_size(model, size)
    with torch.random.fork_rng():  # what the new priors start from is overwritten
        attach_priors(model, written, (channels, *size))
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
