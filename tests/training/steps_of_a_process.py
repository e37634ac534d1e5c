"""Run by torchrun, or alone: trains in float64; writes losses, and gradients of an epoch's first and last step."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import vicinal
from vicinal.training.accelerator import make_accelerator
from vicinal.training.setup import prepare
from vicinal.training.train_step import train_step


def main(folder: Path, images: int, accumulate: int) -> None:
    """Trains two epochs on a number of images."""
    config = vicinal.TrainConfig(
        prior="gmm:init=spread+gab",
        pool="avg",
        precision="fp64",
        epochs=2,
        warmup=1,
        batch_size=24,
        accumulate=accumulate,
        train_size=images,
        device="cpu",
    )
    state = prepare(config, make_accelerator(config))
    losses, gradients = [], {}
    for epoch in range(2):
        for images, labels in state.train.batches(epoch):
            loss = train_step(state, config, len(losses), images, labels)
            losses.append(state.accelerator.reduce(loss, "mean"))
            if len(losses) in (1, state.train.steps):
                gradients |= {
                    f"{len(losses)}.{name}": parameter.grad.clone()
                    for name, parameter in state.raw_model.named_parameters()
                }
    if state.accelerator.is_main_process:
        file = folder / f"{config.train_size}-{state.accelerator.num_processes}.safetensors"
        save_file({**gradients, "losses": torch.stack(losses)}, file)
    # The process group is not destroyed here: it would be freed together with `state` while Python's lock is held, and
    # gloo can wait for that lock to free its last tensor.
    state.accelerator.wait_for_everyone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:  # images:accumulate
        main(Path(sys.argv[1]), *map(int, case.split(":")))
