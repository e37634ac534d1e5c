"""How a prior meets q, k and v: one plain reference, and fast paths that are tested against it."""

from vicinal.attention.compile_op import operator_arguments, recomputed_attention
from vicinal.attention.dispatch import attend
from vicinal.attention.per_image import ImageGroup, PriorPerImage, ordered_mask
from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.reference import attend_plain, attention_weights

__all__ = [
    "ImageGroup",
    "PlacedPrior",
    "PriorPerImage",
    "attend",
    "attend_plain",
    "attention_weights",
    "operator_arguments",
    "ordered_mask",
    "recomputed_attention",
]
