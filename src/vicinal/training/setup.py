"""From a configuration to everything that a training step needs: devices, data, model, optimizer, schedule, mixing."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from vicinal.attachment import attach, get_priors
from vicinal.attachment.attached_priors import priors_to_config
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
from vicinal.models import create_model, load
from vicinal.models.factory import find_backbone
from vicinal.training.config import ConfigError, TrainConfig
from vicinal.training.model_path import model_folder
from vicinal.training.optimizer import create_optimizer

from timm.scheduler import CosineLRScheduler  # isort: skip
from timm.utils import ModelEmaV3  # isort: skip

__all__ = [
    "TrainState",
    "make_accelerator",
    "make_loaders",
    "prepare",
    "reset_accelerator",
    "seed_generators",
    "uses_cpu",
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
    mixing: Mixing
    train: Loader
    val: Loader
    test: Loader
    class_names: list[str]
    preprocessing: Preprocessing

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average if there is one, else the model itself."""
        return self.ema.module if self.ema is not None else self.raw_model


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Returns an Accelerator for the device, precision and processes of a run.

    Processes are those that torchrun or `accelerate launch` started; one process without a launcher.

    Raises:
        ConfigError: if the device does not support the precision, or the batch cannot be divided evenly.
    """
    cpu = uses_cpu(config)
    if cpu and config.precision == "fp16":
        raise ConfigError("precision", "fp16 needs a GPU; on a CPU, use bf16 or fp32")
    precision = config.precision if config.precision in ("bf16", "fp16") else "no"
    accelerator = reset_accelerator(cpu, precision, compiled=config.compile)
    pieces = accelerator.num_processes * config.accumulate
    if config.batch_size % pieces:
        raise ConfigError(
            "batch_size",
            f"must be a multiple of {pieces} ({accelerator.num_processes} processes x {config.accumulate} pieces), "
            f"got {config.batch_size}",
        )
    return accelerator


def reset_accelerator(cpu: bool, precision: str = "no", *, compiled: bool = False) -> Accelerator:
    """Returns an Accelerator whose precision does not depend on earlier ones.

    Accelerate keeps the precision of the first Accelerator of a process in a shared state, which is reset here.

    Args:
        cpu: use the CPU even if there is a GPU.
        precision: Accelerate's `mixed_precision`: `no`, `bf16` or `fp16`.
        compiled: compile models with torch.compile.
    """
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()
    return Accelerator(cpu=cpu, mixed_precision=precision, dynamo_backend="inductor" if compiled else None)


def uses_cpu(config: TrainConfig) -> bool:
    """Returns whether a run trains on the CPU."""
    return config.device == "cpu" or not torch.accelerator.is_available()


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
    raw_model = _make_model(config, source)
    preprocessing = _make_preprocessing(config, source, raw_model)
    with accelerator.local_main_process_first():
        train, val, test = make_loaders(config, source, preprocessing, accelerator)
    raw_model.to(accelerator.device, torch.float64 if config.precision == "fp64" else torch.float32)
    ema = None if config.ema is None else ModelEmaV3(raw_model, decay=config.ema, use_warmup=True)
    optimizer = create_optimizer(raw_model, config)
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=config.epochs * train.steps,
        lr_min=config.min_lr,
        warmup_t=round(config.warmup * train.steps),
        warmup_lr_init=config.min_lr,
        t_in_epochs=False,
    )
    mixing = Mixing(
        config.mix,
        classes=len(source.class_names),
        prob=config.mix_prob,
        smoothing=config.smoothing,
        mixup_share=config.mixup_share,
        per_example=config.mix_per_example,
        model=raw_model,
        transmix=TransMix(config.transmix),
    )
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    return TrainState(
        accelerator=accelerator,
        raw_model=raw_model,
        model=model,
        ema=ema,
        optimizer=optimizer,
        schedule=schedule,
        mixing=mixing,
        train=train,
        val=val,
        test=test,
        class_names=source.class_names,
        preprocessing=preprocessing,
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
    train = Loader(train_images, batch_size=config.batch_size, shuffle=True, seed=config.seed, **shared)
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


def _make_model(config: TrainConfig, source: ImageDataset) -> nn.Module:
    if config.init_from is not None:
        return _load_model(config.init_from, config, source)
    size, name = config.img_size or None, config.model_name
    if size is None and not config.pretrained and not (config.own_data and find_backbone(name) is None):
        size = (source.info.size,)
    options = {} if config.patch_size is None else {"patch_size": config.patch_size}
    return create_model(
        name,
        prior=config.prior,
        img_size=None if size is None else (size[0], size[-1]),
        num_classes=len(source.class_names),
        in_chans=source.channels,
        global_pool=config.pool,
        drop_path_rate=config.drop_path,
        pretrained=config.pretrained,
        **options,
    )


def _load_model(path: str, config: TrainConfig, source: ImageDataset) -> nn.Module:
    """Returns the model of a finished run, or a saved model, with a new classifier head if the classes differ."""
    size = (config.img_size[0], config.img_size[-1]) if config.img_size else None
    saved: Any = load(model_folder(path), img_size=size)
    pretrained_cfg = dict(saved.pretrained_cfg)
    if pretrained_cfg.get("label_names") != source.class_names:
        saved.reset_classifier(len(source.class_names))
    prior = priors_to_config(saved)
    if config.prior != "none" and get_priors(saved):
        raise ConfigError("prior", f"must not be given: {path} has a prior already ({prior})")
    arguments = {**saved.model_args, "num_classes": len(source.class_names), "drop_path_rate": config.drop_path}
    model = create_model(pretrained_cfg["architecture"], prior=prior, **arguments)
    model.load_state_dict(saved.state_dict())
    model.pretrained_cfg.update({key: pretrained_cfg[key] for key in ("mean", "std", "interpolation", "crop_pct")})  # type: ignore[operator, union-attr]
    if config.prior != "none":
        attach(model, config.prior, img_size=pretrained_cfg["input_size"][1:])
    return model


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
