import pytest
import torch

from vicinal.attention.native import attention_path
from vicinal.training.environment import describe_environment, path_notes


def test_the_environment_names_versions_and_machine():
    found = describe_environment(torch.device("cpu"), processes=2, seed=3)
    assert (found["device"], found["processes"], found["seed"]) == ("cpu", 2, 3)
    assert found["threads"] == torch.get_num_threads()
    assert set(found["versions"]) >= {"torch", "timm", "vicinal", "accelerate"}


def test_the_environment_names_the_attention_path_of_the_device():
    assert describe_environment(torch.device("cpu"), processes=1, seed=0)["attention"] == attention_path()
    assert describe_environment(torch.device("meta"), processes=1, seed=0)["attention"] == "torch"


@pytest.mark.parametrize("record", [{}, {"attention": "torch"}, {"attention": "other", "resumed": [{}]}])
def test_another_attention_path_than_before_is_a_note(record):
    (note,) = path_notes(record, "native avx2 0123456789ab")
    assert "attention was computed by torch so far and is by native avx2 0123456789ab now" in note
    assert "VICINAL_NATIVE=0" in note
    assert path_notes(record, "torch") == []


def test_from_a_native_path_to_another_the_note_promises_no_old_bits():
    record = {"attention": "torch", "resumed": [{"attention": "native avx2 0123456789ab"}]}
    (note,) = path_notes(record, "torch")
    assert "VICINAL_NATIVE" not in note
    assert path_notes(record, "native avx2 0123456789ab") == []
