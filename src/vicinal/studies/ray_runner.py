"""The Ray runner: runs of a study as tasks of a Ray cluster, which places them and retries those of lost workers.

A task starts the same process as the local runner and waits for it. When a Ray worker dies, its run stops with a
checkpoint, and the process of the retried task continues the run as soon as the first one has released its lock.
"""

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vicinal.errors import VicinalError
from vicinal.files import write_text
from vicinal.studies.runner import POLL_SECONDS, STOP_SECONDS, Tick, note_exit, start_process, stop_processes
from vicinal.studies.spec import PlannedRun
from vicinal.studies.study_folder import StudyFolder
from vicinal.training.device import find_device
from vicinal.training.signals import Interrupted, StopSignals

__all__ = ["run_on_ray"]

MAX_RETRIES = 10
"""How often Ray starts a task again after its worker or node was lost."""
CONNECT_SECONDS = 10
CHECK_SECONDS = 120
"""Time for all nodes to find the folder of the study, which includes the start of a worker."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Of a Ray that is started here: tasks pass hardly any objects."""
TOKEN_FILE = ".ray-token"
"""Holds a random text in the folder of the study, by which nodes recognize it."""


def run_on_ray(study: StudyFolder, runs: Sequence[PlannedRun], *, address: str, threads: int, tick: Tick) -> None:
    """Runs what is given on a Ray cluster, and returns when all runs are finished or failed.

    Each run is a Ray task with `num_cpus=threads`, and with `num_gpus=1` unless its device is the CPU; `auto` is the
    device that this machine has. (Tested on CPUs only: the request for a GPU has never been run on one.) Ray decides
    how many run at a time. On Ctrl-C or SIGTERM, all runs stop with a checkpoint. If Ray is connected already in this
    process, that connection is used, and stays open.

    Args:
        study: folder of the study, on a file system that all nodes share.
        runs: to start or to resume.
        address: `local` starts Ray on this machine until the runs have ended; `auto`, or the `host:port` of the head
            node, connects to a cluster that this machine is a node of; `ray://host:port` connects from elsewhere.
        threads: of each run.
        tick: shows the progress.

    Raises:
        VicinalError: if Ray is not installed, the cluster cannot be reached, no node has the CPUs and GPUs of a run, or
            a node does not see the folder of the study.
    """
    if not runs:
        return
    with _connected(address):
        gpus = _gpus_per_run(runs[0].config.device)
        _check_resources(threads, gpus)
        shared, token = StudyFolder(study.folder.absolute()), uuid.uuid4().hex
        write_text(shared.folder / TOKEN_FILE, token)
        _check_nodes(shared.folder, token)
        _follow(study, _submit(shared, token, runs, threads, gpus), tick)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connects to a cluster, or starts one, inside of `with`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise VicinalError("ray needs the package ray: pip install 'vicinal[ray]'") from None
    if ray.is_initialized():
        yield
        return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    _check_address(address)
    options: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(
                address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **(options if address == "local" else {}),
            )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise VicinalError(f"ray {address} cannot be used: {_first_line(error)}") from None
        yield
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # ray.init sets one of its own


