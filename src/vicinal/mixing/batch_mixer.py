"""`Mixing`: Mixup, CutMix and TransMix for batches, with soft labels.

timm's `Mixup` does not return its box, changes images in place and needs even batch sizes. `Mixing` returns a
`MixedBatch` with the box, and computes soft labels after the forward pass, because TransMix needs the attention.
"""

import weakref
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.mixup import Mixup
from torch import Tensor, nn

from vicinal.data.rng import preserve_rng
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection import PatchAttention, patch_attention
from vicinal.mixing.mixed_batch import MixedBatch
from vicinal.mixing.transmix import TransMix

__all__ = ["MODES", "Mixing", "Mode"]

Mode = Literal["none", "mixup", "cutmix", "both", "transmix"]
MODES: dict[str, tuple[bool, bool]] = {
    "none": (False, False),
    "mixup": (True, False),
    "cutmix": (False, True),
    "both": (True, True),
    "transmix": (False, True),
}
"""Whether a mode uses Mixup, and whether CutMix."""


class Mixing(Mixup):
    """Mixes each image of a batch with another one, and computes soft labels after the forward pass.

    >>> import torch, vicinal
    >>> model = vicinal.create_model("vit-micro", img_size=32)
    >>> mixing = vicinal.Mixing("transmix", classes=10, model=model, prob=1.0)
    >>> batch = mixing(torch.randn(5, 3, 32, 32), torch.arange(5), seed=0)
    >>> with mixing:  # records the attention; does nothing in other modes
    ...     logits = model(batch.images)
    >>> loss = torch.nn.functional.cross_entropy(logits, mixing.targets(batch))

    Args:
        mode: `none`; `mixup`; `cutmix`; `both`, Mixup or CutMix with equal probability; or `transmix`, CutMix with
            labels weighted by attention.
        classes: number of classes.
        prob: probability that a batch is mixed, or with `per_example` an image.
        smoothing: label smoothing.
        mixup_share: in mode `transmix`, the fraction of mixed batches or images that use Mixup.
        per_example: draw a box and a weight for every image, instead of one for the batch.
        model: for `transmix`, the model in training; or a `vicinal.inspection.PatchAttention` of it, which determines
            the attention layer that is recorded.
        transmix: computes label weights from attention; `TransMix()` by default.
        partner: `reversed`, image i is mixed with image B-1-i; or `random`, with image i of a random permutation.
        mixup_alpha: parameter of the Beta distribution of Mixup.
        cutmix_alpha: parameter of the Beta distribution of CutMix.

    Raises:
        VicinalError: an argument is out of range, or the attention of `model` cannot be recorded.
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
        partner: Literal["reversed", "random"] = "reversed",
        mixup_alpha: float = 1.0,
        cutmix_alpha: float = 1.0,
    ) -> None:
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
        if not isinstance(classes, (int, np.integer)) or classes < 1:
            raise VicinalError(f"classes must be a whole number >= 1, got {classes!r}")
        for name, value in {"prob": prob, "smoothing": smoothing, "mixup_share": mixup_share}.items():
            if not 0 <= value <= 1:
                raise VicinalError(f"{name} must be from 0 to 1, got {value}")
        for name, value in {"mixup_alpha": mixup_alpha, "cutmix_alpha": cutmix_alpha}.items():
            if not value > 0:
                raise VicinalError(f"{name} must be above 0, got {value}")
        if partner not in ("reversed", "random"):
            raise unknown_name("partner", partner, ("reversed", "random"))
        self.partner = partner
        uses_mixup, uses_cutmix = MODES[mode]
        switch = 0.5
        if mode == "transmix" and mixup_share:
            uses_mixup, switch = True, 1 - mixup_share
        alphas = mixup_alpha * uses_mixup, cutmix_alpha * uses_cutmix
        super().__init__(*alphas, None, prob, switch, label_smoothing=smoothing, num_classes=classes)
        self.mixup_enabled = mode != "none"
        self.mode = mode  # overrides timm's `mode` (`batch` or `elem`), which is `per_example` here
        self.per_example = per_example
        self.transmix = transmix or TransMix()
        self.attention = _make_recorder(model) if mode == "transmix" else None
        self._recorded_batch: weakref.ref[MixedBatch] | None = None

    def __call__(self, images: Tensor, labels: Tensor, seed: int) -> MixedBatch:
        """Returns the mixed batch; `images` stays unchanged.

        Args:
            images: floating point, `(batch, channels, height, width)`.
            labels: class indices, `(batch,)`.
            seed: the same seed draws the same mix.

        Raises:
            VicinalError: a shape, dtype or label is wrong.
        """
        self._check(images, labels)
        with preserve_rng():  # timm draws from numpy's global generator
            np.random.seed(seed % 2**32)
            share, cut, mask = self._draw(len(images), images.shape[-2], images.shape[-1])
            order = np.random.permutation(len(images)) if self.partner == "random" else np.arange(len(images))[::-1]
        device, partners = images.device, torch.from_numpy(order.copy())
        other, other_labels = images[partners.to(device)], labels[partners.to(labels.device)]
        blended, mixed = np.where(cut, 0, share), images
        if blended.any():
            mixed = torch.lerp(mixed, other, torch.from_numpy(blended).to(images)[:, None, None, None])
        inside = None
        if mask is not None:
            inside = torch.from_numpy(mask).to(device).expand(len(images), -1, -1)
            mixed = torch.where(inside[:, None], other, mixed)
        shares = torch.from_numpy(share).to(device, torch.promote_types(images.dtype, torch.float32))
        return MixedBatch(mixed, labels, other_labels, shares, inside, self.num_classes, self.label_smoothing)

    def __enter__(self) -> Self:
        if self.attention is not None:
            self.attention.__enter__()
        self._recorded_batch = None
        return self

    def __exit__(self, *error: Any) -> None:
        if self.attention is not None:
            self.attention.__exit__(*error)

    def targets(self, batch: MixedBatch) -> Tensor:
        """Returns soft labels, `(batch, classes)`, after the model ran on the batch inside `with`.

        The recorded attention is consumed by the first batch passed here.

        Args:
            batch: as `Mixing` returned it.

        Raises:
            VicinalError: in mode `transmix`, the recorded attention was consumed by another batch.
        """
        if self.attention is None:
            return batch.targets()
        if self._recorded_batch is None:
            self._recorded_batch = weakref.ref(batch)  # does not keep the images alive after the step
        if batch.mask is None:
            return batch.targets()
        attention = self.attention.map
        if self._recorded_batch() is not batch:
            raise VicinalError(
                "the recorded attention was consumed by another batch; run the model on this batch inside "
                "`with mixing` before calling targets()"
            )
        by_attention = self.transmix(attention, batch.mask)
        cut = batch.mask.flatten(1).any(1)  # the other images are unmixed, or mixed by Mixup
        return batch.targets(torch.where(cut, by_attention.to(batch.share), batch.share))

    def _check(self, images: Tensor, labels: Tensor) -> None:
        if images.dim() != 4 or len(images) == 0 or labels.shape != images.shape[:1]:
            raise VicinalError(
                "images must be (batch, channels, height, width) with batch >= 1, and labels (batch,), "
                f"got {tuple(images.shape)} and {tuple(labels.shape)}"
            )
        if not images.is_floating_point():
            raise VicinalError(f"images must be floating point, got {images.dtype}; normalize them before mixing")
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise VicinalError(f"labels must be class indices of an integer dtype, got {labels.dtype}")
        if labels.device.type != "cpu":  # reading their values would synchronize with the GPU in every step
            return
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            raise VicinalError(
                f"labels must be from 0 to {self.num_classes - 1} for classes={self.num_classes}, got {wrong[0]}"
            )

    def _draw(
        self, count: int, height: int, width: int
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_] | None]:
        """Returns the random draws for a batch.

        Returns:
            The weight of the image mixed in, `(count,)`, whether CutMix is used, `(count,)`, and the boxes,
            `(count or 1, height, width)`, or None without CutMix.
        """
        kept, cut = self._params_per_elem(count) if self.per_example else map(np.atleast_1d, self._params_per_batch())
        share, mask = 1.0 - kept.astype(np.float64), None
        if cut.any():
            mask = boxes(share, height, width) & cut[:, None, None]
            share = np.where(cut, mask.mean((1, 2)), share)
        return share.repeat(count // len(share)), cut.repeat(count // len(cut)), mask


def boxes(areas: NDArray[np.float64], height: int, width: int) -> NDArray[np.bool_]:
    """Returns random boxes, bool `(n, height, width)`, True inside; timm's `rand_bbox` for n boxes at once.

    A box has the aspect ratio of the image, a center drawn from all pixels, and is clipped at the borders.

    Args:
        areas: fraction of the image that each box covers before clipping, `(n,)`.
        height: of the images.
        width: of the images.
    """
    inside = []
    for axis, side in enumerate((height, width), start=1):
        extent = (side * np.sqrt(areas)).astype(int)
        center = np.random.randint(0, side, size=len(areas))
        low, high = (np.expand_dims(edge, (1, 2)) for edge in (center - extent // 2, center + (extent + 1) // 2))
        position = np.expand_dims(np.arange(side), (0, 3 - axis))
        inside.append((position >= low) & (position < high))
    return inside[0] & inside[1]


def _make_recorder(model: nn.Module | PatchAttention | None) -> PatchAttention:
    others = "Modes none, mixup, cutmix and both work with any model"
    if model is None:
        raise VicinalError(f"mode transmix needs model=, the model in training. {others}")
    if isinstance(model, PatchAttention):
        return model
    try:
        return patch_attention(model)
    except VicinalError as error:
        raise VicinalError(f"mode transmix cannot record the attention of the model: {error}. {others}") from None
