"""From a configuration to everything that a training step needs: devices, data, model, optimizer, schedule, mixing."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.data import (
    Augmentation,
    ImageDataset,
    Loader,
    Preprocessing,
    TransformedImages,
    derive_seed,
    open_dataset,
    split,
)
from vicinal.data.rng import reseed
from vicinal.mixing import Mixing, TransMix
from vicinal.training.config import ConfigError, TrainConfig
from vicinal.training.initial_model import create_initial_model
from vicinal.training.optimizer import create_optimizer
from vicinal.training.run_length import RunLength
from vicinal.training.schedule import create_schedule

from timm.scheduler import CosineLRScheduler  # isort: skip
from timm.utils import ModelEmaV3  # isort: skip

__all__ = [
    "TrainState",
    "make_loaders",
    "prepare",
    "seed_generators",
]

MAX_UNCROPPED_SIZE = 96  # pixels; larger images are evaluated on a center crop
CROP_FRACTION = 0.875  # of such an image
MAX_WORKERS = 8  # by default


@dataclass
class TrainState:
    """What a training step reads and changes."""

    accelerator: Accelerator
    raw_model: nn.Module
    """The model itself."""
    model: nn.Module
    """The same model, wrapped by Accelerate for several processes, mixed precision and torch.compile."""
    ema: Any
    """timm's moving average of the weights, or None."""
    optimizer: torch.optim.Optimizer
    schedule: CosineLRScheduler
    length: RunLength
    mixing: Mixing
    train: Loader
    val: Loader
    test: Loader
    class_names: list[str]
    preprocessing: Preprocessing
    class_weights: torch.Tensor | None
    """Weight of each class in the loss, `(classes,)`; None for equal weights."""
    frozen_norms: list[nn.Module]
    """Batch norms that keep their statistics."""
    notes: list[str]
    """What was chosen for the user: a line each, printed before the first step."""

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average if there is one, else the model itself."""
        return self.ema.module if self.ema is not None else self.raw_model


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch, GPUs included."""
    reseed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def prepare(config: TrainConfig, accelerator: Accelerator) -> TrainState:
    """Returns the state before the first step. A resumed run loads its checkpoint into it.

    Args:
        config: of the run.
        accelerator: from `make_accelerator`.

    Raises:
        VicinalError: if the dataset or the model cannot be opened.
    """
    # The main process downloads and decodes; the others then read its cache.
    with accelerator.local_main_process_first():
        source = open_dataset(
            config.dataset,
            data_dir=config.data_dir,
            cache_dir=config.cache_dir,
            skip_unreadable=config.skip_unreadable,
        )
    seed_generators(derive_seed(config.seed))
    notes: list[str] = []
    raw_model = create_initial_model(config, source, notes)
    preprocessing = _make_preprocessing(config, source, raw_model)
    with accelerator.local_main_process_first():
        train, val, test = make_loaders(config, source, preprocessing, accelerator)
    _check_splits(config, train, val, raw_model)
    if config.batch_size > len(train.images):
        notes.append(
            f"batch_size is {config.batch_size}, but there are {len(train.images)} training images: each step takes "
            "all of them"
        )
    raw_model.to(accelerator.device, torch.float64 if config.precision == "fp64" else torch.float32)
    ema = None if config.ema is None else ModelEmaV3(raw_model, decay=config.ema)
    optimizer = create_optimizer(raw_model, config)
    length = RunLength.of(config, train.steps)
    schedule = create_schedule(optimizer, length, config.min_lr)
    mixing = _make_mixing(config, len(source.class_names), raw_model)
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    return TrainState(
        accelerator=accelerator,
        raw_model=raw_model,
        model=model,
        ema=ema,
        optimizer=optimizer,
        schedule=schedule,
        length=length,
        mixing=mixing,
        train=train,
        val=val,
        test=test,
        class_names=source.class_names,
        preprocessing=preprocessing,
        class_weights=_class_weights(train, len(source.class_names)) if config.balance == "weights" else None,
        frozen_norms=[each for each in raw_model.modules() if config.freeze and isinstance(each, _BatchNorm)],
        notes=notes,
    )


