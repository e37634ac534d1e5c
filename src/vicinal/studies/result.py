"""The result of a study or a comparison: a row for each arm, with its statistics."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vicinal.analysis.result import AnalysisResult, write_rows
from vicinal.files import write_json, write_text
from vicinal.studies.published import Published
from vicinal.studies.spec import Metric, Sigma
from vicinal.studies.statistics import ArmSummary, McNemar, PairedDifference
from vicinal.studies.tables import study_text
from vicinal.studies.verdict import Verdict

__all__ = ["ArmRow", "SeedPair", "StudyResult"]


@dataclass(frozen=True)
class SeedPair:
    """The runs of an arm and of the baseline with the same seed, in points."""

    seed: int
    value: float
    baseline: float
    images: McNemar | None
    """Test of the two models on the same images, first the arm's; None if their predictions cannot be compared."""


@dataclass(frozen=True)
class ArmRow:
    """An arm under a condition."""

    condition: str
    arm: str
    summary: ArmSummary
    """Over all finished seeds, in points."""
    difference: PairedDifference | None
    """To the baseline, over the seeds that both have; None for the baseline itself."""
    adjusted_p: float | None
    """p after Holm's correction over all comparisons but the primary one."""
    primary: bool
    verdict: Verdict | None
    planned: tuple[float, float] | None
    """Interval by the standard deviation of an earlier study."""
    published: Published | None
    pairs: tuple[SeedPair, ...]


@dataclass(frozen=True)
class StudyResult(AnalysisResult):
    """What a study, or a comparison of runs, has shown so far. `print` shows its table."""

    name: str
    question: str
    split: str
    """`test` or `val`: the images that the metric is of."""
    metric: Metric
    baseline: str
    rows: tuple[ArmRow, ...]
    planned_runs: int
    finished_runs: int
    failures: Mapping[str, str]
    """Error of each failed run, by its name."""
    mixed: Mapping[str, str]
    """How runs were made otherwise than the study says, by name."""
    also_differs: tuple[str, ...]
    sigma: Sigma | None

    def __str__(self) -> str:
        return self.table()

    @property
    def explorations(self) -> int:
        """Number of comparisons that Holm's correction is over."""
        return sum(row.difference is not None and not row.primary for row in self.rows)

    def table(self) -> str:
        """Returns the table with its question and notes as text for a terminal."""
        return study_text(self)

    def markdown(self) -> str:
        """Returns the table with its question and notes as Markdown."""
        return study_text(self, markdown=True)

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        return asdict(self)

    def csv_rows(self) -> Iterable[Mapping[str, Any]]:
        """Returns a line for each arm under each condition."""
        for row in self.rows:
            found = row.difference
            yield {
                "condition": row.condition,
                "arm": row.arm,
                "split": self.split,
                "metric": self.metric,
                "seeds": row.summary.n,
                "mean": row.summary.mean,
                "sd": row.summary.sd,
                "pairs": found and found.n,
                "difference": found and found.mean,
                "low": found and found.low,
                "high": found and found.high,
                "p": found and found.p,
                "adjusted_p": row.adjusted_p,
                "wins": found and found.wins,
                "detectable": found and found.detectable,
                "primary": row.primary,
                "verdict": row.verdict,
                "published": row.published and row.published.value,
            }

    def pair_rows(self) -> list[dict[str, Any]]:
        """Returns a line for each arm and seed, with the test of the two models on the same images."""
        return [
            {
                "condition": row.condition,
                "arm": row.arm,
                "seed": pair.seed,
                "value": pair.value,
                "baseline": pair.baseline,
                "only_arm": pair.images and pair.images.only_first,
                "only_baseline": pair.images and pair.images.only_second,
                "mcnemar_p": pair.images and pair.images.p,
            }
            for row in self.rows
            for pair in row.pairs
        ]

    def write(self, folder: Path) -> None:
        """Writes `table.txt`, `table.md`, `results.csv`, `results.json` and `pairs.csv`, which contain no times."""
        write_text(folder / "table.txt", self.table() + "\n")
        write_text(folder / "table.md", self.markdown() + "\n")
        write_rows(folder / "results.csv", self.csv_rows())
        write_json(folder / "results.json", self.as_dict())
        if pairs := self.pair_rows():
            write_rows(folder / "pairs.csv", pairs)
