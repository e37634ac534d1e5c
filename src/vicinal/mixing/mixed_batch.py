"""A batch whose images are mixed, and the soft labels that it gets once it is known by how much."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["MixedBatch"]


@dataclass(frozen=True)
class MixedBatch:
    """A batch mixed with itself in reverse order; made by `Mixing`."""

    images: Tensor
    """`(batch, channels, height, width)`."""
    labels: Tensor
    """`(batch,)`."""
    other_labels: Tensor
    """`(batch,)`, of the image that was mixed in."""
    share: Tensor
    """`(batch,)`, how much of each image is the other one: of its area, or of its brightness."""
    mask: Tensor | None
    """`(batch, height, width)`, True where the other image was pasted in; None where no image of the batch was cut."""
    classes: int
    smoothing: float

    def targets(self, share: Tensor | None = None) -> Tensor:
        """Soft labels `(batch, classes)`, smoothed as in timm: by the share given, or by area."""
        weight = (self.share if share is None else share)[:, None]
        low = self.smoothing / self.classes
        high = 1 - self.smoothing + low
        own, other = (
            weight.new_full((len(labels), self.classes), low).scatter_(1, labels.long()[:, None], high)
            for labels in (self.labels, self.other_labels)
        )
        return torch.lerp(own, other, weight)

    def pieces(self, number: int) -> list["MixedBatch"]:
        """The batch cut into that many, as even as can be."""
        masks = [None] * number if self.mask is None else self.mask.tensor_split(number)
        tensors = (self.images, self.labels, self.other_labels, self.share)
        return [
            replace(self, images=images, labels=labels, other_labels=other_labels, share=share, mask=mask)
            for mask, images, labels, other_labels, share in zip(
                masks, *(tensor.tensor_split(number) for tensor in tensors), strict=True
            )
        ]
