"""The training loop.

- An epoch is one pass over the training images. A step is one update of the weights, for any number of processes and
  gradient-accumulation pieces.
- Random choices of a step derive from (seed, step), those of the data from (seed, epoch, image). A checkpoint therefore
  holds no generator state, and a resumed run is exact.
- Validation selects nothing: the last weights, or their moving average, are saved, and tested once.
"""

import math
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.data import Loader, derive_seed
from vicinal.errors import VicinalError
from vicinal.files import write_json
from vicinal.models import save
from vicinal.training.checkpoints import Progress, list_checkpoints, load_checkpoint, save_checkpoint
from vicinal.training.config import RESUME_FIELDS, ConfigError, TrainConfig
from vicinal.training.cpu_memory import keep_freed_memory
from vicinal.training.environment import describe_environment
from vicinal.training.evaluate import Evaluation, evaluate
from vicinal.training.header import run_header
from vicinal.training.logger import NullLogger, RunLogger
from vicinal.training.loss_buffer import LossBuffer
from vicinal.training.run_folder import RESULTS_FILE, Run
from vicinal.training.setup import TrainState, make_accelerator, prepare, seed_generators, uses_cpu
from vicinal.training.signals import Interrupted, StopSignals
from vicinal.training.timer import Timer
from vicinal.training.tracker import start_tracker

__all__ = ["fit", "resume", "train", "train_step"]

DROP_PATH_STREAM, MIXING_STREAM = 1, 2  # make the seeds of a step differ from each other


def train(config: TrainConfig) -> Run:
    """Trains a model, evaluates it and saves it. Returns the run.

    >>> import tempfile, vicinal
    >>> config = vicinal.TrainConfig(epochs=1, warmup=0, train_size=128, out=tempfile.mkdtemp() + "/run")
    >>> run = vicinal.train(config)  # doctest: +ELLIPSIS
    data    digits, 10 classes, 8 x 8 px, grayscale
    ...
    epoch 1/1  loss 2...
    >>> sorted(run.results)
    ['test', 'val']

    During training on a CPU, the process keeps freed memory and flushes denormals.

    Args:
        config: all settings. The run folder must not exist yet; `resume` continues a run.

    Raises:
        VicinalError: if the run folder exists, a setting cannot be used, or the loss is not finite.
        Interrupted: after SIGTERM or SIGINT, when the current step is done and a checkpoint is saved.
    """
    Run.check_free(config.folder)
    with keep_freed_memory(uses_cpu(config)):
        return _train(config, None)


fit = train
"""The former name of `train`."""


def resume(folder: str | Path, config: TrainConfig | None = None) -> Run:
    """Continues a run from its last checkpoint. Returns the run; a finished run is returned unchanged.

    The final weights are those of a run without interruption: bit for bit on a CPU.

    >>> import tempfile, vicinal
    >>> config = vicinal.TrainConfig(epochs=1, warmup=0, train_size=128, out=tempfile.mkdtemp() + "/run")
    >>> run = vicinal.train(config)  # doctest: +ELLIPSIS
    data    digits, 10 classes, 8 x 8 px, grayscale
    ...
    epoch 1/1  loss 2...
    >>> vicinal.resume(run.folder).results == run.results
    True

    Args:
        folder: run folder.
        config: the run's configuration, in which only `data_dir`, `cache_dir`, `workers`, `out`, `track` and
            `checkpoint_minutes` can differ; the saved configuration by default.

    Raises:
        VicinalError: if there is no such run, another field differs, or the loss is not finite.
        Interrupted: after SIGTERM or SIGINT, when the current step is done and a checkpoint is saved.
    """
    run = Run(folder)
    before = run.config
    config = before if config is None else config
    for field in fields(TrainConfig):
        old, new = getattr(before, field.name), getattr(config, field.name)
        if old != new and field.name not in RESUME_FIELDS:
            raise ConfigError(
                field.name,
                f"was {old} in {folder} and cannot become {new} when the run is resumed, because the result would "
                "change; start another run, from these weights with init_from",
            )
    if run.finished:
        return run
    with keep_freed_memory(uses_cpu(config)):
        return _train(config, run)


