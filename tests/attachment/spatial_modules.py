"""Which modules compute attention between places of the image: file and class, written from the libraries' source.

Attention with pooled keys or queries belongs to them. Object queries, class queries of a pooling head, and deformable
attention, which has no product of queries and keys, do not. A pattern of names limits a class to a part of the model.
"""

import re

from torch import nn

from vicinal.attachment.timm_attention import class_name

ANYWHERE, ENCODER = "", "encoder\\."
# architecture: (file.Class, pattern of names)
TRANSFORMERS: dict[str, tuple[str, str]] = {
    "vit": ("modeling_vit.ViTAttention", ANYWHERE),
    "deit": ("modeling_deit.DeiTAttention", ANYWHERE),
    "beit": ("modeling_beit.BeitAttention", ANYWHERE),
    "data2vec_vision": ("modeling_data2vec_vision.Data2VecVisionSdpaSelfAttention", ANYWHERE),
    "dinov2": ("modeling_dinov2.Dinov2Attention", ANYWHERE),
    "dinov2_registers": ("modeling_dinov2_with_registers.Dinov2WithRegistersAttention", ANYWHERE),
    "dinov3": ("modeling_dinov3_vit.DINOv3ViTAttention", ANYWHERE),
    "clip": ("modeling_clip.CLIPAttention", ANYWHERE),
    "siglip": ("modeling_siglip.SiglipAttention", ANYWHERE),  # its pooling head has one query
    "siglip2": ("modeling_siglip2.Siglip2Attention", ANYWHERE),
    "vit_mae": ("modeling_vit_mae.ViTMAEAttention", ANYWHERE),
    "timm_wrapper": ("attention.Attention", ANYWHERE),
    "swin": ("modeling_swin.SwinAttention", ANYWHERE),
    "swinv2": ("modeling_swinv2.Swinv2SelfAttention", ANYWHERE),
    "swin2sr": ("modeling_swin2sr.Swin2SRSelfAttention", ANYWHERE),
    "hiera": ("modeling_hiera.HieraMaskUnitAttention", ANYWHERE),
    "pvt": ("modeling_pvt.PvtEfficientSelfAttention", ANYWHERE),
    "pvt_v2": ("modeling_pvt_v2.PvtV2SelfAttention", ANYWHERE),
    "segformer": ("modeling_segformer.SegformerAttention", ANYWHERE),
    "glpn": ("modeling_glpn.GLPNEfficientSelfAttention", ANYWHERE),
    "mobilevit": ("modeling_mobilevit.MobileViTSelfAttention", ANYWHERE),
    "vitpose": ("modeling_vitpose_backbone.VitPoseBackboneSelfAttention", ANYWHERE),
    "vitdet": ("modeling_vitdet.VitDetAttention", ANYWHERE),
    "sam": ("modeling_sam.SamVisionSdpaAttention", ANYWHERE),
    "sam2": ("modeling_sam2.Sam2MultiScaleAttention", ANYWHERE),
    "sam3": ("modeling_sam3.Sam3ViTRoPEAttention", ANYWHERE),
    "dpt": ("modeling_dpt.DPTSelfAttention", ANYWHERE),
    "depth_anything": ("modeling_dinov2.Dinov2Attention", ANYWHERE),
    "upernet": ("modeling_swin.SwinAttention", ANYWHERE),
    "mask2former": ("modeling_swin.SwinAttention", ANYWHERE),  # its decoder has queries, its encoder is deformable
    "maskformer": ("modeling_maskformer_swin.MaskFormerSwinSelfAttention", ANYWHERE),
    "eomt": ("modeling_eomt.EomtAttention", ANYWHERE),  # queries stand among patches in the last layers
    "detr": ("modeling_detr.DetrSelfAttention", ENCODER),
    "conditional_detr": ("modeling_conditional_detr.ConditionalDetrSelfAttention", ENCODER),
    "deformable_detr": ("", ANYWHERE),  # deformable, and between queries
    "rt_detr": ("modeling_rt_detr.RTDetrSelfAttention", ENCODER),
    "d_fine": ("modeling_d_fine.DFineSelfAttention", ENCODER),
    "yolos": ("modeling_yolos.YolosSelfAttention", ANYWHERE),
    "rf_detr": ("modeling_rf_detr.RfDetrDinov2Attention", ANYWHERE),
}
SMP: dict[str, tuple[str, str]] = {
    "unet_mit": ("mix_transformer.Attention", ANYWHERE),
    "unet_swin": ("swin_transformer_v2_cr.WindowMultiHeadAttention", ANYWHERE),
    "upernet_mit": ("mix_transformer.Attention", ANYWHERE),
    "upernet_swin": ("swin_transformer.WindowAttention", ANYWHERE),
    "dpt_vit": ("attention.Attention", ANYWHERE),
}


def spatial_modules(model: nn.Module, rule: tuple[str, str]) -> set[str]:
    """Returns the names of the modules that a rule calls spatial."""
    cls, pattern = rule
    return {name for name, module in model.named_modules() if class_name(module) == cls and re.match(pattern, name)}
