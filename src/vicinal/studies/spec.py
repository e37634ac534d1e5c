"""The definition of a study: which arms are compared, under which conditions, with which seeds."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vicinal.errors import VicinalError
from vicinal.studies.spec_file import FieldPath, SpecFile
from vicinal.training.config import ConfigError, TrainConfig, recipe

__all__ = ["PARAMETERS", "Comparison", "Condition", "Metric", "PlannedRun", "Sigma", "StudySpec"]

PARAMETERS = "parameters"
"""In `also_differs`: the number of parameters outside of priors."""
Metric = Literal["top1", "balanced_accuracy", "f1"]


@dataclass(frozen=True)
class Condition:
    """One combination of the levels of all further factors. Arms are compared within a condition."""

    levels: tuple[tuple[str, str], ...]
    """Factor and level."""
    changes: Mapping[str, Any]
    """Fields of the configuration."""

    @property
    def name(self) -> str:
        """The levels, joined; empty if the study has no further factors."""
        return "-".join(level for _, level in self.levels)


@dataclass(frozen=True)
class Comparison:
    """An arm that is compared with the baseline under a condition."""

    arm: str
    condition: str


@dataclass(frozen=True)
class Sigma:
    """Standard deviation of the paired difference, in points, known from an earlier study."""

    value: float
    n: int
    """Number of seeds that it came from."""
    study: str


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    name: str
    """Of its folder."""
    arm: str
    condition: Condition
    seed: int
    config: TrainConfig


@dataclass(frozen=True)
class StudySpec:
    """A study as its file defines it. `read_spec` makes it."""

    file: SpecFile
    question: str
    base: Mapping[str, Any]
    """Fields of the configuration of all runs, and `recipe`."""
    arms: Mapping[str, Mapping[str, Any]]
    """Fields that each arm changes."""
    baseline: str
    conditions: tuple[Condition, ...]
    seeds: tuple[int, ...]
    primary: Comparison | None
    """The comparison that is tested as it is; the others are exploration."""
    also_differs: tuple[str, ...]
    """What arms differ in besides the one setting that they compare."""
    threads: int
    sigma: Sigma | None
    metric: Metric
    cost: str | None
    answer: str | None

    def comparisons(self) -> list[Comparison]:
        """Returns each arm but the baseline under each condition."""
        arms = [arm for arm in self.arms if arm != self.baseline]
        return [Comparison(arm, condition.name) for condition in self.conditions for arm in arms]

    def runs(self, folder: Path, directory: Path, device: str = "auto") -> list[PlannedRun]:
        """Returns all runs, seed by seed, so that an unfinished study has whole pairs.

        Args:
            folder: of the study.
            directory: that relative paths of data start at.
            device: of all runs.

        Raises:
            VicinalError: if a setting cannot be used.
        """
        return [
            self.planned_run(arm, condition, seed, folder, directory, device)
            for seed in self.seeds
            for condition in self.conditions
            for arm in self.arms
        ]

    def planned_run(
        self, arm: str, condition: Condition, seed: int, folder: Path, directory: Path, device: str = "auto"
    ) -> PlannedRun:
        """Returns one run; its arguments are those of `runs`.

        Raises:
            VicinalError: if a setting cannot be used.
        """
        name = "-".join(filter(None, (condition.name, arm, f"s{seed}")))
        fields: dict[str, Any] = {"track": "none", **self.base, **condition.changes, **self.arms[arm]}
        fields |= {"seed": seed, "out": folder / "runs" / name, "device": device}
        try:
            config = recipe(fields.pop("recipe", "quick"), **_absolute(fields, directory))
        except VicinalError as error:
            raise self.located(error, arm, condition) from None
        return PlannedRun(name, arm, condition, seed, config)

    def located(self, error: VicinalError, arm: str, condition: Condition) -> VicinalError:
        """Returns an error about the configuration of an arm with file, line and field.

        Args:
            error: about the configuration, or about the dataset or the model that it names.
            arm: whose configuration it is.
            condition: whose configuration it is.
        """
        fields = {**self.base, **condition.changes, **self.arms[arm]}
        field = error.field if isinstance(error, ConfigError) else _mentioned(str(error), fields)
        problem = " ".join(error.args[1:]) if isinstance(error, ConfigError) else str(error)
        return self.file.error(self._path(field, arm, condition), problem)

    def _path(self, field: str | None, arm: str, condition: Condition) -> FieldPath:
        """Returns where a field of a configuration is set; the arm if it is not set."""
        if field in self.arms[arm] or field is None:
            return ("arms", arm) if field is None else ("arms", arm, field)
        for factor, level in condition.levels:
            for path in (("factors", factor, level, field), ("factors", factor)):
                if path in self.file.lines and field in (path[-1], factor):
                    return path
        return next((path for path in (("budget", field), ("base", field)) if path in self.file.lines), ("base", field))


def _mentioned(text: str, fields: Mapping[str, Any]) -> str | None:
    """Returns the field whose name, or else whose value, an error mentions first; None if it mentions none."""
    words = text.replace("'", " ").replace(",", " ").split()
    by_name = (field for word in words for field in sorted(fields) if word == field)
    by_value = (field for field, value in sorted(fields.items()) if isinstance(value, str) and value in text)
    return next(itertools.chain(by_name, by_value), None)


def _absolute(fields: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Returns fields in which relative paths of data start at a folder."""
    changed = dict(fields)
    kind, separator, path = str(fields.get("dataset", "")).partition(":")
    if kind in ("folder", "parquet") and separator:
        changed["dataset"] = f"{kind}:{directory / Path(path).expanduser()}"
    for name in ("data_dir", "cache_dir"):
        if isinstance(fields.get(name), str | Path):
            changed[name] = directory / Path(fields[name]).expanduser()
    if isinstance(fields.get("init_from"), str) and (directory / fields["init_from"]).exists():
        changed["init_from"] = str(directory / fields["init_from"])
    return changed
