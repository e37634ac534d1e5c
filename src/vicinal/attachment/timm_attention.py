"""What every attention class of timm attends over: a table written from timm's source.

It lists the classes of `timm/models` and `timm/layers` that are named attention or compute a softmax. Nothing here
comes from running a model, so that `coverage` can count what is served against it.
"""

from collections.abc import Callable
from enum import Enum

from torch import nn

__all__ = ["TIMM_ATTENTION", "AttendsOver", "attends_over", "class_name", "spatial_layers"]


class AttendsOver(Enum):
    """What the queries of an attention class attend to."""

    SPATIAL = "patches attend to patches, of the image or of a window"
    SPATIAL_POOLED = "patches attend to patches; in some or all layers, queries and keys are in different places"
    CHANNELS = "channels attend to channels"
    ONE_QUERY = "only a class token, a latent or a mean attends"
    NOT_SOFTMAX = "weights are not a softmax of a product of queries and keys"
    HOLDS = "computes no attention, but holds a module of the table that does"
    OTHER = "anything else"


SPATIAL = {AttendsOver.SPATIAL, AttendsOver.SPATIAL_POOLED}

_PATCHES, _POOLED, _CHANNELS = AttendsOver.SPATIAL, AttendsOver.SPATIAL_POOLED, AttendsOver.CHANNELS
_ONE, _NOT, _HOLDS, _OTHER = AttendsOver.ONE_QUERY, AttendsOver.NOT_SOFTMAX, AttendsOver.HOLDS, AttendsOver.OTHER

