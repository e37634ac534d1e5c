"""Go on with images of another size: positions are interpolated, priors carried over."""

from typing import Any

import torch
from torch import nn

from vicinal.attachment import detach
from vicinal.attachment.running import ImageSize
from vicinal.attachment.swapping import Attached
from vicinal.errors import VicinalError
from vicinal.models.backbones import attach_priors, check_patch, cut_of, image_size
from vicinal.priors.base import Prior

__all__ = ["priors_of", "resize", "written_priors"]


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
    channels, *before = declared["input_size"]
    if tuple(before) == size:
        return
    check_patch(declared.get("architecture", type(model).__name__), size, cut_of(model))
    written, trained = written_priors(model), priors_of(model)
    modes = {name: module.training for name, module in model.named_modules()}
    detach(model)
    model.set_input_size(img_size=size)  # type: ignore[operator]
    with torch.random.fork_rng():  # what the new priors start from is overwritten
        attach_priors(model, written, (channels, *size))
    for name, module in model.named_modules():
        if isinstance(module, Attached):
            module.prior = trained[name].resize(module.prior.grid, rescale=rescale)
    for name, module in model.named_modules():
        module.training = modes[name]
    declared["input_size"] = (channels, *size)
    arguments: Any = getattr(model, "model_args", None)
    if arguments is not None and "img_size" in arguments:
        arguments["img_size"] = size


def priors_of(model: nn.Module) -> dict[str, Prior]:
    """The priors that a model carries, by the name of their attention module."""
    return {name: module.prior for name, module in model.named_modules() if isinstance(module, Attached)}


def written_priors(model: nn.Module) -> str | list[dict[str, Any]]:
    """What a config file says of the priors that a model carries, so that they can be attached again."""
    parts: list[dict[str, Any]] = []
    priors = priors_of(model)
    for name, prior in priors.items():
        options = {key: _plain(value) for key, value in prior.spec_options.items()}
        same = [part for part in parts if (part["prior"], part["options"]) == (prior.spec, options)]
        if same:
            same[0]["layers"].append(name)
        else:
            parts.append({"prior": prior.spec, "options": options, "layers": [name]})
    if not parts:
        return "none"
    whole = len(parts) == 1 and len(priors) == next(iter(priors.values())).depth
    return str(parts[0]["prior"]) if whole and not parts[0]["options"] else parts


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
