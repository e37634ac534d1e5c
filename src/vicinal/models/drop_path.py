"""Residual branches under drop path that are not computed for the images whose branch is dropped.

timm computes a branch for all images and multiplies that of dropped ones by 0. On a CPU at a rate of 0.1 this is nearly
a tenth of a training step. DINOv2 (https://arxiv.org/abs/2304.07193) drops a fixed part of a batch; here each image is
dropped or kept as timm does it, by the same random numbers, so the outputs and gradients are those of timm's blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath
from timm.models import cait, swin_transformer, vision_transformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.former_bits import FORMER_BITS

__all__ = ["CaitBlock", "SwinBlock", "VitBlock", "add_branch"]

MIN_IMAGES = 8  # below it, a batch rarely has dropped images


def add_branch(block: nn.Module, x: Tensor, drop_path: Any, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `x + drop_path(branch(x))`, `(images, ...)`.

    Args:
        block: the module whose children `branch` calls.
        x: tokens, `(images, ...)`.
        drop_path: timm's `DropPath`, or a module that drops nothing.
        branch: computes each image by itself, in a shape that `x` can be added to.
    """
    if not _can_skip(block, x, drop_path):
        return x + drop_path(branch(x))  # type: ignore[no-any-return]
    keep: float = 1 - drop_path.drop_prob
    kept = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep).flatten().nonzero().squeeze(1)
    if len(kept) == len(x):
        return torch.add(x, branch(x), alpha=1 / keep)
    if not len(kept):  # the weights get gradients of 0, so that the optimizer updates them
        return x + 0 * branch(x)
    added = branch(x.index_select(0, kept))
    dtype = torch.promote_types(x.dtype, added.dtype)  # they differ under autocast
    return _AddImages.apply(x.to(dtype), added.to(dtype), kept, 1 / keep)  # type: ignore[no-any-return, no-untyped-call]


class _AddImages(torch.autograd.Function):
    """`x.index_add(0, index, added, alpha=factor)`, which by itself keeps `added` for its backward pass."""

    @staticmethod
    def forward(x: Tensor, added: Tensor, index: Tensor, factor: float) -> Tensor:
        return x.index_add(0, index, added, alpha=factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.factor = inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0], gradients[0].index_select(0, index) * ctx.factor, None, None


def _can_skip(block: nn.Module, x: Tensor, drop_path: Any) -> bool:
    """Returns whether leaving out images saves time and nobody can notice it.

    A GPU would wait for the number of kept images, and a compiled graph has fixed shapes. Hooks and taps see whole
    batches. Dropout in the branch would draw other numbers; batch norm would see other images.
    """
    return bool(
        not FORMER_BITS
        and type(drop_path) is DropPath
        and drop_path.training
        and 0 < drop_path.drop_prob < 1
        and drop_path.scale_by_keep
        and len(x) >= MIN_IMAGES
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not any(_needs_all_images(module) for module in block.modules())
    )


def _needs_all_images(module: nn.Module) -> bool:
    return (
        "forward" in module.__dict__  # a tap
        or bool(module._forward_hooks or module._forward_pre_hooks)
        or bool(module._backward_hooks or module._backward_pre_hooks)
        or (isinstance(module, nn.Dropout) and module.p > 0)
        or isinstance(module, _BatchNorm)
    )


class VitBlock(vision_transformer.Block):
    """timm's block of a ViT."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Returns tokens, `(batch, tokens, dim)`; the arguments are timm's."""
        if attn_mask is not None or is_causal:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[no-any-return]
        x = add_branch(self, x, self.drop_path1, lambda x: self.ls1(self.attn(self.norm1(x))))
        return add_branch(self, x, self.drop_path2, lambda x: self.ls2(self.mlp(self.norm2(x))))


class SwinBlock(swin_transformer.SwinTransformerBlock):
    """timm's block of a Swin."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens, `(batch, height, width, dim)`."""
        shape = x.shape
        x = add_branch(self, x, self.drop_path1, lambda x: self._attn(self.norm1(x))).flatten(1, 2)
        return add_branch(self, x, self.drop_path2, lambda x: self.mlp(self.norm2(x))).view(shape)


class CaitBlock(cait.LayerScaleBlock):
    """timm's block of a CaiT."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns patches, `(batch, patches, dim)`."""
        x = add_branch(self, x, self.drop_path, lambda x: self.gamma_1 * self.attn(self.norm1(x)))
        return add_branch(self, x, self.drop_path, lambda x: self.gamma_2 * self.mlp(self.norm2(x)))
