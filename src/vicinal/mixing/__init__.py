"""Mixed batches and soft labels: Mixup, CutMix, TransMix."""

from vicinal.mixing.batch_mixer import MODES, Mixing, Mode
from vicinal.mixing.mixed_batch import MixedBatch
from vicinal.mixing.transmix import VARIANTS, TransMix

__all__ = ["MODES", "VARIANTS", "MixedBatch", "Mixing", "Mode", "TransMix"]
