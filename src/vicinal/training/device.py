"""Devices by name: auto, cpu, cuda, cuda:1, mps."""

import torch

from vicinal.training.config_error import ConfigError

__all__ = ["find_device"]


def find_device(name: str) -> torch.device:
    """Returns the device of a name.

    >>> from vicinal.training.device import find_device
    >>> find_device("cpu")
    device(type='cpu')

    Args:
        name: `auto`, an accelerator if there is one and else the CPU; or a device of torch, such as `cpu`, `cuda`,
            `cuda:1` or `mps`.

    Raises:
        ConfigError: if torch does not know the device, or this machine does not have it.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return present or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("device", f"must be auto, cpu, cuda, cuda:1 or mps, got {name}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    names = ["cpu"]
    if present is not None:
        count = torch.accelerator.device_count()
        names += [present.type] if count == 1 else [f"{present.type}:{index}" for index in range(count)]
        if device.type == present.type and (device.index or 0) < count:
            return device
    raise ConfigError("device", f"must be a device of this machine ({', '.join(names)}), got {name}")
