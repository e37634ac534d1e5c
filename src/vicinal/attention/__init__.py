"""How a prior meets q, k and v: one plain reference, and fast paths that are tested against it."""

from vicinal.attention.dispatch import attend
from vicinal.attention.given_prior import GivenPrior
from vicinal.attention.packed import attend_packed
from vicinal.attention.per_image import ImageGroup, PriorPerImage, ordered_mask
from vicinal.attention.placed_prior import PlacedPrior
from vicinal.attention.reference import attend_plain, attention_weights

__all__ = [
    "GivenPrior",
    "ImageGroup",
    "PlacedPrior",
    "PriorPerImage",
    "attend",
    "attend_packed",
    "attend_plain",
    "attention_weights",
    "ordered_mask",
]
