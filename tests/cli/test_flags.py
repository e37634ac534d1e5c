import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from vicinal import TrainConfig, VicinalError
from vicinal.cli._flags import call_with_flags, field_docs
from vicinal.cli.analyze import INSTRUMENTS
from vicinal.cli.main import VERBS, main
from vicinal.training.config import FIELD_GROUPS

COMMANDS = [[verb] for verb in VERBS if verb not in ("analyze", "study")]
COMMANDS += [["analyze", name] for name in INSTRUMENTS] + [["study", name] for name in ("plan", "run", "show")]


@pytest.fixture
def help_of(capsys, monkeypatch):
    def read(*words):
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--help"])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    return read


def groups(text):
    """Returns the lines of each group of a help, by its title, which a line of dashes follows."""
    lines, found = [line.strip() for line in text.splitlines()], {}
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if re.fullmatch("-{70,}", after):
            members = found.setdefault(line, [])
        elif found and not line.startswith("--------"):
            members.append(line)
    return found


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_help_speaks_of_none_or_of_an_empty_default(words, help_of):
    text = " ".join(help_of(*words).split())
    for wrong in ("None", "default: )", "default: False", "STR", "Annotated", "_ArgConfig"):
        assert wrong not in text
    assert not re.search(r"by default\. \(default", text)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_group_fits_in_80_columns(words, help_of):
    text = help_of(*words)
    assert "options" in groups(text)
    assert all(len(line) <= 80 for line in text[text.index("-" * 70) :].splitlines())


def test_the_flags_of_train_are_in_groups(help_of):
    found = groups(help_of("train"))
    assert list(found) == ["options", *(f"{group} options" for group in FIELD_GROUPS)]
    assert list(FIELD_GROUPS) == ["model", "data", "augmentation and mixing", "optimization", "hardware", "output"]
    flags = {title: re.findall(r"^--[a-z-]+", "\n".join(lines), re.MULTILINE) for title, lines in found.items()}
    assert {"--recipe", "--config", "--resume"} <= set(flags["options"])
    assert {"--model", "--prior", "--pool", "--img-size"} <= set(flags["model options"])
    assert {"--dataset", "--train-size", "--val-size"} <= set(flags["data options"])
    assert {"--crop", "--flip", "--erasing", "--mix", "--smoothing"} <= set(flags["augmentation and mixing options"])
    assert {"--epochs", "--batch-size", "--lr", "--prior-lr", "--seed"} <= set(flags["optimization options"])
    assert {"--precision", "--compile", "--device", "--workers"} <= set(flags["hardware options"])
    assert "--out" in flags["output options"]
    shown = [flag for title, lines in flags.items() if title != "options" for flag in lines]
    assert shown == [f"--{each.name.replace('_', '-')}" for each in fields(TrainConfig)]


def test_the_help_of_train_has_the_defaults_of_the_recipe(help_of):
    assert "--epochs INT Number of passes over the training images. (default: 50)" in " ".join(help_of("train").split())
    assert "(default: 300)" in help_of("train", "--recipe", "paper")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--epochs", "2.5"], "--epochs must be a whole number, got '2.5'"),
        (["train", "--epochs", "3.0"], "--epochs must be a whole number, got '3.0'"),
        (["train", "--batch-size", "0"], "--batch-size must be a number of images, at least 1, got 0"),
        (["train", "--lr", "fast"], "--lr must be a number, got 'fast'"),
        (["train", "--lr", "nan"], "--lr must be a number, got 'nan'"),
        (["train", "--img-size", "32", "x"], "--img-size must be a whole number, got 'x'"),
        (["train", "--flip", "maybe"], "--flip must be true|false, got 'maybe'"),
        (["train", "--pool", "max"], "--pool must be token|avg|paper, got 'max'"),
        (["train", "--precision", "fp8"], "--precision must be fp32|bf16|fp16|fp64, got 'fp8'"),
        (["analyze", "erf", "--at", "1", "y"], "--at must be a whole number, got 'y'"),
        (["eval", "runs/x", "--batch-size", "many"], "--batch-size must be a whole number, got 'many'"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(words, message, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"vicinal: {message}\n"


@dataclass
class Group:
    """What to count."""

    counted: int = 1
    """How many."""
    names: tuple[str, ...] = field(default_factory=lambda: ("a",))
    """Which
    of them."""


def show(
    place: Annotated[Path | None, tyro.conf.Positional],
    group: Group,
    pair: tuple[int, int] | None = None,
    kind: Literal["x", "y"] | None = None,
    quiet: bool = False,
) -> tuple[object, ...]:
    """Returns what it is given.

    Args:
        pair: Two
            numbers.
    """
    return place, group.counted, group.names, pair, kind, quiet


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("here", (Path("here"), 1, ("a",), None, None, False)),
        ("here --counted 3 --names b c --pair 1 2", (Path("here"), 3, ("b", "c"), (1, 2), None, False)),
        ("none --kind y --quiet", (None, 1, ("a",), None, "y", True)),
        ("here --kind none", (Path("here"), 1, ("a",), None, None, False)),
    ],
)
def test_flags_become_the_types_of_the_parameters(words, expected):
    assert call_with_flags(show, "show", words.split()) == expected


def test_a_value_that_does_not_fit_is_an_error_of_ours():
    with pytest.raises(VicinalError, match=r"^--counted must be a whole number, got 'x'$"):
        call_with_flags(show, "show", ["here", "--counted", "x"])


def test_docs_of_fields_are_read():
    assert field_docs(Group) == {"counted": "How many.", "names": "Which of them."}


def test_help_has_no_line_breaks_of_the_source(capsys):
    with pytest.raises(SystemExit):
        call_with_flags(show, "show", ["--help"])
    shown = capsys.readouterr().out
    assert "Two numbers." in shown
    assert "Which of them." in shown
