"""`vicinal study`: plans, runs and shows studies."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.errors import VicinalError, unknown_name
from vicinal.files import write_text

__all__ = ["run"]

USAGE = """usage: vicinal study ACTION [--help] ...

  plan STUDY        show the runs of a study, how long they take and the disk space, from a few timed steps
  run STUDY         run a study, or what is left of it
  show STUDY        print the table of a study, also while it runs
  list              list the studies that ship with the package
  copy NAME FILE    write one of these to a file, to change it

STUDY is the name of a ready study, a YAML file (docs/studies.md), or the folder of a study, such as runs/demo."""


def plan(study: Annotated[str, tyro.conf.Positional], /, jobs: int = 1, device: str | None = None) -> None:
    """Shows the runs of a study, how long they take and how much disk space they need, from a few timed steps.

    Args:
        study: The name of a ready study, a YAML file, or the folder of a study.
        jobs: Number of runs at a time.
        device: Device of all runs, as in `vicinal train`.
    """
    from vicinal.studies.plan import plan_study

    print(plan_study(study, jobs=jobs, device=device).table())


def run_study(
    study: Annotated[str, tyro.conf.Positional],
    /,
    jobs: int = 1,
    device: str | None = None,
    out: Path | None = None,
    ray: str | None = None,
    allow_mixed: bool = False,
) -> None:
    """Runs a study, or what is left of it: finished runs are not run again, others go on from their last checkpoint.

    Args:
        study: The name of a ready study, a YAML file, or the folder of a study.
        jobs: Number of runs at a time; each uses as many threads as the study says.
        device: Device of all runs, as in `vicinal train`.
        out: Folder of the study; runs/NAME by default.
        ray: Address of a Ray cluster to run on, or local; it needs the extra [ray].
        allow_mixed: Go on where earlier runs had other threads, versions, devices or attention paths; the table lists
            them.
    """
    from vicinal.studies.study import study as run_all
    from vicinal.training.signals import Interrupted

    try:
        result = run_all(study, out=out, jobs=jobs, device=device, ray=ray, allow_mixed=allow_mixed)
    except Interrupted as interrupted:
        print(f"vicinal: {interrupted}", file=sys.stderr)
        sys.exit(128 + interrupted.signal)
    print(f"\n{result}")
    if result.failures:
        raise VicinalError(
            f"{len(result.failures)} of {result.planned_runs} runs failed; when the cause is removed, the same command "
            "runs them again"
        )


def show(study: Annotated[str, tyro.conf.Positional], /, pairs: bool = False, markdown: bool = False) -> None:
    """Prints the table of a study, also while it runs.

    Args:
        study: The name of a ready study, a YAML file, or the folder of a study.
        pairs: Every pair of runs with the same seed, with McNemar's test of the two models.
        markdown: As Markdown.
    """
    from vicinal.studies.study import show_study
    from vicinal.studies.tables import pairs_text

    result = show_study(study)
    print(pairs_text(result) if pairs else result.markdown() if markdown else result.table())


def list_studies() -> None:
    """Lists the studies that ship with the package: question, cost and answer."""
    from vicinal.studies.spec_reader import read_spec
    from vicinal.studies.study_path import ready_studies

    for name, file in ready_studies().items():
        spec = read_spec(file)
        print(
            f"{name}\n  question  {spec.question}\n  cost      {spec.cost}\n  answer    {spec.answer or 'not run yet'}"
        )


def copy(name: Annotated[str, tyro.conf.Positional], file: Annotated[Path, tyro.conf.Positional], /) -> None:
    """Writes a ready study to a YAML file, to change it or to point it to your data.

    Args:
        name: The name of a ready study.
        file: The file, which must not exist yet.
    """
    from vicinal.studies.study_path import ready_studies

    ready = ready_studies()
    if name not in ready:
        raise unknown_name("ready study", name, ready)
    if file.exists():
        raise VicinalError(f"{file} exists already; give another name")
    if not file.parent.is_dir():
        raise VicinalError(f"the folder {file.parent} does not exist")
    write_text(file, ready[name].read_text(encoding="utf-8"))
    print(f"wrote {file}; edit it, then: vicinal study run {file}")


ACTIONS: dict[str, Callable[..., None]] = {
    "plan": plan,
    "run": run_study,
    "show": show,
    "list": list_studies,
    "copy": copy,
}


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal study`, and plans, runs or shows."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return
    if args[0] not in ACTIONS:
        raise unknown_name("action", args[0], ACTIONS)
    call_with_flags(ACTIONS[args[0]], f"vicinal study {args[0]}", args[1:])
