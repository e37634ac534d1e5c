"""The ranges of numbers in a configuration, and the settings that exclude each other."""

import math
from typing import TYPE_CHECKING

from vicinal.training.config_error import ConfigError
from vicinal.training.model_path import is_weights_file

if TYPE_CHECKING:
    from vicinal.training.config import TrainConfig

__all__ = ["RANGES", "check_ranges"]

RANGES: dict[str, tuple[float, float, str]] = {
    "patch_size": (1, math.inf, "a number of pixels, at least 1"),
    "drop_path": (0, 0.99, "a probability from 0 to below 1"),
    "train_size": (1, math.inf, "a number of images, at least 1"),
    "val_size": (0, math.inf, "a fraction below 1 or a number of images"),
    "color_jitter": (0, 1, "a number from 0 to 1"),
    "crop_padding": (0, math.inf, "a number of pixels, at least 0"),
    "erasing": (0, 1, "a probability from 0 to 1"),
    "erasing_area": (0.02, 1, "a fraction from 0.02 to 1"),
    "erasing_aspect": (1e-3, 1, "a ratio from 0.001 to 1"),
    "mix_prob": (0, 1, "a probability from 0 to 1"),
    "mixup_alpha": (1e-3, math.inf, "a number, at least 0.001"),
    "cutmix_alpha": (1e-3, math.inf, "a number, at least 0.001"),
    "mixup_share": (0, 1, "a fraction from 0 to 1"),
    "smoothing": (0, 0.99, "a fraction from 0 to below 1"),
    "epochs": (1, math.inf, "a whole number, at least 1"),
    "steps": (1, math.inf, "a number of steps, at least 1"),
    "warmup": (0, math.inf, "a number of epochs, at least 0"),
    "batch_size": (1, math.inf, "a number of images, at least 1"),
    "accumulate": (1, math.inf, "a number of pieces, at least 1"),
    "lr": (1e-12, math.inf, "a number above 0"),
    "min_lr": (0, math.inf, "a number, at least 0"),
    "prior_lr": (0, math.inf, "a number, at least 0"),
    "layer_decay": (1e-3, 1, "a factor above 0, at most 1"),
    "weight_decay": (0, math.inf, "a number, at least 0"),
    "clip_grad": (1e-12, math.inf, "a number above 0"),
    "ema": (0, 0.9999999, "a decay from 0 to below 1"),
    "patience": (1, math.inf, "a number of epochs, at least 1"),
    "workers": (0, 1024, "a number of processes from 0 to 1024"),
    "seed": (0, 2**31 - 1, "a whole number from 0 to 2147483647"),
    "checkpoint_minutes": (0, math.inf, "a number of minutes, at least 0"),
}
"""Minimum, maximum and description of the range, by field. None is in every range."""


def check_ranges(config: "TrainConfig") -> None:
    """Raises ConfigError if a number is out of range, or two settings exclude each other.

    Args:
        config: its values have the types of their fields.
    """
    for name, (low, high, expected) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise ConfigError(name, f"must be {expected}, got {value:g}")
    if len(config.img_size) > 2 or any(side < 1 for side in config.img_size):
        raise ConfigError("img_size", f"must be one number of pixels, or height and width, got {config.img_size}")
    if config.val_size >= 1 and config.val_size != int(config.val_size):
        raise ConfigError("val_size", f"must be below 1 or a whole number of images, got {config.val_size:g}")
    if config.steps is None and config.warmup is not None and config.warmup >= config.epochs:
        raise ConfigError("warmup", f"must be below the number of epochs ({config.epochs}), got {config.warmup:g}")
    if config.min_lr > config.lr:
        raise ConfigError("min_lr", f"must be at most lr ({config.lr:g}), got {config.min_lr:g}")
    if config.init_from is not None and config.pretrained:
        raise ConfigError("init_from", "does not go with pretrained: leave one of them out")
    pool = config.pool if config.pool != "paper" else None  # a recipe has it, for whatever model
    if config.init_from is not None and not is_weights_file(config.init_from) and (config.model or pool):
        raise ConfigError("init_from", "of a run or a saved model does not go with model and pool: leave these out")
