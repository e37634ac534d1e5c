"""Swin for small images."""

from typing import Any

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed_nhwc, trunc_normal_
from timm.models.swin_transformer import SwinTransformer, WindowAttention, get_relative_position_index
from torch import Tensor, nn

from vicinal.grid import Grid
from vicinal.models.drop_path import SwinBlock
from vicinal.priors.relative_bias import stretch_flat_table

__all__ = ["Swin"]


class PatchEmbedWithPositions(PatchEmbed):
    """Patch embedding, norm and absolute position embedding; the output is `(batch, height, width, dim)`."""

    def __init__(self, *, embed_dim: int, device: Any = None, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(embed_dim=embed_dim, device=device, dtype=dtype, **kwargs)
        self.pos_embed = nn.Parameter(torch.zeros(1, *self.grid_size, embed_dim, device=device, dtype=dtype))
        trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Returns patches, `(batch, height, width, dim)`, of images `(batch, channels, height, width)`."""
        patches: Tensor = super().forward(x)
        return patches + self.pos_embed

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Changes the image size; interpolates the position embedding."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        resampled = resample_abs_pos_embed_nhwc(self.pos_embed.detach(), self.grid_size)
        self.pos_embed = nn.Parameter(resampled)


class Swin(SwinTransformer):
    """timm's Swin with the reference's hyperparameters (Liu et al., https://arxiv.org/abs/2103.14030).

    As in the reference: three stages, MLP ratio 2, windows of 4, an absolute position embedding next to the relative
    tables, drop path that grows with depth, and torch's default initialization. Pooling is the mean; there is no class
    token.

    Different: any grid of patches works. An odd grid is padded before downsampling and window partition; the reference
    raises an error.
    """

    def __init__(self, *, window_size: int = 4, **kwargs: Any) -> None:
        defaults = {"mlp_ratio": 2, "embed_layer": PatchEmbedWithPositions, "weight_init": "skip"}
        super().__init__(window_size=window_size, **{**defaults, **kwargs})
        for stage in self.layers:
            for block in stage.blocks:
                block.__class__ = SwinBlock  # timm's stages take no class of their blocks
        self.window = (window_size, window_size)
        self._set_stages()

    def no_weight_decay(self) -> set[str]:
        """Returns the names of position tables, relative and absolute."""
        names: set[str] = super().no_weight_decay()
        return names | {"patch_embed.pos_embed"}

    def set_input_size(self, img_size: Any = None, patch_size: Any = None, **kwargs: Any) -> None:
        """Changes the image size, with windows of the same size; interpolates the position embedding."""
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        self.window = kwargs.get("window_size") or self.window
        self._set_stages(kwargs.get("always_partition"))

    def _set_stages(self, always_partition: bool | None = None) -> None:
        """Sets the grid of each stage, rounded up as timm's padding does; timm's own `set_input_size` rounds down."""
        height, width = self.patch_embed.grid_size
        for index, stage in enumerate(self.layers):
            if index:
                stage.input_resolution = height, width
                height, width = (height + 1) // 2, (width + 1) // 2
            stage.output_resolution = height, width
            for block in stage.blocks:
                block.input_resolution = height, width
                set_window(block.attn, block._calc_window_shift(self.window)[0])
                block.set_input_size((height, width), self.window, always_partition)


def set_window(attention: WindowAttention, window: tuple[int, int]) -> None:
    """Changes the window size of an attention layer; interpolates its relative position table."""
    if tuple(window) == tuple(attention.window_size):
        return
    table: Tensor = attention.relative_position_bias_table.detach()
    stretched = stretch_flat_table(table, Grid(*attention.window_size), Grid(*window))
    attention.window_size, attention.window_area = tuple(window), window[0] * window[1]
    attention.relative_position_bias_table = nn.Parameter(stretched)
    index = get_relative_position_index(*window, device=table.device)
    attention.register_buffer("relative_position_index", index, persistent=False)
