"""What a report is about: a study, a comparison of runs, or one run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vicinal.errors import VicinalError
from vicinal.studies.result import StudyResult
from vicinal.studies.run_comparison import compare, expand_patterns, group_runs
from vicinal.studies.study import show_study
from vicinal.studies.study_folder import StudyFolder
from vicinal.training.run_folder import Run

__all__ = ["ReportArm", "ReportSource", "open_source"]


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

    @property
    def is_single(self) -> bool:
        """Whether the report is about one run."""
        return len(self.arms) == 1 and len(self.arms[0].runs) == 1


def open_source(paths: Sequence[str | Path]) -> ReportSource:
    """Returns what a report is about.

    Args:
        paths: the folder of a study; or run folders, of which patterns such as `runs/a-*` are expanded.

    Raises:
        VicinalError: if a path is neither a study nor a run.
    """
    if not paths:
        raise VicinalError("a report needs the folder of a study, or run folders")
    if len(paths) == 1 and StudyFolder(paths[0]).exists:
        return _of_study(Path(paths[0]))
    return _of_runs(paths)


def _of_study(folder: Path) -> ReportSource:
    study = StudyFolder(folder)
    spec, record, result = study.spec(), study.record(), show_study(folder)
    arms: dict[tuple[str, str], list[Run]] = {
        (condition.name, arm): []
        for condition in spec.conditions
        for arm in sorted(spec.arms, key=lambda arm: arm != spec.baseline)
    }
    for planned in sorted(spec.runs(folder, record.directory, record.device), key=lambda planned: planned.seed):
        if (study.run_folder(planned.name) / "config.yaml").is_file():
            arms[planned.condition.name, planned.arm].append(Run(study.run_folder(planned.name)))
    missing = []
    if result.finished_runs < result.planned_runs:
        missing.append(f"{result.planned_runs - result.finished_runs} of {result.planned_runs} runs are not finished.")
    return ReportSource(
        title=folder.resolve().name,
        question=spec.question,
        result=result,
        arms=tuple(ReportArm(condition, arm, tuple(runs)) for (condition, arm), runs in arms.items()),
        missing=tuple(missing),
        folder=folder,
    )


def _of_runs(paths: Sequence[str | Path]) -> ReportSource:
    runs = [each if isinstance(each, Run) else Run(each) for each in expand_patterns(paths)]
    if len(runs) == 1:
        run = runs[0]
        missing = () if run.finished else ("The run is not finished: it has no final figures yet.",)
        return ReportSource(run.folder.name, "", None, (ReportArm("", "", (run,)),), missing, run.folder)
    grouped: dict[tuple[str, str], list[Run]] = {}
    for each in sorted(group_runs(runs), key=lambda each: each.seed):
        grouped.setdefault((each.condition, each.arm), []).append(each.run)
    unfinished = [run.folder.name for run in runs if not run.finished]
    missing_text = (f"Not finished: {', '.join(unfinished)}.",) if unfinished else ()
    arms_finished = {arm for (_, arm), members in grouped.items() if any(run.finished for run in members)}
    result = compare(runs) if len(arms_finished) > 1 else None
    baseline = result.baseline if result else runs[0].config.prior
    ordered = sorted(grouped.items(), key=lambda item: item[0][1] != baseline)
    return ReportSource(
        title="comparison",
        question="",
        result=result,
        arms=tuple(ReportArm(condition, arm, tuple(members)) for (condition, arm), members in ordered),
        missing=missing_text,
        folder=Path.cwd(),
    )
