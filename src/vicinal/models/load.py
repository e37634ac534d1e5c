"""Loads a saved model: a folder of `config.json` and `model.safetensors`, local or on the Hub. No pickle is opened."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from vicinal.attachment.attached_priors import check_sites
from vicinal.errors import VicinalError
from vicinal.image_size import ImageSize, height_and_width
from vicinal.models.factory import make_timm_model
from vicinal.models.model_config import set_model_config
from vicinal.models.prior_config import Priors, attach_priors, current_priors
from vicinal.models.resize import resize
from vicinal.models.save import CONFIG, PREPROCESSING, WEIGHTS, shape_differences, without_weight_source

__all__ = ["fill_model", "load"]

# Arguments with which timm.create_model opens other files.
FORBIDDEN_ARGUMENTS = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "model_name",
}


def load(source: str | Path, *, img_size: ImageSize | None = None, rescale: bool = True) -> nn.Module:
    """Returns a saved model in evaluation mode. `vicinal.load` also takes the folder of a run.

    Args:
        source: a folder, or `hf-hub:owner/name`, or `hf-hub:owner/name@revision`.
        img_size: change the image size, as `resize` does.
        rescale: as in `resize`.

    Raises:
        VicinalError: files are missing, damaged or do not fit each other.
    """
    config_file, weights_file = _fetch(str(source)) if str(source).startswith("hf-hub:") else _local(Path(source))
    return fill_model(config_file, _read_weights(weights_file), weights_file, img_size=img_size, rescale=rescale)


def fill_model(
    config_file: Path,
    weights: Mapping[str, Tensor],
    weights_file: Path,
    *,
    img_size: ImageSize | None = None,
    rescale: bool = True,
) -> nn.Module:
    """Returns the model that a config.json describes, with weights that were read before, in evaluation mode.

    Args:
        config_file: as `save` or `save_config` wrote it.
        weights: state dict of the model.
        weights_file: where the weights are from, for error messages.
        img_size: as in `load`.
        rescale: as in `resize`.

    Raises:
        VicinalError: the config is damaged, or the weights do not fit it.
    """
    config = _read_config(config_file)
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
        model = _rebuild(config, config_file, weights)
    _fill(model, weights, weights_file)
    model.eval()
    if img_size is not None and height_and_width(img_size) != tuple(model.pretrained_cfg["input_size"][1:]):  # type: ignore[index]
        resize(model, img_size, rescale=rescale)
    return model


def _local(folder: Path) -> tuple[Path, Path]:
    if not folder.is_dir():
        raise VicinalError(f"{folder} is not a folder; expected one that vicinal.save wrote, or hf-hub:owner/name")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            found = sorted(file.name for file in folder.iterdir())
            raise VicinalError(
                f"{folder} has no {name}; found {', '.join(found) or 'no files'}. A saved model is {CONFIG} and "
                f"{WEIGHTS}; other weight formats are not supported"
            )
    return folder / CONFIG, folder / WEIGHTS


def _fetch(source: str) -> tuple[Path, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    name, _, revision = source.removeprefix("hf-hub:").partition("@")
    files = []
    for file in (CONFIG, WEIGHTS):
        try:
            files.append(Path(hf_hub_download(name, file, revision=revision or None)))
        except EntryNotFoundError as error:  # includes LocalEntryNotFoundError
            raise VicinalError(f"cannot get {file} of {source}: {error}") from error
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise VicinalError(f"cannot open {source}: {type(error).__name__}: {error}") from error
    return files[0], files[1]


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VicinalError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise VicinalError(f"{file} has no architecture; expected a config.json that vicinal.save or timm wrote")
    if "pretrained_cfg" not in config:  # written by an early timm, without a nested pretrained_cfg
        config["pretrained_cfg"] = {key: config[key] for key in (*PREPROCESSING, "input_size") if key in config}
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(config.setdefault(key, {}), dict):
            raise VicinalError(f"{file}: {key!r} must be a mapping, got {config[key]!r}")
    if wrong := sorted(FORBIDDEN_ARGUMENTS & config["model_args"].keys()):
        raise VicinalError(f"{file}: model_args must not have {wrong[0]!r}, which opens other files")
    return config


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        size = file.stat().st_size
        raise VicinalError(
            f"{file} is not a complete safetensors file ({size} bytes): {error}. It may be truncated or of another "
            "format; copy or save it again"
        ) from None


def _rebuild(config: Mapping[str, Any], file: Path, weights: Mapping[str, Tensor]) -> nn.Module:
    arguments = {"num_classes": config.get("num_classes"), **config["model_args"]}
    prior = current_priors(arguments.pop("prior", "none"))
    architecture = config["architecture"]
    if not timm.is_model(architecture):
        raise VicinalError(f"{file}: timm {timm.__version__} has no model {architecture!r}")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    try:
        model = make_timm_model(architecture, pretrained=False, **arguments)
        declared: dict[str, Any] = {**model.pretrained_cfg, **config["pretrained_cfg"]}  # type: ignore[dict-item]
        declared = {**without_weight_source(declared), "architecture": architecture}
        if "label_names" in config:
            declared["label_names"] = config["label_names"]
        channels, height, width = declared["input_size"]
        attach_priors(model, _with_layers(prior, config, weights), (channels, height, width))
        if "prior_sites" in config:
            check_sites(model, config["prior_sites"])
    except (VicinalError, KeyError, TypeError) as error:
        raise VicinalError(f"{file}: {error}") from error
    declared["input_size"] = (channels, height, width)
    return set_model_config(model, declared, arguments)


def _with_layers(prior: Priors, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Priors:
    """Returns a prior for all layers as a prior for the layers that had it when the model was saved.

    Later versions can attach priors to more layers. Configs of 0.1.0 do not list layers; the names of the weights do,
    unless the prior has no weights.
    """
    if not isinstance(prior, str) or prior == "none":
        return prior
    with_weights = dict.fromkeys(name.rpartition(".prior.")[0] for name in weights if ".prior." in name)
    layers = list(config.get("prior_sites", with_weights))
    return [{"prior": prior, "layers": layers}] if layers else prior


def _fill(model: nn.Module, weights: Mapping[str, Tensor], file: Path) -> None:
    wanted = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    wrong = list(shape_differences({name: tuple(values.shape) for name, values in weights.items()}, wanted))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise VicinalError(f"{file} does not fit its config.json: {wrong[0]}{more}")
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, values in weights.items():  # restores the dtype of a model saved in bf16
        if named[name].dtype != values.dtype:
            named[name].data = named[name].data.to(values.dtype)
    model.load_state_dict(weights)
