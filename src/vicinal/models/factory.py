"""`create_model`: makes a model by name, with a prior attached."""

from typing import Any

import timm
import torch
from torch import nn

from vicinal.errors import VicinalError, unknown_name
from vicinal.image_size import ImageSize, height_and_width
from vicinal.inspection.model_runner import ModelRunner, eval_without_side_effects
from vicinal.models.backbones import ALIASES, BACKBONES, Backbone
from vicinal.models.model_config import channel_statistics, set_model_config
from vicinal.models.patch_size import required_divisor, validate_patch_size
from vicinal.models.prior_config import Priors, attach_priors, current_priors

__all__ = ["create_model", "find_backbone", "make_timm_model"]

DROP_PATH_RATE = 0.1


def create_model(
    name: str,
    *,
    prior: Priors | None = "none",
    img_size: ImageSize | None = None,
    num_classes: int | None = 10,
    in_chans: int = 3,
    global_pool: str | None = None,
    drop_path_rate: float = DROP_PATH_RATE,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """Returns a new model with a prior in every attention layer over a grid of patches.

    >>> import vicinal
    >>> model = vicinal.create_model("vit", prior="gmm:kernels=5", img_size=32, num_classes=10)
    >>> sum(parameter.numel() for parameter in model.parameters())  # 1,080 of them are the prior's
    2693506

    A prior changes nothing else: pooling and, for the same seed, initial weights stay the same.

    Args:
        name: one of `vicinal models`, such as `vit`, `swin`, `cait`, `pit`, `t2t`, `vit-mini`; or any model of timm.
        prior: spec of the prior, such as `gmm` or `gmm:kernels=3+gab`; `none` or None for no prior.
        img_size: side, or height and width, of the images; 32 by default, for models of timm their own default.
        num_classes: number of outputs; None for that of the pretrained model.
        in_chans: number of image channels.
        global_pool: `token`, the class token, or `avg`, the mean over patches. The default is `token` for ViT, CaiT and
            PiT, and `avg` for Swin, T2T, `vit-mini` and `vit-micro`, with and without a prior. CaiT takes `token` only
            and Swin `avg` only.
        drop_path_rate: drop path rate in training.
        pretrained: load pretrained weights from the Hub; models of timm only.
        options: further arguments of the model, such as `patch_size`, `depth`, `embed_dim`. The default `patch_size` is
            that of the paper, and twice as large from 64 pixels on.

    Raises:
        VicinalError: the name is unknown, an argument is invalid, or the prior cannot be attached.
    """
    backbone, prior = find_backbone(name), current_priors(prior, warn=True)
    arguments: dict[str, Any] = {
        "img_size": img_size,
        "num_classes": num_classes,
        "in_chans": in_chans,
        "global_pool": global_pool,
    }
    if backbone is None:
        return _from_timm(name, prior, arguments, drop_path_rate, pretrained, options)
    if pretrained:
        raise VicinalError(f"{name} has no pretrained weights; use vicinal.load for a model that you trained")
    try:
        return backbone.create(
            prior=prior,
            drop_path_rate=drop_path_rate,
            **{key: value for key, value in arguments.items() if value is not None},
            **options,
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise _creation_error(name, error) from error


def find_backbone(name: str) -> Backbone | None:
    """Returns the backbone of a name, an alias or a timm name; None if the package has no such backbone.

    Raises:
        VicinalError: the name is not a text.
    """
    if not isinstance(name, str):
        raise VicinalError(f"the name of a model must be a text such as 'vit', got {name!r}")
    by_timm_name = {backbone.timm_name: backbone for backbone in BACKBONES.values()}
    return by_timm_name.get(name) or BACKBONES.get(ALIASES.get(name, name))


def make_timm_model(name: str, **arguments: Any) -> nn.Module:
    """Returns a new model of timm's registry.

    Args:
        name: in timm's registry.
        arguments: of `timm.create_model`.

    Raises:
        VicinalError: the name is unknown, timm cannot create the model, or its weights cannot be downloaded.
    """
    if ":" in name or "/" in name:
        raise VicinalError(f"{name!r} is not the name of a model; vicinal.load({name!r}) opens a saved model")
    if not timm.is_model(name.split(".")[0]):
        known = [*BACKBONES, *ALIASES, *timm.list_models()]
        listing = f"`vicinal models` lists the package's models, `vicinal models '{name[:4]}*'` those of timm"
        raise unknown_name("model", name, known, max_suggestions=3, listing=listing)
    try:
        return timm.create_model(name, **arguments)  # type: ignore[no-any-return]
    except OSError as error:  # raised only where timm reads weights, from the Hub or from its cache
        raise VicinalError(
            f"cannot get the pretrained weights of {name} ({type(error).__name__}): the first use downloads them. "
            "pretrained=False (`vicinal analyze`: --random-weights) creates the model without them"
        ) from error
    except Exception as error:  # timm rejects arguments by assert, TypeError and RuntimeError
        raise _creation_error(name, error) from error


def _from_timm(
    name: str, prior: Priors, arguments: dict[str, Any], drop_path: float, pretrained: bool, options: dict[str, Any]
) -> nn.Module:
    given = {key: value for key, value in arguments.items() if value is not None} | options
    size = height_and_width(given["img_size"]) if "img_size" in given else None
    if size is not None:
        given["img_size"] = size[0] if size[0] == size[1] else size  # some models take one number only
    given["drop_path_rate"] = drop_path
    while True:
        try:
            model = make_timm_model(name, pretrained=pretrained, **given)
            break
        except VicinalError as error:
            unknown = [key for key in ("img_size", "drop_path_rate") if _is_unknown_argument(error, key)]
            required = unknown == ["drop_path_rate"] and drop_path not in (0, DROP_PATH_RATE)
            if not unknown or unknown[0] not in given or required:
                raise
            del given[unknown[0]]  # the model can run on any size, or has no residual branches
    declared: Any = dict(model.pretrained_cfg)  # type: ignore[arg-type]
    patches: Any = getattr(model, "patch_embed", None)
    if size is None:
        size = height_and_width(getattr(patches, "img_size", None) or declared["input_size"][1:])
    else:
        validate_patch_size(name, size, required_divisor(model))
        _check_forward(name, model, (arguments["in_chans"], *size), declared["input_size"][1:])
    declared["input_size"] = (arguments["in_chans"], *size)
    declared.update(channel_statistics(declared, arguments["in_chans"]))
    attach_priors(model, prior, declared["input_size"])
    return set_model_config(model, declared, given)


def _check_forward(name: str, model: nn.Module, shape: tuple[int, int, int], own: tuple[int, int]) -> None:
    """Runs the model once on noise.

    timm builds some models for image sizes they cannot process; fail now, not at the first batch.
    """
    run = ModelRunner(model, shape)
    try:
        with eval_without_side_effects(model), torch.no_grad():
            model(run.noise(1))
    except Exception as error:
        raise VicinalError(
            f"{name} does not run on images of {shape[1]} x {shape[2]} pixels ({_describe_error(error)}); its default "
            f"is {own[0]} x {own[1]}"
        ) from error


def _is_unknown_argument(error: VicinalError, argument: str) -> bool:
    """Returns whether Python raised a TypeError for an unknown keyword argument."""
    cause = error.__cause__
    return isinstance(cause, TypeError) and f"unexpected keyword argument '{argument}'" in str(cause)


def _creation_error(name: str, error: Exception) -> VicinalError:
    if isinstance(error, VicinalError):
        return error
    return VicinalError(f"cannot create {name}: {_describe_error(error)}")


def _describe_error(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
