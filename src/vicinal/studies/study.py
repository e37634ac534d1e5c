"""Running a study, and its result so far."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vicinal.errors import VicinalError
from vicinal.studies.arm_facts import check_arms, measure_arms
from vicinal.studies.comparison import compare_arms
from vicinal.studies.observation import Observation
from vicinal.studies.progress import Progress
from vicinal.studies.result import StudyResult
from vicinal.studies.run_environment import RunEnvironment
from vicinal.studies.runner import run_local
from vicinal.studies.spec import PlannedRun
from vicinal.studies.study_folder import RunState, StudyFolder, StudyRecord
from vicinal.studies.study_path import OpenedStudy, open_study
from vicinal.training.run_folder import Run
from vicinal.training.signals import raise_on_sigterm

__all__ = ["show_study", "study"]


def study(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    device: str | None = None,
    ray: str | None = None,
    allow_mixed: bool = False,
) -> StudyResult:
    """Runs a study, or what is left of it. Returns its result; `print` shows the table.

    Each run is a process of its own with a run folder in `OUT/runs`. Finished runs are not run again, others continue
    from their last checkpoint, so a study can be stopped or killed at any time.

    >>> import tempfile, vicinal
    >>> result = vicinal.study(
    ...     {
    ...         "base": {"train_size": 64, "val_size": 0},
    ...         "arms": {"gmm": {"prior": "gmm"}},
    ...         "budget": {"steps": 1},
    ...         "seeds": 1,
    ...     },
    ...     out=tempfile.mkdtemp(),
    ... )  # doctest: +ELLIPSIS
    [1/1] ...
    >>> [(row.arm, row.summary.n) for row in result.rows]
    [('gmm', 1)]

    Args:
        source: the name of a ready study, a YAML file, the folder of a study, or the content of a file as a mapping.
        out: folder of the study; `runs/NAME` by default.
        jobs: number of runs at a time.
        device: of all runs, as in `TrainConfig`.
        ray: address of a Ray cluster to run on, or `local`; this machine without Ray by default.
        allow_mixed: go on where earlier runs were made with other threads, versions, devices or attention paths. The
            table lists them.

    Raises:
        VicinalError: if the definition cannot be used, arms differ in more than they compare, earlier runs were made
            otherwise, or another process runs the study.
        Interrupted: after SIGTERM, when the runs have saved checkpoints.
    """
    if jobs < 1:
        raise VicinalError(f"jobs must be at least 1, got {jobs}")
    opened = open_study(source, out)
    record = _record(opened, device, allow_mixed=allow_mixed)
    runs = opened.spec.runs(opened.folder.folder, record.directory, record.device)
    for planned in runs:
        opened.folder.check_run(planned)
    _check_mixed(opened.folder, runs, record.environment, allow_mixed=allow_mixed)
    with opened.folder.locked():
        opened.folder.write(opened.spec, record)
        _run(opened, record, runs, jobs, ray)
        result = _result(opened, record, runs)
        result.write(opened.folder.folder)
    return result


def show_study(source: str | Path | Mapping[str, Any], *, out: str | Path | None = None) -> StudyResult:
    """Returns the result of a study so far, also while it runs.

    Args:
        source: as in `study`.
        out: as in `study`.

    Raises:
        VicinalError: if the study was not started.
    """
    opened = open_study(source, out)
    if not opened.folder.exists:
        raise VicinalError(f"{opened.folder.folder} has no runs yet; `vicinal study run {source}` starts the study")
    opened = open_study(opened.folder.folder)  # the definition that it was started with
    record = opened.folder.record()
    return _result(opened, record, opened.spec.runs(opened.folder.folder, record.directory, record.device))


def _run(opened: OpenedStudy, record: StudyRecord, runs: Sequence[PlannedRun], jobs: int, ray: str | None) -> None:
    """Runs what is left of a study, on this machine or on a Ray cluster."""
    folder, threads = opened.folder, opened.spec.threads
    to_do = [planned for planned in runs if _is_to_do(folder, planned.name)]
    for planned in to_do:
        folder.failure_file(planned.name).unlink(missing_ok=True)
    message = f"stopped; `vicinal study run {folder.folder}` continues the study"
    with raise_on_sigterm(message), Progress(folder, runs, record.facts) as progress:
        if ray is None:
            run_local(folder, to_do, jobs=jobs, threads=threads, tick=progress.tick)
        else:
            from vicinal.studies.ray_runner import run_on_ray

            run_on_ray(folder, to_do, address=ray, threads=threads, tick=progress.tick)


def _record(opened: OpenedStudy, device: str | None, *, allow_mixed: bool) -> StudyRecord:
    """Returns the record of a study that is about to run: an earlier one with newly measured facts, or a new one.

    Raises:
        VicinalError: if arms differ in more than they compare, or the study was started otherwise.
    """
    before = opened.folder.record() if opened.folder.exists else None
    device = device or (before.device if before else "auto")
    now = RunEnvironment.current(opened.spec.threads, device)
    if before is not None and not allow_mixed and (difference := now.difference(before.environment)):
        raise VicinalError(
            f"{opened.folder.folder} was started with other settings: now {difference}; make them equal, give the "
            "study another folder with --out, or add runs with --allow-mixed, which the table lists"
        )
    spec, folder = opened.spec, opened.folder.folder
    facts = measure_arms(spec, folder, opened.directory, device, before.facts if before else {})
    check_arms(spec, facts, folder, opened.directory)
    return StudyRecord(opened.directory, device, before.environment if before else now, facts)


def _check_mixed(
    folder: StudyFolder, runs: Sequence[PlannedRun], expected: RunEnvironment, *, allow_mixed: bool
) -> None:
    """Raises VicinalError if runs in the folder were made with other threads, versions, devices or attention paths."""
    mixed = {} if allow_mixed else _mixed(folder, runs, expected)
    for name, difference in mixed.items():
        raise VicinalError(
            f"{folder.run_folder(name)} was made otherwise than the study: {difference}; remove it, or keep it with "
            "--allow-mixed, which the table lists"
        )


def _mixed(folder: StudyFolder, runs: Sequence[PlannedRun], expected: RunEnvironment) -> dict[str, str]:
    """Returns how runs were made otherwise than the study, by name."""
    begun = (RunState.FINISHED, RunState.STARTED)
    names = [planned.name for planned in runs if folder.checked_status(planned.name).state in begun]
    return expected.differences({name: Run(folder.run_folder(name)) for name in names})


def _is_to_do(folder: StudyFolder, name: str) -> bool:
    status = folder.status(name)
    return status.state is not RunState.FINISHED and not status.final


def _result(opened: OpenedStudy, record: StudyRecord, runs: Sequence[PlannedRun]) -> StudyResult:
    spec, folder = opened.spec, opened.folder
    statuses = {planned.name: folder.checked_status(planned.name) for planned in runs}
    finished = [planned for planned in runs if statuses[planned.name].state is RunState.FINISHED]
    observations = [
        Observation(planned.arm, planned.condition.name, planned.seed, Run(folder.run_folder(planned.name)))
        for planned in finished
    ]
    conditions = [condition.name for condition in spec.conditions]
    split, rows = compare_arms(
        observations,
        conditions,
        list(spec.arms),
        spec.baseline,
        metric=spec.metric,
        primary=spec.primary,
        sigma=spec.sigma,
    )
    return StudyResult(
        name=opened.name,
        question=spec.question,
        split=split,
        metric=spec.metric,
        baseline=spec.baseline,
        rows=rows,
        planned_runs=len(runs),
        finished_runs=len(finished),
        failures={name: each.message or "" for name, each in statuses.items() if each.state is RunState.FAILED},
        mixed=_mixed(folder, runs, record.environment),
        also_differs=spec.also_differs,
        sigma=spec.sigma,
    )
