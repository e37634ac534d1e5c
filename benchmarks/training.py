"""What training costs besides the bare step: images, bookkeeping, and how a CPU's memory is handled.

    python benchmarks/training.py          # about twenty minutes on two cores
    python benchmarks/training.py --short  # about five

Loop: a step of the loop (load images, mix, forward, backward, update, look at the loss) next to the bare step on images
that are there (forward, backward, update), for the two recipes. Loader: images a second without a model, next to
torchvision's usual pipeline with the same transforms, in one process. Allocator: the bare step in processes of their
own, with and without telling glibc to keep freed memory. Everything in random order within a round; printed are medians
and quartiles. The images are made: what they show does not matter for the time.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vicinal
from measurement import interleaved, print_table
from vicinal.data import Augmentation, Loader, Preprocessing, TransformedImages, open_dataset
from vicinal.data.catalog import CIFAR10
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import recipe
from vicinal.training.cpu_memory import tune_cpu
from vicinal.training.setup import TrainState, prepare
from vicinal.training.train_step import train_step

BACKBONES = ("vit", "swin", "cait", "pit", "t2t")


def made_images(folder: Path, count: int) -> str:
    """A set of random images of 32 x 32 pixels in ten classes, in the layout of CIFAR-10 on the Hub."""
    import datasets

    datasets.disable_progress_bars()
    generator = np.random.default_rng(0)
    for split, number in (("train", count), ("test", 100)):
        pixels = generator.integers(0, 256, (number, 32, 32, 3), np.uint8)
        labels = datasets.ClassLabel(names=[str(name) for name in range(10)])
        features = datasets.Features({"img": datasets.Image(), "label": labels})
        table = datasets.Dataset.from_dict({"img": list(pixels), "label": [n % 10 for n in range(number)]}, features)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return f"parquet:{folder}"


def bare_step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> None:
    """Forward, backward and update."""
    network.train()
    optimizer.zero_grad()
    F.cross_entropy(network(images), targets).backward()
    optimizer.step()


def endless(state: TrainState) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches, epoch after epoch."""
    epoch = 0
    while True:
        yield from state.train.batches(epoch)
        epoch += 1


def loop(dataset: str, cache: Path, name: str, rounds: int) -> None:
    """A step of the loop next to the bare step."""
    settings = {"model": "vit", "prior": "gmm", "img_size": 32, "batch_size": 128}
    config = recipe(name, **settings, dataset=dataset, cache_dir=cache, device="cpu")
    state = prepare(config, make_accelerator(config))
    batches, steps = endless(state), 0
    images, labels = next(batches)
    mixed = state.mixing(images, labels, seed=0)
    images, targets = mixed.images, mixed.targets()

    def whole() -> None:
        nonlocal steps
        train_step(state, config, steps, *next(batches)).item()
        steps += 1

    contenders = {"bare step": lambda: bare_step(state.raw_model, state.optimizer, images, targets), "loop": whole}
    with tune_cpu():  # as `train` does
        times = interleaved(contenders, rounds)
    print_table(f"vit + gmm, 32 px, batch 128, recipe {name}", times)
    rates = {key: 128 / statistics.median(values) for key, values in times.items()}
    print(", ".join(f"{key} {rate:.0f} images/s" for key, rate in rates.items()))


def torchvision_pipeline(dataset: str, cache: Path, augmentation: Augmentation) -> Callable[[], Iterator[list[Tensor]]]:
    """What most people write: torchvision's transforms on Pillow images, and the default collate."""
    from PIL import Image
    from torchvision import transforms

    policy = [transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10)] if augmentation.auto_augment else []
    erasing = [transforms.RandomErasing(augmentation.erasing, scale=(0.02, 0.4))] if augmentation.erasing else []
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            *policy,
            transforms.ToTensor(),
            transforms.Normalize(CIFAR10.mean, CIFAR10.std),
            *erasing,
        ]
    )
    source = open_dataset(dataset, cache_dir=cache)
    pixels = [np.asarray(source.train.image(index)) for index in range(len(source.train))]

    class Cifar(torch.utils.data.Dataset[tuple[Tensor, int]]):
        """As torchvision's: an array in memory."""

        def __len__(self) -> int:
            return len(pixels)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return transform(Image.fromarray(pixels[index])), int(source.train.labels[index])

    loader = torch.utils.data.DataLoader(Cifar(), batch_size=128, shuffle=True)
    return lambda: iter(loader)