# file.Class: what it attends over, and why; a class with a rule by layer below says so
TIMM_ATTENTION: dict[str, tuple[AttendsOver, str]] = {
    # timm/layers
    "attention.Attention": (_PATCHES, "all tokens attend to all tokens"),
    "attention.AttentionRope": (_PATCHES, "all tokens attend to all tokens, with rotary positions"),
    "attention2d.Attention2d": (_PATCHES, "the places of a map attend to each other"),
    "attention2d.MultiQueryAttention2d": (_POOLED, "kv_stride and query_strides make keys or queries sparser"),
    "attention2d.MultiQueryAttentionV2": (_POOLED, "keys come from the same map, or from another one"),
    "attention_pool.AttentionPoolLatent": (_ONE, "learned latents attend to all tokens"),
    "attention_pool.AttentionPoolPrr": (_ONE, "all tokens attend, but only the class token is read; by rule: averaged"),
    "attention_pool2d.AttentionPool2d": (_ONE, "all tokens attend, but only the first is read; by rule: unpooled"),
    "attention_pool2d.RotAttentionPool2d": (_ONE, "all tokens attend, but only the first is read; by rule: unpooled"),
    "bottleneck_attn.BottleneckAttn": (_PATCHES, "the places of a map attend to each other; pooled afterwards"),
    "cbam.ChannelAttn": (_NOT, "a sigmoid gate of channels"),
    "cbam.LightChannelAttn": (_NOT, "a sigmoid gate of channels"),
    "cbam.LightSpatialAttn": (_NOT, "a sigmoid gate of places"),
    "cbam.SpatialAttn": (_NOT, "a sigmoid gate of places"),
    "coord_attn.CoordAttn": (_NOT, "a gate of rows and columns"),
    "coord_attn.EfficientLocalAttn": (_NOT, "a gate of rows and columns"),
    "coord_attn.SimpleCoordAttn": (_NOT, "a gate of rows and columns"),
    "coord_attn.StripAttn": (_NOT, "a gate from strips of convolutions"),
    "diff_attention.DiffAttention": (_PATCHES, "all tokens attend to all tokens, with two softmaxes subtracted"),
    "global_context.GlobalContext": (_NOT, "a softmax of one convolution pools the map"),
    "halo_attn.HaloAttn": (_POOLED, "the places of a block attend to the block and a halo around it"),
    "lambda_layer.LambdaLayer": (_NOT, "a softmax of the keys alone"),
    "ml_decoder.TransformerDecoderLayerOptimal": (_ONE, "class queries attend to the places of a map"),
    "non_local_attn.BatNonLocalAttn": (_HOLDS, "holds BilinearAttnTransform"),
    "non_local_attn.BilinearAttnTransform": (_NOT, "sigmoids of pooled rows and columns, normalized"),
    "non_local_attn.NonLocalAttn": (_PATCHES, "the places of a map attend to each other"),
    "other_pool.SimPool1d": (_ONE, "the mean of all tokens attends to them"),
    "other_pool.SimPool2d": (_ONE, "the mean of a map attends to its places"),
    "selective_kernel.SelectiveKernelAttn": (_NOT, "a softmax over kernels"),
    "split_attn.RadixSoftmax": (_NOT, "a softmax over splits of the channels"),
    "split_attn.SplitAttn": (_HOLDS, "holds RadixSoftmax"),
    # timm/models
    "_efficientnet_blocks.MobileAttention": (_HOLDS, "holds MultiQueryAttention2d or Attention2d"),
    "beit.Attention": (_PATCHES, "all tokens attend to all tokens, with relative biases"),
    "byobnet.SelfAttnBlock": (_HOLDS, "holds BottleneckAttn, HaloAttn or LambdaLayer"),
    "cait.ClassAttn": (_ONE, "the class token attends to all tokens"),
    "cait.LayerScaleBlockClassAttn": (_HOLDS, "holds ClassAttn"),
    "cait.TalkingHeadAttn": (_PATCHES, "all patches attend to all patches, with heads mixed around the softmax"),
    "coat.FactorAttnConvRelPosEnc": (_NOT, "a softmax of the keys alone, over all tokens"),
    "convit.GPSA": (_PATCHES, "all patches attend to all patches, with content and position combined"),
    "convit.MHSA": (_PATCHES, "all tokens attend to all tokens"),
    "cpubone.ConvAttention": (_PATCHES, "queries and keys come from one strided convolution"),
    "crossvit.CrossAttention": (_ONE, "the class token of a branch attends to patches of the other"),
    "crossvit.CrossAttentionBlock": (_HOLDS, "holds CrossAttention"),
    "csatv2.SpatialAttention": (_HOLDS, "holds SpatialTransformerBlock"),
    "csatv2.SpatialTransformerBlock": (
        _OTHER,
        "q and k are (images, places): images of the batch attend to each other",
    ),
    "davit.ChannelAttention": (_CHANNELS, "k.T @ v: channels attend to channels"),
    "davit.ChannelAttentionV2": (_CHANNELS, "q.T @ k: channels attend to channels"),
    "davit.WindowAttention": (_PATCHES, "the places of a window attend to each other"),
    "edgenext.CrossCovarianceAttn": (_CHANNELS, "q and k are transposed: channels attend to channels"),
    "efficientformer.Attention": (_PATCHES, "all patches attend to all patches, with biases"),
    "efficientformer_v2.Attention2d": (_PATCHES, "queries and keys come from one map, strided if `stride` is set"),
    "efficientformer_v2.Attention2dDownsample": (
        _POOLED,
        "queries of every second row and column attend to all places",
    ),
    "efficientvim.EfficientViM": (_NOT, "a softmax of the weights of its heads"),
    "efficientvim.EfficientViMDistilled": (_NOT, "a softmax of the weights of its heads"),
    "efficientvim.HSMSSD": (_NOT, "a softmax of a step size over places, in a state space model"),
    "efficientvit_mit.LiteMLA": (_NOT, "linear attention with a ReLU kernel"),
    "efficientvit_msra.CascadedGroupAttention": (
        _PATCHES,
        "the places of a window attend to each other, head after head",
    ),
    "efficientvit_msra.LocalWindowAttention": (_HOLDS, "holds CascadedGroupAttention"),
    "eva.EvaAttention": (_PATCHES, "all tokens attend to all tokens, with rotary positions"),
    "fastvit.Attention": (_PATCHES, "the places of a map attend to each other"),
    "fastvit.AttentionBlock": (_HOLDS, "holds Attention"),
    "gcvit.WindowAttentionGlobal": (
        _PATCHES,
        "the places of a window attend to each other; by rule: global queries over several windows, which timm repeats"
        " in another order than the windows, so that queries meet windows of other images",
    ),
    "gemma4_vit.Gemma4Attention": (_PATCHES, "all tokens attend to all tokens, with rotary positions"),
    "hiera.MaskUnitAttention": (_POOLED, "the places of a mask unit or image; queries are pooled where q_stride > 1"),
    "hieradet_sam2.MultiScaleAttention": (_POOLED, "the places of a window or image; queries are pooled with q_pool"),
    "iformer.SHMA": (_PATCHES, "the places of a map or window attend to each other, gated afterwards"),
    "levit.Attention": (_PATCHES, "all patches attend to all patches, with biases"),
    "levit.AttentionDownsample": (_POOLED, "queries of every second row and column attend to all places"),
    "lowformer.ConvAttention": (_PATCHES, "queries and keys come from one strided convolution"),
    "maxxvit.Attention2d": (_PATCHES, "the places of a map, block or grid attend to each other"),
    "maxxvit.AttentionCl": (_PATCHES, "the places of a map, block or grid attend to each other"),
    "maxxvit.ParallelPartitionAttention": (_HOLDS, "holds AttentionCl twice"),
    "maxxvit.PartitionAttention2d": (_HOLDS, "holds Attention2d"),
    "maxxvit.PartitionAttentionCl": (_HOLDS, "holds AttentionCl"),
    "metaformer.Attention": (_PATCHES, "the places of a map attend to each other"),
    "mobilevit.LinearSelfAttention": (_NOT, "a softmax of one channel over patches"),
    "mvitv2.MultiScaleAttention": (_POOLED, "queries and keys are pooled by strides that differ from layer to layer"),
    "mvitv2.MultiScaleAttentionPoolFirst": (_POOLED, "queries and keys are pooled before they are projected"),
    "nest.Attention": (_PATCHES, "the places of a block attend to each other"),
    "nextvit.ConvAttention": (_NOT, "a grouped convolution"),
    "nextvit.EfficientAttention": (
        _POOLED,
        "keys are means of sr_ratio ** 2 tokens that follow each other in the flattened map, across the ends of rows",
    ),
    "pvt_v2.Attention": (_POOLED, "keys come from a strided convolution or from pooling to 7 x 7"),
    "shvit.SHSA": (_PATCHES, "the places of a map attend to each other, for a part of the channels"),
    "swiftformer.EfficientAdditiveAttention": (_NOT, "normalized products with one learned vector"),
    "swin_transformer.WindowAttention": (_PATCHES, "the places of a window attend to each other"),
    "swin_transformer_v2.WindowAttention": (_PATCHES, "the places of a window attend to each other, by cosine"),
    "swin_transformer_v2_cr.WindowMultiHeadAttention": (
        _PATCHES,
        "the places of a window attend to each other, by cosine",
    ),
    "tiny_vit.Attention": (_PATCHES, "the places of a window attend to each other"),
    "tnt.Attention": (_PATCHES, "patches attend to patches, and the pixels of a patch to each other"),
    "twins.GlobalSubSampleAttn": (_POOLED, "keys come from a strided convolution"),
    "twins.LocallyGroupedAttn": (_PATCHES, "the places of a window attend to each other"),
    "visformer.Attention": (_PATCHES, "the places of a map attend to each other"),
    "vision_transformer.DiffParallelScalingBlock": (
        _PATCHES,
        "all tokens attend to all tokens, two softmaxes subtracted",
    ),
    "vision_transformer.ParallelScalingBlock": (_PATCHES, "all tokens attend to all tokens, beside an MLP"),
    "vision_transformer_relpos.RelPosAttention": (_PATCHES, "all tokens attend to all tokens, with relative biases"),
    "vision_transformer_sam.Attention": (_PATCHES, "the places of a window or map attend to each other"),
    "volo.Attention": (_PATCHES, "the places of a map attend to each other"),
    "volo.ClassAttention": (_ONE, "the class token attends to all tokens"),
    "volo.OutlookAttention": (_NOT, "weights are projected from one place: there are no keys"),
    "xcit.ClassAttentionBlock": (_HOLDS, "holds cait.ClassAttn"),
    "xcit.XCA": (_CHANNELS, "q and k are transposed: channels attend to channels"),
}


