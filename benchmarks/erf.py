"""Receptive fields: images a second in batches, next to one image at a time, as the reference program does it.

    python benchmarks/erf.py          # about five minutes on two cores
    python benchmarks/erf.py --short  # about one

The reference program runs the model on one image twice, first for its output, which nobody reads, then for the feature
map; and it goes backward through everything that has a gradient, parameters included. Next to it the same with one
run, and with one run and gradients of pixels only. All give the same field: the largest difference is printed, relative
to the field's maximum. Memory is the peak of processes of their own, less what they hold before the first image.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import vicinal
from measurement import interleaved, print_table
from vicinal.analysis.receptive_field import receptive_field

vicinal.ensure_torchvision()

import timm  # noqa: E402


def made(name: str) -> nn.Module:
    """The model, with weights as they start."""
    torch.manual_seed(0)
    return vicinal.create_model(name).eval() if name == "vit-mini" else timm.create_model(name).eval()


def one_at_a_time(model: nn.Module, images: Tensor, *, runs: int = 1, parameters: bool = True) -> np.ndarray:
    """The field of the last block's central patch, image by image."""
    found: list[Tensor] = []
    hook = model.blocks[-1].register_forward_hook(lambda _, __, output: found.append(output))
    rows, columns = model.patch_embed.grid_size
    token = model.num_prefix_tokens + rows // 2 * columns + columns // 2
    total = np.zeros(images.shape[2:])
    for image in images.split(1):
        pixels = image.clone().requires_grad_()
        for _ in range(runs):
            model(pixels)
        center = found[-1][:, token].mean()
        found.clear()
        if parameters:
            center.backward()
            gradient = pixels.grad
        else:
            (gradient,) = torch.autograd.grad(center, pixels)
        total += np.maximum(gradient.numpy().mean((0, 1)), 0)
    hook.remove()
    model.zero_grad(set_to_none=True)
    return total / total.sum()


def compare(name: str, size: int, count: int, batch_size: int, rounds: int) -> None:
    """One model: times, images a second and how equal the results are."""
    model, images = made(name), torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    contenders = {
        "reference": lambda: one_at_a_time(model, images, runs=2),
        "one image, one run": lambda: one_at_a_time(model, images),
        "one image, one run, pixels only": lambda: one_at_a_time(model, images, parameters=False),
        "vicinal": lambda: receptive_field(model, images, batch_size=batch_size).field,
    }
    reference, ours = contenders["reference"](), contenders["vicinal"]()
    times = interleaved(contenders, rounds, warm_up=1)
    print_table(f"{name}, {size} px, {count} images, batch {batch_size}", times)
    rates = ", ".join(f"{key} {count / statistics.median(each):.1f} images/s" for key, each in times.items())
    faster = [one / all_ for one, all_ in zip(times["reference"], times["vicinal"], strict=True)]
    low, middle, high = statistics.quantiles(faster, n=4)
    print(f"{rates}\n{middle:.1f} times as fast ({low:.1f}-{high:.1f})", end=", ")
    print(f"largest difference {np.abs(ours - reference).max() / reference.max():.1e}", flush=True)


def child(name: str, size: int, count: int, batch_size: int) -> None:
    """Prints the megabytes that a field of so many images needs, as JSON."""
    model = made(name)
    images = torch.randn(1, 3, size, size).expand(count, -1, -1, -1)
    before = peak()
    receptive_field(model, images, batch_size=batch_size)
    print(json.dumps(peak() - before))


def peak() -> float:
    """Megabytes that this process has held at most; `getrusage` would tell those of its parent."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes) / 1024


def memory(name: str, size: int) -> None:
    """Peak memory by number of images and batch size."""
    print(f"\npeak memory, {name}, {size} px")
    for count, batch_size in ((64, 16), (256, 16), (256, 64)):
        words = [sys.executable, __file__, "--child", name, str(size), str(count), str(batch_size)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        print(f"{count:5} images, batch {batch_size:3}: {json.loads(done.stdout):7.0f} MB", flush=True)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, *numbers = arguments.child
        child(name, *map(int, numbers))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    rounds = 3 if arguments.short else 15
    compare("vit-mini", 32, 64 if arguments.short else 256, arguments.batch_size, rounds)
    compare("deit_tiny_patch16_224", 224, 8 if arguments.short else 32, arguments.batch_size, rounds)
    memory("vit-mini", 32)


if __name__ == "__main__":
    main()
