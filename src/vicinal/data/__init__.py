"""From a name or a folder to batches: datasets, splits, a cache of decoded images, transforms, data loading."""

from vicinal._torchvision import ensure_torchvision

ensure_torchvision()  # before any of these imports torchvision or timm

from vicinal.data.catalog import SETS, DatasetInfo  # noqa: E402
from vicinal.data.dataloader import Loader  # noqa: E402
from vicinal.data.decode import decode  # noqa: E402
from vicinal.data.image_dataset import ImageDataset, ImageSplit  # noqa: E402
from vicinal.data.open_dataset import open_dataset  # noqa: E402
from vicinal.data.rng import derive_seed  # noqa: E402
from vicinal.data.splits import Splits, split  # noqa: E402
from vicinal.data.transformed_images import TransformedImages  # noqa: E402
from vicinal.data.transforms import Augmentation, Preprocessing, evaluation_tensor  # noqa: E402
from vicinal.deprecation import module_getattr  # noqa: E402

__all__ = [
    "SETS",
    "Augmentation",
    "DatasetInfo",
    "ImageDataset",
    "ImageSplit",
    "Loader",
    "Preprocessing",
    "Splits",
    "TransformedImages",
    "decode",
    "derive_seed",
    "evaluation_tensor",
    "open_dataset",
    "split",
]

__getattr__ = module_getattr(
    __name__,
    {
        "Facts": "DatasetInfo",
        "Images": "TransformedImages",
        "Pictures": "ImageSplit",
        "Source": "ImageDataset",
        "derive": "derive_seed",
        "open_source": "open_dataset",
    },
)
