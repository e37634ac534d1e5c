"""Which vision models of transformers take a prior: a survey of small models with random weights.

The architectures of `ARCHITECTURES` have configurations written by hand. Others that transformers lists for images are
built where a general rule finds a configuration that builds and runs; the rest are noted with the error.
"""

import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vicinal.attachment.dry_run import verified
from vicinal.attachment.small_decoders import DECODERS
from vicinal.attachment.small_encoders import ENCODERS
from vicinal.attachment.small_model import SmallModel
from vicinal.attachment.survey import Finding, Limits, Survey, finding_of, finding_or_skip
from vicinal.errors import VicinalError
from vicinal.inspection.model_inspection import inspect_runner
from vicinal.inspection.model_runner import ModelRunner

__all__ = ["ARCHITECTURES", "architectures", "inspect_architecture", "transformers_survey"]

ARCHITECTURES: dict[str, SmallModel] = ENCODERS | DECODERS
"""Models of transformers with small configurations, by name."""

TASKS = (
    "IMAGE",
    "BACKBONE",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "IMAGE_TO_IMAGE",
    "IMAGE_MATTING",
    "KEYPOINT_DETECTION",
    "NORMAL_ESTIMATION",
)
"""transformers' lists of models, `MODEL_FOR_..._MAPPING_NAMES`, that are given nothing but images."""

DEFAULT_SIZE = 128  # of images, where a configuration names no size
HEAD_WIDTH = 16
PATCHES = 8  # rows and columns of patches
MIN_INITIALIZER_RANGE = 1e-3  # below it, tokens hold nothing of the image that could be measured
INITIALIZER_RANGE = 0.02


def architectures() -> dict[str, str]:
    """Returns the class of each model of the survey, by name: those of `ARCHITECTURES`, then all others."""
    from transformers.models.auto import modeling_auto

    named = {name: each.model for name, each in ARCHITECTURES.items()}
    known = {each.config.build().model_type for each in ARCHITECTURES.values()}
    others: dict[str, str] = {}
    for task in TASKS:
        for kind, cls in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            if kind not in known and kind not in named:
                others.setdefault(kind, cls if isinstance(cls, str) else cls[0])
    return named | dict(sorted(others.items()))


def inspect_architecture(name: str, family: str) -> Finding:
    """Returns the finding of one architecture; if it fails, a finding that says why it was skipped.

    Args:
        name: of an architecture.
        family: class of the model.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # random weights: nothing is to be asked for
    return finding_or_skip(name, family, lambda: _inspect(name, family))


def _inspect(name: str, family: str) -> Finding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        runner = ARCHITECTURES[name].runner() if name in ARCHITECTURES else _general_runner(family)
    return finding_of(verified(inspect_runner(runner)), name, family)


def _general_runner(name: str) -> ModelRunner:
    """Returns a model with the smallest configuration that builds and runs.

    Args:
        name: class of the model.

    Raises:
        Exception: what the last configuration, the default one, fails with.
    """
    import transformers

    cls, failure = getattr(transformers, name), None
    for config in _configurations(cls.config_class):
        try:
            model: nn.Module = cls(config).eval()
            _draw_convolutions(model)
            runner = ModelRunner(model, _image_shape(config))
            with torch.no_grad():
                runner(runner.noise(2))
            return runner
        except Exception as error:
            failure = error
    assert failure is not None
    raise failure


def _draw_convolutions(model: nn.Module) -> None:
    """Draws weights of convolutions that keep the scale of their input.

    transformers draws many with a deviation of 0.02 and freezes batch norms: nothing of the image arrives in tokens.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


def _configurations(cls: Any) -> Iterator[Any]:
    """Yields configurations of a class: all sizes reduced, depth and image only, depth only, and the default."""
    default = cls()
    depth, image, width = (rule(default) for rule in (_less_depth, _less_image, _less_width))
    for options in (depth | image | width, depth | image, depth, {}):
        try:
            yield cls(**_keep_scale(default), **options)
        except Exception:  # options that contradict each other: transformers raises many kinds of error
            if not options:
                raise


def _less_depth(config: Any) -> dict[str, Any]:
    """Returns options for fewer layers."""
    names = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers")
    options: dict[str, Any] = {name: 2 for name in names if _number(config, name) > 2}
    for name in ("depths", "layers_per_block", "blocks_per_stage"):
        depths = getattr(config, name, None)
        if isinstance(depths, list | tuple) and all(isinstance(depth, int) for depth in depths):
            options[name] = [min(depth, 2) for depth in depths]
    return options


def _less_image(config: Any) -> dict[str, Any]:
    """Returns options for smaller images."""
    size, patch = _number(config, "image_size"), _number(config, "patch_size")
    return {"image_size": PATCHES * patch} if size > PATCHES * patch > PATCHES * 4 else {}


def _less_width(config: Any) -> dict[str, Any]:
    """Returns options for narrower tokens."""
    heads = _number(config, "num_attention_heads")
    if not heads or not _number(config, "hidden_size"):
        return {}
    width = heads * HEAD_WIDTH
    return {"hidden_size": width} | ({"intermediate_size": 2 * width} if _number(config, "intermediate_size") else {})


def _keep_scale(config: Any) -> dict[str, Any]:
    """Returns options for weights that leave something of the image in the tokens: SAM's have a range of 1e-10."""
    scale = getattr(config, "initializer_range", None)
    small = isinstance(scale, float) and scale < MIN_INITIALIZER_RANGE
    return {"initializer_range": INITIALIZER_RANGE} if small else {}


def _number(config: Any, name: str) -> int:
    """Returns an option that is a whole number; 0 if there is none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _image_shape(config: Any) -> tuple[int, ...]:
    """Returns the shape of one input: channels, height and width, behind frames where a model takes videos."""
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    size = (size, size) if isinstance(size, int) else size
    height, width = size if isinstance(size, list | tuple) else (DEFAULT_SIZE, DEFAULT_SIZE)
    image = (_number(config, "num_channels") or 3, height, width)
    frames = _number(config, "num_frames")
    return (frames, *image) if frames else image


def transformers_survey(pattern: str, notes: Path, *, memory: int, seconds: float) -> Survey:
    """Returns a survey of every architecture of transformers whose name fits.

    Args:
        pattern: of names, such as `*detr*`.
        notes: file of findings, one per line; architectures found there are not inspected again.
        memory: bytes that the inspecting process can use.
        seconds: time for one model.
    """
    try:
        import transformers
    except ImportError as error:
        raise VicinalError("transformers is not installed; pip install 'vicinal[hf]' brings it") from error
    known = architectures()
    fitting = {name: known[name] for name in known if fnmatch.fnmatch(name, pattern)}
    if not fitting:
        raise VicinalError(f"no architecture of transformers is named {pattern!r}; '*' surveys all of them")
    return Survey(fitting, inspect_architecture, notes, Limits(memory, seconds), transformers.__version__)
