"""The training loop.

- An epoch is one pass over the training images, its last step with those that are left. A step is one update of the
  weights, for any number of processes and gradient-accumulation pieces, by the mean loss over its images.
- Random choices of a step derive from (seed, step), those of the data from (seed, epoch, image). A checkpoint therefore
  holds no generator state, and a resumed run is exact.
- Validation selects nothing unless `patience` or `keep` say so: the last weights, or their moving average, are saved,
  and tested once.
"""

import math
import sys
from dataclasses import fields
from pathlib import Path

from accelerate.utils import broadcast_object_list

from vicinal.attention.native import attention_path, prepare_native
from vicinal.data import DataRecord
from vicinal.files import write_json
from vicinal.models import save
from vicinal.models.save import save_config
from vicinal.training.accelerator import make_accelerator
from vicinal.training.checkpoints import Progress, load_best, load_checkpoint, save_best, save_checkpoint
from vicinal.training.config import RESUME_FIELDS, ConfigError, TrainConfig
from vicinal.training.cpu_memory import tune_cpu
from vicinal.training.device import find_device
from vicinal.training.divergence import divergence_error
from vicinal.training.environment import describe_environment, path_notes
from vicinal.training.evaluate import Evaluation, evaluate
from vicinal.training.header import run_header
from vicinal.training.logger import NullLogger, RunLogger
from vicinal.training.loss_buffer import LossBuffer
from vicinal.training.model_path import MODEL_CONFIG
from vicinal.training.predictions_file import write_predictions
from vicinal.training.run_folder import ATTENTION_KEY, RESULTS_FILE, Run, with_absolute_paths
from vicinal.training.setup import TrainState, prepare
from vicinal.training.signals import Interrupted, StopSignals
from vicinal.training.timer import Timer
from vicinal.training.tracker import start_tracker
from vicinal.training.train_step import train_step

__all__ = ["fit", "resume", "train"]


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
        config: all settings. `out` must not exist yet; without it, the run folder gets a new name. `resume` continues a
            run.

    Raises:
        VicinalError: if the run folder exists, a setting cannot be used, or the loss is not finite.
        Interrupted: after SIGTERM or SIGINT, when the current step is done and a checkpoint is saved.
    """
    if config.out is not None:
        Run.check_free(config.folder)
    with tune_cpu(find_device(config.device).type == "cpu"):
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
        config: the run's configuration, in which only `RESUME_FIELDS` can differ; the saved one by default. `dataset`
            says where the data is now: it must have the same images.

    Raises:
        VicinalError: if there is no such run, another field or the data differ, or the loss is not finite.
        Interrupted: after SIGTERM or SIGINT, when the current step is done and a checkpoint is saved.
    """
    run = Run(folder)
    before = with_absolute_paths(run.config)
    config = before if config is None else with_absolute_paths(config)
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
    run.check_resumable()
    with tune_cpu(find_device(config.device).type == "cpu"):
        return _train(config, run)


def _train(config: TrainConfig, run: Run | None) -> Run:
    """Trains a new run, or `run` from its last checkpoint. Returns the run."""
    # Set up devices, data, model and optimizer.
    accelerator = make_accelerator(config)
    if accelerator.device.type == "cpu":
        prepare_native()
    is_main = accelerator.is_main_process
    state = prepare(config, accelerator)
    length = state.length

    # Create the run folder, or restore the last checkpoint.
    run, progress = _open_run(config, run, state)
    logger = _make_logger(config, state, run, progress)
    losses, timer = LossBuffer(accelerator), Timer(progress.seconds)
    with StopSignals() as stop_signals, logger:
        while not progress.is_over(length.epochs, config.patience):
            timer.restart()
            last_step = length.last_step(progress.epoch)
            batches = state.train.batches(progress.epoch, start=progress.position)
            steps = range(progress.step, last_step + 1)
            for step, (images, labels) in zip(steps, batches, strict=False):  # the last epoch can be shorter
                # Update the weights.
                losses.append(train_step(state, config, step, images, labels))
                if not losses.full and step < last_step:
                    continue

                # Read the losses, averaged over processes, and whether any process has to stop.
                values, stop_signal = losses.flush(stop_signals.received)
                for loss in values:
                    progress.add_step(loss, state.train.step_size(progress.position))
                    if not math.isfinite(loss):
                        raise divergence_error(run.folder, config, progress, "train", loss, write=is_main)
                    logger.log_step(progress.epoch, loss)
                progress.seconds = timer.total()
                progress.training_seconds += timer.lap()

                # Save a checkpoint every few minutes, and before the run stops.
                if is_main and (stop_signal or timer.checkpoint_age() > 60 * config.checkpoint_minutes):
                    save_checkpoint(run.folder, state, progress)
                    timer.restart()
                if stop_signal:
                    accelerator.wait_for_everyone()  # a launcher kills the other processes when the first one exits
                    raise _interrupted(stop_signal, progress.step, length.steps, run.folder)

            # Evaluate on validation images, log the epoch and save a checkpoint.
            val = _evaluate(state, config, "val", progress, run)
            progress.seconds = timer.total()
            progress.end_epoch(_epoch_metrics(state, progress, val))
            logger.log_epoch(progress.history[-1])
            if is_main:
                if config.keep == "best" and progress.best_epoch == progress.epoch - 1:
                    save_best(run.folder, state.eval_model)
                save_checkpoint(run.folder, state, progress)

        _finish(state, config, progress, run, logger)
    accelerator.wait_for_everyone()
    return run


