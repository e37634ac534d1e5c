"""T2T-ViT for small images: overlapping patches, embedded in steps."""

import math
from typing import Any

import torch
from timm.layers import Mlp, resample_abs_pos_embed, to_2tuple, trunc_normal_
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.attachment.plain_attention import PLAIN_CLASSES, PlainAttention
from vicinal.attention import attend
from vicinal.errors import VicinalError
from vicinal.models.drop_path import VitBlock

__all__ = ["T2t", "TokensToToken"]


class TokenAttention(nn.Module):
    """Single-head attention that changes the token width; the residual is the value, which has the new width."""

    def __init__(self, dim: int, out_dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory_kwargs = {"device": device, "dtype": dtype}
        self.scale = dim**-0.5  # of the input width, as in T2T-ViT, not of the head width
        self.qkv = nn.Linear(dim, 3 * out_dim, bias=False, **factory_kwargs)
        self.proj = nn.Linear(out_dim, out_dim, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens, `(batch, tokens, out_dim)`, of tokens `(batch, tokens, dim)`."""
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return (v + self.proj(self.attend_tokens(q, k, v))).squeeze(1)  # type: ignore[no-any-return]

    def attend_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention of queries, keys and values `(batch, 1, tokens, out_dim)`, of the same shape."""
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)


class _PlainTokenAttention(PlainAttention):
    """`TokenAttention` without a prior, by the native kernels where they serve it."""

    def attend_tokens(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention of queries, keys and values `(batch, 1, tokens, out_dim)`, of the same shape."""
        return attend(q, k, v, scale=self.scale)


PLAIN_CLASSES[TokenAttention.forward] = _PlainTokenAttention


class TokenTransformer(nn.Module):
    """The transformer block between two unfold steps: attention and an MLP, `out_dim` wide."""

    def __init__(self, dim: int, out_dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory_kwargs = {"device": device, "dtype": dtype}
        self.norm1 = nn.LayerNorm(dim, **factory_kwargs)
        self.attn = TokenAttention(dim, out_dim, **factory_kwargs)
        self.norm2 = nn.LayerNorm(out_dim, **factory_kwargs)
        self.mlp = Mlp(out_dim, out_dim, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens, `(batch, tokens, out_dim)`, of tokens `(batch, tokens, dim)`."""
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TokensToToken(nn.Module):
    """Patch embedding in steps of 2: unfolds 3 x 3 neighborhoods with stride 2, with transformer blocks in between.

    Patches have 4, 8 or 16 pixels a side. Replaces timm's `PatchEmbed`.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        token_dim: int = 64,
        bias: bool = True,
        dynamic_img_pad: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory_kwargs = {"device": device, "dtype": dtype}
        steps = round(math.log2(patch_size))
        if 2**steps != patch_size or steps < 2:
            raise VicinalError(f"patch_size of T2T must be 4, 8 or 16, got {patch_size}")
        self.patch_size: tuple[int, int] = to_2tuple(patch_size)
        widths = [in_chans] + [token_dim] * (steps - 1)
        self.transformers = nn.ModuleList(
            TokenTransformer(9 * width, token_dim, **factory_kwargs) for width in widths[:-1]
        )
        self.gather = nn.Unfold(kernel_size=3, stride=2, padding=1)
        self.proj = nn.Linear(9 * token_dim, embed_dim, bias=bias, **factory_kwargs)
        self.set_input_size(img_size)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Changes the image size."""
        self.img_size: tuple[int, int] = to_2tuple(img_size)
        self.grid_size = self.dynamic_feat_size(self.img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Returns the side of a patch in pixels, or both sides."""
        return max(self.patch_size) if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Returns rows and columns of patches for an image size."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def forward(self, x: Tensor) -> Tensor:
        """Returns patches, `(batch, patches, dim)`, of images `(batch, channels, height, width)`."""
        if tuple(x.shape[2:]) != self.img_size:
            raise VicinalError(f"images must be of size {self.img_size}, got {tuple(x.shape[2:])}")
        for transformer in self.transformers:
            grid = (x.shape[2] // 2, x.shape[3] // 2)
            tokens = transformer(self.gather(x).transpose(1, 2))
            x = tokens.transpose(1, 2).unflatten(2, grid)
        return self.proj(self.gather(x).transpose(1, 2))  # type: ignore[no-any-return]


class T2t(VisionTransformer):
    """Tokens-to-token embedding, then timm's ViT (Yuan et al., https://arxiv.org/abs/2101.11986).

    As in the reference: token transformers 64 wide with one head, one of them for patches of 4 pixels and two for 8;
    MLP ratio 2; frozen sinusoidal positions; the norm before mean pooling; drop path that grows with depth; weights
    from a truncated N(0, 0.02^2); norm epsilon 1e-5.

    Different: the unused class token and norm of the reference (1,408 parameters) are absent; `global_pool="token"`
    adds a class token that is used, as in T2T-ViT; and the blocks do not add their normalized input to the attention
    output, which the reference does and T2T-ViT does not. Positions are a buffer, interpolated when the image size
    changes.
    """

    pos_embed: Tensor

    def __init__(self, *, global_pool: str = "avg", **kwargs: Any) -> None:
        defaults = {
            "class_token": global_pool == "token",
            "fc_norm": False,
            "mlp_ratio": 2,
            "qkv_bias": False,
            "norm_layer": nn.LayerNorm,
            "weight_init": "skip",
            "embed_layer": TokensToToken,
            "block_fn": VitBlock,
        }
        super().__init__(global_pool=global_pool, **{**defaults, **kwargs})
        shape, device, dtype = self.pos_embed.shape, self.pos_embed.device, self.pos_embed.dtype
        del self.pos_embed
        self.register_buffer("pos_embed", sinusoids(shape[1], shape[2]).to(device, dtype))
        self.init_weights()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initializes all weights as the reference does; the arguments are timm's, and unused."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Changes the image size; interpolates the position embedding."""
        before = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size)
        self.pos_embed = resample_abs_pos_embed(
            self.pos_embed, self.patch_embed.grid_size, before, num_prefix_tokens=self.num_prefix_tokens
        )


def sinusoids(positions: int, dim: int) -> Tensor:
    """Returns sinusoids, `(1, positions, dim)`: sine in even, cosine in odd channels, frequencies 10000^(-2i/dim)."""
    position = torch.arange(positions, dtype=torch.float64)[:, None]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = position * frequency
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[None, :, :dim].float()
