"""The local runner: runs of a study in processes of their own, a few at a time."""

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from vicinal.files import write_text
from vicinal.studies.run_process import FAILED, STOPPED, command, thread_variables
from vicinal.studies.spec import PlannedRun
from vicinal.studies.study_folder import StudyFolder

__all__ = ["POLL_SECONDS", "STOP_SECONDS", "Tick", "note_exit", "run_local", "start_process", "stop_processes"]

Tick = Callable[[Sequence[str]], None]
"""Called about five times a second with the names of the runs that are running."""
POLL_SECONDS = 0.2
STOP_SECONDS = 60
"""Time for a process to finish its step and save a checkpoint."""


def run_local(study: StudyFolder, runs: Sequence[PlannedRun], *, jobs: int, threads: int, tick: Tick) -> None:
    """Runs what is given, and returns when all runs are finished or failed.

    When this process gets Ctrl-C or SIGTERM, or dies, the processes of the runs stop with a checkpoint.

    Args:
        study: folder of the study.
        runs: to start or to resume.
        jobs: number of runs at a time.
        threads: of each run.
        tick: shows the progress.
    """
    waiting = deque(runs)
    running: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                slot = min(set(range(jobs)) - {taken for taken, _ in running.values()})
                planned = waiting.popleft()
                running[planned.name] = slot, start_process(study, planned, threads, slot)
            time.sleep(POLL_SECONDS)
            for name, (_, process) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    _close_input(process)
                    note_exit(study, name, process.returncode)
            tick(list(running))
    finally:
        stop_processes([process for _, process in running.values()])


def start_process(
    study: StudyFolder, planned: PlannedRun, threads: int, slot: int | None = None
) -> "subprocess.Popen[bytes]":
    """Starts the process of a run. Its output goes to the run's log file.

    Args:
        study: folder of the study.
        planned: the run.
        threads: that it uses.
        slot: number of the run among those that run now, which says which GPU it takes; None for all GPUs.
    """
    study.failure_file(planned.name).unlink(missing_ok=True)
    config_file, log = study.config_file(planned.name), study.log_file(planned.name)
    for file in (config_file, log):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_text(config_file, planned.config.to_yaml())
    environment = os.environ | thread_variables(threads) | _gpu_variables(planned.config.device, slot)
    with open(log, "ab") as output:
        return subprocess.Popen(
            command(study.folder, planned.name, config_file),
            stdin=subprocess.PIPE,  # closed when this process ends, which stops the run
            stdout=output,
            stderr=output,
            env=environment,
        )


def note_exit(study: StudyFolder, name: str, code: int) -> None:
    """Stores the error of a process that died without a word, such as by a lack of memory.

    Args:
        study: folder of the study.
        name: of the run.
        code: exit code; negative for a signal.
    """
    if code not in (0, FAILED, STOPPED):
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        study.note_failure(name, f"the process of the run {how}; see {_shown(study.log_file(name))}")


def _gpu_variables(device: str, slot: int | None) -> dict[str, str]:
    """Returns what gives each run at a time another GPU, if there are several and no device is named."""
    import torch

    count = torch.cuda.device_count()
    if slot is None or count < 2 or device not in ("auto", "cuda"):
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(count)]
    return {"CUDA_VISIBLE_DEVICES": names[slot % count]}


def stop_processes(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Stops processes after their current step, and waits for them."""
    for process in processes:
        _close_input(process)
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _close_input(process: "subprocess.Popen[bytes]") -> None:
    """Closes the standard input of a process, which stops it if it runs."""
    assert process.stdin is not None
    process.stdin.close()


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