def _finish(state: TrainState, config: TrainConfig, progress: Progress, run: Run, logger: NullLogger) -> None:
    """Evaluates the final model. Saves it, its predictions, then its results, which mark the run as finished."""
    if config.keep == "best":
        state.accelerator.wait_for_everyone()  # the main process has written it
        load_best(run.folder, state.eval_model)
    evaluated = {}
    for name, loader in (("val", state.val), ("test", state.test)):
        found = _evaluate(state, config, name, progress, run)
        if found is not None:
            evaluated[name] = loader, found
    if state.accelerator.is_main_process:
        results = {name: found.as_dict() for name, (_, found) in evaluated.items()}
        logger.log_results(results)
        write_predictions(run.folder, evaluated, state.class_names)
        _save_model(state, config, run.folder)
        attention = attention_path(state.accelerator.device)
        write_json(run.folder / RESULTS_FILE, {**results, ATTENTION_KEY: attention})


def _open_run(config: TrainConfig, run: Run | None, state: TrainState) -> tuple[Run, Progress]:
    accelerator = state.accelerator
    environment = describe_environment(accelerator.device, accelerator.num_processes, config.seed)
    loaders = {"train": state.train, "val": state.val, "test": state.test}
    data = DataRecord.of({role: loader.images.split for role, loader in loaders.items()}, state.class_names)
    if run is not None:
        run.check_data(data, config.dataset)
        progress = load_checkpoint(run.folder, state)
        state.notes += path_notes(run.environment, environment["attention"])
        if accelerator.is_main_process:
            run.note_resumed(environment, config)
        return run, progress
    if accelerator.is_main_process:
        run = Run.create(config, environment, data)
        file, preprocessing = run.folder / MODEL_CONFIG, state.preprocessing.declared()
        save_config(state.raw_model, file, class_names=state.class_names, preprocessing=preprocessing)
    folder = broadcast_object_list([None if run is None else run.folder])[0]  # waits for the main process
    return Run(folder), Progress()


def _make_logger(config: TrainConfig, state: TrainState, run: Run, progress: Progress) -> NullLogger:
    """Prints the header of the run and starts its tracker. Returns the logger of this process."""
    if not state.accelerator.is_main_process:
        return NullLogger()
    print("".join(f"note: {note}\n" for note in state.notes), end="", file=sys.stderr)
    print(run_header(config, state, run.folder, progress.step), flush=True)
    tracker = start_tracker(config, run.folder, progress.step)
    return RunLogger(run.folder, state.raw_model, state.length, progress.step, progress.history, tracker)


def _evaluate(state: TrainState, config: TrainConfig, split: str, progress: Progress, run: Run) -> Evaluation | None:
    """Returns the metrics on a split; None if it is empty.

    Raises:
        VicinalError: if the loss is not finite.
    """
    loader = state.val if split == "val" else state.test
    if not len(loader.images):
        return None
    found = evaluate(state.eval_model, loader, len(state.class_names), state.accelerator)
    if not math.isfinite(found.loss):
        write = state.accelerator.is_main_process
        raise divergence_error(run.folder, config, progress, split, found.loss, write=write)
    return found


def _epoch_metrics(state: TrainState, progress: Progress, val: Evaluation | None) -> dict[str, float | None]:
    """Returns the row of metrics.csv for the epoch that ends now."""
    images = sum(state.train.step_size(position) for position in range(progress.position))
    return {
        "epoch": progress.epoch + 1,
        "step": progress.step,
        "images_seen": progress.epoch * len(state.train.images) + images,
        "lr": state.optimizer.param_groups[0]["lr"],
        "train_loss": progress.loss / images,
        "val_loss": val.loss if val else None,
        "val_top1": val.top1 if val else None,
        "val_top5": val.top5 if val else None,
        "images_per_second": round(images / progress.training_seconds, 2),
        "seconds": round(progress.seconds, 2),
    }


def _interrupted(stop_signal: int, step: int, steps: int, folder: Path) -> Interrupted:
    text = f"stopped after step {step} of {steps}; `vicinal train --resume {folder}` continues exactly there"
    return Interrupted(text, stop_signal)


def _save_model(state: TrainState, config: TrainConfig, folder: Path) -> None:
    model = state.accelerator.unwrap_model(state.eval_model, keep_fp32_wrapper=False)
    if config.precision == "fp64":
        model.float()
    preprocessing = state.preprocessing.declared()
    save(model, folder / "model", class_names=state.class_names, preprocessing=preprocessing, overwrite=True)
