"""The process of one run of a study: `python -m vicinal.studies.run_process STUDY NAME CONFIG`.

It trains or resumes the run, and ends as if it got SIGTERM, with a checkpoint, when its standard input is closed: that
is when the process that started it dies, by whatever signal. A lock keeps two processes from one run.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path

from filelock import FileLock

from vicinal.errors import VicinalError
from vicinal.studies.study_folder import StudyFolder
from vicinal.training.config import TrainConfig
from vicinal.training.run_folder import Run
from vicinal.training.signals import Interrupted
from vicinal.training.train import resume, train

__all__ = ["command", "main", "thread_variables"]

FAILED, STOPPED = 2, 3
"""Exit codes: the run failed and its error is stored; it was stopped and can be resumed."""


def command(study: Path, name: str, config_file: Path) -> list[str]:
    """Returns the command that starts the process of a run.

    Args:
        study: folder of the study.
        name: of the run.
        config_file: YAML file with its configuration.
    """
    return [sys.executable, "-m", __name__, str(study), name, str(config_file)]


def thread_variables(threads: int) -> dict[str, str]:
    """Returns the environment variables that set the number of threads before torch starts."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    return dict.fromkeys(names, str(threads))


def main(arguments: list[str]) -> int:
    """Trains or resumes a run. Returns the exit code."""
    study, name, config_file = StudyFolder(arguments[0]), arguments[1], Path(arguments[2])
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    folder = study.run_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{name}.lock")):  # waits for a process that is about to stop
        try:
            return _train(folder, TrainConfig.from_yaml(config_file))
        except VicinalError as error:
            study.note_failure(name, str(error))
            print(f"vicinal: {error}", file=sys.stderr)
        except Exception as error:
            study.note_failure(name, f"{type(error).__name__}: {error}".strip())
            traceback.print_exc()
    return FAILED


def _train(folder: Path, config: TrainConfig) -> int:
    try:
        run = resume(folder, config) if (folder / "config.yaml").is_file() else train(config)
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"vicinal: {error}", file=sys.stderr)
        return STOPPED
    _remove_checkpoints(run)
    return 0


def _remove_checkpoints(run: Run) -> None:
    """Removes the checkpoints of a finished run, which take six times the space of its model."""
    if run.finished:
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)


def _stop_with_parent() -> None:
    """Sends SIGTERM to this process when its standard input is closed."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
