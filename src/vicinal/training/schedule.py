"""The learning-rate schedule: linear warm-up, then a cosine over the steps that are left."""

import torch

from vicinal.training.config import TrainConfig

from timm.scheduler import CosineLRScheduler  # isort: skip

__all__ = ["create_schedule"]


def create_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, steps: int) -> CosineLRScheduler:
    """Returns timm's cosine schedule over all steps of a run; `step_update(step)` sets the rate of that step.

    The rate rises from `min_lr` at step 0 to `lr` at the end of the warm-up, and would reach `min_lr` one step after
    the last. Each group's rate is that times its `lr_scale`.

    Args:
        optimizer: from `create_optimizer`.
        config: `epochs`, `warmup` and `min_lr` are used.
        steps: number of steps in an epoch.
    """
    total = config.epochs * steps
    warmup = min(round(config.warmup_epochs * steps), total - 1)
    return CosineLRScheduler(
        optimizer,
        t_initial=total - warmup,
        lr_min=config.min_lr,
        warmup_t=warmup,
        warmup_lr_init=config.min_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )
