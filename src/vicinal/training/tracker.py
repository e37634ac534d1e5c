"""The tracker of a run: TensorBoard, Weights & Biases or MLflow, through Accelerate."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vicinal.errors import VicinalError
from vicinal.files import write_json
from vicinal.training.config import TrainConfig
from vicinal.training.config_error import ConfigError

__all__ = ["TRACKER_FILE", "check_tracker", "start_tracker"]

PROJECT = "vicinal"  # project of Weights & Biases, experiment of MLflow
TRACKER_FILE = "tracker.json"  # the tracker's own id of the run, so that a resumed run continues there


def check_tracker(config: TrainConfig) -> None:
    """Raises ConfigError if the package of the tracker is not installed."""
    if config.track != "none" and importlib.util.find_spec(config.track) is None:
        raise ConfigError(
            "track",
            f"{config.track} needs the package {config.track}, which is not installed; `pip install {config.track}`, "
            "or choose tensorboard or none",
        )


def start_tracker(config: TrainConfig, folder: Path, step: int = 0) -> Any:
    """Returns a started `accelerate.tracking.GeneralTracker`; None for `none`.

    Args:
        config: of the run, which Weights & Biases and MLflow store too.
        folder: run folder; its name is the name of the run.
        step: number of steps done before, if the run is resumed.

    Raises:
        VicinalError: the tracker does not start, because of its network or login for example.
    """
    if config.track == "none":
        return None
    tracker = _make_tracker(config, folder, step)
    try:
        tracker.start()
        if config.track != "tensorboard":  # it would write another folder for every start
            tracker.store_init_configuration(_plain_values(config))
            run = tracker.tracker
            run_id = run.id if config.track == "wandb" else run.info.run_id
            write_json(folder / TRACKER_FILE, {"tracker": config.track, "id": run_id})
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise VicinalError(
            f"the tracker {config.track} does not start: {reason}; `vicinal train --resume {folder} --track none` goes "
            "on without it"
        ) from error
    return tracker


def _make_tracker(config: TrainConfig, folder: Path, step: int) -> Any:
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker

    if config.track == "tensorboard":
        return TensorBoardTracker("tensorboard", folder, purge_step=step + 1)
    before = _run_id(config, folder)
    if config.track == "wandb":
        return WandBTracker(PROJECT, name=folder.name, dir=str(folder), id=before, resume="allow")
    return MLflowTracker(PROJECT, run_id=before, run_name=folder.name)


def _run_id(config: TrainConfig, folder: Path) -> str | None:
    """Returns the id that the tracker gave the run before, if the run is resumed with the same tracker."""
    file = folder / TRACKER_FILE
    stored = json.loads(file.read_text()) if file.is_file() else {}
    return str(stored["id"]) if stored.get("tracker") == config.track else None


def _plain_values(config: TrainConfig) -> dict[str, Any]:
    return {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in asdict(config).items()
    }
