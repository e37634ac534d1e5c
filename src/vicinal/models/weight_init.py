"""Weight initialization and drop path of the reference, where timm differs."""

from collections.abc import Iterable

from timm.layers import DropPath
from torch import nn

__all__ = ["init_patch_embed", "init_xavier", "set_drop_path"]


def init_xavier(module: nn.Module) -> None:
    """Initializes one layer, for `nn.Module.apply`: Xavier normal weights, zero biases, norms at 1."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def init_patch_embed(projection: nn.Conv2d) -> None:
    """Initializes a patch embedding as the reference does, whose embedding is a linear layer over flat patches."""
    nn.init.xavier_normal_(projection.weight.flatten(1))


def set_drop_path(blocks: Iterable[nn.Module], rate: float) -> None:
    """Sets the same drop path rate in all blocks; in timm the rate grows with depth."""
    for block in blocks:
        for name, child in list(block.named_children()):
            if name.startswith("drop_path") and isinstance(child, DropPath | nn.Identity):
                setattr(block, name, DropPath(rate) if rate else nn.Identity())