def loading(dataset: str, cache: Path, rounds: int) -> None:
    """Images a second, without a model."""
    source = open_dataset(dataset, cache_dir=cache)
    preprocessing = Preprocessing(32, 32, 3, CIFAR10.mean, CIFAR10.std)
    kinds = {
        "quick: crop, flip": Augmentation(),
        "paper: crop, flip, AutoAugment, erasing": Augmentation(auto_augment="cifar10", erasing=0.25),
    }
    for title, augmentation in kinds.items():
        loader = Loader(
            TransformedImages(source.train, preprocessing, augmentation, cache_dir=cache), batch_size=128, shuffle=True
        )
        usual = torchvision_pipeline(dataset, cache, augmentation)
        contenders = {
            "torchvision": lambda usual=usual: sum(1 for _ in usual()),
            "vicinal": lambda loader=loader: sum(1 for _ in loader.batches(0)),
        }
        times = interleaved(contenders, rounds)
        print_table(f"loader, {title}", times)
        count = len(loader.images)
        print(", ".join(f"{key} {count / statistics.median(values):.0f} images/s" for key, values in times.items()))


def child(name: str, keep: bool, steps: int) -> None:
    """Steps of one backbone in this process: prints their seconds, and page faults a step, as JSON."""
    with tune_cpu(keep):
        torch.manual_seed(0)
        network = vicinal.create_model(name, prior="gmm", img_size=32)
        optimizer = torch.optim.AdamW(network.parameters())
        images, targets = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
        for _ in range(2):
            bare_step(network, optimizer, images, targets)
        faults, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, []
        for _ in range(steps):
            began = time.perf_counter()
            bare_step(network, optimizer, images, targets)
            seconds.append(time.perf_counter() - began)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    print(json.dumps({"seconds": statistics.median(seconds), "faults": faults / steps}))


def allocator(names: tuple[str, ...], rounds: int, steps: int) -> None:
    """Every backbone, with and without the setting, in turn."""
    print("\nallocator: seconds of a step and page faults, batch 128, gmm; plain / freed memory kept")
    for name in names:
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for count in range(rounds):
            for keep in (False, True) if count % 2 else (True, False):
                words = [
                    sys.executable,
                    __file__,
                    "--child",
                    name,
                    "--steps",
                    str(steps),
                    *(["--keep"] if keep else []),
                ]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                found[keep].append(json.loads(done.stdout))
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(found[True], found[False], strict=True)]
        plain, kept = (
            {key: statistics.median(each[key] for each in found[keep]) for key in ("seconds", "faults")}
            for keep in (False, True)
        )
        times = f"{plain['seconds']:7.2f} s /{kept['seconds']:6.2f} s"
        faults = f"{plain['faults']:10.0f} /{kept['faults']:8.0f} faults"
        ratio = f"ratio of time {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{name:6}{times}{faults}   {ratio}", flush=True)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer rounds, and the allocator for PiT only")
    parser.add_argument("--parts", nargs="+", choices=("loop", "loading", "allocator"), default=None)
    parser.add_argument("--child", choices=BACKBONES, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.keep, arguments.steps)
        return
    parts = arguments.parts or ["allocator", "loading", "loop"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    if "allocator" in parts:
        allocator(("pit",) if arguments.short else BACKBONES, 3 if arguments.short else 5, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "images").mkdir()
        cache = Path(folder) / "cache"
        dataset = made_images(Path(folder) / "images", 2560)
        if "loading" in parts:
            loading(dataset, cache, 5 if arguments.short else 11)
        if "loop" in parts:
            for name in ("quick", "paper"):
                loop(dataset, cache, name, 9 if arguments.short else 31)


if __name__ == "__main__":
    main()
