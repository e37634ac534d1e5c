"""Small models of transformers, most of them from the survey's table, and a decoder of torch."""

from collections.abc import Callable

import torch
from torch import nn

from vicinal.attachment.coverage_transformers import ARCHITECTURES
from vicinal.attachment.small_decoders import RFDETR_BODY, SMALL_RESNET, detr, mask2former
from vicinal.attachment.small_encoders import BODY, PATCH, SQUARE
from vicinal.attachment.small_model import SmallModel, small
from vicinal.inspection.model_runner import ModelRunner


def eager_vit() -> ModelRunner:
    runner = ARCHITECTURES["vit"].runner()
    runner.model.set_attn_implementation("eager")
    return runner


def rf_detr_backbone(size: tuple[int, int]) -> SmallModel:
    return small("RfDetrDinov2Backbone", (3, *size), "RfDetrDinov2Config", **RFDETR_BODY)


class TorchDecoder(nn.Module):
    """torch's encoder and decoder; 36 queries attend to 36 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 64, 16, 16)
        self.queries = nn.Parameter(torch.randn(36, 64))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.encoder(self.embed(x).flatten(2).mT)
        return self.decoder(self.queries.expand(len(x), -1, -1), patches)


FROM_SURVEY = [
    "vit",
    "dinov2_registers",
    "dinov3",
    "clip",
    "siglip",
    "yolos",
    "detr",
    "rt_detr",
    "d_fine",
    "rf_detr",
    "eomt",
    "sam2",
    "segformer",
    "mask2former",
    "upernet",
    "swin",
    "hiera",
    "vitdet",
    "sam",
]
VARIANTS = {
    "vit_rectangle": small("ViTModel", (3, 64, 256), image_size=(64, 256), patch_size=16, **BODY),
    "detr_small": detr((128, 160), **SMALL_RESNET),
    "detr_resnet50": detr((320, 384), 256),
    "rf_detr_backbone": rf_detr_backbone((112, 112)),
    "rf_detr_backbone_rectangle": rf_detr_backbone((112, 168)),
    "mask2former_three_scales": mask2former(3),
    "videomae": small("VideoMAEModel", (4, *SQUARE), num_frames=4, **PATCH, **BODY),
    "vit_mae": small("ViTMAEModel", SQUARE, **PATCH, **BODY),
    "owlvit": small("OwlViTVisionModel", SQUARE, **PATCH, **BODY),
}
OTHERS: dict[str, Callable[[], ModelRunner]] = {
    **{name: ARCHITECTURES[name].runner for name in FROM_SURVEY},
    **{name: model.runner for name, model in VARIANTS.items()},
    "vit_eager": eager_vit,
    "torch_decoder": lambda: ModelRunner(TorchDecoder(), (3, 96, 96)),
}
