"""From a name or a folder to batches: datasets, splits, a cache of decoded images, transforms, data loading."""

from vicinal.data.catalog import SETS, DatasetInfo
from vicinal.data.data_record import DataRecord
from vicinal.data.dataloader import Loader
from vicinal.data.decode import decode
from vicinal.data.image_dataset import ImageDataset, ImageSplit
from vicinal.data.open_dataset import open_dataset
from vicinal.data.rng import derive_seed
from vicinal.data.splits import Splits, split
from vicinal.data.transformed_images import TransformedImages
from vicinal.data.transforms import Augmentation, Preprocessing, evaluation_tensor
from vicinal.deprecation import module_getattr

__all__ = [
    "SETS",
    "Augmentation",
    "DataRecord",
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
