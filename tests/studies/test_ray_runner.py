"""Runs of a study on Ray: the same tables as on one machine, whatever is lost on the way."""

import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

import vicinal
from ray_clusters import meanwhile, run_processes, steps_done, two_nodes, wait_for
from vicinal.errors import VicinalError
from vicinal.files import write_text
from vicinal.studies import ray_runner
from vicinal.studies.ray_runner import TOKEN_FILE, run_on_ray
from vicinal.studies.spec_reader import read_spec
from vicinal.studies.study import study
from vicinal.studies.study_folder import StudyFolder

SOURCE = Path(vicinal.__file__).parent.parent
TABLES = ("table.txt", "results.csv", "results.json", "pairs.csv")
STEPS = 40
SPEC = {
    "base": {"train_size": 64, "val_size": 0, "batch_size": 64, "checkpoint_minutes": 0},
    "arms": {"none": {"prior": "none"}, "gmm": {"prior": "gmm"}},
    "budget": {"steps": STEPS},
    "seeds": 2,
}
LONG_SPEC = {**SPEC, "budget": {"steps": 300}, "seeds": 1}
"""Its runs take many seconds, in which a signal arrives."""
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))  # of Ray workers, too
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray stores a token in the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # restored after what the runner sets
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def local_tables(tmp_path_factory):
    """The tables of the local runner, by file name."""
    folder = tmp_path_factory.mktemp("local")
    return _local_tables(SPEC, folder)


@pytest.fixture(scope="module")
def long_tables(tmp_path_factory):
    """The tables of `LONG_SPEC`."""
    return _local_tables(LONG_SPEC, tmp_path_factory.mktemp("long"))


def _local_tables(spec, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SOURCE))
        study(spec, out=folder, jobs=2)
    return tables(folder)


def tables(folder):
    return {name: (folder / name).read_bytes() for name in TABLES}


def planned_runs(folder):
    return read_spec(SPEC).runs(folder, Path.cwd(), "cpu")


def run_planned(folder, address):
    folder.mkdir(exist_ok=True)
    run_on_ray(StudyFolder(folder), planned_runs(folder), address=address, threads=1, tick=lambda running: None)


def resumptions(folder, name):
    return len(json.loads((folder / "runs" / name / "environment.json").read_text())["resumed"])


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(VicinalError, match=r"pip install 'vicinal\[ray\]'"):
        run_planned(tmp_path, "local")


