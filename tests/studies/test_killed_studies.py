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
SECONDS = (0.3, 14.0)
"""Range of the time to a kill: from the start of Python to the end of a run."""


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


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_gives_the_same_table(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(definition(budget={"steps": 60}), sort_keys=False))
    whole = start(file, tmp_path / "whole")
    assert whole.wait(timeout=300) == 0, (tmp_path / "whole.log").read_text()
    draw, finished_early = random.Random(0), 0
    for index in range(KILLS):
        process = start(file, tmp_path / "killed")
        try:
            process.wait(timeout=draw.uniform(*SECONDS))
            finished_early += 1
        except subprocess.TimeoutExpired:
            kill(process, ("group", "study", "run")[index % 3])
        if index % 3 == 2 and process.poll() is None:  # the study goes on without one of its runs
            time.sleep(1)
            kill(process, "group")
        process.wait(timeout=60)
    assert finished_early < KILLS / 2
    last = start(file, tmp_path / "killed")
    assert last.wait(timeout=300) == 0, (tmp_path / "killed.log").read_text()
    assert tables(tmp_path / "killed") == tables(tmp_path / "whole")
    for name in ("none-s0", "gmm-s1"):
        models = [tmp_path / each / "runs" / name / "model" / "model.safetensors" for each in ("whole", "killed")]
        assert models[0].read_bytes() == models[1].read_bytes()


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
