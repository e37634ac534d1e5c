"""Small models whose weights are large enough to matter."""

from timm.models.vision_transformer import VisionTransformer
from torch import nn


def vit(**options):
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3}
    return lively(VisionTransformer(**settings | options))


def lively(model):
    """Weights of the size of 1, so that attention is far from uniform."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model.eval()
