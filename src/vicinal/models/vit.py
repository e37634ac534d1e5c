"""ViT for small images, with absolute or relative positions."""

from typing import Any

import torch
from timm.layers import RelPosBias
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from vicinal.grid import Grid
from vicinal.models.drop_path import VitBlock
from vicinal.models.weight_init import init_patch_embed, init_xavier, set_drop_path
from vicinal.priors.relative_bias import stretch_flat_table

__all__ = ["Vit", "VitRelPos"]

# timm's defaults: MLP ratio 4, bias in qkv, norm epsilon 1e-6.
_REFERENCE: dict[str, Any] = {"mlp_ratio": 2, "qkv_bias": False, "norm_layer": nn.LayerNorm, "weight_init": "skip"}


class Vit(VisionTransformer):
    """timm's ViT with the reference's hyperparameters (Dosovitskiy et al., https://arxiv.org/abs/2010.11929).

    As in the reference: MLP ratio 2, no bias in qkv, norm epsilon 1e-5, one drop path rate for all blocks, Xavier
    normal weights, class token and positions from N(0, 1). `global_pool="token"` is the pooling of
    its plain ViT; `"avg"`, the mean over patches, then the norm, without a class token, that of its masked ViT.
    `token_std` is the initial standard deviation of class token and positions; `vit-mini` has timm's 0.02, which learns
    faster from photographs.

    Different: only `global_pool` determines whether there is a class token, never a prior, and no prior acts on it.
    """

    def __init__(
        self, *, global_pool: str = "token", drop_path_rate: float = 0.0, token_std: float = 1.0, **kwargs: Any
    ) -> None:
        self.token_std = token_std
        super().__init__(
            global_pool=global_pool,
            **{"class_token": global_pool == "token", "block_fn": VitBlock, **_REFERENCE, **kwargs},
        )
        set_drop_path(self.blocks, drop_path_rate)
        self.init_weights()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initializes all weights as the reference does; the arguments are timm's, and unused."""
        self.apply(init_xavier)
        init_patch_embed(self.patch_embed.proj)
        for tokens in (self.cls_token, self.reg_token, self.pos_embed):
            if tokens is not None:
                nn.init.normal_(tokens, std=self.token_std)


class VitRelPos(VisionTransformerRelPos):
    """`Vit` with a relative position bias table per layer and head in place of absolute positions.

    Hyperparameters and initial weights are those of `Vit`; layers are those of timm's `vit_relpos`, without layer
    scale. Mean pooling by default, as in timm; `global_pool="token"` adds a class token.
    """

    def __init__(self, *, global_pool: str = "avg", drop_path_rate: float = 0.0, **kwargs: Any) -> None:
        defaults = {
            "class_token": global_pool == "token",
            "fc_norm": global_pool == "avg",
            "rel_pos_type": "bias",
            "init_values": None,
        }
        super().__init__(global_pool=global_pool, **{**defaults, **_REFERENCE, **kwargs})
        set_drop_path(self.blocks, drop_path_rate)
        self.init_weights()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initializes all weights as `Vit` does, and relative position tables as timm does."""
        self.apply(init_xavier)
        init_patch_embed(self.patch_embed.proj)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token)

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Changes the image size; interpolates the relative position tables."""
        before = Grid(*self.patch_embed.grid_size)
        self.patch_embed.set_input_size(img_size=img_size)
        grid = Grid(*self.patch_embed.grid_size)
        for block in self.blocks:
            old = block.attn.rel_pos
            flat: Tensor = old.relative_position_bias_table.detach()
            offsets = before.table_shape[0] * before.table_shape[1]
            table = stretch_flat_table(flat[:offsets], before, grid)
            new = RelPosBias((grid.height, grid.width), flat.shape[1], old.prefix_tokens, flat.device, flat.dtype)
            # the last three entries are for pairs with the class token
            new.relative_position_bias_table = nn.Parameter(torch.cat([table, flat[offsets:]]))
            block.attn.rel_pos = new
