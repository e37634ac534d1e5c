"""A batch of mixed images, and its soft labels."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["MixedBatch"]


@dataclass(frozen=True)
class MixedBatch:
    """A batch in which each image is mixed with another one; made by `Mixing`."""

    images: Tensor
    """Mixed images, `(batch, channels, height, width)`."""
    labels: Tensor
    """Class indices, `(batch,)`."""
    other_labels: Tensor
    """Class indices of the images mixed in, `(batch,)`."""
    share: Tensor
    """Weight of the image mixed in, `(batch,)`: fraction of the area for CutMix, of the pixel values for Mixup."""
    mask: Tensor | None
    """CutMix boxes, bool `(batch, height, width)`, True inside; None if CutMix was used for no image."""
    classes: int
    """Number of classes."""
    smoothing: float
    """Label smoothing."""

    def targets(self, share: Tensor | None = None) -> Tensor:
        """Returns soft labels, `(batch, classes)`, smoothed as in timm.

        Args:
            share: weights of the labels of the images mixed in, `(batch,)`; `self.share` by default.
        """
        weight = (self.share if share is None else share)[:, None]
        low = self.smoothing / self.classes
        high = 1 - self.smoothing + low
        own, other = (
            weight.new_full((len(labels), self.classes), low).scatter_(1, labels.long()[:, None], high)
            for labels in (self.labels, self.other_labels)
        )
        return torch.lerp(own, other, weight)

    def pieces(self, number: int) -> list["MixedBatch"]:
        """Returns the batch split into `number` batches, whose sizes differ by at most 1."""
        masks = [None] * number if self.mask is None else self.mask.tensor_split(number)
        tensors = (self.images, self.labels, self.other_labels, self.share)
        return [
            replace(self, images=images, labels=labels, other_labels=other_labels, share=share, mask=mask)
            for mask, images, labels, other_labels, share in zip(
                masks, *(tensor.tensor_split(number) for tensor in tensors), strict=True
            )
        ]