def _make_mixing(config: TrainConfig, classes: int, model: nn.Module) -> Mixing:
    return Mixing(
        config.mix,
        classes=classes,
        prob=config.mix_prob,
        smoothing=config.smoothing,
        mixup_share=config.mixup_share,
        per_example=config.mix_per_example,
        model=model,
        transmix=TransMix(config.transmix),
        partner=config.mix_partner,
        mixup_alpha=config.mixup_alpha,
        cutmix_alpha=config.cutmix_alpha,
    )


def _class_weights(train: Loader, classes: int) -> torch.Tensor:
    """Returns weights inverse to the numbers of training images, `(classes,)`, whose mean over images is 1."""
    counts = torch.bincount(train.images.labels, minlength=classes).double()
    return torch.where(counts > 0, counts.sum() / (counts > 0).sum() / counts, 0.0)


def _check_splits(config: TrainConfig, train: Loader, val: Loader, model: nn.Module) -> None:
    """Raises ConfigError if there are too few images: none for validation, or a single one for batch normalization."""
    for name, needs_val in {"patience": config.patience is not None, "keep": config.keep == "best"}.items():
        if needs_val and not len(val.images):
            raise ConfigError(name, f"of {getattr(config, name)} needs validation images: val_size must be above 0")
    if config.freeze:
        return  # batch norms are not trained
    total = train.step_size(train.steps - 1)
    own = max(1, total // train.world)
    if own // min(config.accumulate, own) == 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ConfigError(
            "batch_size",
            f"of {config.batch_size} leaves a single image for the last step of {len(train.images)} images (of a "
            "process or a piece), on which batch normalization cannot train; choose another number",
        )


def make_loaders(
    config: TrainConfig, source: ImageDataset, preprocessing: Preprocessing, accelerator: Accelerator
) -> tuple[Loader, Loader, Loader]:
    """Returns the loaders of the training, validation and test images of this process.

    Args:
        config: of the run.
        source: the dataset.
        preprocessing: size and normalization of images.
        accelerator: number of processes, and the index of this one.
    """
    splits = split(source, val_size=config.val_size, train_size=config.train_size, seed=config.seed)
    augmentation = Augmentation(
        crop=config.crop,
        flip=source.info.flip if config.flip is None else config.flip,
        auto_augment=source.info.policy if config.auto_augment else None,
        rand_augment=config.rand_augment,
        color_jitter=config.color_jitter,
        erasing=config.erasing,
        padding=config.crop_padding,
        erasing_area=config.erasing_area,
        erasing_aspect=config.erasing_aspect,
        fill=config.fill,
    )
    train_images = TransformedImages(
        splits.train, preprocessing, augmentation, seed=config.seed, cache_dir=config.cache_dir
    )
    world, on_gpu = accelerator.num_processes, accelerator.device.type == "cuda"
    workers = config.workers
    if workers is None:
        cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = 0 if train_images.cached and not on_gpu else max(1, min(MAX_WORKERS, cores))
    shared: dict[str, Any] = {
        "rank": accelerator.process_index,
        "world": world,
        "workers": workers,
        "pin_memory": on_gpu,
    }
    train = Loader(
        train_images,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
        balanced=config.balance == "sampling",
        **shared,
    )
    val, test = (
        Loader(
            TransformedImages(images, preprocessing, cache_dir=config.cache_dir),
            batch_size=max(1, config.batch_size // world // config.accumulate),
            shuffle=False,
            **shared,
        )
        for images in (splits.val, splits.test)
    )
    return train, val, test


def _make_preprocessing(config: TrainConfig, source: ImageDataset, model: nn.Module) -> Preprocessing:
    """Returns the preprocessing of the initial weights if they were trained before, else that of the dataset."""
    pretrained_cfg: Any = model.pretrained_cfg
    of_model = Preprocessing.of_model(pretrained_cfg)
    if config.pretrained or config.init_from is not None:
        return of_model
    height, width = of_model.height, of_model.width
    crop = 1.0 if max(height, width) <= MAX_UNCROPPED_SIZE else CROP_FRACTION
    facts = source.info
    return Preprocessing(height, width, of_model.channels, facts.mean, facts.std, of_model.interpolation, crop)
