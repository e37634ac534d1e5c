"""What a report is about: a study, a comparison of runs, or one run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vicinal.errors import VicinalError
from vicinal.studies.result import StudyResult
from vicinal.studies.run_comparison import compare, expand_patterns, group_runs
from vicinal.studies.study import show_study
from vicinal.studies.study_folder import StudyFolder
from vicinal.training.run_folder import Run

__all__ = ["ReportArm", "ReportSource", "counted", "open_source"]


@dataclass(frozen=True)
class ReportArm:
    """The runs of an arm under a condition, sorted by seed; those of a single run have neither name."""

    condition: str
    arm: str
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """Condition and arm, for headings."""
        return ", ".join(filter(None, (self.condition, self.arm))) or "this run"

    @property
    def finished(self) -> tuple[Run, ...]:
        """The runs that are finished."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def shown(self) -> Run | None:
        """The run whose model is shown: the finished one with the smallest seed; None if there is none."""
        return next(iter(self.finished), None)


@dataclass(frozen=True)
class ReportSource:
    """A study, a comparison or a run."""

    title: str
    question: str
    result: StudyResult | None
    """Statistics; None if there are not two arms."""
    arms: tuple[ReportArm, ...]
    """The baseline first."""
    missing: tuple[str, ...]
    """Sentences about what the page cannot show."""
    folder: Path
    """Where the report is written by default."""
    kind: str = "Comparison"
    """Study, Comparison or Run, for the heading."""

    @property
    def heading(self) -> str:
        """The question, or what is compared."""
        return self.question or self.title

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all arms."""
        return tuple(run for arm in self.arms for run in arm.runs)

    @property
    def split(self) -> str:
        """The split of final figures: that of the statistics, or `test` if all finished runs have it, else `val`."""
        if self.result is not None:
            return self.result.split
        return "test" if all("test" in (run.results or {}) for run in self.runs if run.finished) else "val"

    @property
    def facts(self) -> tuple[str, ...]:
        """What all figures are of: models, data, number of runs, images."""
        configs = [run.config for run in self.runs]
        if not configs:
            return ()
        finished = sum(run.finished for run in self.runs)
        return (
            ", ".join(dict.fromkeys(config.init_from or config.model_name for config in configs)),
            ", ".join(dict.fromkeys(config.dataset for config in configs)),
            f"{counted(len(self.arms), 'arm')}, {counted(finished, 'finished run')}",
            *([f"figures of {self.images}"] if finished else []),
        )

    @property
    def images(self) -> str:
        """The split of final figures with its number of images, such as `359 test images`."""
        counts = {(run.results or {}).get(self.split, {}).get("images") for run in self.runs if run.finished}
        known = sorted(count for count in counts if isinstance(count, int))
        if not known or None in counts:
            return f"{self.split} images"
        number = f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"
        return f"{number} {self.split} images"


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, such as `1 seed` or `3 seeds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def open_source(paths: Sequence[str | Path]) -> ReportSource:
    """Returns what a report is about.

    Args:
        paths: the folder of a study; or run folders, of which patterns such as `runs/a-*` are expanded.

    Raises:
        VicinalError: if a path is neither a study nor a run.
    """
    if not paths:
        raise VicinalError("a report needs the folder of a study, or run folders")
    for path in paths:
        if StudyFolder(path).exists:
            if len(paths) > 1:
                raise VicinalError(f"a report is about one study or about runs, got {path} and others")
            return _of_study(Path(path))
    return _of_runs(paths)


def _of_study(folder: Path) -> ReportSource:
    study = StudyFolder(folder)
    spec, record, result = study.spec(), study.record(), show_study(folder)
    arms: dict[tuple[str, str], list[Run]] = {
        (condition.name, arm): []
        for condition in spec.conditions
        for arm in sorted(spec.arms, key=lambda arm: arm != spec.baseline)
    }
    started = [
        (planned, Run(study.run_folder(planned.name)))
        for planned in sorted(spec.runs(folder, record.directory, record.device), key=lambda planned: planned.seed)
        if (study.run_folder(planned.name) / "config.yaml").is_file()
    ]
    readable, missing = _readable(run for _, run in started)
    for planned, run in started:
        if run in readable:
            arms[planned.condition.name, planned.arm].append(run)
    unfinished = result.planned_runs - result.finished_runs - len(result.failures)
    if unfinished:
        missing.append(f"{unfinished} of {counted(result.planned_runs, 'run')} not finished yet.")
    if result.failures:
        missing.append(f"{len(result.failures)} of {counted(result.planned_runs, 'run')} failed: see What was run.")
    return ReportSource(
        title=folder.resolve().name,
        question=spec.question,
        result=result,
        arms=tuple(ReportArm(condition, arm, tuple(runs)) for (condition, arm), runs in arms.items()),
        missing=tuple(missing),
        folder=folder,
        kind="Study",
    )


def _of_runs(paths: Sequence[str | Path]) -> ReportSource:
    runs = [each if isinstance(each, Run) else _open_run(Path(each)) for each in expand_patterns(paths)]
    runs, missing = _readable(runs)
    if not runs:
        raise VicinalError(missing[0])
    finished, unfinished = [run for run in runs if run.finished], [run for run in runs if not run.finished]
    if len(runs) == 1:
        missing += ["The run is not finished: it has no final figures yet."] * len(unfinished)
        missing += [f"It failed: {run.failure}" for run in unfinished if run.failure]
        run = runs[0]
        return ReportSource(run.folder.name, "", None, (ReportArm("", "", (run,)),), tuple(missing), run.folder, "Run")
    is_compared = len({each.arm for each in group_runs(finished)}) > 1
    if unfinished:
        missing.append(f"Not finished: {', '.join(run.folder.name for run in unfinished)}.")
    grouped: dict[tuple[str, str], list[Run]] = {}
    for each in sorted(group_runs(finished if is_compared else runs), key=lambda each: each.seed):
        grouped.setdefault((each.condition, each.arm), []).append(each.run)
    if not is_compared:
        missing.append("Nothing is compared: that needs finished runs of at least two arms.")
    result = compare(finished) if is_compared else None
    ordered = sorted(grouped.items(), key=lambda item: result is not None and item[0][1] != result.baseline)
    names = list(dict.fromkeys(arm for (_, arm), _ in ordered))
    return ReportSource(
        title=f"{', '.join(names[1:])} against {names[0]}" if is_compared else counted(len(runs), "run"),
        question="",
        result=result,
        arms=tuple(ReportArm(condition, arm, tuple(members)) for (condition, arm), members in ordered),
        missing=tuple(missing),
        folder=Path.cwd(),
        kind="Comparison",
    )


def _open_run(folder: Path) -> Run:
    """Returns a run. Raises VicinalError if the folder exists, and is neither a run nor a study."""
    if folder.is_dir() and not (folder / "config.yaml").is_file():
        raise VicinalError(
            f"{folder} is neither a study nor a run: it has neither study.yaml and study.json nor config.yaml"
        )
    return Run(folder)


def _readable(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Returns the runs whose files can be read, and a sentence about each other run."""
    readable, problems = [], []
    for run in runs:
        try:
            _ = run.config, run.metrics, run.environment, run.results
            readable.append(run)
        except VicinalError as error:
            problems.append(f"{run.folder.name} is left out: {error}.")
    return readable, problems
