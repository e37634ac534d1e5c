import itertools
import pickle
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vicinal.errors import VicinalError
from vicinal.training.config import RECIPES, ConfigError, TrainConfig, recipe


@given(
    lr=st.floats(1e-6, 1.0),
    img_size=st.lists(st.integers(1, 512), max_size=2).map(tuple),
    flip=st.sampled_from([None, True, False]),
    ema=st.none() | st.floats(0, 0.9999),
    model=st.none() | st.sampled_from(["vit", "swin"]),
    data_dir=st.none() | st.just(Path("some/where")),
)
def test_yaml_gives_back_what_was_written(tmp_path_factory, **values):
    config = TrainConfig(**values)
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(config.to_yaml())
    assert TrainConfig.from_yaml(file) == config


def test_a_file_names_a_recipe_and_what_differs(tmp_path):
    file = tmp_path / "paper.yaml"
    file.write_text("recipe: paper\nmodel: vit\nlr: 5e-4\nimg_size: 48\n")  # YAML reads 5e-4 as a text
    config = TrainConfig.from_yaml(file)
    assert (config.lr, config.img_size, config.epochs, config.mix) == (5e-4, (48,), 300, "both")


def test_the_paper_recipe_is_the_papers():
    config = recipe("paper")
    assert (config.opt, config.lr, config.weight_decay, config.batch_size) == ("adamw", 1e-3, 0.05, 128)
    assert (config.epochs, config.warmup_epochs, config.min_lr) == (300, 30, 1e-6)
    assert (config.smoothing, config.drop_path, config.auto_augment, config.erasing) == (0.1, 0.1, True, 0.25)
    assert (config.mix, config.mix_prob, config.prior_lr) == ("both", 0.5, 1.0)
    assert TrainConfig() == recipe("quick")
    assert set(RECIPES) == {"quick", "paper", "finetune"}


def test_every_field_is_documented():
    import ast
    import inspect

    body = ast.parse(inspect.getsource(TrainConfig)).body[0].body
    documented = {
        first.target.id
        for first, second in itertools.pairwise(body)
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr)
    }
    assert documented == {field.name for field in fields(TrainConfig)}


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": 0},
        {"epochs": 2.5},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"smoothing": 1.0},
        {"warmup": 51.0},
        {"min_lr": 1.0},
        {"val_size": 2.5},
        {"img_size": (1, 2, 3)},
        {"mixup_share": 2.0},
        {"compile": "yes"},
        {"seed": -1},
        {"init_from": "runs/x", "model": "vit"},
    ],
)
def test_a_wrong_value_is_an_error_of_its_field(values):
    field, value = next(iter(values.items()))
    with pytest.raises(ConfigError) as error:
        TrainConfig(**values)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field} ")
    assert error.value.flag_message == f"--{field.replace('_', '-')}" + str(error.value).removeprefix(field)
    if len(values) == 1:
        given = f"{value:g}" if isinstance(value, float | int) else repr(value)
        assert str(error.value).endswith(f", got {given}")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"precision": "fp8"}, "fp"),
        ({"mix": "cutmx"}, "cutmix"),
        ({"transmix": "papre"}, "paper"),
        ({"pool": "max"}, "avg"),
    ],
)
def test_an_unknown_choice_is_named_with_those_that_are_known(values, nearest):
    ((field, value),) = values.items()
    with pytest.raises(VicinalError, match=f"{field} '{value}'.*{nearest}"):
        TrainConfig(**values)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("modle: vit", "'modle'.*'model'"),
        ("recipe: papre", "'papre'.*'paper'"),
        ("- a\n- b", "wrong.yaml"),
        ("a: [", "wrong.yaml"),
        ("epochs: 0", "wrong.yaml: epochs .* 0"),
        ("format: 3", "wrong.yaml: format must be 1 or 2, got 3"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, named):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(VicinalError, match=named):
        TrainConfig.from_yaml(file)
    with pytest.raises(VicinalError, match=r"missing.yaml"):
        TrainConfig.from_yaml(tmp_path / "missing.yaml")


def test_a_folder_is_named_after_what_the_run_is():
    config = TrainConfig(model="vit", prior="gmm:kernels=3+gab", dataset="cifar10", seed=2)
    assert config.folder == Path("runs/vit-gmm-kernels=3+gab-cifar10-s2")
    assert TrainConfig(dataset="folder:data/my photos").folder == Path("runs/vit-mini-my-photos-s0")
    assert TrainConfig(out=Path("x/y")).folder == Path("x/y")
