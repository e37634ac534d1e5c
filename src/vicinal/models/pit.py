"""PiT for small images: a ViT with two downsamplings of the patch grid."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vicinal.models.drop_path import VitBlock
from vicinal.models.weight_init import init_xavier

__all__ = ["Pit"]

Feature = tuple[Tensor, tuple[int, int]]


class Downsample(nn.Module):
    """Halves the grid and widens the tokens.

    Patches: depthwise 3 x 3 convolution with stride 2, then a pointwise one. Class token: a linear layer.
    """

    def __init__(self, dim: int, out_dim: int, prefix: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        factory_kwargs = {"device": device, "dtype": dtype}
        self.depthwise = nn.Conv2d(dim, out_dim, kernel_size=3, stride=2, padding=1, groups=dim, **factory_kwargs)
        self.pointwise = nn.Conv2d(out_dim, out_dim, kernel_size=1, **factory_kwargs)
        self.token = nn.Linear(dim, out_dim, **factory_kwargs) if prefix else None

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Feature:
        """Returns tokens, `(batch, prefix + patches, out_dim)`, and the new grid.

        Args:
            x: tokens, `(batch, prefix + patches, dim)`.
            grid: rows and columns of the patches.
        """
        prefix = x.shape[1] - grid[0] * grid[1]
        image = x[:, prefix:].transpose(1, 2).unflatten(2, grid)
        image = self.pointwise(self.depthwise(image))
        patches = image.flatten(2).transpose(1, 2)
        if self.token is not None:
            patches = torch.cat([self.token(x[:, :prefix]), patches], dim=1)
        return patches, (image.shape[2], image.shape[3])


class Stage(nn.Module):
    """Blocks on one grid, after the downsampling to that grid."""

    def __init__(self, pool: Downsample | None, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.pool, self.blocks = pool, nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Feature:
        """Returns tokens, `(batch, prefix + patches, out_dim)`, and the grid of this stage.

        Args:
            x: tokens of the stage before, `(batch, prefix + patches, dim)`.
            grid: rows and columns of its patches.
        """
        if self.pool is not None:
            x, grid = self.pool(x, grid)
        return checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x), grid


class Pit(nn.Module):
    """A pooling transformer (Heo et al., https://arxiv.org/abs/2103.16302), with timm's blocks and interface.

    As in the reference: patches do not overlap, the class token has a position too, downsampling has a pointwise
    convolution after the depthwise one, no bias in qkv, norm epsilon 1e-5, one drop path rate for all blocks, Xavier
    normal weights, class token and positions from N(0, 1). `global_pool="token"` is the pooling of the reference.

    Different: `global_pool="avg"`, without a class token, as in `Vit`; and the grid can be a rectangle.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "token",
        embed_dim: tuple[int, ...] = (96, 192, 384),
        depths: tuple[int, ...] = (2, 6, 4),
        num_heads: tuple[int, ...] = (2, 4, 8),
        mlp_ratio: float = 2,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory_kwargs = {"device": device, "dtype": dtype}
        self.num_classes, self.global_pool, self.in_chans = num_classes, global_pool, in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim[-1]
        self.num_prefix_tokens = 1 if global_pool == "token" else 0

        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim[0], **factory_kwargs)
        tokens = self.num_prefix_tokens + self.patch_embed.num_patches
        self.cls_token = (
            nn.Parameter(torch.empty(1, 1, embed_dim[0], **factory_kwargs)) if self.num_prefix_tokens else None
        )
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, embed_dim[0], **factory_kwargs))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.stages = nn.ModuleList()
        for index, (dim, depth, heads) in enumerate(zip(embed_dim, depths, num_heads, strict=True)):
            pool = Downsample(embed_dim[index - 1], dim, self.num_prefix_tokens, **factory_kwargs) if index else None
            block = partial(
                VitBlock,
                dim,
                heads,
                mlp_ratio,
                proj_drop=proj_drop_rate,
                attn_drop=attn_drop_rate,
                drop_path=drop_path_rate,
                norm_layer=nn.LayerNorm,
                **factory_kwargs,
            )
            self.stages.append(Stage(pool, (block() for _ in range(depth))))
        self.feature_info = [
            {"num_chs": dim, "reduction": patch_size * 2**index, "module": f"stages.{index}"}
            for index, dim in enumerate(embed_dim)
        ]
        self.norm: nn.Module = nn.LayerNorm(self.embed_dim, **factory_kwargs)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.embed_dim, num_classes, **factory_kwargs) if num_classes else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        """Initializes all weights as the reference does."""
        self.apply(init_xavier)
        nn.init.normal_(self.pos_embed)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of position embedding and class token, as timm's models do."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns patterns of the parameters of each layer, for layer-wise learning-rate decay in timm."""
        fine = [(r"^stages\.(\d+)\.pool", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^cls_token|pos_embed|patch_embed", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enables gradient checkpointing: activations are recomputed in the backward pass."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def get_classifier(self) -> nn.Module:
        """Returns the classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier, and the pooling if given; `""` disables pooling."""
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else global_pool
        factory_kwargs: dict[str, Any] = {"device": self.pos_embed.device, "dtype": self.pos_embed.dtype}
        self.head = nn.Linear(self.embed_dim, num_classes, **factory_kwargs) if num_classes else nn.Identity()

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        """Changes the image size; interpolates the position embedding."""
        before = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size)
        resampled = resample_abs_pos_embed(
            self.pos_embed.detach(), self.patch_embed.grid_size, before, num_prefix_tokens=self.num_prefix_tokens
        )
        self.pos_embed = nn.Parameter(resampled)

    def _embed(self, x: Tensor) -> Feature:
        x = self.patch_embed(x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.pos_drop(x + self.pos_embed), self.patch_embed.grid_size

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns the tokens of the last stage before norm and pooling, `(batch, tokens, dim)`."""
        x, grid = self._embed(x)
        for stage in self.stages:
            x, grid = stage(x, grid)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns logits, `(batch, classes)`: pooling, norm, classifier; with `pre_logits` the pooled features."""
        if self.global_pool:
            x = x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.head_drop(self.norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, `(batch, classes)`, of images `(batch, channels, height, width)`."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Returns the last tokens and the feature maps of the stages, `(batch, dim, rows, columns)` each.

        The arguments are those of timm's models.
        """
        assert output_fmt == "NCHW", "Output shape must be NCHW."
        take, last = feature_take_indices(len(self.stages), indices)
        x, grid = self._embed(x)
        maps = []
        for index, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x, grid = stage(x, grid)
            if index in take:
                tokens = self.norm(x) if norm and index == len(self.stages) - 1 else x
                maps.append(tokens[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid))
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the stages after those that `indices` select, and returns the selected indices."""
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take  # type: ignore[no-any-return]
