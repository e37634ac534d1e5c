"""Trackers, with stand-ins for the packages wandb and mlflow, which record what they are given."""

import importlib.machinery
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

import vicinal
from small_runs import config
from vicinal.errors import VicinalError
from vicinal.training.config import ConfigError
from vicinal.training.signals import Interrupted
from vicinal.training.tracker import TRACKER_FILE


def install(monkeypatch, name):
    """Returns a stand-in of a package that can be imported."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    module.calls = []
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def wandb(monkeypatch):
    module = install(monkeypatch, "wandb")

    def init(**arguments):
        module.calls.append(("init", arguments))
        return SimpleNamespace(
            id=arguments["id"] or "abc123",
            log=lambda values, step: module.calls.append(("log", step, values)),
            finish=lambda: module.calls.append(("finish",)),
        )

    module.init = init
    module.config = SimpleNamespace(update=lambda values, **_: module.calls.append(("config", values)))
    return module


@pytest.fixture
def mlflow(monkeypatch):
    module = install(monkeypatch, "mlflow")
    module.utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
    module.search_experiments = lambda filter_string: []
    module.create_experiment = lambda **arguments: module.calls.append(("experiment", arguments["name"])) or "7"
    module.start_run = lambda **arguments: (
        module.calls.append(("init", arguments)) or SimpleNamespace(info=SimpleNamespace(run_id="run-9"))
    )
    module.log_params = lambda values: module.calls.append(("config", values))
    module.log_metrics = lambda values, step, **_: module.calls.append(("log", step, values))
    module.end_run = lambda: module.calls.append(("finish",))
    return module


def logged(module):
    return {call[1]: call[2] for call in module.calls if call[0] == "log"}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_gets_the_configuration_and_every_epoch(tmp_path, name, request):
    module = request.getfixturevalue(name)
    run = vicinal.train(config(tmp_path / "first", epochs=2, track=name))
    kinds = [call[0] for call in module.calls]
    assert kinds == [*(["experiment"] if name == "mlflow" else []), "init", "config", "log", "log", "log", "finish"]
    settings = next(call[1] for call in module.calls if call[0] == "config")
    assert settings["epochs"] == 2
    assert settings["out"] == str(tmp_path / "first")
    started = next(call[1] for call in module.calls if call[0] == "init")
    assert started["name" if name == "wandb" else "run_name"] == "first"
    logs = [call for call in module.calls if call[0] == "log"]
    for (_, step, values), row in zip(logs, run.metrics, strict=False):
        assert step == row["step"]
        assert values["val_loss"] == pytest.approx(row["val_loss"])
        assert values["lr"] == pytest.approx(row["lr"])
    assert logs[-1][2]["final/test_top1"] == run.results["test"]["top1"]
    assert json.loads((run.folder / TRACKER_FILE).read_text())["tracker"] == name
    assert not (run.folder / "tensorboard").exists()


def test_a_resumed_run_continues_the_run_of_the_tracker(tmp_path, wandb, monkeypatch):
    from vicinal.training import logger

    settings = config(tmp_path / "run", epochs=2, track="wandb")
    log_epoch = logger.RunLogger.log_epoch

    def stop(self, row):
        log_epoch(self, row)
        raise Interrupted("stopped", 15)

    monkeypatch.setattr(logger.RunLogger, "log_epoch", stop)
    with pytest.raises(Interrupted):
        vicinal.train(settings)
    monkeypatch.setattr(logger.RunLogger, "log_epoch", log_epoch)
    vicinal.resume(tmp_path / "run")
    ids = [call[1]["id"] for call in wandb.calls if call[0] == "init"]
    assert ids == [None, "abc123"]
    assert wandb.calls.count(("finish",)) == 2


def test_without_a_tracker_there_is_metrics_csv_only(tmp_path):
    run = vicinal.train(config(tmp_path / "run", epochs=1, warmup=0, track="none"))
    assert len(run.metrics) == 1
    assert not (run.folder / "tensorboard").exists()
    assert not (run.folder / TRACKER_FILE).exists()


def test_tensorboard_is_the_default_and_has_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = vicinal.train(config(tmp_path / "run", epochs=2))
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    for column in ("val_loss", "train_loss", "lr"):
        found = {event.step: event.value for event in events.Scalars(column)}
        assert found == {int(row["step"]): pytest.approx(row[column]) for row in run.metrics}
    assert events.Scalars("final/test_top1")[0].value == pytest.approx(run.results["test"]["top1"])


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"track {name} needs the package {name}.*pip install {name}") as error:
        vicinal.train(config(tmp_path / "run", track=name))
    assert error.value.flag_message.startswith(f"--track {name} needs")
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_does_not_start_is_an_error_of_one_line(tmp_path, wandb):
    def refuse(**arguments):
        raise RuntimeError("no API key\nrun `wandb login`")

    wandb.init = refuse
    with pytest.raises(
        VicinalError, match=r"^the tracker wandb does not start: no API key run `wandb login`; "
    ) as error:
        vicinal.train(config(tmp_path / "run", track="wandb"))
    assert "--track none" in str(error.value)
