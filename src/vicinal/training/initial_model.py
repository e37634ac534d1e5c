"""The model before the first step: new, of timm's pretrained weights, of a run or saved model, or of a weights file."""

from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from vicinal.attachment import attach, get_priors
from vicinal.attachment.attached_priors import priors_to_config
from vicinal.data import ImageDataset
from vicinal.errors import VicinalError
from vicinal.image_size import height_and_width
from vicinal.models import create_model, load
from vicinal.models.factory import find_backbone, make_timm_model
from vicinal.models.resize import resize
from vicinal.priors.base import Prior
from vicinal.training.config import ConfigError, TrainConfig
from vicinal.training.model_path import is_weights_file, model_folder

from timm.layers import resample_patch_embed  # isort: skip

__all__ = ["create_initial_model", "freeze"]


def create_initial_model(config: TrainConfig, source: ImageDataset, notes: list[str]) -> nn.Module:
    """Returns the model that a run starts with, on the CPU.

    Args:
        config: of the run.
        source: the dataset, for classes, channels and image size.
        notes: gets a line for each choice that the user did not make.

    Raises:
        VicinalError: if the model cannot be created, or its weights cannot be loaded.
    """
    trained = config.pretrained or config.init_from is not None
    if not trained and (config.layer_decay is not None or config.freeze):
        name = "freeze" if config.freeze else "layer_decay"
        raise ConfigError(name, "needs weights that were trained before: give pretrained, or init_from")
    if config.init_from is not None and not is_weights_file(config.init_from):
        model = _load_model(config.init_from, config, source, notes)
    else:
        model = _create_model(config, source)
    if config.freeze:
        freeze(model)
    return model


def freeze(model: nn.Module) -> None:
    """Freezes all parameters but those of the classifier head and of priors; frozen batch norms keep their statistics.

    Args:
        model: a model of timm, with its priors attached.
    """
    model.requires_grad_(False)
    trained: list[Any] = [model.get_classifier(), *(each for each in model.modules() if isinstance(each, Prior))]  # type: ignore[operator]
    for module in trained:
        for part in module if isinstance(module, tuple | list) else [module]:
            part.requires_grad_(True)


def _create_model(config: TrainConfig, source: ImageDataset) -> nn.Module:
    name = config.model_name
    options: dict[str, Any] = {}
    if config.patch_size is not None:
        options["patch_size"] = config.patch_size
    if config.init_from is not None:
        _check_weights_file(config.init_from, config.model)
        # num_classes: the classes of the file are not known, so timm discards its classifier head.
        options["pretrained_cfg_overlay"] = {"file": config.init_from, "custom_load": False, "num_classes": -1}
    trained = config.pretrained or config.init_from is not None
    size = config.img_size or None
    if size is None and not trained and not (config.own_data and find_backbone(name) is None):
        size = (source.info.size,)
    model: Any = create_model(
        name,
        prior=config.prior,
        img_size=None if size is None else (size[0], size[-1]),
        num_classes=len(source.class_names),
        in_chans=source.channels,
        global_pool=_choose_pool(name, config.pool),
        drop_path_rate=config.drop_path,
        pretrained=trained,
        **options,
    )
    model.model_args.pop("pretrained_cfg_overlay", None)
    return model  # type: ignore[no-any-return]


def _choose_pool(name: str, pool: str | None) -> str | None:
    """Returns timm's `global_pool`; None for the default of the model."""
    backbone = find_backbone(name)
    if pool != "paper":
        return pool
    return backbone.paper_pool if backbone is not None else None


