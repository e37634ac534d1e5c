"""`vicinal compare`: the statistics of a study on any finished runs."""

from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from vicinal.cli._flags import call_with_flags

__all__ = ["run"]


def compare(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    baseline: str | None = None,
    metric: Literal["top1", "balanced_accuracy", "f1"] = "top1",
    pairs: bool = False,
    markdown: bool = False,
) -> None:
    """Compares finished runs, paired by seed. Arms are runs that differ in their seed only.

    Args:
        runs: Run folders, or patterns such as 'runs/c-*'.
        baseline: Arm that the others are compared with, by its name in the table; by default none, or that of the first
            run.
        metric: What is compared, on the test images, or on validation images if a run has no test images.
        pairs: Every pair of runs with the same seed, with McNemar's test of the two models.
        markdown: As Markdown.
    """
    from vicinal.studies.run_comparison import compare as compare_runs
    from vicinal.studies.tables import pairs_text

    result = compare_runs(runs, baseline=baseline, metric=metric)
    print(pairs_text(result) if pairs else result.markdown() if markdown else result.table())


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal compare`, compares and prints."""
    call_with_flags(compare, "vicinal compare", args)
