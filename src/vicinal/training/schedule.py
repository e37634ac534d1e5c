"""The learning-rate schedule: linear warm-up, then a cosine over the steps that are left."""

import torch

from vicinal.training.run_length import RunLength

from timm.scheduler import CosineLRScheduler  # isort: skip

__all__ = ["create_schedule"]


def create_schedule(optimizer: torch.optim.Optimizer, length: RunLength, min_lr: float) -> CosineLRScheduler:
    """Returns timm's cosine schedule over all steps of a run; `step_update(step)` sets the rate of that step.

    The rate rises from `min_lr` at step 0 to `lr` at the end of the warm-up, and would reach `min_lr` one step after
    the last. Each group's rate is that times its `lr_scale`.

    Args:
        optimizer: from `create_optimizer`.
        length: of the run, with its warm-up.
        min_lr: rate at step 0, and one step after the last.
    """
    return CosineLRScheduler(
        optimizer,
        t_initial=length.steps - length.warmup,
        lr_min=min_lr,
        warmup_t=length.warmup,
        warmup_lr_init=min_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )
