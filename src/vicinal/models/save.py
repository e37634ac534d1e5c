"""Saved models: a folder of `config.json` and `model.safetensors`, in the layout that timm has on the Hub.

`model_args` in the config makes the model again, its prior included; `pretrained_cfg` holds class names and how images
are prepared. Nothing here reads or writes a pickle.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models import push_to_hf_hub, save_for_hf
from torch import nn

from vicinal.attachment import get_priors
from vicinal.attachment.attached_priors import describe_sites, priors_to_config
from vicinal.errors import VicinalError
from vicinal.models.backbones import image_size, images_of
from vicinal.models.factory import make_timm_model

__all__ = ["CONFIG", "PREPROCESSING", "WEIGHTS", "differences", "push_to_hub", "save", "without_source"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model to a folder that `load`, here or elsewhere, opens again, bit for bit.

    >>> import tempfile, torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1, num_classes=2)
    >>> folder = vicinal.save(model, tempfile.mkdtemp() + "/model", class_names=["cat", "dog"])
    >>> sorted(file.name for file in folder.iterdir())
    ['config.json', 'model.safetensors']

    Args:
        model: one of `create_model`, or of `timm.create_model`, with priors attached or not.
        folder: where to; it may not hold a model yet.
        class_names: what the outputs mean, in their order.
        preprocessing: how images are prepared, in timm's words: `mean`, `std`, `interpolation`, `crop_pct`,
            `crop_mode`. What is not said stays as `model.pretrained_cfg` has it.
        model_args: further arguments that `timm.create_model` was given, if it was not `create_model` that made it.
        overwrite: replace a model that is in the folder.
    """
    model, folder = _unwrapped(model), Path(folder)
    config, arguments = _describe(model, class_names, preprocessing, model_args)
    existing = [file.name for file in (folder / CONFIG, folder / WEIGHTS) if file.exists()]
    if existing and not overwrite:
        raise VicinalError(f"{folder} holds a {existing[0]} already; give another folder, or overwrite=True")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as beside:
        _write(model, Path(beside), config, arguments)
        for name in (WEIGHTS, CONFIG):  # whole files appear at once, or not at all
            with open(Path(beside, name), "rb") as file:
                os.fsync(file.fileno())
            os.replace(Path(beside, name), folder / name)
    return folder


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
    private: bool = False,
    token: str | None = None,
    commit_message: str = "Add model",
) -> str:
    """Put a model on the Hugging Face Hub, where `load("hf-hub:REPO_ID")` finds it; returns its address.

    >>> import vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm")
    >>> vicinal.push_to_hub(model, "me/vit-micro-gmm")  # doctest: +SKIP

    Args:
        model: as for `save`.
        repo_id: `owner/name`; made if there is none.
        class_names: as for `save`.
        preprocessing: as for `save`.
        model_args: as for `save`.
        private: for a repository that is made now.
        token: of the Hub; by default the one of `hf auth login`.
        commit_message: what the Hub's history says.
    """
    model = _unwrapped(model)
    config, arguments = _describe(model, class_names, preprocessing, model_args)
    usage = f'```python\nimport vicinal\n\nmodel = vicinal.load("hf-hub:{repo_id}")\n```'
    card = {"tags": ["image-classification", "timm", "vicinal"], "usage": usage}
    return str(
        push_to_hf_hub(
            model,
            repo_id,
            commit_message=commit_message,
            token=token,
            private=private,
            model_config=config,
            model_card=card,
            model_args=arguments,
            safe_serialization=True,
        )
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of `torch.compile` and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _describe(
    model: nn.Module,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    model_args: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `config.json` says besides timm's own entries, and the arguments that make the model again."""
    declared: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture = declared.get("architecture")
    if not architecture:
        raise VicinalError(
            f"{type(model).__name__} does not say which of timm's models it is; save takes models of "
            "vicinal.create_model and timm.create_model"
        )
    arguments = {**_arguments(model), **(model_args or {})}
    _check_rebuilds(model, architecture, arguments)
    arguments["prior"] = priors_to_config(model)
    sites = describe_sites(model)
    if arguments["prior"] == "none":
        del arguments["prior"]
    classes: Any = model.num_classes
    names = declared.get("label_names") if class_names is None else list(class_names)
    if names is not None and len(names) != classes:
        raise VicinalError(f"the model has {classes} classes, given {len(names)} class_names")
    channels = arguments["in_chans"]
    images = {key: declared[key] for key in PREPROCESSING if key in declared} | images_of(declared, channels)
    if wrong := set(preprocessing or {}) - set(PREPROCESSING):
        raise VicinalError(f"preprocessing takes {', '.join(PREPROCESSING)}; given {sorted(wrong)[0]!r}")
    images.update(preprocessing or {})
    for key in ("mean", "std"):
        if len(images[key]) != channels:
            raise VicinalError(
                f"preprocessing {key!r} has {len(images[key])} numbers, for images of {channels} channels"
            )
    size = image_size(arguments.get("img_size") or declared["input_size"][1:])
    described = {**declared, **images, "input_size": (channels, *size), "num_classes": classes, "label_names": None}
    described["fixed_input_size"] = "img_size" in arguments
    config = {"num_classes": classes, "pretrained_cfg": without_source(described), "vicinal_version": _version()}
    if sites:
        config["prior_sites"] = sites
    if names is not None:
        config["label_names"] = list(names)
    try:
        json.dumps([config, arguments])
    except TypeError as error:
        raise VicinalError(f"a config.json cannot hold what the model was made with: {error}") from None
    return config, arguments


def _version() -> str:
    import vicinal

    return vicinal.__version__


def without_source(declared: Mapping[str, Any]) -> dict[str, Any]:
    """timm's entry for a model, less where its first weights came from: these are others now."""
    gone = {"url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load", "architecture", "tag"}
    return {key: value for key, value in declared.items() if key not in gone and value is not None}


def _arguments(model: nn.Module) -> dict[str, Any]:
    """What a model was made with: as `create_model` noted, or as far as the model tells."""
    noted: Any = getattr(model, "model_args", None)
    arguments = dict(noted or {})
    if noted is None:
        stem = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        arguments["in_chans"] = getattr(model, "in_chans", stem.in_channels if stem else 3)
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if size is not None:
            arguments["img_size"] = tuple(size)
    arguments["num_classes"] = model.num_classes
    pool = getattr(model, "global_pool", None)  # both may have been changed by reset_classifier
    if isinstance(pool, str):
        arguments["global_pool"] = pool
    return arguments


def _check_rebuilds(model: nn.Module, architecture: str, arguments: Mapping[str, Any]) -> None:
    """An error if these arguments do not make a model with weights of the same names and shapes."""
    with torch.device("meta"):
        again = make_timm_model(architecture, pretrained=False, **arguments)
    prior_names = {f"{name}.prior." for name in get_priors(model)}
    here = {
        name: tuple(values.shape)
        for name, values in model.state_dict().items()
        if not any(name.startswith(prefix) for prefix in prior_names)
    }
    there = {name: tuple(values.shape) for name, values in again.state_dict().items()}
    wrong = list(differences(here, there))
    if wrong:
        raise VicinalError(
            f"{architecture} made with {dict(arguments)} would not be this model: {wrong[0]}; give the other "
            "arguments that it was made with as model_args={...}, or make it by vicinal.create_model"
        )


def differences(here: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Which weights differ, by name: what they are here, and what they are there."""
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            shapes = ["absent" if names.get(name) is None else str(names[name]) for names in (here, there)]
            yield f"{name} is {shapes[0]}, expected {shapes[1]}"


def _write(model: nn.Module, folder: Path, config: dict[str, Any], arguments: dict[str, Any]) -> None:
    try:
        save_for_hf(model, folder, model_config=config, model_args=arguments, safe_serialization=True)
    except RuntimeError as error:  # weights that share memory
        raise VicinalError(f"safetensors cannot hold this model: {error}") from error
