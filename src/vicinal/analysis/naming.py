"""What to call a model in titles and tables."""

from collections.abc import Mapping

from torch import nn

__all__ = ["name_of"]


def name_of(model: nn.Module) -> str:
    """The architecture that a model declares, or its class."""
    declared = getattr(model, "pretrained_cfg", None)
    return (declared.get("architecture") if isinstance(declared, Mapping) else None) or type(model).__name__
