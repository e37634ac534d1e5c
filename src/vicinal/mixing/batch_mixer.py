"""Mixed batches and their soft labels: timm's Mixup and CutMix, and TransMix.

timm's `Mixup` hides its box, changes images in place and takes even batches only. Here a batch says what was done to
it, and labels come after the forward pass, since TransMix wants to see the attention first.
"""

import weakref
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal._torchvision import ensure_torchvision
from vicinal.data.rng import own_randomness
from vicinal.errors import VicinalError, unknown
from vicinal.inspection import PatchAttention, patch_attention
from vicinal.mixing.mixed_batch import MixedBatch
from vicinal.mixing.transmix import TransMix

ensure_torchvision()  # before timm
from timm.data.mixup import Mixup  # noqa: E402

__all__ = ["MODES", "Mixing", "Mode"]

Mode = Literal["none", "mixup", "cutmix", "both", "transmix"]
MODES: dict[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "mixup": (1.0, 0.0),
    "cutmix": (0.0, 1.0),
    "both": (1.0, 1.0),
    "transmix": (0.0, 1.0),
}
"""The alphas of Mixup's and CutMix's Beta distributions."""


class Mixing(Mixup):
    """Mixes a batch with itself in reverse order, and makes its labels once the model has seen it.

    >>> import torch, vicinal
    >>> model = vicinal.create_model("vit-micro", img_size=32)
    >>> mixing = vicinal.Mixing("transmix", classes=10, model=model, prob=1.0)
    >>> batch = mixing(torch.randn(5, 3, 32, 32), torch.arange(5), seed=0)
    >>> with mixing:  # reads the attention; nothing happens here in the other modes
    ...     logits = model(batch.images)
    >>> loss = torch.nn.functional.cross_entropy(logits, mixing.targets(batch))

    Args:
        mode: `none`, `mixup`, `cutmix`, `both`: half each, or `transmix`: CutMix labelled by attention.
        classes: number of classes.
        prob: share of the batches, or with `per_example` of the images, that are mixed.
        smoothing: label smoothing.
        mixup_share: in `transmix`, the share of what is mixed that is Mixup.
        per_example: a box and a share for every image, instead of one for the batch.
        model: for `transmix`, the model that is trained; or what `vicinal.inspection.patch_attention` made of it, which
            says which attention to read.
        transmix: how attention becomes a share; the paper's way by default.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        classes: int,
        prob: float = 0.5,
        smoothing: float = 0.1,
        mixup_share: float = 0.0,
        per_example: bool = False,
        model: nn.Module | PatchAttention | None = None,
        transmix: TransMix | None = None,
    ) -> None:
        if mode not in MODES:
            raise unknown("--mix", mode, MODES)
        if not isinstance(classes, (int, np.integer)) or classes < 1:
            raise VicinalError(f"classes is a whole number, at least 1, given {classes!r}")
        for name, given in {"prob": prob, "smoothing": smoothing, "mixup_share": mixup_share}.items():
            if not 0 <= given <= 1:
                raise VicinalError(f"{name} is a share from 0 to 1, given {given}")
        mixup_alpha, cutmix_alpha = MODES[mode]
        switch = 0.5
        if mode == "transmix" and mixup_share:
            mixup_alpha, switch = 1.0, 1 - mixup_share
        super().__init__(mixup_alpha, cutmix_alpha, None, prob, switch, label_smoothing=smoothing, num_classes=classes)
        self.mixup_enabled = mode != "none"
        self.mode = mode  # timm's is `batch` or `elem`, which `per_example` says here
        self.per_example = per_example
        self.transmix = transmix or TransMix()
        self.attention = _attention_of(model) if mode == "transmix" else None
        self._read_for: weakref.ref[MixedBatch] | None = None

    def __call__(self, images: Tensor, labels: Tensor, seed: int) -> MixedBatch:
        """The images given stay as they are; the same seed gives the same mix.

        Args:
            images: `(batch, channels, height, width)`, in floating point.
            labels: `(batch,)`, whole numbers below the number of classes.
            seed: of all that is drawn.
        """
        self._check(images, labels)
        with own_randomness():  # timm draws from numpy's global generator
            np.random.seed(seed % 2**32)
            share, cut, mask = self._draw(len(images), images.shape[-2], images.shape[-1])
        device, other = images.device, images.flip(0)
        blended, mixed = np.where(cut, 0, share), images
        if blended.any():
            mixed = torch.lerp(mixed, other, torch.from_numpy(blended).to(images)[:, None, None, None])
        inside = None
        if mask is not None:
            inside = torch.from_numpy(mask).to(device).expand(len(images), -1, -1)
            mixed = torch.where(inside[:, None], other, mixed)
        shares = torch.from_numpy(share).to(device, torch.promote_types(images.dtype, torch.float32))
        return MixedBatch(mixed, labels, labels.flip(0), shares, inside, self.num_classes, self.label_smoothing)

    def __enter__(self) -> Self:
        if self.attention is not None:
            self.attention.__enter__()
        self._read_for = None
        return self

    def __exit__(self, *error: Any) -> None:
        if self.attention is not None:
            self.attention.__exit__(*error)

    def targets(self, batch: MixedBatch) -> Tensor:
        """Soft labels `(batch, classes)` of the batch that the model has just seen inside `with`.

        The attention of a run belongs to the first batch that asks for its labels.
        """
        if self.attention is None:
            return batch.targets()
        if self._read_for is None:
            self._read_for = weakref.ref(batch)  # so that its images are not kept beyond the step
        if batch.mask is None:
            return batch.targets()
        attention = self.attention.map
        if self._read_for() is not batch:
            raise VicinalError(
                "the attention that was read is that of another batch, which has its labels already: "
                "run the model on this one inside `with mixing`, and then ask for its targets"
            )
        by_attention = self.transmix(attention, batch.mask)
        cut = batch.mask.flatten(1).any(1)  # the others are whole, or blended by Mixup
        return batch.targets(torch.where(cut, by_attention.to(batch.share), batch.share))

    def _check(self, images: Tensor, labels: Tensor) -> None:
        if images.dim() != 4 or len(images) == 0 or labels.shape != images.shape[:1]:
            raise VicinalError(
                "Mixing takes images (batch, channels, height, width), one or more, and as many labels (batch,), "
                f"given {tuple(images.shape)} and {tuple(labels.shape)}"
            )
        if not images.is_floating_point():
            raise VicinalError(f"Mixing takes images in floating point, given {images.dtype}: scale them before")
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise VicinalError(f"Mixing takes labels that are numbers of classes, such as int64, given {labels.dtype}")
        if labels.device.type != "cpu":  # a look at them would make every step wait for the GPU
            return
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            raise VicinalError(
                f"labels are numbers from 0 to {self.num_classes - 1} for classes={self.num_classes}, given {wrong[0]}"
            )

    def _draw(
        self, count: int, height: int, width: int
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_] | None]:
        """How much of each image becomes the other one, which of them are cut, and where: `(count or 1, h, w)`."""
        kept, cut = self._params_per_elem(count) if self.per_example else map(np.atleast_1d, self._params_per_batch())
        share, mask = 1.0 - kept.astype(np.float64), None
        if cut.any():
            mask = boxes(share, height, width) & cut[:, None, None]
            share = np.where(cut, mask.mean((1, 2)), share)
        return share.repeat(count // len(share)), cut.repeat(count // len(cut)), mask


def boxes(areas: NDArray[np.float64], height: int, width: int) -> NDArray[np.bool_]:
    """Boxes of these shares of an image and of its aspect, around any pixel and cut off at the borders: `(n, h, w)`.

    timm's `rand_bbox`, for many at once.
    """
    inside = []
    for axis, side in enumerate((height, width), start=1):
        extent = (side * np.sqrt(areas)).astype(int)
        centre = np.random.randint(0, side, size=len(areas))
        low, high = (np.expand_dims(edge, (1, 2)) for edge in (centre - extent // 2, centre + (extent + 1) // 2))
        place = np.expand_dims(np.arange(side), (0, 3 - axis))
        inside.append((place >= low) & (place < high))
    return inside[0] & inside[1]


def _attention_of(model: nn.Module | PatchAttention | None) -> PatchAttention:
    others = "`none`, `mixup`, `cutmix` and `both` work with any model"
    if model is None:
        raise VicinalError(f"transmix reads the attention of the model that is trained; give model=. {others}")
    if isinstance(model, PatchAttention):
        return model
    try:
        return patch_attention(model)
    except VicinalError as error:
        raise VicinalError(f"transmix has no attention to go by: {error}. {others}") from None
