"""The training loop.

- An epoch is one pass over the training images; a step is one update, whatever the number of processes and pieces.
- What a step draws derives from (seed, step), what the data draws from (seed, epoch, image). Nothing depends on what
  was drawn before, so a resumed run needs no state of any generator to go on exactly.
- Validation chooses nothing here: the last weights, or their moving average, are what is saved and tested, once.
"""

import math
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.data import derive_seed
from vicinal.errors import VicinalError
from vicinal.models import save
from vicinal.training import checkpoints
from vicinal.training.config import FREE, TrainConfig
from vicinal.training.environment import describe, keep_memory, seed_everything
from vicinal.training.evaluate import evaluate
from vicinal.training.logger import Recorder, Silence
from vicinal.training.run_folder import RESULTS, Run, write_json
from vicinal.training.setup import Job, on_cpu, prepare, start
from vicinal.training.signals import Interrupted, Stopping

__all__ = ["fit", "resume", "train_step"]

DROP_PATH, MIXING = 1, 2  # numbers that keep the draws of a step apart
CHECKPOINTS = "checkpoints"


@dataclass
class Progress:
    """Where a run is, and what it has to remember besides tensors."""

    epoch: int = 0
    position: int = 0
    """Steps done in this epoch."""
    step: int = 0
    loss: float = 0.0
    """Sum of the losses of this epoch's steps."""
    seconds: float = 0.0
    """Spent so far, over all starts."""
    training_seconds: float = 0.0
    """Spent on this epoch's steps."""
    history: list[dict[str, float | None]] = field(default_factory=list)


def fit(config: TrainConfig) -> Run:
    """Train a model, evaluate it, save it.

    >>> import tempfile, vicinal
    >>> config = vicinal.TrainConfig(epochs=1, warmup=0, train_size=128, out=tempfile.mkdtemp() + "/run")
    >>> run = vicinal.fit(config)  # doctest: +ELLIPSIS
    epoch 1/1  loss 2...
    >>> sorted(run.results)
    ['test', 'val']

    SIGTERM and SIGINT end it after the current step, with a checkpoint, by the exception `Interrupted`. While it
    lasts, this process keeps freed memory and flushes denormals, if it trains on a CPU.

    Args:
        config: everything that the run depends on. Its folder may not exist; `resume` continues a run.
    """
    Run.check_free(config.folder)
    with keep_memory(on_cpu(config)):
        return _fit(config, None)


def resume(folder: str | Path, config: TrainConfig | None = None) -> Run:
    """Continue a run from its last checkpoint, exactly: the weights at the end are those of a run that never stopped.

    >>> import tempfile, vicinal
    >>> config = vicinal.TrainConfig(epochs=1, warmup=0, train_size=128, out=tempfile.mkdtemp() + "/run")
    >>> run = vicinal.fit(config)  # doctest: +ELLIPSIS
    epoch 1/1  loss 2...
    >>> vicinal.resume(run.folder).results == run.results  # a finished run is left as it is
    True

    Args:
        folder: of the run.
        config: the run's own, with changes to what the result does not depend on: `data_dir`, `cache_dir`, `workers`,
            `checkpoint_minutes`.
    """
    run = Run(folder)
    before = run.config
    config = before if config is None else config
    for each in fields(TrainConfig):
        was, now = getattr(before, each.name), getattr(config, each.name)
        if was != now and each.name not in FREE:
            flag = "--" + each.name.replace("_", "-")
            raise VicinalError(
                f"{flag} was {was} in {folder} and cannot become {now}: the result would not be that of one run; "
                "start another one, with --init-from if it should begin with these weights"
            )
    if run.finished:
        return run
    with keep_memory(on_cpu(config)):
        return _fit(config, run)


def _fit(config: TrainConfig, run: Run | None) -> Run:
    accelerator = start(config)
    main = accelerator.is_main_process
    job = prepare(config, accelerator)
    environment = describe(accelerator.device, accelerator.num_processes, config.seed)
    progress = Progress()
    if run is None:
        if main:
            Run.create(config, environment)
        accelerator.wait_for_everyone()
        run = Run(config.folder)
    else:
        progress = _restore(job, run.folder)
        if main:
            run.note_resumed(environment)
    steps, began = job.train.steps, time.monotonic() - progress.seconds
    every = 1 if accelerator.device.type == "cpu" else 16  # steps; to look at a loss is to wait for the GPU
    recorder = (
        Recorder(run.folder, job.network, config.epochs, steps, progress.step, progress.history) if main else Silence()
    )
    with Stopping() as stopping, recorder:
        saved = mark = time.monotonic()
        while progress.epoch < config.epochs:
            pending: list[Tensor] = []
            for images, labels in job.train.batches(progress.epoch, start=progress.position):
                pending.append(train_step(job, config, progress.step + len(pending), images, labels))
                if len(pending) < every and progress.position + len(pending) < steps:
                    continue
                losses, stop = _agree(job, pending, stopping.asked)
                for loss in losses:
                    progress.step, progress.position = progress.step + 1, progress.position + 1
                    if not math.isfinite(loss):
                        raise _not_finite(loss, progress, config, run.folder)
                    progress.loss += loss
                    recorder.step(progress.epoch, loss)
                pending, now = [], time.monotonic()
                progress.training_seconds, mark = progress.training_seconds + now - mark, now
                progress.seconds = now - began
                if main and (stop or now - saved > 60 * config.checkpoint_minutes):
                    _save(job, run.folder, progress)
                    saved = mark = time.monotonic()
                if stop:
                    accelerator.wait_for_everyone()  # a launcher ends all processes when the first one has left
                    raise Interrupted(
                        f"stopped after step {progress.step} of {config.epochs * steps}; "
                        f"`vicinal train --resume {run.folder}` continues exactly there",
                        stop,
                    )
            _end_epoch(job, config, progress, began)
            recorder.epoch(progress.history[-1])
            if main:
                _save(job, run.folder, progress)
            saved = mark = time.monotonic()
        classes = len(job.class_names)
        results = {
            name: evaluate(job.judged, loader, classes, accelerator).as_dict()
            for name, loader in (("val", job.val), ("test", job.test))
            if len(loader.images)
        }
        if main:
            recorder.result(results)
            _finish(job, config, run.folder, results)
    accelerator.wait_for_everyone()
    return run


