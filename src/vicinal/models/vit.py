"""ViT for small images, and its sister with relative positions."""

from typing import Any

import torch
from timm.layers import RelPosBias
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from vicinal.grid import Grid
from vicinal.models.weight_init import set_drop_path, xavier
from vicinal.priors.relative_bias import stretch_flat_table

__all__ = ["Vit", "VitRelPos"]

# What timm has otherwise: a wider MLP, biases in qkv, an epsilon of 1e-6.
_REFERENCE: dict[str, Any] = {"mlp_ratio": 2, "qkv_bias": False, "norm_layer": nn.LayerNorm, "weight_init": "skip"}


class Vit(VisionTransformer):
    """timm's ViT with the reference's numbers (Dosovitskiy et al., https://arxiv.org/abs/2010.11929).

    As in the reference: MLP ratio 2, no bias in qkv, norm epsilon 1e-5, one drop path rate for all blocks, Xavier
    normal weights, class token and positions from N(0, 1). `global_pool="token"` reads the class token, as its plain
    ViT does; `"avg"` has no class token and takes the mean over patches, then the norm, as its masked ViT does.
    `token_std` is the deviation of class token and positions at the start; `vit-mini` has timm's 0.02, with which it
    learns faster from photographs.

    Different: whether there is a class token depends on `global_pool` alone, never on a prior; and every prior leaves
    the class token alone.
    """

    def __init__(
        self, *, global_pool: str = "token", drop_path_rate: float = 0.0, token_std: float = 1.0, **kwargs: Any
    ) -> None:
        self.token_std = token_std
        super().__init__(
            global_pool=global_pool,
            **{"class_token": global_pool == "token", **_REFERENCE, **kwargs},
        )
        set_drop_path(self.blocks, drop_path_rate)
        self.init_weights()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Start all weights as the reference does; the arguments are timm's, and unused."""
        self.apply(xavier)
        start_patches(self.patch_embed.proj)
        for tokens in (self.cls_token, self.reg_token, self.pos_embed):
            if tokens is not None:
                nn.init.normal_(tokens, std=self.token_std)


class VitRelPos(VisionTransformerRelPos):
    """`Vit` with a free table of relative positions per layer and head instead of absolute ones.

    Numbers and starting weights are those of `Vit`; the layers are those of timm's `vit_relpos`, without layer scale.
    Mean pooling by default, as there; `global_pool="token"` adds a class token.
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
        """Start all weights as `Vit` does; tables of positions start as timm has them."""
        self.apply(xavier)
        start_patches(self.patch_embed.proj)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token)

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Go on with images of another size: the tables of positions are stretched."""
        before = Grid(*self.patch_embed.grid_size)
        self.patch_embed.set_input_size(img_size=img_size)
        grid = Grid(*self.patch_embed.grid_size)
        for block in self.blocks:
            old = block.attn.rel_pos
            flat: Tensor = old.relative_position_bias_table.detach()
            offsets = before.table_shape[0] * before.table_shape[1]
            table = stretch_flat_table(flat[:offsets], before, grid)
            new = RelPosBias((grid.height, grid.width), flat.shape[1], old.prefix_tokens, flat.device, flat.dtype)
            # behind the offsets come the three cases in which the class token takes part
            new.relative_position_bias_table = nn.Parameter(torch.cat([table, flat[offsets:]]))
            block.attn.rel_pos = new


def start_patches(projection: nn.Conv2d) -> None:
    """Start a patch embedding as the reference does, which has a linear layer over the pixels of a patch."""
    nn.init.xavier_normal_(projection.weight.flatten(1))
