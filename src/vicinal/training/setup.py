"""From a configuration to what the loop turns: data, model, optimiser, schedule, mixing."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
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
from vicinal.errors import VicinalError
from vicinal.mixing import Mixing, TransMix
from vicinal.models import create_model, load
from vicinal.training.config import DEFAULT_MODEL, TrainConfig
from vicinal.training.environment import new_accelerator, seed_everything
from vicinal.training.model_path import model_folder
from vicinal.training.optimizer import create_optimizer

from timm.scheduler import CosineLRScheduler  # isort: skip
from timm.utils import ModelEmaV3  # isort: skip

__all__ = ["Job", "loaders", "on_cpu", "prepare", "start"]

SEEN_WHOLE_UP_TO = 96  # pixels; of larger images evaluation sees the centre


@dataclass
class Job:
    """All that a step needs."""

    accelerator: Accelerator
    network: nn.Module
    """The model itself."""
    model: nn.Module
    """The same as Accelerate runs it: over several processes, in lower precision, compiled."""
    ema: Any
    optimizer: torch.optim.Optimizer
    schedule: CosineLRScheduler
    mixing: Mixing
    train: Loader
    val: Loader
    test: Loader
    class_names: list[str]
    preprocessing: Preprocessing

    @property
    def judged(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average, if there is one."""
        return self.ema.module if self.ema is not None else self.network


def start(config: TrainConfig) -> Accelerator:
    """Devices and processes, as torchrun or `accelerate launch` set them up, or one process alone."""
    cpu = on_cpu(config)
    if cpu and config.precision == "fp16":
        raise VicinalError("--precision fp16 needs a GPU; on a CPU, bf16 or fp32 work")
    precision = config.precision if config.precision in ("bf16", "fp16") else "no"
    accelerator = new_accelerator(cpu, precision, compiled=config.compile)
    pieces = accelerator.num_processes * config.accumulate
    if config.batch_size % pieces:
        raise VicinalError(
            f"--batch-size {config.batch_size} cannot be cut into {accelerator.num_processes} processes x "
            f"{config.accumulate} pieces; give a multiple of {pieces}"
        )
    return accelerator


def prepare(config: TrainConfig, accelerator: Accelerator) -> Job:
    """Make everything, in the same way whether the run is new or resumed."""
    with accelerator.local_main_process_first():  # the first one fetches and decodes, the others find it done
        source = open_dataset(config.dataset, data_dir=config.data_dir, cache_dir=config.cache_dir)
    seed_everything(derive_seed(config.seed))
    network = _network(config, source)
    declared: Any = network.pretrained_cfg
    preprocessing = _preprocessing(config, source, declared)
    with accelerator.local_main_process_first():
        train, val, test = loaders(config, source, preprocessing, accelerator)
    network.to(accelerator.device, torch.float64 if config.precision == "fp64" else torch.float32)
    ema = None if config.ema is None else ModelEmaV3(network, decay=config.ema, use_warmup=True)
    optimizer = create_optimizer(network, config)
    steps = config.epochs * train.steps
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=steps,
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
        model=network,
        transmix=TransMix(config.transmix),
    )
    model, optimizer = accelerator.prepare(network, optimizer)
    return Job(
        accelerator,
        network,
        model,
        ema,
        optimizer,
        schedule,
        mixing,
        train,
        val,
        test,
        source.class_names,
        preprocessing,
    )


def loaders(
    config: TrainConfig, source: ImageDataset, preprocessing: Preprocessing, accelerator: Accelerator
) -> tuple[Loader, Loader, Loader]:
    """Batches for training, validation and test."""
    splits = split(source, val_size=config.val_size, train_size=config.train_size, seed=config.seed)
    rank, world = accelerator.process_index, accelerator.num_processes
    augmentation = Augmentation(
        crop=config.crop,
        flip=source.info.flip if config.flip is None else config.flip,
        auto_augment=source.info.policy if config.auto_augment else None,
        erasing=config.erasing,
    )
    training = TransformedImages(
        splits.train, preprocessing, augmentation, seed=config.seed, cache_dir=config.cache_dir
    )
    workers, on_gpu = config.workers, accelerator.device.type == "cuda"
    if workers is None:
        free = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = 0 if training.cached and not on_gpu else max(1, min(8, free))
    train = Loader(
        training,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
        rank=rank,
        world=world,
        workers=workers,
        pin_memory=on_gpu,
    )
    val, test = (
        Loader(
            TransformedImages(pictures, preprocessing, cache_dir=config.cache_dir),
            batch_size=max(1, config.batch_size // world // config.accumulate),
            shuffle=False,
            rank=rank,
            world=world,
            workers=workers,
            pin_memory=on_gpu,
        )
        for pictures in (splits.val, splits.test)
    )
    return train, val, test


def on_cpu(config: TrainConfig) -> bool:
    """Whether the run is on a CPU."""
    return config.device == "cpu" or not torch.accelerator.is_available()


def _network(config: TrainConfig, source: ImageDataset) -> nn.Module:
    size = config.img_size or None
    classes = len(source.class_names)
    if config.init_from is not None:
        return _from_run(config, source)
    options = {} if config.patch_size is None else {"patch_size": config.patch_size}
    if size is None and not config.pretrained:
        size = (source.info.size,)
    return create_model(
        config.model or DEFAULT_MODEL,
        prior=config.prior,
        img_size=None if size is None else (size[0], size[-1]),
        num_classes=classes,
        in_chans=source.channels,
        global_pool=config.pool,
        drop_path_rate=config.drop_path,
        pretrained=config.pretrained,
        **options,
    )


def _from_run(config: TrainConfig, source: ImageDataset) -> nn.Module:
    """The model of a finished run, or a saved one, made for another set of classes."""
    given = str(config.init_from)
    size = (config.img_size[0], config.img_size[-1]) if config.img_size else None
    trained: Any = load(model_folder(given), img_size=size)
    declared = dict(trained.pretrained_cfg)
    if declared.get("label_names") != source.class_names:
        trained.reset_classifier(len(source.class_names))
    prior = priors_to_config(trained)
    if config.prior != "none" and get_priors(trained):
        raise VicinalError(f"{given} has a prior already ({prior}); leave --prior out")
    arguments = {
        **trained.model_args,
        "num_classes": len(source.class_names),
        "drop_path_rate": config.drop_path,
    }
    network = create_model(declared["architecture"], prior=prior, **arguments)
    network.load_state_dict(trained.state_dict())
    network.pretrained_cfg.update({key: declared[key] for key in ("mean", "std", "interpolation", "crop_pct")})  # type: ignore[operator, union-attr]
    if config.prior != "none":
        attach(network, config.prior, img_size=declared["input_size"][1:])
    return network


def _preprocessing(config: TrainConfig, source: ImageDataset, declared: dict[str, Any]) -> Preprocessing:
    """How images are prepared: as the weights that training starts from are used to, else as the set says."""
    given = Preprocessing.of_model(declared)
    if config.pretrained or config.init_from is not None:
        return given
    crop = 1.0 if max(given.height, given.width) <= SEEN_WHOLE_UP_TO else 0.875
    return Preprocessing(
        given.height, given.width, given.channels, source.info.mean, source.info.std, given.interpolation, crop
    )
