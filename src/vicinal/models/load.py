"""Opens a saved model: a folder of `config.json` and `model.safetensors`, or the same on the Hub. Never a pickle."""

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
from vicinal.inspection.model_runner import ImageSize
from vicinal.models.backbones import Priors, attach_priors, image_size
from vicinal.models.factory import make_timm_model, note
from vicinal.models.resize import resize
from vicinal.models.save import CONFIG, PREPROCESSING, WEIGHTS, differences, without_source

__all__ = ["load"]

# What timm.create_model would act upon by opening other files.
FORBIDDEN = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "model_name"}


def load(source: str | Path, *, img_size: ImageSize | None = None, rescale: bool = True) -> nn.Module:
    """Open a saved model, ready for inference (`model.train()` to go on training).

    >>> import tempfile, torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=32).eval()
    >>> folder = vicinal.save(model, tempfile.mkdtemp() + "/model", class_names=list("abcdefghij"))
    >>> images = torch.randn(2, 3, 32, 32)
    >>> torch.equal(vicinal.load(folder)(images), model(images))
    True
    >>> vicinal.load(folder).pretrained_cfg["label_names"][:3]
    ['a', 'b', 'c']

    Args:
        source: a folder, or `hf-hub:owner/name`, or `hf-hub:owner/name@revision`.
        img_size: take images of another size: positions are interpolated and the prior is resized.
        rescale: as in `resize`.
    """
    config_file, weights_file = _fetch(str(source)) if str(source).startswith("hf-hub:") else _local(Path(source))
    config = _read_config(config_file)
    weights = _read_weights(weights_file)
    with torch.random.fork_rng(devices=[]):  # the weights that a new model starts with are overwritten
        model = _rebuild(config, config_file, weights)
    _fill(model, weights, weights_file)
    model.eval()
    if img_size is not None and image_size(img_size) != tuple(model.pretrained_cfg["input_size"][1:]):  # type: ignore[index]
        resize(model, img_size, rescale=rescale)
    return model


def _local(folder: Path) -> tuple[Path, Path]:
    if not folder.is_dir():
        raise VicinalError(f"there is no folder {folder}; give one that vicinal.save wrote, or hf-hub:owner/name")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            here = sorted(file.name for file in folder.iterdir())
            raise VicinalError(
                f"{folder} has no {name}, only {', '.join(here) or 'nothing'}; a saved model is {CONFIG} and "
                f"{WEIGHTS}; weights of other formats are not opened"
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
        except EntryNotFoundError as error:  # which LocalEntryNotFoundError is too
            raise VicinalError(f"cannot get {file} of {source}: {error}") from error
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise VicinalError(f"cannot open {source}: {type(error).__name__}: {error}") from error
    return files[0], files[1]


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VicinalError(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise VicinalError(f"{file} names no architecture; expected what vicinal.save or timm wrote")
    if "pretrained_cfg" not in config:  # as timm once wrote it: all in one
        config["pretrained_cfg"] = {key: config[key] for key in (*PREPROCESSING, "input_size") if key in config}
    for key in ("model_args", "pretrained_cfg"):
        if not isinstance(config.setdefault(key, {}), dict):
            raise VicinalError(f"{file}: {key!r} is no mapping")
    if wrong := sorted(FORBIDDEN & config["model_args"].keys()):
        raise VicinalError(f"{file}: model_args may not have {wrong[0]!r}, which would open other files")
    return config


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        size = file.stat().st_size
        raise VicinalError(
            f"{file} is no whole safetensors file ({size} bytes): {error}. It may be cut off or of another format; "
            "copy or save it again"
        ) from None


def _rebuild(config: Mapping[str, Any], file: Path, weights: Mapping[str, Tensor]) -> nn.Module:
    arguments = {"num_classes": config.get("num_classes"), **config["model_args"]}
    prior = arguments.pop("prior", "none")
    architecture = config["architecture"]
    if not timm.is_model(architecture):
        raise VicinalError(f"{file}: timm {timm.__version__} has no model {architecture!r}")
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    try:
        model = make_timm_model(architecture, pretrained=False, **arguments)
        declared: dict[str, Any] = {**model.pretrained_cfg, **config["pretrained_cfg"]}  # type: ignore[dict-item]
        declared = {**without_source(declared), "architecture": architecture}
        if "label_names" in config:
            declared["label_names"] = config["label_names"]
        channels, height, width = declared["input_size"]
        attach_priors(model, _with_layers(prior, config, weights), (channels, height, width))
        if "prior_sites" in config:
            check_sites(model, config["prior_sites"])
    except (VicinalError, KeyError, TypeError) as error:
        raise VicinalError(f"{file}: {error}") from error
    declared["input_size"] = (channels, height, width)
    return note(model, declared, arguments)


def _with_layers(prior: Priors, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Priors:
    """Returns a prior for all layers as one for the layers that had it when the model was saved.

    Later versions may find more layers that take a prior. Configs of 0.1.0 do not list layers; their weights do, unless
    the prior has none.
    """
    if not isinstance(prior, str) or prior == "none":
        return prior
    with_weights = dict.fromkeys(name.rpartition(".prior.")[0] for name in weights if ".prior." in name)
    layers = list(config.get("prior_sites", with_weights))
    return [{"prior": prior, "layers": layers}] if layers else prior


def _fill(model: nn.Module, weights: Mapping[str, Tensor], file: Path) -> None:
    wanted = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    wrong = list(differences({name: tuple(values.shape) for name, values in weights.items()}, wanted))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise VicinalError(f"{file} does not fit its config.json: {wrong[0]}{more}")
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, values in weights.items():  # a model saved in bf16 is one again
        if named[name].dtype != values.dtype:
            named[name].data = named[name].data.to(values.dtype)
    model.load_state_dict(weights)
