"""The folder of a study: its definition, its record, its runs and their states."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from os import getpid
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vicinal.errors import VicinalError
from vicinal.files import write_json, write_text
from vicinal.studies.run_environment import RunEnvironment
from vicinal.studies.spec import PlannedRun, StudySpec
from vicinal.studies.spec_reader import read_spec
from vicinal.training.config import RESUME_FIELDS
from vicinal.training.run_folder import Run, with_absolute_paths

__all__ = ["RunState", "RunStatus", "StudyFolder", "StudyRecord"]

SPEC_FILE, RECORD_FILE, LOCK_FILE = "study.yaml", "study.json", ".lock"
RECORD_FORMAT = 1


class RunState(Enum):
    """How far a run of a study is."""

    WAITING = "waiting"
    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class RunStatus:
    """State of a run, and what is known about it."""

    state: RunState
    steps: int = 0
    """Steps done at the end of the last epoch."""
    message: str | None = None
    """Why it failed."""
    final: bool = False
    """Whether it would fail again, so that it is not started again."""


@dataclass(frozen=True)
class StudyRecord:
    """What `study.json` holds."""

    directory: Path
    """The folder that relative paths of data start at."""
    device: str
    environment: RunEnvironment
    facts: Mapping[str, Any]
    """What was measured of each arm, by the name of arm and condition."""


class StudyFolder:
    """A study in its folder: `study.yaml`, `study.json`, `runs/`, `logs/`, `failed/` and tables.

    Args:
        folder: it need not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def exists(self) -> bool:
        """Whether the folder holds a study."""
        return (self.folder / SPEC_FILE).is_file() and (self.folder / RECORD_FILE).is_file()

    def spec(self) -> StudySpec:
        """Returns the definition that the study was last started with.

        Raises:
            VicinalError: if it cannot be used.
        """
        return read_spec(self.folder / SPEC_FILE)

    def record(self) -> StudyRecord:
        """Returns the record of the study."""
        values = json.loads((self.folder / RECORD_FILE).read_text(encoding="utf-8"))
        if values["format"] != RECORD_FORMAT:
            raise VicinalError(f"{self.folder / RECORD_FILE} was written by another version of vicinal")
        environment = RunEnvironment(**values["environment"])
        return StudyRecord(Path(values["directory"]), values["device"], environment, values["facts"])

    def write(self, spec: StudySpec, record: StudyRecord) -> None:
        """Writes definition and record; the folder is made if necessary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {
            "format": RECORD_FORMAT,
            "directory": str(record.directory),
            "device": record.device,
            "environment": record.environment.as_dict(),
            "facts": dict(record.facts),
        }
        write_text(self.folder / SPEC_FILE, spec.file.text)
        write_json(self.folder / RECORD_FILE, values)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from running the study inside of `with`. The lock ends with the process.

        Raises:
            VicinalError: if another process runs the study.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = self.folder / f"{LOCK_FILE}-owner"
        try:
            with FileLock(self.folder / LOCK_FILE, timeout=0):
                write_text(owner, f"process {getpid()} on {socket.gethostname()}")
                yield
        except Timeout:
            name = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
            raise VicinalError(
                f"{self.folder} is being run by {name}; `vicinal study show {self.folder}` shows how far it is"
            ) from None

    def run_folder(self, name: str) -> Path:
        """Returns the folder of a run."""
        return self.folder / "runs" / name

    def config_file(self, name: str) -> Path:
        """Returns the file with the configuration of a run, which is written each time that its process starts."""
        return self.folder / "configs" / f"{name}.yaml"

    def log_file(self, name: str) -> Path:
        """Returns the file with the output of a run."""
        return self.folder / "logs" / f"{name}.log"

    def failure_file(self, name: str) -> Path:
        """Returns the file with the error of a run, which exists if it failed."""
        return self.folder / "failed" / f"{name}.json"

    def note_failure(self, name: str, message: str) -> None:
        """Stores why a run failed."""
        file = self.failure_file(name)
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"message": message})

    def status(self, name: str) -> RunStatus:
        """Returns the status of a run."""
        folder = self.run_folder(name)
        run = Run(folder) if (folder / "config.yaml").is_file() else None
        metrics = [] if run is None else run.metrics
        steps = int(metrics[-1]["step"] or 0) if metrics else 0
        if run is not None and run.finished:
            return RunStatus(RunState.FINISHED, steps)
        if run is not None and run.failure is not None:
            return RunStatus(RunState.FAILED, steps, run.failure, final=True)
        if (file := self.failure_file(name)).is_file():
            return RunStatus(RunState.FAILED, steps, json.loads(file.read_text(encoding="utf-8"))["message"])
        return RunStatus(RunState.WAITING if run is None else RunState.STARTED, steps)

    def checked_status(self, name: str) -> RunStatus:
        """Returns the status of a run, which is that of a failed one if a file of the run cannot be read."""
        try:
            status = self.status(name)
            if status.state in (RunState.FINISHED, RunState.STARTED):
                run = Run(self.run_folder(name))
                _ = run.config, run.results, run.environment
        except VicinalError as error:
            return RunStatus(RunState.FAILED, message=str(error), final=True)
        return status

    def check_run(self, planned: PlannedRun) -> None:
        """Raises VicinalError if the folder of a run holds a run with other settings."""
        folder = self.run_folder(planned.name)
        if not (folder / "config.yaml").is_file():
            return
        before, now = Run(folder).config, with_absolute_paths(planned.config)
        for field in sorted(now.__dataclass_fields__.keys() - RESUME_FIELDS):
            old, new = getattr(before, field), getattr(now, field)
            if old != new:
                raise VicinalError(
                    f"{folder} was run with {field} {old}, and the study now has {new}; give the changed study another "
                    "folder with --out"
                )