def train_step(job: Job, config: TrainConfig, step: int, images: Tensor, labels: Tensor) -> Tensor:
    """One update on this process's images of a step; returns the mean loss over them."""
    accelerator = job.accelerator
    device, dtype = accelerator.device, next(job.network.parameters()).dtype
    job.schedule.step_update(step)
    images, labels = images.to(device, dtype, non_blocking=True), labels.to(device, non_blocking=True)
    rank = accelerator.process_index
    batch = job.mixing(images, labels, derive_seed(config.seed, step, rank, MIXING))
    seed_everything(derive_seed(config.seed, step, rank, DROP_PATH))
    job.model.train()
    job.optimizer.zero_grad()
    total = torch.zeros((), device=device, dtype=dtype)
    for number, part in enumerate(batch.pieces(config.accumulate), start=1):
        last = number == config.accumulate
        with nullcontext() if last else accelerator.no_sync(job.model):  # processes exchange gradients once a step
            with job.mixing:
                logits = job.model(part.images)
            loss = F.cross_entropy(logits, job.mixing.targets(part)) / config.accumulate
            accelerator.backward(loss)
        total += loss.detach()
    if config.clip_grad is not None:
        accelerator.clip_grad_norm_(job.model.parameters(), config.clip_grad)
    job.optimizer.step()
    if job.ema is not None:
        job.ema.update(job.network, step=step + 1)
    return total


def _agree(job: Job, losses: list[Tensor], asked: int) -> tuple[list[float], int]:
    """Losses averaged over processes, and the signal to stop by, if any process got one."""
    packed = torch.stack([*losses, losses[0].new_tensor(asked)])
    if job.accelerator.num_processes > 1:
        packed = job.accelerator.reduce(packed, "sum")
        packed[:-1] /= job.accelerator.num_processes
    *means, anybody = packed.tolist()
    return means, asked or (signal.SIGTERM if anybody else 0)


def _end_epoch(job: Job, config: TrainConfig, progress: Progress, began: float) -> None:
    """Evaluate, note the epoch's figures, and go to the start of the next."""
    steps = job.train.steps
    val = evaluate(job.judged, job.val, len(job.class_names), job.accelerator) if len(job.val.images) else None
    progress.seconds = time.monotonic() - began
    progress.epoch += 1
    progress.history.append(
        {
            "epoch": progress.epoch,
            "step": progress.step,
            "images_seen": progress.step * config.batch_size,
            "lr": job.optimizer.param_groups[0]["lr"],
            "train_loss": progress.loss / steps,
            "val_loss": val.loss if val else None,
            "val_top1": val.top1 if val else None,
            "val_top5": val.top5 if val else None,
            "images_per_second": round(steps * config.batch_size / progress.training_seconds, 2),
            "seconds": round(progress.seconds, 2),
        }
    )
    progress.position, progress.loss, progress.training_seconds = 0, 0.0, 0.0


def _not_finite(loss: float, progress: Progress, config: TrainConfig, folder: Path) -> VicinalError:
    kept = sorted(file.name for file in (folder / CHECKPOINTS).glob("step-*"))
    last = f"{kept[-1]}, from before, is kept in {folder / CHECKPOINTS}" if kept else "there was no checkpoint yet"
    precise = "--precision fp32, " if config.precision in ("bf16", "fp16") else ""
    return VicinalError(
        f"the loss became {loss} at step {progress.step} (epoch {progress.epoch + 1}); {last}. Start another run with "
        f"{precise}a lower --lr or --prior-lr, --clip-grad 1 or a longer --warmup"
    )


def _save(job: Job, folder: Path, progress: Progress) -> None:
    tensors = {f"model.{name}": value for name, value in job.network.state_dict().items()}
    if job.ema is not None:
        tensors |= {f"ema.{name}": value for name, value in job.ema.module.state_dict().items()}
    optimizer, rest = checkpoints.pack_optimizer(job.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    scaler = job.accelerator.scaler
    state = {
        "progress": asdict(progress),
        "optimizer": rest,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }
    checkpoints.write(folder / CHECKPOINTS, progress.step, tensors, state)


def _restore(job: Job, folder: Path) -> Progress:
    """Go back to the last checkpoint; to the start, if the run had not come to one."""
    found = checkpoints.latest(folder / CHECKPOINTS)
    if found is None:
        return Progress()
    tensors, state = found
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = value
    job.network.load_state_dict(parts["model"])
    if job.ema is not None:
        job.ema.module.load_state_dict(parts["ema"])
    checkpoints.unpack_optimizer(job.optimizer, parts["optimizer"], state["optimizer"])
    if job.accelerator.scaler is not None:
        job.accelerator.scaler.load_state_dict(state["scaler"])
    return Progress(**state["progress"])


def _finish(job: Job, config: TrainConfig, folder: Path, results: dict[str, Any]) -> None:
    """Save the model, then the results, whose file says that the run is finished."""
    model = job.accelerator.unwrap_model(job.judged, keep_fp32_wrapper=False)
    if config.precision == "fp64":
        model.float()
    save(
        model,
        folder / "model",
        class_names=job.class_names,
        preprocessing=job.preprocessing.declared(),
        overwrite=True,
    )
    write_json(folder / RESULTS, results)
