"""Small models of Hugging Face transformers, with weights of order 1; a test that asks for one needs transformers."""

import pytest

from small_models import lively
from vicinal.attachment.coverage_transformers import ARCHITECTURES

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}


def library():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def image_classifier(name, **options):
    """Returns `{name}ForImageClassification`, for images of 32 x 32."""
    transformers = library()
    config = getattr(transformers, f"{name}Config")(**(SWIN if name.startswith("Swin") else SMALL) | options)
    return lively(getattr(transformers, f"{name}ForImageClassification")(config))


def yolos():
    """A class token, 4 x 6 patches of images of 32 x 48, and 7 detection tokens."""
    transformers = library()
    config = transformers.YolosConfig(**SMALL | {"image_size": [32, 48]}, num_detection_tokens=7)
    return lively(transformers.YolosModel(config))


def rf_detr_backbone():
    """8 x 8 patches in 2 x 2 windows, each with a class token; layer 2 of 4 attends to all windows."""
    transformers = library()
    config = transformers.RfDetrDinov2Config(
        **SMALL | {"num_hidden_layers": 4, "image_size": 64}, num_windows=2, out_indices=[2, 4]
    )
    return lively(transformers.RfDetrDinov2Backbone(config))


def eomt():
    """4 x 4 patches behind a class token and 4 registers, with 10 queries in front of these in the last 2 layers."""
    transformers = library()
    config = transformers.EomtConfig(
        **SMALL | {"num_hidden_layers": 4}, num_queries=10, num_blocks=2, num_register_tokens=4
    )
    return lively(transformers.EomtForUniversalSegmentation(config))


def surveyed(name):
    """Returns a model of the survey's table of architectures."""
    library()
    return ARCHITECTURES[name].build().eval()