def _train(config: TrainConfig, run: Run | None) -> Run:
    """Trains a new run, or `run` from its last checkpoint. Returns the run."""
    # Set up devices, data, model and optimizer.
    accelerator = make_accelerator(config)
    is_main = accelerator.is_main_process
    state = prepare(config, accelerator)
    steps = state.train.steps

    # Create the run folder, or restore the last checkpoint.
    run, progress = _open_run(config, run, state)
    logger = _make_logger(config, state, run, progress)
    losses, timer = LossBuffer(accelerator), Timer(progress.seconds)
    with StopSignals() as stop_signals, logger:
        while progress.epoch < config.epochs:
            timer.restart()
            last_step = (progress.epoch + 1) * steps - 1
            batches = state.train.batches(progress.epoch, start=progress.position)
            for step, (images, labels) in enumerate(batches, start=progress.step):
                # Update the weights.
                losses.append(train_step(state, config, step, images, labels))
                if not losses.full and step < last_step:
                    continue

                # Read the losses, averaged over processes, and whether any process has to stop.
                values, stop_signal = losses.flush(stop_signals.received)
                for loss in values:
                    progress.add_step(loss)
                    if not math.isfinite(loss):
                        raise _loss_error(loss, progress, config, run.folder)
                    logger.log_step(progress.epoch, loss)
                progress.seconds = timer.total()
                progress.training_seconds += timer.lap()

                # Save a checkpoint every few minutes, and before the run stops.
                if is_main and (stop_signal or timer.checkpoint_age() > 60 * config.checkpoint_minutes):
                    save_checkpoint(run.folder, state, progress)
                    timer.restart()
                if stop_signal:
                    accelerator.wait_for_everyone()  # a launcher kills the other processes when the first one exits
                    raise _interrupted(stop_signal, progress.step, config.epochs * steps, run.folder)

            # Evaluate on validation images, log the epoch and save a checkpoint.
            val = _evaluate(state, state.val)
            progress.seconds = timer.total()
            progress.end_epoch(_epoch_metrics(state, config, progress, val))
            logger.log_epoch(progress.history[-1])
            if is_main:
                save_checkpoint(run.folder, state, progress)

        # Evaluate the final model. Save it, then its results, which mark the run as finished.
        evaluations = {"val": _evaluate(state, state.val), "test": _evaluate(state, state.test)}
        results = {name: found.as_dict() for name, found in evaluations.items() if found is not None}
        if is_main:
            logger.log_results(results)
            _save_model(state, config, run.folder)
            write_json(run.folder / RESULTS_FILE, results)
    accelerator.wait_for_everyone()
    return run


def train_step(state: TrainState, config: TrainConfig, step: int, images: Tensor, labels: Tensor) -> Tensor:
    """Updates the weights once. Returns the mean loss over this process's images, a scalar on the device.

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
    state.optimizer.zero_grad()
    total = torch.zeros((), device=device, dtype=dtype)
    for number, piece in enumerate(batch.pieces(config.accumulate), start=1):
        is_last = number == config.accumulate
        with nullcontext() if is_last else accelerator.no_sync(state.model):  # reduce gradients once per step
            with state.mixing:
                logits = state.model(piece.images)
            loss = F.cross_entropy(logits, state.mixing.targets(piece)) / config.accumulate
            accelerator.backward(loss)
        total += loss.detach()
    if config.clip_grad is not None:
        accelerator.clip_grad_norm_(state.model.parameters(), config.clip_grad)
    state.optimizer.step()
    if state.ema is not None:
        state.ema.update(state.raw_model, step=step + 1)
    return total


def _open_run(config: TrainConfig, run: Run | None, state: TrainState) -> tuple[Run, Progress]:
    accelerator = state.accelerator
    environment = describe_environment(accelerator.device, accelerator.num_processes, config.seed)
    if run is not None:
        progress = load_checkpoint(run.folder, state)
        if accelerator.is_main_process:
            run.note_resumed(environment)
        return run, progress
    if accelerator.is_main_process:
        Run.create(config, environment)
    accelerator.wait_for_everyone()
    return Run(config.folder), Progress()


def _make_logger(config: TrainConfig, state: TrainState, run: Run, progress: Progress) -> NullLogger:
    """Prints the header of the run and starts its tracker. Returns the logger of this process."""
    if not state.accelerator.is_main_process:
        return NullLogger()
    print(run_header(config, state, run.folder, progress.step), flush=True)
    tracker = start_tracker(config, run.folder, progress.step)
    steps = state.train.steps
    return RunLogger(run.folder, state.raw_model, config.epochs, steps, progress.step, progress.history, tracker)


def _evaluate(state: TrainState, loader: Loader) -> Evaluation | None:
    if not len(loader.images):
        return None
    return evaluate(state.eval_model, loader, len(state.class_names), state.accelerator)


def _epoch_metrics(
    state: TrainState, config: TrainConfig, progress: Progress, val: Evaluation | None
) -> dict[str, float | None]:
    """Returns the row of metrics.csv for the epoch that ends now."""
    steps = state.train.steps
    return {
        "epoch": progress.epoch + 1,
        "step": progress.step,
        "images_seen": progress.step * config.batch_size,
        "lr": state.optimizer.param_groups[0]["lr"],
        "train_loss": progress.loss / steps,
        "val_loss": val.loss if val else None,
        "val_top1": val.top1 if val else None,
        "val_top5": val.top5 if val else None,
        "images_per_second": round(steps * config.batch_size / progress.training_seconds, 2),
        "seconds": round(progress.seconds, 2),
    }


def _loss_error(loss: float, progress: Progress, config: TrainConfig, folder: Path) -> VicinalError:
    checkpoints = list_checkpoints(folder)
    last = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
    precision = "precision fp32, " if config.precision in ("bf16", "fp16") else ""
    return VicinalError(
        f"the loss became {loss} at step {progress.step} (epoch {progress.epoch + 1}); {last}. Start another run with "
        f"{precision}a lower lr or prior_lr, clip_grad 1 or a longer warmup"
    )


def _interrupted(stop_signal: int, step: int, steps: int, folder: Path) -> Interrupted:
    command = f"vicinal train --resume {folder}"
    return Interrupted(f"stopped after step {step} of {steps}; `{command}` continues exactly there", stop_signal)


def _save_model(state: TrainState, config: TrainConfig, folder: Path) -> None:
    model = state.accelerator.unwrap_model(state.eval_model, keep_fp32_wrapper=False)
    if config.precision == "fp64":
        model.float()
    preprocessing = state.preprocessing.declared()
    save(model, folder / "model", class_names=state.class_names, preprocessing=preprocessing, overwrite=True)
