"""Flags that choose images, shared by the verbs of `vicinal analyze` that run models on images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vicinal.cli._models import Device

if TYPE_CHECKING:
    from vicinal.analysis.image_selection import ImageSelection

__all__ = ["ImageArgs"]


@dataclass
class ImageArgs:
    """Images to run the models on."""

    images: str | None = None
    """A folder of images, an image, or one of `vicinal datasets`, such as folder:PATH, whose test split is used; by
    default the run's own dataset."""
    dataset: str | None = None
    """Where the run's own dataset is now, if it was moved."""
    data_dir: Path | None = None
    """Folder of a Parquet copy of the dataset, to be used instead of the Hub; by default that of the run."""
    count: int = 64
    """Number of images to measure on."""
    batch_size: int = 32
    """Number of images in a batch, which bounds the memory."""
    seed: int = 0
    """Seed of the random choice of images, and of random positions."""
    device: Device = "auto"
    """auto: a GPU if there is one."""

    def select(self) -> "ImageSelection":
        """Returns the selection of images; raises VicinalError if a number is out of range."""
        from vicinal.analysis.image_selection import ImageSelection

        return ImageSelection(self.images, self.data_dir, self.count, self.batch_size, self.seed, self.dataset)