def _with_global_queries(module: nn.Module, parent: nn.Module) -> AttendsOver:
    return _OTHER if module.use_global and int(parent.num_windows) > 1 else _PATCHES  # type: ignore[arg-type]


# Rules by layer, given a module and the one that holds it.
_RULES: dict[str, Callable[[nn.Module, nn.Module], AttendsOver]] = {
    "attention_pool.AttentionPoolPrr": lambda module, _: _PATCHES if module.pool == "avg" else _ONE,
    "attention_pool2d.AttentionPool2d": lambda module, _: _ONE if module.pool_type == "token" else _PATCHES,
    "attention_pool2d.RotAttentionPool2d": lambda module, _: _ONE if module.pool_type == "token" else _PATCHES,
    "gcvit.WindowAttentionGlobal": _with_global_queries,
}


def class_name(module: nn.Module) -> str:
    """Returns file and name of a module's class, such as `vision_transformer.ParallelScalingBlock`."""
    cls = type(module)
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def attends_over(module: nn.Module, parent: nn.Module) -> AttendsOver | None:
    """Returns what a module attends over; None if its class is not in the table.

    Args:
        module: of a timm model.
        parent: the module that holds it, which some rules look at.
    """
    name = class_name(module)
    if name not in TIMM_ATTENTION or not type(module).__module__.startswith("timm."):
        return None
    return _RULES[name](module, parent) if name in _RULES else TIMM_ATTENTION[name][0]


def spatial_layers(model: nn.Module) -> dict[str, str]:
    """Returns the class of each module of a timm model that the table calls spatial, by the module's name."""
    found = {}
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        if attends_over(module, parent) in SPATIAL:
            found[name] = class_name(module)
    return found
