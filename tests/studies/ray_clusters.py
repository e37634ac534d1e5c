"""Ray clusters on this machine, and the processes of the runs on them, for tests."""

import contextlib
import shutil
import tempfile
import threading
import time
from pathlib import Path

import psutil

STORE_BYTES = 100 * 2**20
WAIT_SECONDS = 180


@contextlib.contextmanager
def two_nodes():
    """Yields a cluster of two nodes with one CPU each; checks that no process of it is left."""
    from ray.cluster_utils import Cluster

    # The address of the cluster is written there, whatever `temp_dir` is; on a new machine there is no such folder.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets are in there
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "temp_dir": folder}
    before = set(psutil.Process().children(recursive=True))  # such as multiprocessing's resource tracker
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield cluster
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        cluster.shutdown()
        _, alive = psutil.wait_procs(started, timeout=180)
        shutil.rmtree(folder, ignore_errors=True)
        assert alive == []


def run_processes(folder):
    """Returns the processes of the runs of a study, by the name of the run."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "vicinal.studies.run_process" in words and str(folder) in words:
                found[words[words.index(str(folder)) + 1]] = process
    return found


def wait_for(condition):
    """Returns the result of a function as soon as it is true."""
    end = time.monotonic() + WAIT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)
    return result


def steps_done(folder: Path, name: str) -> int:
    """Returns how many epochs, of one step each, a run has reported."""
    file = folder / "runs" / name / "metrics.csv"
    return max(0, len(file.read_text().splitlines()) - 1) if file.is_file() else 0


@contextlib.contextmanager
def meanwhile(action):
    """Runs a function in another thread inside of `with`; its error is an error of the test."""
    errors: list[BaseException] = []

    def call():
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]
