"""A study that is killed at random moments ends with the table of one that is not."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from small_studies import definition, tables

KILLS = 20
MAX_SECONDS = 14.0  # to a kill; a study goes on after it, so that later kills meet later moments of it


def start(file, folder):
    command = [sys.executable, "-m", "vicinal", "study", "run", str(file), "--jobs", "2", "--out", str(folder)]
    with open(f"{folder}.log", "ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def kill(process, target):
    """Kills the whole process group, the study alone, or one of its runs."""
    if target == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif target == "study":
        process.kill()
    elif children := psutil.Process(process.pid).children():
        children[0].kill()


def assert_same_results(folder, whole):
    assert tables(folder) == tables(whole)
    for name in ("none-s0", "gmm-s1"):
        model = f"runs/{name}/model/model.safetensors"
        assert (folder / model).read_bytes() == (whole / model).read_bytes()


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_gives_the_same_table(tmp_path):
    """Kills a study twenty times, at moments up to the time that a whole one takes; one that ended starts anew."""
    file, whole = tmp_path / "study.yaml", tmp_path / "whole"
    file.write_text(yaml.safe_dump(definition(budget={"steps": 60}), sort_keys=False))
    began = time.monotonic()
    assert start(file, whole).wait(timeout=300) == 0, (tmp_path / "whole.log").read_text()
    seconds = min(time.monotonic() - began, MAX_SECONDS)
    draw, kills, studies = random.Random(0), 0, 0
    while kills < KILLS:
        folder = tmp_path / f"killed-{studies}"
        process = start(file, folder)
        try:
            ended = process.wait(timeout=draw.uniform(0.3, seconds))
        except subprocess.TimeoutExpired:
            target = ("group", "study", "run")[kills % 3]
            kill(process, target)
            kills += 1
            if target == "run" and process.poll() is None:  # the study goes on without one of its runs
                time.sleep(1)
                kill(process, "group")
            process.wait(timeout=60)
        else:
            assert ended == 0, (tmp_path / f"killed-{studies}.log").read_text()
            assert_same_results(folder, whole)
            studies += 1
    folder = tmp_path / f"killed-{studies}"
    assert start(file, folder).wait(timeout=300) == 0, (tmp_path / f"killed-{studies}.log").read_text()
    assert_same_results(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_runs_with_a_checkpoint_and_leaves_no_process(tmp_path, number):
    file, folder = tmp_path / "study.yaml", tmp_path / "study"
    file.write_text(yaml.safe_dump(definition(budget={"steps": 5000}, seeds=1)))
    process = start(file, folder)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("runs/*/checkpoints/step-*.safetensors"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert len(gone) == 2
    error = (tmp_path / "study.log").read_text()
    assert "stopped" in error
    assert "Traceback" not in error
    assert not list(folder.glob("failed/*"))
    assert list(folder.glob("runs/none-s0/checkpoints/step-*.safetensors"))
