"""The loss buffer and the timer of the training loop."""

import signal
from types import SimpleNamespace

import pytest
import torch

from vicinal.training import timer as timer_module
from vicinal.training.loss_buffer import LossBuffer
from vicinal.training.timer import Timer


def processes(number, device="cpu", others=()):
    """An accelerator whose other processes have sent `others`: their losses, and their signal."""
    return SimpleNamespace(
        device=torch.device(device),
        num_processes=number,
        reduce=lambda values, how: values + sum(map(torch.tensor, others)),
    )


def test_a_gpu_reads_losses_in_groups_and_a_cpu_one_by_one():
    for device, size in (("cpu", 1), ("cuda", 16)):
        losses = LossBuffer(processes(1, device))
        for _ in range(size):
            assert not losses.full
            losses.append(torch.tensor(1.0))
        assert losses.full


def test_losses_are_averaged_over_processes_and_the_buffer_is_empty_afterwards():
    losses = LossBuffer(processes(2, others=[[3.0, 6.0, 0.0]]))
    losses.append(torch.tensor(1.0))
    losses.append(torch.tensor(2.0))
    assert losses.flush(0) == ([2.0, 4.0], 0)
    assert losses.losses == []


@pytest.mark.parametrize(
    ("own", "other", "expected"), [(signal.SIGINT, 0, signal.SIGINT), (0, signal.SIGINT, signal.SIGTERM), (0, 0, 0)]
)
def test_all_processes_stop_if_one_received_a_signal(own, other, expected):
    losses = LossBuffer(processes(2, others=[[0.0, float(other)]]))
    losses.append(torch.tensor(1.0))
    assert losses.flush(own)[1] == expected


def test_laps_leave_out_what_happens_before_a_restart(monkeypatch):
    now = 100.0
    monkeypatch.setattr(timer_module.time, "monotonic", lambda: now)
    timer = Timer(seconds=7.0)
    now = 103.0
    assert (timer.lap(), timer.checkpoint_age(), timer.total()) == (3.0, 3.0, 10.0)
    now = 104.0
    assert (timer.lap(), timer.checkpoint_age(), timer.total()) == (1.0, 4.0, 11.0)
    now = 109.0  # a checkpoint was saved
    timer.restart()
    now = 111.0
    assert (timer.lap(), timer.checkpoint_age(), timer.total()) == (2.0, 2.0, 18.0)
