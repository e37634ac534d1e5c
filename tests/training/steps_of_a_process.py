"""Run by torchrun, or alone: steps in float64, whose losses and first gradients go to a file."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import vicinal
from vicinal.training.setup import prepare, start
from vicinal.training.train import train_step


def main(folder: Path) -> None:
    """Take the steps of two epochs, 26 of them."""
    torch.set_num_threads(1)
    config = vicinal.TrainConfig(
        prior="gmm:init=spread+gab", pool="avg", precision="fp64", epochs=2, warmup=1, batch_size=96, device="cpu"
    )
    job = prepare(config, start(config))
    losses, gradients = [], {}
    for epoch in range(2):
        for images, labels in job.train.batches(epoch):
            loss = train_step(job, config, len(losses), images, labels)
            losses.append(job.accelerator.reduce(loss, "mean"))
            if len(losses) == 1:
                gradients = {name: parameter.grad.clone() for name, parameter in job.network.named_parameters()}
    if job.accelerator.is_main_process:
        save_file({**gradients, "losses": torch.stack(losses)}, folder / f"{job.accelerator.num_processes}.safetensors")
    # The group stays to the end, as in training: ending it here would free it together with `job`, which holds Python's
    # lock, and gloo may wait for that lock to free its last tensor.
    job.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
