"""The named datasets: their place on the Hub, sizes, channel statistics and augmentation policy.

A dataset's page is https://huggingface.co/datasets/ID. `pytest -m network` compares this table with what the Hub says.
"""

from dataclasses import dataclass, field
from typing import Literal

from vicinal.deprecation import warn_renamed

__all__ = ["DIGITS", "OWN_DATA", "SETS", "DatasetInfo", "HubDataset"]

Statistics = tuple[float, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """Image size, channel statistics and augmentation of a dataset. The defaults suit photographs."""

    size: int = 224
    """Height and width to train at, in pixels."""
    mean: Statistics = (0.485, 0.456, 0.406)
    """Mean of each channel, of values between 0 and 1."""
    std: Statistics = (0.229, 0.224, 0.225)
    """Standard deviation of each channel."""
    policy: Literal["cifar10", "svhn", "imagenet"] = "imagenet"
    """AutoAugment policy."""
    flip: bool = True
    """Whether a horizontal flip keeps the label."""


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hugging Face Hub."""

    id: str
    """Repository, such as `uoft-cs/cifar10`."""
    classes: int
    """Number of classes."""
    images: tuple[int, int]
    """Number of images for training and validation, and for testing."""
    info: DatasetInfo = field(default_factory=DatasetInfo)
    config: str | None = None
    """Configuration of the repository."""
    image: str = "image"
    """Column of images."""
    label: str = "label"
    """Column of labels."""
    train: str = "train"
    """Split to train on; `+` joins several."""
    test: str = "test"
    """Split to test on: the validation split if the test split has no labels."""

    @property
    def facts(self) -> DatasetInfo:
        """Deprecated name of `info`."""
        warn_renamed("HubDataset.facts", "HubDataset.info")
        return self.info

    @property
    def page(self) -> str:
        """Address of the dataset's page."""
        return f"https://huggingface.co/datasets/{self.id}"


CIFAR10 = DatasetInfo(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "cifar10")
CIFAR100 = DatasetInfo(32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "cifar10")
SVHN = DatasetInfo(32, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), "svhn", flip=False)
TINY = DatasetInfo(64, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
OWN_DATA = DatasetInfo(size=64)
"""Of a user's own data: a size at which small models learn in minutes."""
DIGITS = DatasetInfo(8, (0.3053,), (0.3760,), "svhn", flip=False)
"""scikit-learn's 1,797 digits of 8 x 8 pixels, which need no download."""

SETS = {
    "cifar10": HubDataset("uoft-cs/cifar10", 10, (50_000, 10_000), CIFAR10, config="plain_text", image="img"),
    "cifar100": HubDataset(
        "uoft-cs/cifar100", 100, (50_000, 10_000), CIFAR100, config="cifar100", image="img", label="fine_label"
    ),
    "svhn": HubDataset("ufldl-stanford/svhn", 10, (73_257, 26_032), SVHN, config="cropped_digits"),
    "tiny-imagenet": HubDataset("zh-plus/tiny-imagenet", 200, (100_000, 10_000), TINY, test="valid"),
    "oxford-iiit-pet": HubDataset("timm/oxford-iiit-pet", 37, (3_680, 3_669)),
    "caltech101": HubDataset("dpdl-benchmark/caltech101", 102, (3_059, 6_085)),  # 101 objects and the background
    "stanford-cars": HubDataset("tanganke/stanford_cars", 196, (8_144, 8_041)),
    "stanford-dogs": HubDataset("maurice-fp/stanford-dogs", 120, (12_000, 8_580)),
    "flowers102": HubDataset("dpdl-benchmark/oxford_flowers102", 102, (2_040, 6_149), train="train+validation"),
    "imagenet-1k": HubDataset("ILSVRC/imagenet-1k", 1_000, (1_281_167, 50_000), test="validation"),
}
