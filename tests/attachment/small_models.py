"""Small models of timm's families, and weights that let attention show."""

import torch
from torch import nn

import vicinal

vicinal.ensure_torchvision()  # processes that tests start import this file too

from timm.models.beit import Beit  # noqa: E402
from timm.models.cait import Cait  # noqa: E402
from timm.models.swin_transformer import SwinTransformer  # noqa: E402
from timm.models.swin_transformer_v2 import SwinTransformerV2  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.models.vision_transformer_relpos import VisionTransformerRelPos  # noqa: E402

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 4, "num_classes": 5}


def vit(**options):
    return VisionTransformer(**VIT | options)


def vit_relpos(**options):
    return VisionTransformerRelPos(**VIT | {"rel_pos_type": "bias"} | options)


SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)}


def swin(**options):
    return SwinTransformer(**SWIN | options, num_classes=5, drop_path_rate=0.0)


def swin_v2():
    return SwinTransformerV2(**SWIN, num_classes=5, drop_path_rate=0.0)


def cait():
    return Cait(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5)


def beit():
    return Beit(
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=4,
        num_classes=5,
        use_rel_pos_bias=True,
        init_values=0.1,
    )


def images(model, batch=2):
    height, width = model.patch_embed.img_size if hasattr(model.patch_embed, "img_size") else (32, 32)
    return torch.randn(batch, 3, height, width)


def lively(model):
    """Gives a model weights of order 1, so that attention is far from uniform, and biases that are not 0."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.5 if "position" in name else parameter[0].numel() ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif "gamma" in name:  # of LayerScale, which starts so small that it hides attention
            nn.init.ones_(parameter)
    return model.eval()