def _check_weights_file(file: str, name: str | None) -> None:
    """Raises VicinalError if a file does not have the weights of a timm model; a classifier head need not fit."""
    if name is None or find_backbone(name) is not None:
        raise ConfigError("model", f"must name the timm model of {file}, got {name}; a run is given by its folder")
    if Path(file).suffix != ".safetensors":
        raise ConfigError("init_from", f"must be a safetensors file, got {file}; pickles are not opened, convert it")
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            found = set(content.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError("init_from", f"must be a safetensors file, got {file}: {error}") from None
    with torch.device("meta"):
        model: Any = make_timm_model(name)
    heads = model.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{head}." for head in ((heads,) if isinstance(heads, str) else heads))
    wanted = set(model.state_dict())
    wrong = sorted(key for key in wanted ^ found if not key.startswith(heads))
    if wrong:
        verb, more = "has no" if wrong[0] in wanted else "has", f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        problem = f"must be a file of the weights of {name}, got {file}, which {verb} {wrong[0]}{more}"
        raise ConfigError("init_from", problem)


def _load_model(path: str, config: TrainConfig, source: ImageDataset, notes: list[str]) -> nn.Module:
    """Returns the model of a finished run, or a saved model, with a new classifier head if the classes differ."""
    saved: Any = load(model_folder(path))
    pretrained_cfg = dict(saved.pretrained_cfg)
    if pretrained_cfg.get("label_names") != source.class_names:
        saved.reset_classifier(len(source.class_names))
        saved.model_args["num_classes"] = len(source.class_names)
    saved.model_args["drop_path_rate"] = config.drop_path
    if config.prior != "none" and get_priors(saved):
        raise ConfigError("prior", f"must not be given: {path} has a prior already ({priors_to_config(saved)})")
    model = _at_size(saved, config, notes)
    model.pretrained_cfg.update({key: pretrained_cfg[key] for key in ("mean", "std", "interpolation", "crop_pct")})
    if config.prior != "none":
        attach(model, config.prior, img_size=model.pretrained_cfg["input_size"][1:])
    return model  # type: ignore[no-any-return]


def _at_size(saved: Any, config: TrainConfig, notes: list[str]) -> Any:
    """Returns a saved model, made again for the image size and patch size of a run.

    By default patches grow with the image, so that the number of tokens stays the same, where that is possible.
    """
    before = height_and_width(saved.pretrained_cfg["input_size"][1:])
    size = (config.img_size[0], config.img_size[-1]) if config.img_size else before
    patches = getattr(getattr(saved, "patch_embed", None), "patch_size", None)
    old = height_and_width(patches)[0] if patches is not None else None
    new = config.patch_size
    if new is None and old is not None and size != before:
        grown = {old * side / side_before for side, side_before in zip(size, before, strict=True)}
        new = int(next(iter(grown))) if len(grown) == 1 and next(iter(grown)).is_integer() else None
    model = None
    if new is not None and old is not None and new != old:
        try:
            model = _rebuild(saved, {"img_size": tuple(side // old * new for side in before), "patch_size": new})
        except VicinalError as error:
            if config.patch_size is not None:
                raise ConfigError("patch_size", f"cannot become {new}: {error}") from error
    if model is None:
        new, model = old, _rebuild(saved, {"img_size": before if hasattr(saved, "set_input_size") else size})
    if height_and_width(model.pretrained_cfg["input_size"][1:]) != size:
        resize(model, size)
    if size != before and config.patch_size is None and old is not None:
        rows, columns = size[0] // (new or old), size[1] // (new or old)
        notes.append(
            f"{config.init_from} was trained on {before[0]} x {before[1]} pixels with patches of {old}: at {size[0]} x "
            f"{size[1]} it has patches of {new} and {rows} x {columns} tokens; patch_size sets another number"
        )
    return model


def _rebuild(saved: Any, changes: dict[str, Any]) -> Any:
    """Returns a model like `saved`, with its weights, made with other arguments; kernels of patches are resampled.

    Raises:
        VicinalError: if the arguments change more than the kernel of a convolution.
    """
    model: Any = create_model(
        saved.pretrained_cfg["architecture"], prior=priors_to_config(saved), **{**saved.model_args, **changes}
    )
    weights, wanted = saved.state_dict(), model.state_dict()
    if weights.keys() != wanted.keys():
        raise VicinalError("the model would have other layers")
    for name, values in weights.items():
        shape = wanted[name].shape
        if values.shape != shape:
            if len(shape) != 4 or values.shape[:2] != shape[:2]:
                raise VicinalError(f"{name} would have another shape")
            weights[name] = resample_patch_embed(values, list(shape[2:]))
    model.load_state_dict(weights)
    return model
