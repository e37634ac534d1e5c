"""CaiT for small images: wide talking heads, then layers in which only the class token listens."""

from functools import partial
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import cait
from torch import Tensor, nn

from vicinal.models.vit import start_patches
from vicinal.models.weight_init import set_drop_path, xavier

__all__ = ["Cait", "TalkingHeads"]


class TalkingHeads(nn.Module):
    """Attention whose heads are mixed before and after the softmax (https://arxiv.org/abs/2003.02436).

    Heads are `head_dim` wide whatever `dim` is. In a class layer queries come from the class token, and keys and
    values from the patches, their context.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        head_dim: int = 64,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        here = {"device": device, "dtype": dtype}
        inner = num_heads * head_dim
        self.num_heads, self.head_dim, self.scale = num_heads, head_dim, head_dim**-0.5
        self.q = nn.Linear(dim, inner, bias=qkv_bias, **here)
        self.kv = nn.Linear(dim, 2 * inner, bias=qkv_bias, **here)
        self.mix_logits = nn.Parameter(torch.empty(num_heads, num_heads, **here))
        self.mix_weights = nn.Parameter(torch.empty(num_heads, num_heads, **here))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(inner, dim, **here)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the mixing of heads from N(0, 1), as the reference does."""
        nn.init.normal_(self.mix_logits)
        nn.init.normal_(self.mix_weights)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """`(batch, queries, dim)`, and what they attend to if it is not themselves."""
        context = x if context is None else context
        q = self._heads(self.q(x))
        k, v = (self._heads(part) for part in self.kv(context).chunk(2, dim=-1))
        logits = (q * self.scale) @ k.transpose(-2, -1)
        weights = mix(logits, self.mix_logits).softmax(dim=-1)
        out = self.attn_drop(mix(weights, self.mix_weights)) @ v
        out = self.proj(out.transpose(1, 2).flatten(2))
        return self.proj_drop(out)  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


def mix(x: Tensor, weights: Tensor) -> Tensor:
    """`(batch, heads, queries, keys)`: new head g is the sum over h of `weights[h, g]` times head h."""
    return (weights.t() @ x.flatten(2)).view_as(x)


class ClassBlock(cait.LayerScaleBlockClassAttn):
    """A class layer: the class token, normalised, attends to the patches as they are, and not to itself."""

    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        """Patches `(batch, patches, dim)` and the class token `(batch, 1, dim)`; a new class token comes out."""
        x_cls = x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(x_cls), x))
        return x_cls + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_cls)))  # type: ignore[no-any-return]


class Cait(cait.Cait):
    """timm's CaiT with the reference's blocks (Touvron et al., https://arxiv.org/abs/2103.17239).

    As in the reference: heads of 64 channels, however narrow the network; talking heads in the class layers too, which
    attend to the patches without their norm and without the class token; layer scale that starts at 0.1 up to layer 18,
    at 1e-5 up to 24 and at 1e-6 beyond; norm epsilon 1e-5; one drop path rate for all layers, class layers included;
    Xavier normal weights, class token, positions and mixing of heads from N(0, 1). The class layers read the image, so
    `"token"` is its only pooling.
    """

    pos_embed: nn.Parameter

    def __init__(
        self, *, drop_path_rate: float = 0.0, head_dim: int = 64, mlp_width: int = 384, embed_dim: int, **kwargs: Any
    ) -> None:
        heads = partial(TalkingHeads, head_dim=head_dim)
        # timm cuts dim * ratio to a whole number, and a half keeps rounding errors off it
        ratio = (mlp_width + 0.5) / embed_dim
        defaults = {
            "mlp_ratio": ratio,
            "mlp_ratio_token_only": ratio,
            "qkv_bias": False,
            "norm_layer": nn.LayerNorm,
            "attn_block": heads,
            "attn_block_token_only": heads,
            "block_layers_token": ClassBlock,
        }
        super().__init__(embed_dim=embed_dim, **{**defaults, **kwargs})
        set_drop_path([*self.blocks, *self.blocks_token_only], drop_path_rate)
        start_patches(self.patch_embed.proj)
        nn.init.normal_(self.cls_token)
        nn.init.normal_(self.pos_embed)
        for blocks in (self.blocks, self.blocks_token_only):
            for depth, block in enumerate(blocks, start=1):
                start = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
                nn.init.constant_(block.gamma_1, start)
                nn.init.constant_(block.gamma_2, start)

    def _init_weights(self, m: nn.Module) -> None:
        xavier(m)

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Go on with images of another size: positions are interpolated."""
        before = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size)
        grid = self.patch_embed.grid_size
        resampled = resample_abs_pos_embed(self.pos_embed.detach(), grid, before, num_prefix_tokens=0)
        self.pos_embed = nn.Parameter(resampled)
