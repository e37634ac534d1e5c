"""The header of a training: data, model, prior, recipe, device and folder of a run, before its first step."""

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vicinal.attachment import get_priors
from vicinal.data import ImageSplit
from vicinal.data.data_record import SKIPPED_FILE
from vicinal.training.config import FIELD_GROUPS, TrainConfig, recipe
from vicinal.training.recipes import RECIPES
from vicinal.training.setup import TrainState

__all__ = ["nearest_recipe", "run_header"]

WIDTH, INDENT = 80, 8
RECIPE_GROUPS = ("augmentation and mixing", "optimization")


def run_header(config: TrainConfig, state: TrainState, folder: Path, step: int = 0) -> str:
    """Returns lines of up to 80 columns that say what is trained on what.

    Args:
        config: of the run.
        state: before the first step.
        folder: run folder.
        step: number of steps done before, if the run is resumed.
    """
    steps, epoch_steps = state.length.steps, state.length.epoch_steps
    epochs = f"{steps / epoch_steps:.4g} epochs of {epoch_steps:,}"
    resumed = f", from step {step:,} of {steps:,}" if step else ""
    rows = [
        ("data", _describe_data(config, state)),
        *((name, text) for name, text in _describe_splits(state).items()),
        *_describe_skipped(state, folder),
        ("model", _describe_model(config, state)),
        ("prior", _describe_prior(config, state.raw_model)),
        ("recipe", _describe_recipe(config)),
        (
            "steps",
            f"{steps:,} of {config.batch_size} images: {epochs}{resumed}",
        ),
        ("device", _describe_device(config, state)),
        ("run", str(folder)),
    ]
    return "\n".join(_wrap(name, text) for name, text in rows)


def nearest_recipe(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    """Returns the recipe that a configuration differs least from, and the settings that differ.

    >>> import vicinal
    >>> nearest_recipe(vicinal.recipe("paper", epochs=100, model="vit"))
    ('paper', {'epochs': 100})
    """
    recipes = {name: recipe(name) for name in RECIPES}
    differences = {
        name: {field: getattr(config, field) for field in _recipe_fields() if _differs(config, other, field)}
        for name, other in recipes.items()
    }
    name = min(differences, key=lambda name: len(differences[name]))
    return name, differences[name]


def _differs(config: TrainConfig, other: TrainConfig, field: str) -> bool:
    return bool(getattr(config, field) != getattr(other, field))


def _recipe_fields() -> list[str]:
    """Returns the names of the fields that recipes are about."""
    names = list(TrainConfig.__dataclass_fields__)
    starts = {group: names.index(first) for group, first in FIELD_GROUPS.items()}
    ends = dict(zip(starts, [*list(starts.values())[1:], len(names)], strict=True))
    return [name for group in RECIPE_GROUPS for name in names[starts[group] : ends[group]] if name != "seed"]


def _describe_data(config: TrainConfig, state: TrainState) -> str:
    preprocessing = state.preprocessing
    color = "grayscale" if preprocessing.channels == 1 else "RGB"
    place = "" if config.data_dir is None else f" in {config.data_dir}"
    size = f"{preprocessing.height} x {preprocessing.width} px"
    return f"{config.dataset}{place}, {len(state.class_names)} classes, {size}, {color}"


def _describe_splits(state: TrainState) -> dict[str, str]:
    """Returns the number of images of each split and where they come from, by the name of the split."""
    train, val, test = (loader.images.split for loader in (state.train, state.val, state.test))
    texts = {"train": f"{len(train):,} images"}
    if len(train) < train.split_size:
        texts["train"] += f" of {train.split_size:,}"
    for name, split in (("val", val), ("test", test)):
        texts[name] = f"{len(split):,} images, {_origin(split, train)}" if len(split) else "none"
    return texts


def _describe_skipped(state: TrainState, folder: Path) -> list[tuple[str, str]]:
    """Returns a row about images that are left out because they cannot be read; none if there are none."""
    splits = {loader.images.split.key: loader.images.split for loader in (state.train, state.val, state.test)}
    count = sum(len(split.skipped) for split in splits.values())
    images = "1 image" if count == 1 else f"{count:,} images"
    text = f"{images} left out that cannot be read: {folder / SKIPPED_FILE}"
    return [("skipped", text)] if count else []


def _origin(split: ImageSplit, train: ImageSplit) -> str:
    return "held out of the training images" if split.key == train.key else "a split of the dataset's own"


def _describe_model(config: TrainConfig, state: TrainState) -> str:
    model = state.raw_model
    name = config.init_from or config.model_name
    weights = " from timm's weights" if config.pretrained else ""
    tokens = _describe_tokens(model)
    pool = getattr(model, "global_pool", None)
    parts = [f"{name}{weights}, {_count(model.parameters()):,} parameters"]
    parts += [tokens] if tokens else []
    parts += [f"pooling {pool}"] if isinstance(pool, str) and pool else []
    return ", ".join(parts)


def _describe_tokens(model: nn.Module) -> str:
    """Returns the number of tokens of a model whose class declares its patches as timm's do; else nothing."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not isinstance(grid, tuple) or len(grid) != 2:
        return ""
    prefix = getattr(model, "num_prefix_tokens", 0)
    more = f" + {prefix}" if prefix else ""
    return f"{grid[0] * grid[1] + prefix} tokens ({grid[0]} x {grid[1]}{more})"


def _describe_prior(config: TrainConfig, model: nn.Module) -> str:
    priors = get_priors(model)
    if not priors:
        return "none"
    parameters = {id(each): each for prior in priors.values() for each in prior.parameters()}
    spec = "+".join(dict.fromkeys(prior.spec for prior in priors.values()))
    name = config.prior if config.prior != "none" else spec
    numbers = f"{len(priors)} layers, {_count(parameters.values()):,} parameters"
    return f"{name} in {numbers}, learning rate x {config.prior_lr:g}"


def _describe_recipe(config: TrainConfig) -> str:
    name, changes = nearest_recipe(config)
    settings = ", ".join(f"{field} {_short(value)}" for field, value in changes.items())
    return f"{name}, with {settings}" if settings else name


def _describe_device(config: TrainConfig, state: TrainState) -> str:
    device, processes = state.accelerator.device, state.accelerator.num_processes
    parts = [str(device)]
    if device.type == "cpu":
        parts.append(f"{torch.get_num_threads()} threads")
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    if processes > 1:
        parts.append(f"{processes} processes")
    return ", ".join([*parts, config.precision, *(["compiled"] if config.compile else [])])


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _wrap(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name:{INDENT}}{text}",
        WIDTH,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
