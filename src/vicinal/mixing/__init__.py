"""Batches of mixed images and their soft labels."""

from vicinal.mixing.batches import MixedBatch
from vicinal.mixing.mixing import MODES, Mixing, Mode
from vicinal.mixing.transmix import VARIANTS, TransMix

__all__ = ["MODES", "VARIANTS", "MixedBatch", "Mixing", "Mode", "TransMix"]
