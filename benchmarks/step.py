"""The rest of a training step: our blocks and optimizer next to timm's drop path, plain head mixing and AdamW's loop.

    python benchmarks/step.py --rounds 5  # about four minutes on an idle core

A step is forward, cross-entropy, backward and AdamW of a backbone with `gmm` at 32 pixels, with one thread and in CPU
time, which other work on the machine changes little. Both run once in each round, in random order; printed are the
median ratio and the quartiles.
"""

import argparse
import copy
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vicinal
from measurement import interleaved, print_table

vicinal.ensure_torchvision()

from timm.layers import DropPath  # noqa: E402

from vicinal.models import cait  # noqa: E402

BACKBONES = ("vit", "swin", "cait", "pit", "t2t")
MIX = cait.mix


class PlainDropPath(DropPath):
    """timm's drop path: not `DropPath` itself, so that branches run for all images."""


def plain_mix(x: Tensor, weights: Tensor) -> Tensor:
    """Returns mixed heads by one product for all images, which transposes them."""
    return (weights.t() @ x.flatten(2)).view_as(x)


def measure(name: str, batch: int, rounds: int) -> None:
    """Times steps of a backbone and prints a table."""
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    ours = vicinal.create_model(name, prior="gmm:init=spread", img_size=32).train()
    plain = copy.deepcopy(ours)
    for module in plain.modules():
        if type(module) is DropPath:
            module.__class__ = PlainDropPath
    models: dict[str, nn.Module] = {"plain": plain, "vicinal": ours}
    optimizers = {
        key: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=key == "vicinal") for key, model in models.items()
    }

    def step(key: str) -> None:
        cait.mix = MIX if key == "vicinal" else plain_mix
        optimizers[key].zero_grad()
        F.cross_entropy(models[key](images), labels).backward()
        optimizers[key].step()

    with vicinal.tune_cpu():
        runs = {key: lambda key=key: step(key) for key in models}  # type: ignore[misc]
        times = interleaved(runs, rounds, clock=time.process_time)
    print_table(f"{name} + gmm, 32 px, batch {batch}, CPU time of one thread", times)


def main() -> None:
    """Parses the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=BACKBONES, default=list(BACKBONES))
    parser.add_argument("--rounds", type=int, default=11, help="measured steps of each, at least 2")
    parser.add_argument("--batch", type=int, default=64, help="images in a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in arguments.models:
        measure(name, arguments.batch, arguments.rounds)


if __name__ == "__main__":
    main()
