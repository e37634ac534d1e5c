"""Reports that several files of tests open."""

import pytest

from browser import chromium
from planted_runs import planted_run
from planted_study import planted_metrics
from small_studies import definition, finished_study
from vicinal.report import write_report

HOSTILE = "<script>document.title = 'run'</script>", "$x^2$", "</script>", "\"quotes' &amp; {{ 7 * 7 }}", "\N{ROCKET}"
"""Names that would be markup, mathematics or code if they were not escaped."""


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the tests of one file: an event loop runs until it is closed."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    """A trained study of two arms and two seeds."""
    folder = tmp_path_factory.mktemp("reports") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        finished_study(definition(question="Does a mask help on the embedded digits?"), folder, patch)
    return folder


@pytest.fixture(scope="session")
def study_report(study_folder):
    """The report of the trained study."""
    return write_report(study_folder)


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory):
    """A comparison whose arms, run folders and datasets have names that have to be escaped."""
    folder = tmp_path_factory.mktemp("hostile")
    runs = []
    for number, name in enumerate(HOSTILE):
        for seed in (0, 1):
            correct = [index < 60 + 7 * number + seed for index in range(100)]
            place = folder / f"{number} {name.replace('/', '_')} {seed}"
            runs.append(planted_run(place, correct, init_from=name, dataset=f"folder:{name}", seed=seed))
            planted_metrics(runs[-1], 0.1 * number)
    for number in (0, 1):  # so that there is a comparison under one condition
        correct = [index < 50 + number for index in range(100)]
        runs.append(
            planted_run(
                folder / f"base {number}", correct, init_from="base", dataset=f"folder:{HOSTILE[0]}", seed=number
            )
        )
    return write_report([run.folder for run in runs], out=folder / "report.html")
