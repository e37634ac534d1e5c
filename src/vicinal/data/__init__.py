"""From a name or a folder to batches: sources, splits, a cache of decoded pictures, transforms, loading."""

from vicinal._torchvision import ensure_torchvision

ensure_torchvision()  # before any of these imports torchvision or timm

from vicinal.data.catalog import SETS, Facts  # noqa: E402
from vicinal.data.dataloader import Loader  # noqa: E402
from vicinal.data.decode import decode  # noqa: E402
from vicinal.data.image_dataset import Pictures, Source  # noqa: E402
from vicinal.data.open_dataset import open_source  # noqa: E402
from vicinal.data.rng import derive  # noqa: E402
from vicinal.data.splits import Splits, split  # noqa: E402
from vicinal.data.transformed_images import Images  # noqa: E402
from vicinal.data.transforms import Augmentation, Preprocessing, evaluation_tensor  # noqa: E402

__all__ = [
    "SETS",
    "Augmentation",
    "Facts",
    "Images",
    "Loader",
    "Pictures",
    "Preprocessing",
    "Source",
    "Splits",
    "decode",
    "derive",
    "evaluation_tensor",
    "open_source",
    "split",
]
