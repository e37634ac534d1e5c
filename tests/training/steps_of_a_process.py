"""Run by torchrun, or alone: twenty steps in float64, whose losses and first gradients go to a file."""

import sys
from pathlib import Path

import torch

import vicinal
from vicinal.training.loop import train_step
from vicinal.training.preparing import prepare, start

folder = Path(sys.argv[1])
torch.set_num_threads(1)
config = vicinal.TrainConfig(
    prior="gmm:init=spread+gab", pool="avg", drop_path=0.0, precision="fp64", epochs=2, batch_size=96, device="cpu"
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
    torch.testing.assert_close(len(losses), 26)
    from safetensors.torch import save_file

    save_file({**gradients, "losses": torch.stack(losses)}, folder / f"{job.accelerator.num_processes}.safetensors")
job.accelerator.end_training()
