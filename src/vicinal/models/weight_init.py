"""How the reference starts and regularises its networks, where timm does otherwise."""

from collections.abc import Iterable

from timm.layers import DropPath
from torch import nn

__all__ = ["set_drop_path", "xavier"]


def xavier(module: nn.Module) -> None:
    """Start one layer: weights by Xavier's normal rule, biases at 0, norms at 1. For `nn.Module.apply`."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def set_drop_path(blocks: Iterable[nn.Module], rate: float) -> None:
    """Drop every residual branch at the same rate; timm lets the rate grow with depth."""
    for block in blocks:
        for name, child in list(block.named_children()):
            if name.startswith("drop_path") and isinstance(child, DropPath | nn.Identity):
                setattr(block, name, DropPath(rate) if rate else nn.Identity())