@with_ray
def test_a_cluster_that_does_not_answer_is_a_short_error(tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"  # bound, but nothing listens there
        monkeypatch.setenv("RAY_ADDRESS", address)
        for given in (address, f"ray://{address}", "auto"):
            with pytest.raises(VicinalError, match=r"^ray \S*127.0.0.1:\d+ cannot be reached: ") as caught:
                run_planned(tmp_path, given)
            assert "\n" not in str(caught.value)


@with_ray
@pytest.mark.parametrize("address", ["nonsense", "host:port", ":6379", "host:"])
def test_what_is_no_address_is_a_short_error(tmp_path, address):
    with pytest.raises(VicinalError, match=f"^ray must be local, auto or the address .* got {address}$"):
        run_planned(tmp_path, address)


def test_a_study_without_anything_to_run_needs_no_cluster(tmp_path):
    run_on_ray(StudyFolder(tmp_path), [], address="nonsense", threads=1, tick=pytest.fail)


def test_a_node_knows_the_folder_of_the_study_by_its_content(tmp_path):
    with pytest.raises(VicinalError, match="must be on a file system that all nodes share"):
        ray_runner._check_folder(tmp_path, "token")
    write_text(tmp_path / TOKEN_FILE, "of a folder with the same path on another disk")
    with pytest.raises(VicinalError, match=f"^{tmp_path} is not the folder of the study on the node "):
        ray_runner._check_folder(tmp_path, "token")
    write_text(tmp_path / TOKEN_FILE, "token")
    ray_runner._check_folder(tmp_path, "token")


@with_ray
@pytest.mark.parametrize(
    ("device", "here", "cluster_gpus", "expected"),
    [("auto", "cpu", 0, 0), ("auto", "cuda", 2, 1), ("cuda", "cuda", 2, 1), ("cpu", "cpu", 2, 0)],
)
def test_a_run_asks_for_a_gpu_if_its_device_is_one(monkeypatch, device, here, cluster_gpus, expected):
    monkeypatch.setattr(ray_runner, "find_device", lambda name: torch.device(here))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": cluster_gpus})
    assert ray_runner._gpus_per_run(device) == expected


@with_ray
def test_devices_that_a_cluster_cannot_give_are_refused(monkeypatch):
    monkeypatch.setattr(ray_runner, "find_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 1})
    with pytest.raises(VicinalError, match=r"device must not have a number with ray, .* got cuda:1"):
        ray_runner._gpus_per_run("cuda:1")
    with pytest.raises(VicinalError, match="device must be given, because the Ray cluster has GPUs and this machine"):
        ray_runner._gpus_per_run("auto")


@with_ray
def test_a_run_that_no_node_could_start_is_refused(monkeypatch):
    nodes = [(True, {"CPU": 2.0}), (True, {"CPU": 1.0, "GPU": 1.0}), (False, {"CPU": 9.0, "GPU": 9.0})]
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": alive, "Resources": owned} for alive, owned in nodes])
    ray_runner._check_resources(2, 0)
    ray_runner._check_resources(1, 1)
    with pytest.raises(VicinalError, match="no node of the Ray cluster has 3 CPUs, which each run needs"):
        ray_runner._check_resources(3, 0)
    with pytest.raises(VicinalError, match="no node of the Ray cluster has 2 CPUs and a GPU, "):
        ray_runner._check_resources(2, 1)


@with_ray
def test_every_way_in_which_a_task_ends_is_stored_as_the_local_runner_does(tmp_path, monkeypatch):
    from ray import exceptions

    ends = {
        "finished": 0,
        "failed": 2,  # the process has stored its error
        "killed": -9,
        "unshared": exceptions.RayTaskError("_run", "traceback", VicinalError("must be shared")),
        "broken": exceptions.RayTaskError("_run", "traceback", RuntimeError("no module vicinal\nmore lines")),
        "lost": exceptions.WorkerCrashedError(),
    }

    def get(name):
        if isinstance(ends[name], Exception):
            raise ends[name]
        return ends[name]

    monkeypatch.setattr("ray.get", get)
    folder = StudyFolder(tmp_path)
    for name in ends:
        ray_runner._note_end(folder, name, name)
    messages = {name: folder.status(name).message for name in ends}
    assert (messages["finished"], messages["failed"], messages["unshared"]) == (None, None, "must be shared")
    assert messages["killed"] == f"the process of the run was killed by signal 9; see {folder.log_file('killed')}"
    assert messages["broken"].startswith("the node of the run cannot start runs: no module vicinal; the same version")
    assert messages["lost"].startswith("Ray lost the run, after at most 10 retries: The worker died")


@pytest.mark.slow
@with_ray
def test_nodes_that_do_not_share_the_folder_are_found_before_the_first_run(tmp_path):
    write_text(tmp_path / TOKEN_FILE, "other")
    with two_nodes() as cluster, ray_runner._connected(cluster.address):
        with pytest.raises(VicinalError, match=f"^{tmp_path} is not the folder of the study on the node "):
            ray_runner._check_nodes(tmp_path, "token")
        ray_runner._check_nodes(tmp_path, "other")


@pytest.mark.slow
@with_ray
def test_two_nodes_give_the_tables_of_the_local_runner(tmp_path, monkeypatch, local_tables):
    monkeypatch.chdir(tmp_path)
    with two_nodes() as cluster:
        study(SPEC, out="relative", ray=cluster.address)
    assert tables(tmp_path / "relative") == local_tables


@pytest.mark.slow
@with_ray
def test_a_killed_worker_is_replaced_and_its_run_continues(tmp_path, local_tables):
    def kill_worker():
        wait_for(lambda: steps_done(tmp_path, "none-s0") >= 3)
        worker = run_processes(tmp_path)["none-s0"].parent()
        assert worker.name().startswith("ray::")
        worker.kill()

    with two_nodes() as cluster, meanwhile(kill_worker):
        study(SPEC, out=tmp_path, ray=cluster.address)
    assert resumptions(tmp_path, "none-s0") == 1
    assert tables(tmp_path) == local_tables


@pytest.mark.slow
@with_ray
def test_the_runs_of_a_lost_node_continue_on_another(tmp_path, local_tables):
    with two_nodes() as cluster:
        (lost,) = cluster.worker_nodes

        def remove_node():
            wait_for(lambda: all(steps_done(tmp_path, name) >= 3 for name in ("none-s0", "gmm-s0")))
            cluster.remove_node(lost, allow_graceful=False)

        with meanwhile(remove_node):
            study(SPEC, out=tmp_path, ray=cluster.address)
    assert resumptions(tmp_path, "none-s0") + resumptions(tmp_path, "gmm-s0") == 1
    assert tables(tmp_path) == local_tables


@pytest.mark.slow
@with_ray
def test_a_failed_run_is_listed_and_the_others_finish(tmp_path):
    spec = SPEC | {"arms": {"none": {}, "diverging": {"lr": 1e36}}, "budget": {"steps": 6}, "seeds": 1}
    with two_nodes() as cluster:
        result = study(spec, out=tmp_path, ray=cluster.address)
    assert list(result.failures) == ["diverging-s0"]
    assert "loss" in result.failures["diverging-s0"]
    assert (result.finished_runs, result.planned_runs) == (1, 2)


@pytest.mark.slow
@with_ray
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_study_leaves_checkpoints_and_no_process(tmp_path, long_tables, number, code):
    folder, definition = tmp_path / "out", tmp_path / "study.yaml"
    definition.write_text(json.dumps(LONG_SPEC))
    words = ["study", "run", str(definition), "--out", str(folder), "--ray", "local"]
    command = [sys.executable, "-m", "vicinal", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        wait_for(lambda: steps_done(folder, "none-s0") >= 3)
        started = [*psutil.Process(process.pid).children(recursive=True), *run_processes(folder).values()]
        assert any("raylet" in each.name() for each in started)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert process.returncode == code
    assert errors.startswith("vicinal: stopped")
    assert "Traceback" not in errors
    assert alive == []
    assert "continues exactly there" in (folder / "logs" / "none-s0.log").read_text()
    result = study(definition, out=folder, jobs=os.cpu_count() or 1)
    assert resumptions(folder, "none-s0") == 1
    assert result.finished_runs == 2
    assert tables(folder) == long_tables
