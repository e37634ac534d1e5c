"""Attention as plain hooks see it, with fused attention off; and where Swin's windows come from, patch by patch."""

import copy
import functools

import torch
from timm.models.cait import Cait, TalkingHeadAttn
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer


def vit(**options):
    small = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 4, "num_classes": 5}
    return _sharp(VisionTransformer(**small | options))


def swin(img_size=32):
    return _sharp(
        SwinTransformer(
            img_size=img_size,
            patch_size=2,
            window_size=4,
            embed_dim=12,
            depths=(2, 2),
            num_heads=(2, 3),
            num_classes=5,
            drop_path_rate=0.0,
        )
    )


def cait():
    return _sharp(Cait(img_size=(32, 48), patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5))


def _sharp(model):
    """Weights as large as after training, so that heads look at some patches more than at others."""
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name or name.endswith(("q.weight", "k.weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def plain_forward(module, x, **_):
    """timm's attention under a prior, as the formula says, with dropout's hooks in their place."""
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT * module.scale
    scale, bias = module.prior()
    logits = logits * (1 if scale is None else scale) + (0 if bias is None else bias)
    return module.proj((module.attn_drop(logits.softmax(-1)) @ v).transpose(1, 2).flatten(2))


@torch.no_grad()
def hooked(model, images):
    """Weights of every attention layer in float64, `(sequences, heads, queries, keys)`, without a tap."""
    model = copy.deepcopy(model).eval()
    seen = []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if hasattr(module, "prior"):
            module.forward = functools.partial(plain_forward, module)
        if isinstance(module, TalkingHeadAttn):  # heads are mixed between softmax and dropout
            module.proj_w.register_forward_pre_hook(lambda _, given: seen.append(given[0].movedim(-1, 1).double()))
        elif hasattr(module, "attn_drop"):
            module.attn_drop.register_forward_pre_hook(lambda _, given: seen.append(given[0].double()))
    model(images)
    return seen


def swin_place(window, patch, size, shift):
    """Row and column that a patch of a window of 4 x 4 had before the map was rolled and padded; None for padding."""
    across = -(-size[1] // 4)
    row, column = window // across * 4 + patch // 4, window % across * 4 + patch % 4
    if row >= size[0] or column >= size[1]:
        return None
    return (row + shift) % size[0], (column + shift) % size[1]
