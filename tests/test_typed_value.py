import math
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vicinal import Grid, TrainConfig, VicinalError, build_prior
from vicinal.training.config import ConfigError
from vicinal.typed_value import choices, convert_value, describe_type

NOT_NUMBERS = [None, True, False, "x", "", [], [3], {}, b"3", 3j, math.nan, math.inf, "nan", "1e999"]

# Type: (value, what it becomes), values that are refused.
TABLE = {
    int: ([(3, 3), (-1, -1), (np.int64(3), 3)], [*NOT_NUMBERS, "3", 3.0, 2.5, np.float64(3), np.True_]),
    float: ([(3, 3.0), (2.5, 2.5), ("1e-3", 1e-3), (np.float32(0.5), 0.5)], [*NOT_NUMBERS, 10**400]),
    bool: ([(True, True), (False, False)], [None, 0, 1, "true", "yes", 1.0]),
    str: ([("a", "a"), ("", "")], [None, 3, True, ["a"], Path("a")]),
    Path: ([("a/b", Path("a/b")), (Path("a"), Path("a"))], [None, 3, True, ["a"]]),
    Literal["a", "b"]: ([("a", "a")], [None, "c", 0, True, ["a"]]),
    Literal[1, 2]: ([(1, 1)], ["1", True, 3, 1.0]),
    int | None: ([(None, None), (3, 3)], ["none", "3", True, 3.0]),
    Literal["a"] | None: ([(None, None), ("a", "a")], ["none", "b", False]),
    tuple[int, ...]: ([(32, (32,)), ([32, 48], (32, 48)), ((), ()), ((1,), (1,))], [None, "32", True, [True], [3.0]]),
    tuple[int, int]: ([([1, 2], (1, 2))], [1, [1], [1, 2, 3], "1/2"]),
}

TEXT_TABLE = {
    int: ([("3", 3), ("-2", -2)], ["3.0", "x", "true", "", "1/2"]),
    float: ([("3", 3.0), ("1e-3", 1e-3)], ["x", "true", "nan", "inf", ""]),
    bool: ([("true", True), ("False", False)], ["1", "yes", "x"]),
    str | None: ([("a", "a"), ("None", None)], []),
    int | None: ([("none", None), ("3", 3)], ["x"]),
    Literal[1, 2]: ([("1", 1)], ["3"]),
    tuple[int, ...]: ([("32/48", (32, 48)), ("8", (8,))], ["a", "1/x", "3.0"]),
    float | Sequence[float] | None: ([("1/2", [1.0, 2.0]), ("2", 2.0), ("none", None)], ["x", "1/x"]),
}


def rows(table):
    good = [(type_, value, expected) for type_, (taken, _) in table.items() for value, expected in taken]
    bad = [(type_, value) for type_, (_, refused) in table.items() for value in refused]
    return good, bad


@pytest.mark.parametrize(("type_", "value", "expected"), rows(TABLE)[0], ids=repr)
def test_values_that_are_taken(type_, value, expected):
    assert_same(convert_value(value, type_), expected)


@pytest.mark.parametrize(("type_", "value"), rows(TABLE)[1], ids=repr)
def test_values_that_are_refused(type_, value):
    with pytest.raises(ValueError, match=r".+") as error:
        convert_value(value, type_)
    assert str(error.value) == describe_type(type_)


@pytest.mark.parametrize(("type_", "value", "expected"), rows(TEXT_TABLE)[0], ids=repr)
def test_text_that_is_taken(type_, value, expected):
    assert_same(convert_value(value, type_, text=True), expected)


@pytest.mark.parametrize(("type_", "value"), rows(TEXT_TABLE)[1], ids=repr)
def test_text_that_is_refused(type_, value):
    with pytest.raises(ValueError, match=r".+"):
        convert_value(value, type_, text=True)


def assert_same(found, expected):
    assert found == expected
    assert type(found) is type(expected) or isinstance(expected, Path)


def test_descriptions_and_choices():
    assert describe_type(int | None) == "a whole number or none"
    assert describe_type(Literal["a", "b"]) == "a|b"
    assert describe_type(tuple[int, ...]) == "a whole number, or several"
    assert choices(Literal["a", "b"] | None) == ("a", "b")
    assert choices(int) == ()
    sequence = np.ones(3)
    assert convert_value(sequence, Any) is sequence


@given(st.integers(-(10**15), 10**15), st.floats(allow_nan=False, allow_infinity=False))
def test_text_of_a_number_is_that_number(whole, number):
    assert convert_value(str(whole), int, text=True) == whole
    assert convert_value(repr(number), float) == number
    assert convert_value(repr(number), float, text=True) == number


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner),
    max_leaves=4,
)


@given(ANYTHING, st.sampled_from(list(TABLE)))
def test_a_value_is_converted_to_a_fixed_point_or_refused(value, type_):
    try:
        converted = convert_value(value, type_)
    except ValueError:
        return
    assert convert_value(converted, type_) == converted


def members(type_):
    return typing.get_args(type_) if isinstance(type_, types.UnionType) else (type_,)


HINTS = typing.get_type_hints(TrainConfig)
WHOLE = [field.name for field in fields(TrainConfig) if int in members(HINTS[field.name])]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [True, "3", 3.0])
def test_no_whole_number_of_a_config_is_a_bool_a_text_or_a_float(name, value, tmp_path):
    with pytest.raises(ConfigError) as error:
        TrainConfig(**{name: value})
    assert str(error.value).startswith(f"{name} must be a whole number")
    assert str(error.value).endswith(f", got {value!r}")
    assert error.value.flag_message.startswith(f"--{name.replace('_', '-')} must be a whole number")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({name: value}))
    with pytest.raises(VicinalError, match=f"config.yaml: {name} must be a whole number"):
        TrainConfig.from_yaml(file)


@pytest.mark.parametrize("name", list(HINTS))
def test_no_field_takes_a_mapping_and_the_message_is_one_line_of_ours(name):
    with pytest.raises(VicinalError) as error:
        TrainConfig(**{name: {"a": 1}})
    assert str(error.value).startswith(f"{name} must be ")
    assert "\n" not in str(error.value)
    assert "pydantic" not in str(error.value)


def test_yaml_numbers_lists_and_paths_are_taken(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("lr: 1e-3\nimg_size: 32\ndata_dir: some/where\nwarmup: 2\n")
    config = TrainConfig.from_yaml(file)
    assert (config.lr, config.img_size, config.data_dir, config.warmup) == (1e-3, (32,), Path("some/where"), 2.0)
    file.write_text("img_size: [32, 48]\n")
    assert TrainConfig.from_yaml(file).img_size == (32, 48)


@pytest.mark.parametrize("value", [True, "3", 3.0, None])
def test_no_whole_number_of_a_prior_is_a_bool_a_text_or_a_float(value):
    with pytest.raises(VicinalError) as error:
        build_prior("gmm", heads=2, grid=Grid(4, 4), kernels=value)
    assert str(error.value) == f"option 'kernels' of prior 'gmm' must be a whole number, got {value!r}"


def test_text_of_a_spec_and_python_values_give_the_same_prior():
    by_spec = build_prior("gmm:kernels=2,sigma=1e+0,share_heads=true", heads=2, grid=Grid(4, 4))
    by_value = build_prior("gmm", heads=2, grid=Grid(4, 4), kernels=2, sigma=1, share_heads=True)
    assert by_spec.sigma.tolist() == by_value.sigma.tolist()
    assert by_spec.sigma.shape == by_value.sigma.shape
