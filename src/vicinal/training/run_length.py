"""The length of a run in optimizer steps and epochs."""

import math
from dataclasses import dataclass

from vicinal.training.config import ConfigError, TrainConfig

__all__ = ["RunLength"]


@dataclass(frozen=True)
class RunLength:
    """Number of steps of a run and of an epoch. The last epoch is shorter where the steps end in the middle of it."""

    steps: int
    """Steps of the run."""
    epoch_steps: int
    """Steps of a whole epoch."""
    warmup: int
    """Steps in which the learning rate rises."""

    @classmethod
    def of(cls, config: TrainConfig, epoch_steps: int) -> "RunLength":
        """Returns the length of a run: `steps` of its configuration, or its epochs.

        Args:
            config: `steps`, `epochs` and `warmup` are used.
            epoch_steps: number of steps of an epoch.

        Raises:
            ConfigError: if the warm-up is as long as the run.
        """
        steps = config.steps or config.epochs * epoch_steps
        by_steps = config.steps is not None and config.warmup is None
        warmup = round(steps / 10) if by_steps else round(config.warmup_epochs * epoch_steps)
        if config.steps is not None and config.warmup is not None and warmup >= steps:
            raise ConfigError(
                "warmup",
                f"must be shorter than the run of {steps} steps, got {config.warmup:g} epochs of {epoch_steps} steps",
            )
        return cls(steps, epoch_steps, min(warmup, steps - 1))

    @property
    def epochs(self) -> int:
        """Number of epochs; a shorter last one counts."""
        return math.ceil(self.steps / self.epoch_steps)

    def last_step(self, epoch: int) -> int:
        """Returns the index of the last step of an epoch; both count from 0."""
        return min((epoch + 1) * self.epoch_steps, self.steps) - 1
