"""From the file of a study to its definition, with errors that name file, line and field."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from vicinal.errors import unknown_name
from vicinal.studies.spec import PARAMETERS, Comparison, Condition, Metric, Sigma, StudySpec
from vicinal.studies.spec_file import FieldPath, SpecFile
from vicinal.training.config import TrainConfig
from vicinal.typed_value import convert_value

__all__ = ["read_spec"]

DEFAULT_SEEDS, DEFAULT_THREADS = 8, 1
SPEC_FIELDS = (
    "question",
    "base",
    "arms",
    "baseline",
    "factors",
    "seeds",
    "budget",
    "primary",
    "also_differs",
    "threads",
    "sigma",
    "metric",
    "cost",
    "answer",
)
SET_ELSEWHERE = {"seed": "by seeds", "out": "by the study", "device": "with --device"}
"""Fields of a configuration that a study sets by itself."""
NAME = re.compile(r"[\w.=+]([\w.=+-]*[\w.=+])?", re.ASCII)
"""Names of arms and levels, which are parts of folder names."""


def read_spec(source: str | Path | Mapping[str, Any]) -> StudySpec:
    """Returns the definition of a study.

    Args:
        source: a YAML file, or its content as a mapping.

    Raises:
        VicinalError: with file, line and field, if the definition cannot be used.
    """
    file = SpecFile.of_values(source) if isinstance(source, Mapping) else SpecFile.read(Path(source))
    return _Reader(file).read()


class _Reader:
    """Reads the fields of a study.

    Args:
        file: the study.
    """

    def __init__(self, file: SpecFile) -> None:
        self.file, self.values, self.error = file, file.values, file.error
        self.config_fields = {field.name for field in fields(TrainConfig)} - set(SET_ELSEWHERE)

    def read(self) -> StudySpec:
        """Returns the definition."""
        self._check_names((), self.values, SPEC_FIELDS, "field of a study")
        arms = self._arms()
        base = self._base()
        conditions = self._conditions()
        self._check_set_once(arms)
        baseline = self._convert("baseline", str, next(iter(arms)))
        if baseline not in arms:
            raise self.error(("baseline",), str(unknown_name("arm", baseline, arms)))
        spec = StudySpec(
            file=self.file,
            question=self._convert("question", str, ""),
            base=base,
            arms=arms,
            baseline=baseline,
            conditions=conditions,
            seeds=self._seeds(),
            primary=self._primary(arms, baseline, conditions),
            also_differs=self._also_differs(),
            threads=self._convert("threads", int, DEFAULT_THREADS),
            sigma=self._sigma(),
            metric=self._convert("metric", Metric, "top1"),
            cost=self._convert("cost", str | None, None),
            answer=self._convert("answer", str | None, None),
        )
        if spec.threads < 1:
            raise self.error(("threads",), f"must be a number of threads, at least 1, got {spec.threads}")
        for condition, arm in itertools.product(conditions, arms):
            spec.planned_run(arm, condition, spec.seeds[0], Path(), Path.cwd())  # checks the settings
        return spec

    def _arms(self) -> dict[str, dict[str, Any]]:
        arms = self._mapping(("arms",), self.values.get("arms"))
        if len(arms) < 1:
            raise self.error(("arms",), "must name at least one arm, such as `gmm: {prior: gmm}`")
        self._check_labels(("arms",), arms)
        return {name: self._changes(("arms", name), changes) for name, changes in arms.items()}

    def _base(self) -> dict[str, Any]:
        base = self._changes(("base",), self.values.get("base", {}), more=("recipe",))
        budget = self._mapping(("budget",), self.values.get("budget", {}))
        self._check_names(("budget",), budget, ("epochs", "steps"), "budget")
        if len(budget) > 1:
            raise self.error(("budget",), "must be either epochs or steps")
        for name in budget:
            if name in base:
                raise self.error(("base", name), "is set in budget, too: leave one of them out")
        return {**base, **budget}

    def _conditions(self) -> tuple[Condition, ...]:
        factors = self._mapping(("factors",), self.values.get("factors", {}))
        self._check_labels(("factors",), factors)
        levels = [
            [(factor, level, changes) for level, changes in self._levels(factor, value).items()]
            for factor, value in factors.items()
        ]
        return tuple(
            Condition(
                tuple((factor, level) for factor, level, _ in chosen),
                {name: value for _, _, changes in chosen for name, value in changes.items()},
            )
            for chosen in itertools.product(*levels)
        )

    def _levels(self, factor: str, value: Any) -> dict[str, dict[str, Any]]:
        """Returns the changes of each level: a list of values of a field, or a mapping of names to changes."""
        path = ("factors", factor)
        if not isinstance(value, Mapping | list | tuple) or not value:
            raise self.error(
                path, f"must be a list of values, or levels such as `small: {{train_size: 500}}`, got {value!r}"
            )
        if isinstance(value, Mapping):
            self._check_labels(path, value)
            return {level: self._changes((*path, level), changes) for level, changes in value.items()}
        if factor not in self.config_fields:
            listing = "a list of values needs the name of a setting; other factors have levels with names"
            raise self.error(path, str(unknown_name("setting", factor, self.config_fields, listing=listing)))
        labels = [_label(each) for each in value]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                raise self.error((*path, index), f"the value {value[index]!r} is there twice")
        return {label: {factor: each} for label, each in zip(labels, value, strict=True)}

    def _seeds(self) -> tuple[int, ...]:
        value = self.values.get("seeds", DEFAULT_SEEDS)
        seeds = self._convert("seeds", tuple[int, ...], None) if isinstance(value, list | tuple | range) else None
        if seeds is None:
            seeds = tuple(range(self._convert("seeds", int, DEFAULT_SEEDS)))
        if not seeds or min(seeds) < 0:
            raise self.error(("seeds",), f"must be a number of seeds, at least 1, or a list of seeds, got {value!r}")
        for index, seed in enumerate(seeds):
            if seed in seeds[:index]:
                raise self.error(("seeds", index), f"the seed {seed} is there twice")
        return seeds

    def _primary(self, arms: Mapping[str, Any], baseline: str, conditions: tuple[Condition, ...]) -> Comparison | None:
        others = [arm for arm in arms if arm != baseline]
        value = self.values.get("primary")
        if value is None:
            return Comparison(others[0], conditions[0].name) if len(others) == len(conditions) == 1 else None
        chosen = {"arm": value} if isinstance(value, str) else self._mapping(("primary",), value)
        factors = [factor for factor, _ in conditions[0].levels]
        self._check_names(("primary",), chosen, ("arm", *factors), "factor")
        if chosen.get("arm") not in others:
            raise self.error(("primary",), str(unknown_name("arm", str(chosen.get("arm")), others)))
        wanted = {factor: _label(level) for factor, level in chosen.items() if factor != "arm"}
        found = [each for each in conditions if wanted.items() <= dict(each.levels).items()]
        if len(found) != 1:
            example = ", ".join(f"{factor}: {level}" for factor, level in conditions[0].levels)
            raise self.error(
                ("primary",),
                f"must name one of the {len(conditions)} conditions, such as {{arm: {others[0]}, {example}}}, "
                f"got {len(found)} of them",
            )
        return Comparison(str(chosen["arm"]), found[0].name)

    def _also_differs(self) -> tuple[str, ...]:
        found: tuple[str, ...] = self._convert("also_differs", tuple[str, ...], ())
        for index, name in enumerate(found):
            if name not in {*self.config_fields, PARAMETERS}:
                problem = unknown_name("setting", name, {*self.config_fields, PARAMETERS})
                raise self.error(("also_differs", index), str(problem))
        return found

    def _sigma(self) -> Sigma | None:
        if self.values.get("sigma") is None:
            return None
        value = self._mapping(("sigma",), self.values["sigma"])
        types_: dict[str, Any] = {"value": float, "n": int, "study": str}
        self._check_names(("sigma",), value, types_, "field of sigma")
        for name in types_:
            if name not in value:
                raise self.error(("sigma",), f"needs {name}: `sigma: {{value: 0.6, n: 8, study: priors}}`")
        converted = {name: self._checked(("sigma", name), value[name], type_) for name, type_ in types_.items()}
        sigma = Sigma(**converted)
        if sigma.value <= 0 or sigma.n < 2:
            raise self.error(("sigma",), f"needs a value above 0 in points and n of at least 2, got {value}")
        return sigma

    def _changes(self, path: FieldPath, value: Any, more: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns the fields of a configuration that an arm, a level or the base sets."""
        changes = self._mapping(path, value)
        for name in changes:
            if name in SET_ELSEWHERE:
                raise self.error((*path, name), f"is set {SET_ELSEWHERE[name]}: leave it out")
        self._check_names(path, changes, {*self.config_fields, *more}, "setting")
        return dict(changes)

    def _check_set_once(self, arms: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises VicinalError if a factor sets what arms, or another factor, set too."""
        owner: dict[str, str] = {name: "arms" for changes in arms.values() for name in changes}
        for factor, levels in self._mapping(("factors",), self.values.get("factors", {})).items():
            named = (
                {name for changes in levels.values() for name in changes} if isinstance(levels, Mapping) else {factor}
            )
            for name in sorted(named):
                if name in owner:
                    raise self.error(("factors", factor), f"sets {name}, which {owner[name]} set too")
                owner[name] = f"levels of {factor}"

    def _check_names(self, path: FieldPath, values: Iterable[Any], known: Iterable[str], kind: str) -> None:
        known = list(known)
        for name in values:
            if name not in known:
                raise self.error((*path, name), str(unknown_name(kind, str(name), known)))

    def _check_labels(self, path: FieldPath, values: Mapping[Any, Any]) -> None:
        """Raises VicinalError for names of arms, factors or levels that cannot be part of a folder's name."""
        for name in values:
            if not isinstance(name, str):
                raise self.error(path, f"the name {name!r} must be text: write it in quotes")
            if not NAME.fullmatch(name):
                raise self.error((*path, name), "the name must consist of letters, digits and . _ = + -")

    def _mapping(self, path: FieldPath, value: Any) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise self.error(path, f"must be a mapping such as `name: value`, got {value!r}")
        return value

    def _convert(self, name: str, type_: Any, default: Any) -> Any:
        """Returns a field of the study as a type, or the default if it is not given."""
        return self._checked((name,), self.values[name], type_) if name in self.values else default

    def _checked(self, path: FieldPath, value: Any, type_: Any) -> Any:
        try:
            return convert_value(value, type_)
        except ValueError as error:
            raise self.error(path, f"must be {error}, got {value!r}") from None


def _label(value: Any) -> str:
    """Returns a value as part of a folder's name."""
    text = "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-") or "none"
