"""One update of the weights."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.data import derive_seed
from vicinal.training.config import TrainConfig
from vicinal.training.setup import TrainState, seed_generators

__all__ = ["train_step"]

DROP_PATH_STREAM, MIXING_STREAM = 1, 2  # make the seeds of a step differ from each other


def train_step(state: TrainState, config: TrainConfig, step: int, images: Tensor, labels: Tensor) -> Tensor:
    """Updates the weights once. Returns the loss, a scalar on the device; its mean over processes is that over images.

    Args:
        state: changed in place.
        config: of the run.
        step: number of steps done before.
        images: of this process, `(images, channels, height, width)`.
        labels: class indices, `(images,)`.
    """
    accelerator = state.accelerator
    device, dtype = accelerator.device, next(state.raw_model.parameters()).dtype
    state.schedule.step_update(step)
    images, labels = images.to(device, dtype, non_blocking=True), labels.to(device, non_blocking=True)
    rank = accelerator.process_index
    batch = state.mixing(images, labels, derive_seed(config.seed, step, rank, MIXING_STREAM))
    seed_generators(derive_seed(config.seed, step, rank, DROP_PATH_STREAM))
    state.model.train()
    for module in state.frozen_norms:
        module.eval()
    state.optimizer.zero_grad()
    total = torch.zeros((), device=device, dtype=dtype)
    pieces = batch.pieces(min(config.accumulate, len(images)))
    weights = None if state.class_weights is None else state.class_weights.to(dtype).to(device)
    weight = state.train.weight(step % state.train.steps)  # of this process's slice
    for piece in pieces:
        is_last = piece is pieces[-1]
        with nullcontext() if is_last else accelerator.no_sync(state.model):  # reduce gradients once per step
            with state.mixing:
                logits = state.model(piece.images)
            loss = F.cross_entropy(logits, state.mixing.targets(piece), weights)
            loss = loss * (weight * len(piece.images) / len(images))
            accelerator.backward(loss)
        total += loss.detach()
    if config.clip_grad is not None:
        accelerator.clip_grad_norm_(state.model.parameters(), config.clip_grad)
    state.optimizer.step()
    if state.ema is not None:
        state.ema.update(state.raw_model)
    return total
