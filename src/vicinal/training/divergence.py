"""The end of a run whose loss stops being a finite number."""

from pathlib import Path

from vicinal.errors import VicinalError
from vicinal.training.checkpoints import Progress, checkpoint_file, list_checkpoints
from vicinal.training.config import TrainConfig
from vicinal.training.failure import write_failure

__all__ = ["divergence_error"]


def divergence_error(
    folder: Path, config: TrainConfig, progress: Progress, split: str, loss: float, *, write: bool
) -> VicinalError:
    """Returns the error that ends a run, and notes it in the run folder, so that the run is not resumed.

    A checkpoint of the weights that gave this loss is removed. A training loss right after a finite validation loss of
    the same weights leaves their checkpoint.

    Args:
        folder: run folder.
        config: of the run.
        progress: the step with this loss is counted.
        split: `train`, `val` or `test`: the images of the loss.
        loss: not finite.
        write: whether this process writes to the run folder.
    """
    validated = progress.position == 1 and bool(progress.history) and progress.history[-1]["val_loss"] is not None
    if write and not (split == "train" and validated):
        checkpoint_file(folder, progress.step - (split == "train")).unlink(missing_ok=True)
    checkpoints = list_checkpoints(folder)
    kept = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint before that"
    name = {"train": "", "val": "validation ", "test": "test "}[split]
    precision = "precision fp32, " if config.precision in ("bf16", "fp16") else ""
    epoch = len(progress.history) + (progress.position > 0)
    message = (
        f"the {name}loss became {loss} at step {progress.step} (epoch {epoch}); {kept}. Start another run with "
        f"{precision}a lower lr or prior_lr, clip_grad 1 or a longer warmup"
    )
    if write:
        write_failure(folder, progress.step, message)
    return VicinalError(message)
