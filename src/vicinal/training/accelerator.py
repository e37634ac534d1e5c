"""Accelerate's Accelerator for the device and precision of a run."""

import atexit
import os
import time

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import patch_environment

from vicinal.training.config import ConfigError, TrainConfig
from vicinal.training.device import find_device
from vicinal.training.tracker import check_tracker

__all__ = ["make_accelerator", "reset_accelerator"]

SECONDS_TO_FREE = 0.5


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Returns an Accelerator for the device, precision and processes of a run.

    Processes are those that torchrun or `accelerate launch` started; one process without a launcher.

    Raises:
        ConfigError: if the device does not support the precision, the batch cannot be divided evenly, or the package of
            the tracker is missing.
    """
    check_tracker(config)
    device = find_device(config.device)
    if config.precision == "fp16" and device.type in ("cpu", "mps"):
        raise ConfigError("precision", f"fp16 needs a GPU; on {device.type}, use bf16 or fp32")
    if config.precision == "fp64" and device.type == "mps":
        raise ConfigError("precision", "fp64 does not exist on mps; use fp32")
    precision = config.precision if config.precision in ("bf16", "fp16") else "no"
    accelerator = reset_accelerator(config.device, precision, compiled=config.compile)
    pieces = accelerator.num_processes * config.accumulate
    if config.batch_size % pieces:
        raise ConfigError(
            "batch_size",
            f"must be a multiple of {pieces} ({accelerator.num_processes} processes x {config.accumulate} pieces), "
            f"got {config.batch_size}",
        )
    return accelerator


def reset_accelerator(device: str, precision: str = "no", *, compiled: bool = False) -> Accelerator:
    """Returns an Accelerator whose device and precision do not depend on earlier ones.

    Accelerate keeps those of the first Accelerator of a process in shared states, which are reset here. With several
    processes, each takes the GPU of its local rank.

    Args:
        device: as in `find_device`.
        precision: Accelerate's `mixed_precision`: `no`, `bf16` or `fp16`.
        compiled: compile models with torch.compile.

    Raises:
        ConfigError: if this machine does not have the device, or several processes were to share it.
    """
    found, several = find_device(device), int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and found.index is not None:
        raise ConfigError("device", f"must have no number with several processes, got {device}")
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()
    if PartialState._shared_state and not several and PartialState().device != found:
        PartialState._reset_state()
    named = {} if several or device in ("auto", "cpu") else {"ACCELERATE_TORCH_DEVICE": str(found)}
    if several:
        atexit.unregister(_let_threads_end)
        atexit.register(_let_threads_end)
    with patch_environment(**named):
        backend = "inductor" if compiled else None
        return Accelerator(cpu=found.type == "cpu", mixed_precision=precision, dynamo_backend=backend)


def _let_threads_end() -> None:
    """Waits without Python's lock: gloo's threads need it to free their last tensors, and abort a process without it.

    To destroy the process group is no way out: that waits for these threads while it holds the lock.
    """
    time.sleep(SECONDS_TO_FREE)
