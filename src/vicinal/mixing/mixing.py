"""Mixed batches and their soft labels: timm's Mixup and CutMix, with draws that a resumed run repeats."""

import numpy as np
from torch import Tensor

from vicinal._torchvision import ensure_torchvision
from vicinal.errors import unknown

ensure_torchvision()  # before timm
from timm.data.mixup import Mixup, mixup_target  # noqa: E402

__all__ = ["MODES", "Mixing"]

MODES = {"none": (0.0, 0.0), "mixup": (1.0, 0.0), "cutmix": (0.0, 1.0), "both": (1.0, 1.0)}
"""The alphas of Mixup's and CutMix's Beta distributions."""


class Mixing(Mixup):
    """Mixes a batch with itself in reverse order, and its labels likewise.

    >>> import torch
    >>> from vicinal.mixing import Mixing
    >>> mix = Mixing("cutmix", classes=10, prob=1.0, smoothing=0.0)
    >>> images, targets = mix(torch.randn(5, 3, 32, 32), torch.arange(5), seed=0)
    >>> targets.shape, targets.sum(1).tolist()
    (torch.Size([5, 10]), [1.0, 1.0, 1.0, 1.0, 1.0])

    Args:
        mode: `none`, `mixup`, `cutmix`, or `both`: half each.
        classes: number of classes.
        prob: share of the batches that are mixed.
        smoothing: label smoothing.
    """

    def __init__(self, mode: str, *, classes: int, prob: float = 0.5, smoothing: float = 0.1) -> None:
        if mode not in MODES:
            raise unknown("--mix", mode, MODES)
        mixup_alpha, cutmix_alpha = MODES[mode]
        super().__init__(mixup_alpha, cutmix_alpha, prob=prob, label_smoothing=smoothing, num_classes=classes)
        self.mixup_enabled = mode != "none"

    def __call__(self, images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Images, which are changed in place, and targets `(batch, classes)`; the same seed gives the same mix."""
        np.random.seed(seed % 2**32)  # timm draws from numpy's global generator
        share = self._mix_batch(images)
        return images, mixup_target(labels, self.num_classes, share, self.label_smoothing)
