"""`compare`: the statistics of a study on any finished runs, paired by seed."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vicinal.errors import VicinalError, unknown_name
from vicinal.studies.comparison import compare_arms
from vicinal.studies.observation import Observation
from vicinal.studies.result import StudyResult
from vicinal.studies.run_environment import RunEnvironment
from vicinal.studies.spec import Metric
from vicinal.training.config import RESUME_FIELDS, TrainConfig
from vicinal.training.run_folder import Run

__all__ = ["compare"]

DATA_FIELDS = ("dataset", "data_dir", "train_size", "val_size")
"""Runs are compared under the same values of these settings."""
IGNORED_FIELDS = RESUME_FIELDS - {"dataset", "data_dir"} | {"seed", "device"}


def compare(runs: Iterable[str | Path | Run], *, baseline: str | None = None, metric: Metric = "top1") -> StudyResult:
    """Returns the statistics of finished runs: arms are runs that differ in their seed only, pairs have the same seed.

    >>> import tempfile, vicinal
    >>> config = vicinal.TrainConfig(train_size=64, steps=1)
    >>> runs = [
    ...     vicinal.train(config.changed(prior=prior, out=f"{tempfile.mkdtemp()}/{prior}")) for prior in ("none", "gmm")
    ... ]  # doctest: +ELLIPSIS
    data ...
    >>> [(row.arm, row.summary.n) for row in vicinal.compare(runs).rows]
    [('none', 1), ('gmm', 1)]

    Arms are compared on the same data; other datasets and training sizes are conditions of their own. No comparison is
    the primary one, because none was named before the runs.

    Args:
        runs: run folders. Shell patterns such as `runs/c-*` are expanded.
        baseline: name of the arm that the others are compared with; by default `none`, or that of the first
            run.
        metric: `top1`, `balanced_accuracy` or `f1`.

    Raises:
        VicinalError: if a folder is not a run, two runs have the same settings and seed, or fewer than two arms are
            finished.
    """
    opened = [each if isinstance(each, Run) else Run(each) for each in _expand(runs)]
    finished = [run for run in opened if run.finished]
    observations = _observations(finished)
    arms = list(dict.fromkeys(each.arm for each in observations))
    if len(arms) < 2:
        raise VicinalError(
            f"a comparison needs finished runs of at least two arms, got {len(finished)} finished runs of {len(arms)}; "
            "runs of one arm differ in their seed only"
        )
    baseline = baseline or ("none" if "none" in arms else arms[0])
    if baseline not in arms:
        raise unknown_name("arm", baseline, arms)
    arms = [baseline, *(arm for arm in arms if arm != baseline)]
    conditions = list(dict.fromkeys(each.condition for each in observations))
    split, rows = compare_arms(observations, conditions, arms, baseline, metric=metric)
    present = {(each.condition, each.arm) for each in observations}
    environment = RunEnvironment.of_record(finished[0].environment)
    return StudyResult(
        name="comparison",
        question="",
        split=split,
        metric=metric,
        baseline=baseline,
        rows=tuple(row for row in rows if (row.condition, row.arm) in present),
        planned_runs=len(opened),
        finished_runs=len(finished),
        failures={str(run.folder): "not finished" for run in opened if not run.finished},
        mixed=environment.differences({str(run.folder): run for run in finished}),
        also_differs=tuple(_varying([run.config for run in finished], _arm_fields())[1:]),
        sigma=None,
    )


def _observations(runs: Sequence[Run]) -> list[Observation]:
    """Returns finished runs with the names of their arms and conditions.

    Raises:
        VicinalError: if two runs have the same settings and seed.
    """
    configs = [run.config for run in runs]
    arms, conditions = _names(configs, _arm_fields()), _names(configs, DATA_FIELDS, empty="")
    found: dict[tuple[str, str, int], Observation] = {}
    for arm, condition, config, run in zip(arms, conditions, configs, runs, strict=True):
        key = arm, condition, config.seed
        if key in found:
            raise VicinalError(
                f"{found[key].run.folder} and {run.folder} have the same settings and the seed {config.seed}; "
                "leave one of them out"
            )
        found[key] = Observation(arm, condition, config.seed, run)
    return list(found.values())


def _expand(runs: Iterable[str | Path | Run]) -> list[str | Path | Run]:
    """Returns the given runs, with the folders that fit a pattern in its place, sorted."""
    found: list[str | Path | Run] = []
    for each in [runs] if isinstance(runs, str | Path | Run) else runs:
        if isinstance(each, Run) or Path(each).exists() or not any(mark in str(each) for mark in "*?["):
            found.append(each)
            continue
        pattern = Path(each)
        root = Path(pattern.anchor)
        matches = sorted(path for path in root.glob(str(pattern.relative_to(root))) if (path / "config.yaml").is_file())
        if not matches:
            raise VicinalError(f"no run folder fits {str(each)!r}")
        found += matches
    return found


def _arm_fields() -> list[str]:
    """Returns the names of the settings that tell arms apart."""
    return [field.name for field in fields(TrainConfig) if field.name not in {*IGNORED_FIELDS, *DATA_FIELDS}]


def _varying(configs: Sequence[TrainConfig], names: Iterable[str]) -> list[str]:
    """Returns the fields that differ between configurations."""
    return [name for name in names if len({getattr(config, name) for config in configs}) > 1]


def _names(configs: Sequence[TrainConfig], names: Iterable[str], empty: str = "all") -> list[str]:
    """Returns a name for each configuration, made of those of the given fields that vary; `empty` if none does."""
    varying = _varying(configs, names)
    if len(varying) == 1:
        return [_text(getattr(config, varying[0])) for config in configs]
    return [" ".join(f"{name}={_text(getattr(config, name))}" for name in varying) or empty for config in configs]


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
