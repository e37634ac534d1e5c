"""Losses of several steps, read at once and averaged over processes."""

import signal

import torch
from accelerate import Accelerator
from torch import Tensor

__all__ = ["LossBuffer"]

GPU_STEPS_PER_READ = 16


class LossBuffer:
    """Collects the losses of several steps on the device, because reading one synchronizes with a GPU.

    Args:
        accelerator: averages over processes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.size = 1 if accelerator.device.type == "cpu" else GPU_STEPS_PER_READ
        self.losses: list[Tensor] = []

    def append(self, loss: Tensor) -> None:
        """Appends the loss of a step, a scalar."""
        self.losses.append(loss)

    @property
    def full(self) -> bool:
        """Whether the losses are to be read."""
        return len(self.losses) >= self.size

    def flush(self, stop_signal: int) -> tuple[list[float], int]:
        """Empties the buffer. Returns the losses averaged over processes, and the signal to stop by.

        Args:
            stop_signal: the signal that this process received; 0 if none. If only other processes received one,
                SIGTERM is returned.
        """
        packed = torch.stack([*self.losses, self.losses[0].new_tensor(stop_signal)])
        self.losses = []
        if self.accelerator.num_processes > 1:
            packed = self.accelerator.reduce(packed, "sum")
            packed[:-1] /= self.accelerator.num_processes
        *means, any_signal = packed.tolist()
        return means, stop_signal or (signal.SIGTERM if any_signal else 0)
