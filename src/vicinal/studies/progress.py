"""The progress of a study: a live table on a terminal, else a line for each run that ends."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from vicinal.studies.arm_facts import facts_key
from vicinal.studies.spec import PlannedRun
from vicinal.studies.study_folder import RunState, RunStatus, StudyFolder
from vicinal.text_table import text_table
from vicinal.training.run_folder import Run

__all__ = ["Progress"]

REDRAW_SECONDS = 1.0
UP_AND_CLEAR = "\x1b[{lines}F\x1b[J"
"""Terminal sequence: to the start of the line so many lines up, and clear what is below."""


class Progress:
    """Shows how far the runs of a study are, inside of `with`.

    Args:
        folder: of the study.
        runs: all runs of the study.
        facts: steps of each arm under each condition, from `measure_arms`.
    """

    def __init__(self, folder: StudyFolder, runs: Sequence[PlannedRun], facts: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self.runs = folder, runs
        self.steps = {run.name: int(facts[facts_key(run.arm, run.condition)]["steps"]) for run in runs}
        self.ended: dict[str, RunStatus] = {}
        self.started = self.drawn = time.monotonic()
        self.lines = 0
        self.is_live = sys.stdout.isatty()

    def __enter__(self) -> "Progress":
        self._update(())
        self.done_before = self._fraction(self._statuses())
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def tick(self, running: Sequence[str]) -> None:
        """Shows the runs that ended since the last call, and on a terminal draws the table again.

        Args:
            running: names of the runs that are running.
        """
        for name, status in self._update(running):
            self._clear()
            print(f"[{len(self.ended)}/{len(self.runs)}] {name}: {self._describe(name, status)}", flush=True)
        if self.is_live and time.monotonic() - self.drawn > REDRAW_SECONDS:
            self._clear()
            lines = self._visible(self._table(running).splitlines())
            self.lines, self.drawn = len(lines), time.monotonic()
            print("\n".join(lines), flush=True)

    def _update(self, running: Sequence[str]) -> list[tuple[str, RunStatus]]:
        """Returns the runs that ended since the last call."""
        statuses = {
            run.name: self.folder.status(run.name)
            for run in self.runs
            if run.name not in self.ended and run.name not in running
        }
        new = {name: each for name, each in statuses.items() if each.state in (RunState.FINISHED, RunState.FAILED)}
        self.ended |= new
        return list(new.items())

    def _statuses(self) -> dict[str, RunStatus]:
        return {run.name: self.ended.get(run.name) or self.folder.status(run.name) for run in self.runs}

    def _fraction(self, statuses: Mapping[str, RunStatus]) -> float:
        """Returns the share of all steps that is done, or that failed runs will not do."""
        done = sum(self.steps[name] if name in self.ended else each.steps for name, each in statuses.items())
        return done / sum(self.steps.values())

    def _describe(self, name: str, status: RunStatus) -> str:
        if status.state is RunState.FAILED:
            return f"failed: {status.message}"
        results = Run(self.folder.run_folder(name)).results or {}
        return ", ".join(f"{split} top-1 {100 * values['top1']:.2f}%" for split, values in results.items())

    def _table(self, running: Sequence[str]) -> str:
        """Returns a line for each arm under each condition, and one with the remaining time."""
        statuses = self._statuses()
        rows = [["arm", "finished", "failed", "running"]]
        groups: dict[str, list[PlannedRun]] = {}
        for run in self.runs:
            groups.setdefault(facts_key(run.arm, run.condition), []).append(run)
        for key, members in groups.items():
            states = [statuses[run.name].state for run in members]
            active = [
                f"s{run.seed} {statuses[run.name].steps / self.steps[run.name]:.0%}"
                for run in members
                if run.name in running
            ]
            failed = str(states.count(RunState.FAILED) or "")
            rows.append([key, f"{states.count(RunState.FINISHED)}/{len(members)}", failed, ", ".join(active)])
        return f"{text_table(rows, right=(1, 2))}\n{self._remaining(statuses)}"

    def _visible(self, lines: list[str]) -> list[str]:
        """Returns the lines that fit on the terminal, with the last one; others could not be cleared."""
        size = shutil.get_terminal_size()
        shown = lines if len(lines) < size.lines else [*lines[: max(0, size.lines - 3)], "...", lines[-1]]
        return [line[: size.columns - 1] for line in shown]

    def _remaining(self, statuses: Mapping[str, RunStatus]) -> str:
        fraction, elapsed = self._fraction(statuses), time.monotonic() - self.started
        gained = fraction - self.done_before
        left = "unknown" if gained <= 0 else tqdm.format_interval(elapsed * (1 - fraction) / gained)
        return f"{len(self.ended)} of {len(self.runs)} runs, {fraction:.0%} of all steps, ETA {left}"

    def _clear(self) -> None:
        """Removes the table from the terminal."""
        if self.lines:
            print(UP_AND_CLEAR.format(lines=self.lines), end="")
            self.lines = 0
