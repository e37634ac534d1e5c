"""The sets of images that have a name: where they are on the Hub, and what is known of them.

A set's page is https://huggingface.co/datasets/ID. `pytest -m network` compares this table with what the Hub says.
"""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["DIGITS", "SETS", "Facts", "HubSet"]

Statistics = tuple[float, ...]


@dataclass(frozen=True)
class Facts:
    """What training needs to know of a set, besides its images. The defaults are those of photographs."""

    size: int = 224
    """Pixels a side to train at."""
    mean: Statistics = (0.485, 0.456, 0.406)
    std: Statistics = (0.229, 0.224, 0.225)
    policy: Literal["cifar10", "svhn", "imagenet"] = "imagenet"
    """Of AutoAugment."""
    flip: bool = True
    """Whether a mirrored image means the same."""


@dataclass(frozen=True)
class HubSet:
    """A set on the Hugging Face Hub."""

    id: str
    classes: int
    images: tuple[int, int]
    """For training and validation, and for testing."""
    facts: Facts = field(default_factory=Facts)
    config: str | None = None
    image: str = "image"
    """The column of images."""
    label: str = "label"
    """The column of labels."""
    train: str = "train"
    """The split to train on; several are joined by +."""
    test: str = "test"
    """The split that test figures come from: the validation split, where the test split has no labels."""

    @property
    def page(self) -> str:
        """Where to read about it."""
        return f"https://huggingface.co/datasets/{self.id}"


CIFAR10 = Facts(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "cifar10")
CIFAR100 = Facts(32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), "cifar10")
SVHN = Facts(32, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), "svhn", flip=False)
TINY = Facts(64, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
DIGITS = Facts(8, (0.3053,), (0.3760,), "svhn", flip=False)
"""Of scikit-learn's 1,797 digits of 8 x 8 pixels, which need no download."""

SETS = {
    "cifar10": HubSet("uoft-cs/cifar10", 10, (50_000, 10_000), CIFAR10, config="plain_text", image="img"),
    "cifar100": HubSet(
        "uoft-cs/cifar100", 100, (50_000, 10_000), CIFAR100, config="cifar100", image="img", label="fine_label"
    ),
    "svhn": HubSet("ufldl-stanford/svhn", 10, (73_257, 26_032), SVHN, config="cropped_digits"),
    "tiny-imagenet": HubSet("zh-plus/tiny-imagenet", 200, (100_000, 10_000), TINY, test="valid"),
    "oxford-iiit-pet": HubSet("timm/oxford-iiit-pet", 37, (3_680, 3_669)),
    "caltech101": HubSet("dpdl-benchmark/caltech101", 102, (3_059, 6_085)),  # 101 objects and the background
    "stanford-cars": HubSet("tanganke/stanford_cars", 196, (8_144, 8_041)),
    "stanford-dogs": HubSet("maurice-fp/stanford-dogs", 120, (12_000, 8_580)),
    "flowers102": HubSet("dpdl-benchmark/oxford_flowers102", 102, (2_040, 6_149), train="train+validation"),
    "imagenet-1k": HubSet("ILSVRC/imagenet-1k", 1_000, (1_281_167, 50_000), test="validation"),
}
