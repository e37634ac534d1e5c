"""Saves a model: a folder of `config.json` and `model.safetensors`, in timm's layout on the Hub.

`model_args` in the config are the arguments that create the model again, its prior included; `pretrained_cfg` holds
class names and preprocessing. Pickle is neither read nor written.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models import push_to_hf_hub, save_for_hf
from timm.models._hub import save_config_for_hf
from torch import nn

from vicinal.attachment import get_priors
from vicinal.attachment.attached_priors import describe_sites, priors_to_config
from vicinal.errors import VicinalError
from vicinal.files import replace_file
from vicinal.image_size import height_and_width
from vicinal.inspection.model_runner import unwrapped
from vicinal.models.factory import make_timm_model
from vicinal.models.model_config import channel_statistics

__all__ = [
    "CONFIG",
    "PREPROCESSING",
    "WEIGHTS",
    "push_to_hub",
    "save",
    "save_config",
    "shape_differences",
    "without_weight_source",
]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
"""Entries of `pretrained_cfg` that describe the preprocessing of images."""


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a model to a folder, atomically; `load` returns a model with bit-identical weights.

    >>> import tempfile, torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1, num_classes=2)
    >>> folder = vicinal.save(model, tempfile.mkdtemp() + "/model", class_names=["cat", "dog"])
    >>> sorted(file.name for file in folder.iterdir())
    ['config.json', 'model.safetensors']

    Args:
        model: a model of `create_model` or `timm.create_model`, with or without priors.
        folder: the folder; must not hold a model yet.
        class_names: name of each output.
        preprocessing: entries in timm's format: `mean`, `std`, `interpolation`, `crop_pct`, `crop_mode`. The default of
            each is that of `model.pretrained_cfg`.
        model_args: further arguments of `timm.create_model`, if it created the model.
        overwrite: replace the model in the folder.

    Returns:
        The folder.

    Raises:
        VicinalError: the folder holds a model, or the model cannot be described by a config.
    """
    model, folder = unwrapped(model), Path(folder)
    config, arguments = _describe(model, class_names, preprocessing, model_args)
    existing = [file.name for file in (folder / CONFIG, folder / WEIGHTS) if file.exists()]
    if existing and not overwrite:
        raise VicinalError(f"{folder} has a {existing[0]} already; use another folder, or overwrite=True")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        _write(model, Path(temporary), config, arguments)
        for name in (WEIGHTS, CONFIG):  # each file is written atomically
            replace_file(Path(temporary, name), folder / name)
    return folder


def save_config(
    model: nn.Module, file: Path, *, class_names: Sequence[str] | None = None, preprocessing: Mapping[str, Any] | None
) -> None:
    """Writes the config.json of a model without its weights, for weights that are stored elsewhere.

    Args:
        model: as for `save`.
        file: the file; its folder is created.
        class_names: as for `save`.
        preprocessing: as for `save`.

    Raises:
        VicinalError: the model cannot be described by a config.
    """
    model = unwrapped(model)
    config, arguments = _describe(model, class_names, preprocessing, None)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".writing-{file.name}")
    save_config_for_hf(model, temporary, model_config=config, model_args=arguments)
    replace_file(temporary, file)


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
    """Uploads a model to the Hugging Face Hub, for `load("hf-hub:REPO_ID")`, and returns its address.

    >>> import vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm")
    >>> vicinal.push_to_hub(model, "me/vit-micro-gmm")  # doctest: +SKIP

    Args:
        model: as for `save`.
        repo_id: `owner/name`; created if it does not exist.
        class_names: as for `save`.
        preprocessing: as for `save`.
        model_args: as for `save`.
        private: make a new repository private.
        token: access token of the Hub; by default that of `hf auth login`.
        commit_message: message of the commit.

    Raises:
        VicinalError: the model cannot be described by a config.
    """
    model = unwrapped(model)
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