def _check_address(address: str) -> None:
    """Raises VicinalError if nothing listens at an address; Ray itself takes minutes to say so."""
    if address in ("local", "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise VicinalError(f"ray must be local, auto or the address of a cluster such as host:6379, got {address}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise VicinalError(
            f"ray {address} cannot be reached: {error}; `ray start --head` starts a cluster, and `ray status` shows it"
        ) from None


def _gpus_per_run(device: str) -> int:
    """Returns 1 if runs use a GPU, else 0.

    Raises:
        VicinalError: if the device has a number, which Ray chooses; or for `auto` if the cluster has GPUs and this
            machine does not, because the study would be planned for CPUs.
    """
    import ray

    if device != "auto" and torch.device(device).index is not None:
        raise VicinalError(
            f"device must not have a number with ray, which gives each run a GPU of its own, got {device}"
        )
    gpus = int(find_device(device).type != "cpu")
    if device == "auto" and not gpus and ray.cluster_resources().get("GPU", 0):
        raise VicinalError(
            "device must be given, because the Ray cluster has GPUs and this machine does not: start the study on a "
            "node with a GPU, or run it on CPUs with --device cpu"
        )
    return gpus


def _check_resources(threads: int, gpus: int) -> None:
    """Raises VicinalError if no node could ever start a run, for which Ray would wait forever."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in nodes):
        needs = f"{threads} CPU{'s' if threads > 1 else ''}{' and a GPU' if gpus else ''}"
        raise VicinalError(f"no node of the Ray cluster has {needs}, which each run needs; see threads in the study")


def _check_nodes(folder: Path, token: str) -> None:
    """Raises VicinalError if a node does not see the folder of the study, or cannot import this package."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0)(_check_folder)
    nodes = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            nodes[task.options(scheduling_strategy=place).remote(folder, token)] = node["NodeManagerHostname"]
    done, _ = ray.wait(list(nodes), num_returns=len(nodes), timeout=CHECK_SECONDS)
    for reference in done:
        try:
            ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise VicinalError(_task_message(error, nodes[reference])) from None
        except ray.exceptions.RayError:
            continue  # the node was lost: no run will be placed there


def _check_folder(folder: Path, token: str) -> None:
    """Raises VicinalError if a folder on this node is not that of the study."""
    file = folder / TOKEN_FILE
    if not file.is_file() or file.read_text(encoding="utf-8") != token:
        raise VicinalError(
            f"{folder} is not the folder of the study on the node {socket.gethostname()}; with ray, it must be on a "
            "file system that all nodes share"
        )


def _submit(study: StudyFolder, token: str, runs: Sequence[PlannedRun], threads: int, gpus: int) -> dict[Any, str]:
    """Returns the name of the run of each task."""
    import ray

    task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=MAX_RETRIES)(_run)
    tasks = {}
    for planned in runs:
        config = planned.config.changed(out=study.run_folder(planned.name))
        reference = task.options(name=planned.name).remote(study, token, replace(planned, config=config), threads)
        tasks[reference] = planned.name
    return tasks


def _run(study: StudyFolder, token: str, planned: PlannedRun, threads: int) -> int:
    """Runs the process of a run on a node of the cluster. Returns its exit code."""
    _check_folder(study.folder, token)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ray.cancel sends it; scripts start jobs that ignore it
    process = start_process(study, planned, threads)
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)  # ray.cancel raises KeyboardInterrupt between two calls, not inside of a long one
    finally:
        stop_processes([process])
    return process.returncode


def _follow(study: StudyFolder, tasks: dict[Any, str], tick: Tick) -> None:
    """Waits for tasks, which are removed as they end; cancels those that are left if it is interrupted.

    Args:
        study: folder of the study.
        tasks: name of the run of each task.
        tick: shows the progress.
    """
    import ray

    before = {name: _modified(study.config_file(name)) for name in tasks.values()}
    signals = StopSignals()
    try:
        with signals:  # stores a signal, in place of an exception inside of a call of Ray
            while tasks and not signals.received:
                _wait_once(study, tasks, before, tick)
    finally:
        for reference in tasks:
            ray.cancel(reference)
        if tasks:
            ray.wait(list(tasks), num_returns=len(tasks), timeout=STOP_SECONDS + CONNECT_SECONDS)
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.received:
        raise Interrupted(f"stopped; `vicinal study run {study.folder}` continues the study", signals.received)


def _wait_once(study: StudyFolder, tasks: dict[Any, str], before: Mapping[str, int | None], tick: Tick) -> None:
    """Removes the tasks that end within a short time, and shows the progress of the others."""
    import ray

    done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=POLL_SECONDS)
    for reference in done:
        _note_end(study, tasks.pop(reference), reference)
    tick([name for name in tasks.values() if _modified(study.config_file(name)) != before[name]])


def _note_end(study: StudyFolder, name: str, reference: Any) -> None:
    """Stores the error of a run that did not store one itself."""
    import ray

    try:
        note_exit(study, name, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        study.note_failure(name, _task_message(error, "of the run"))
    except ray.exceptions.RayError as error:
        study.note_failure(name, f"Ray lost the run, after at most {MAX_RETRIES} retries: {_first_line(error)}")


def _task_message(error: Any, node: str) -> str:
    """Returns what a task failed with."""
    if isinstance(error.cause, VicinalError):
        return str(error.cause)
    return (
        f"the node {node} cannot start runs: {_first_line(error.cause)}; the same version of vicinal must be "
        "installed on every node"
    )


def _modified(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.is_file() else None


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
