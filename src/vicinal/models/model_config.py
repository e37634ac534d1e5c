"""What a model declares of itself, in timm's format: `pretrained_cfg` and `model_args`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["channel_statistics", "set_model_config"]


def channel_statistics(declared: Mapping[str, Any], channels: int) -> dict[str, tuple[float, ...]]:
    """Returns `mean` and `std` of a `pretrained_cfg`, one number per channel.

    Args:
        declared: the `pretrained_cfg`.
        channels: number of channels; if it differs from that of the config, each channel gets the average.
    """
    statistics = {key: tuple(declared[key]) for key in ("mean", "std")}
    return {
        key: values if len(values) == channels else (sum(values) / len(values),) * channels
        for key, values in statistics.items()
    }


def set_model_config(model: nn.Module, declared: dict[str, Any], arguments: dict[str, Any]) -> nn.Module:
    """Sets `pretrained_cfg`, `default_cfg` and `model_args` of a model, and returns the model.

    Args:
        model: any model.
        declared: the `pretrained_cfg`.
        arguments: the arguments that the model was made with.
    """
    for name, value in {"pretrained_cfg": declared, "default_cfg": declared, "model_args": arguments}.items():
        setattr(model, name, value)
    return model
