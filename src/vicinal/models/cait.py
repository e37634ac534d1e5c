"""CaiT for small images: talking heads of fixed width, then class-attention layers."""

from functools import partial
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import cait
from torch import Tensor, nn

from vicinal.former_bits import FORMER_BITS
from vicinal.models.drop_path import CaitBlock
from vicinal.models.weight_init import init_patch_embed, init_xavier, set_drop_path

__all__ = ["Cait", "TalkingHeads"]


class TalkingHeads(nn.Module):
    """Attention whose heads are mixed before and after the softmax (https://arxiv.org/abs/2003.02436).

    Heads have `head_dim` channels for any `dim`. In a class-attention layer, the query is the class token and keys and
    values are the patches.
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
        factory_kwargs = {"device": device, "dtype": dtype}
        inner = num_heads * head_dim
        self.num_heads, self.head_dim, self.scale = num_heads, head_dim, head_dim**-0.5
        self.q = nn.Linear(dim, inner, bias=qkv_bias, **factory_kwargs)
        self.kv = nn.Linear(dim, 2 * inner, bias=qkv_bias, **factory_kwargs)
        self.mix_logits = nn.Parameter(torch.empty(num_heads, num_heads, **factory_kwargs))
        self.mix_weights = nn.Parameter(torch.empty(num_heads, num_heads, **factory_kwargs))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(inner, dim, **factory_kwargs)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the head mixing from N(0, 1), as the reference does."""
        nn.init.normal_(self.mix_logits)
        nn.init.normal_(self.mix_weights)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the attention output, `(batch, queries, dim)`.

        Args:
            x: queries, `(batch, queries, dim)`.
            context: keys and values, `(batch, keys, dim)`; `x` by default.
        """
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
    """Returns mixed heads, `(batch, heads, queries, keys)`: head g is the sum over h of `weights[h, g] * x[:, h]`."""
    if FORMER_BITS:
        return (weights.t() @ x.flatten(2)).view_as(x)
    # `@` would transpose x to multiply once for all images, which takes four times as long
    return torch.bmm(weights.t().expand(x.shape[0], -1, -1), x.flatten(2)).view_as(x)


class ClassBlock(cait.LayerScaleBlockClassAttn):
    """A class-attention layer: the normalized class token attends to the unnormalized patches, and not to itself."""

    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        """Returns the new class token, `(batch, 1, dim)`.

        Args:
            x: patches, `(batch, patches, dim)`.
            x_cls: class token, `(batch, 1, dim)`.
        """
        x_cls = x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(x_cls), x))
        return x_cls + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_cls)))  # type: ignore[no-any-return]


class Cait(cait.Cait):
    """timm's CaiT with the reference's blocks (Touvron et al., https://arxiv.org/abs/2103.17239).

    As in the reference: heads of 64 channels for any width; talking heads in the class-attention layers too, which
    attend to the unnormalized patches and not to the class token; layer scale initialized at 0.1 up to layer 18, at
    1e-5 up to 24 and at 1e-6 beyond; norm epsilon 1e-5; one drop path rate for all layers, class-attention layers
    included; Xavier normal weights, class token, positions and head mixing from N(0, 1). The output is the class token,
    so `"token"` is the only pooling.
    """

    pos_embed: nn.Parameter

    def __init__(
        self, *, drop_path_rate: float = 0.0, head_dim: int = 64, mlp_width: int = 384, embed_dim: int, **kwargs: Any
    ) -> None:
        heads = partial(TalkingHeads, head_dim=head_dim)
        # timm truncates dim * ratio to an integer; 0.5 guards against rounding errors
        ratio = (mlp_width + 0.5) / embed_dim
        defaults = {
            "mlp_ratio": ratio,
            "mlp_ratio_token_only": ratio,
            "qkv_bias": False,
            "norm_layer": nn.LayerNorm,
            "attn_block": heads,
            "attn_block_token_only": heads,
            "block_layers": CaitBlock,
            "block_layers_token": ClassBlock,
        }
        super().__init__(embed_dim=embed_dim, **{**defaults, **kwargs})
        set_drop_path([*self.blocks, *self.blocks_token_only], drop_path_rate)
        init_patch_embed(self.patch_embed.proj)
        nn.init.normal_(self.cls_token)
        nn.init.normal_(self.pos_embed)
        for blocks in (self.blocks, self.blocks_token_only):
            for depth, block in enumerate(blocks, start=1):
                start = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
                nn.init.constant_(block.gamma_1, start)
                nn.init.constant_(block.gamma_2, start)

    def _init_weights(self, m: nn.Module) -> None:
        init_xavier(m)

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Changes the image size; interpolates the position embedding."""
        before = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size)
        grid = self.patch_embed.grid_size
        resampled = resample_abs_pos_embed(self.pos_embed.detach(), grid, before, num_prefix_tokens=0)
        self.pos_embed = nn.Parameter(resampled)