def _describe(
    model: nn.Module,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    model_args: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the entries of `config.json` temporarys timm's own, and the arguments that create the model again."""
    declared: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture = declared.get("architecture")
    if not architecture:
        raise VicinalError(
            f"model must be one of vicinal.create_model or timm.create_model, got {type(model).__name__} without an "
            "architecture in pretrained_cfg; vicinal.save_prior keeps the priors of any model"
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
        raise VicinalError(f"class_names must have {classes} names, one per class, got {len(names)}")
    channels = arguments["in_chans"]
    images = {key: declared[key] for key in PREPROCESSING if key in declared} | channel_statistics(declared, channels)
    if wrong := set(preprocessing or {}) - set(PREPROCESSING):
        raise VicinalError(f"preprocessing must have keys of {', '.join(PREPROCESSING)}, got {sorted(wrong)[0]!r}")
    images.update(preprocessing or {})
    for key in ("mean", "std"):
        if len(images[key]) != channels:
            raise VicinalError(
                f"preprocessing {key!r} must have {channels} numbers, one per channel, got {len(images[key])}"
            )
    size = height_and_width(arguments.get("img_size") or declared["input_size"][1:])
    described = {**declared, **images, "input_size": (channels, *size), "num_classes": classes, "label_names": None}
    described["fixed_input_size"] = "img_size" in arguments
    config = {"num_classes": classes, "pretrained_cfg": without_weight_source(described), "vicinal_version": _version()}
    if sites:
        config["prior_sites"] = sites
    if names is not None:
        config["label_names"] = list(names)
    try:
        json.dumps([config, arguments])
    except TypeError as error:
        raise VicinalError(f"the arguments of the model cannot be written to config.json: {error}") from None
    return config, arguments


def _version() -> str:
    import vicinal

    return vicinal.__version__


def without_weight_source(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `pretrained_cfg` without the entries that say where timm's pretrained weights are."""
    removed = {
        "url",
        "file",
        "hf_hub_id",
        "hf_hub_filename",
        "source",
        "state_dict",
        "custom_load",
        "architecture",
        "tag",
    }
    return {key: value for key, value in declared.items() if key not in removed and value is not None}


def _arguments(model: nn.Module) -> dict[str, Any]:
    """Returns the arguments that a model was created with: its `model_args`, or inferred from its modules."""
    stored: Any = getattr(model, "model_args", None)
    arguments = dict(stored or {})
    if stored is None:
        stem = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        arguments["in_chans"] = getattr(model, "in_chans", stem.in_channels if stem else 3)
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if size is not None:
            arguments["img_size"] = tuple(size)
    arguments["num_classes"] = model.num_classes
    pool = getattr(model, "global_pool", None)  # reset_classifier can have changed num_classes and global_pool
    if isinstance(pool, str):
        arguments["global_pool"] = pool
    return arguments


def _check_rebuilds(model: nn.Module, architecture: str, arguments: Mapping[str, Any]) -> None:
    """Raises VicinalError if the arguments create a model with weights of other names or shapes."""
    with torch.device("meta"):
        again = make_timm_model(architecture, pretrained=False, **arguments)
    prior_names = {f"{name}.prior." for name in get_priors(model)}
    here = {
        name: tuple(values.shape)
        for name, values in model.state_dict().items()
        if not any(name.startswith(prefix) for prefix in prior_names)
    }
    there = {name: tuple(values.shape) for name, values in again.state_dict().items()}
    wrong = list(shape_differences(here, there))
    if wrong:
        raise VicinalError(
            f"{architecture} created with {dict(arguments)} is not this model: {wrong[0]}; pass its other arguments as "
            "model_args={...}, or create it with vicinal.create_model"
        )


def shape_differences(here: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yields a description of every weight whose shape differs.

    Args:
        here: shapes found, by name.
        there: shapes expected, by name.
    """
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            shapes = ["absent" if names.get(name) is None else str(names[name]) for names in (here, there)]
            yield f"{name} is {shapes[0]}, expected {shapes[1]}"


def _write(model: nn.Module, folder: Path, config: dict[str, Any], arguments: dict[str, Any]) -> None:
    try:
        save_for_hf(model, folder, model_config=config, model_args=arguments, safe_serialization=True)
    except RuntimeError as error:  # weights that share memory
        raise VicinalError(f"safetensors cannot store this model: {error}") from error
