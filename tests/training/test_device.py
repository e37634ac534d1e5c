"""Devices by name. No GPU is needed: torch is told that there are some."""

import pytest
import torch

from small_runs import config
from vicinal.errors import VicinalError
from vicinal.training.accelerator import make_accelerator
from vicinal.training.config import ConfigError
from vicinal.training.device import find_device


@pytest.fixture
def accelerators(monkeypatch):
    """Makes torch report a number of devices of a type."""

    def report(kind, count):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return report


def test_without_an_accelerator_there_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    for name in ("cuda", "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=rf"device of this machine \(cpu\), got {name}"):
            find_device(name)


def test_devices_of_the_machine_are_found_and_others_named(accelerators):
    accelerators("cuda", 2)
    assert find_device("auto") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda:1")
    assert find_device("cpu") == torch.device("cpu")
    for name in ("cuda:2", "mps"):
        with pytest.raises(ConfigError, match=rf"\(cpu, cuda:0, cuda:1\), got {name}"):
            find_device(name)
    accelerators("mps", 1)
    assert find_device("mps") == torch.device("mps")


def test_a_name_that_torch_does_not_know_is_an_error():
    with pytest.raises(ConfigError, match=r"auto, cpu, cuda, cuda:1 or mps, got gpu"):
        find_device("gpu")


@pytest.mark.parametrize(("kind", "name"), [("cuda", "cuda:1"), ("mps", "mps")])
def test_a_run_uses_the_device_that_was_named_and_the_next_one_its_own(accelerators, monkeypatch, tmp_path, kind, name):
    with monkeypatch.context():
        accelerators(kind, 2)
        assert make_accelerator(config(tmp_path, device=name)).device == torch.device(name)
    monkeypatch.undo()
    assert make_accelerator(config(tmp_path, device="cpu")).device == torch.device("cpu")


def test_a_numbered_device_is_for_one_process(accelerators, monkeypatch, tmp_path):
    accelerators("cuda", 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"no number with several processes, got cuda:1"):
        make_accelerator(config(tmp_path, device="cuda:1"))


@pytest.mark.parametrize(("precision", "said"), [("fp16", "fp16 needs a GPU; on mps"), ("fp64", "fp64 does not exist")])
def test_what_mps_cannot_do_is_said(accelerators, tmp_path, precision, said):
    accelerators("mps", 1)
    with pytest.raises(VicinalError, match=said):
        make_accelerator(config(tmp_path, device="mps", precision=precision))
