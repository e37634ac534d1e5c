import re

import pytest
import torch
from timm.optim import create_optimizer_v2

from vicinal.errors import VicinalError
from vicinal.training import checkpoints

TENSORS = {"model.a": torch.randn(3, 4), "model.count": torch.tensor(7), "ema.b": torch.randn(2).bfloat16()}
STATE = {"step": 5, "loss": 0.1 + 0.2, "history": [{"top1": None}]}


def test_what_was_written_is_read_again(tmp_path):
    checkpoints.write_checkpoint(tmp_path, 5, TENSORS, STATE)
    tensors, state = checkpoints.read_checkpoint(tmp_path)
    assert state == STATE
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


def test_the_last_two_are_kept_and_nothing_else(tmp_path):
    for step in (9, 10, 100, 1000):
        checkpoints.write_checkpoint(tmp_path, step, TENSORS, STATE)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "step-00000100.safetensors",
        "step-00001000.safetensors",
    ]


def test_without_one_there_is_none(tmp_path):
    assert checkpoints.read_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "other"])
def test_a_damaged_one_is_skipped_with_a_warning(tmp_path, how):
    checkpoints.write_checkpoint(tmp_path, 1, TENSORS, {**STATE, "step": 1})
    last = checkpoints.write_checkpoint(tmp_path, 2, TENSORS, {**STATE, "step": 2})
    content = last.read_bytes()
    damaged = {
        "cut": content[:-3],
        "flipped": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        "empty": b"",
        "other": b"no checkpoint at all",
    }
    last.write_bytes(damaged[how])
    with pytest.warns(UserWarning, match=r"step-00000002.safetensors"):
        tensors, state = checkpoints.read_checkpoint(tmp_path)
    assert state["step"] == 1
    assert torch.equal(tensors["model.a"], TENSORS["model.a"])


@pytest.mark.filterwarnings("ignore:.*step-00000001")
def test_if_all_are_damaged_that_is_an_error(tmp_path):
    checkpoints.write_checkpoint(tmp_path, 1, TENSORS, STATE).write_bytes(b"")
    with pytest.raises(VicinalError, match=re.escape(str(tmp_path))):
        checkpoints.read_checkpoint(tmp_path)


def test_a_file_that_was_being_written_is_not_taken_for_one(tmp_path):
    checkpoints.write_checkpoint(tmp_path, 1, TENSORS, STATE)
    (tmp_path / ".writing-00000002").write_bytes(b"half")
    assert checkpoints.read_checkpoint(tmp_path)[1]["step"] == 5


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lion", "adafactor", "radam"])
def test_an_optimizer_goes_on_where_it_was(tmp_path, name):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        return model, create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.1)

    def step(model, optimizer, number):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=torch.Generator().manual_seed(number))).pow(2).sum().backward()
        optimizer.step()

    model, optimizer = make()
    for number in range(3):
        step(model, optimizer, number)
    tensors, rest = checkpoints.pack_optimizer(optimizer)
    weights = {f"model.{key}": value for key, value in model.state_dict().items()}
    checkpoints.write_checkpoint(tmp_path, 3, tensors | weights, rest)
    step(model, optimizer, 3)

    other, again = make()
    read, state = checkpoints.read_checkpoint(tmp_path)
    other.load_state_dict({key[6:]: read.pop(key) for key in list(read) if key.startswith("model.")})
    checkpoints.unpack_optimizer(again, read, state)
    step(other, again, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
