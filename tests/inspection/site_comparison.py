"""Compares the sites that inspection finds with cells written from a model's code."""

import re
from collections.abc import Iterator, Sequence

import torch

from cells_by_code import Cells, Table
from vicinal.inspection.model_inspection import inspect_runner
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.refusal import Refusal
from vicinal.inspection.sites import AttentionSite


def inspected(runner: ModelRunner) -> list[AttentionSite]:
    return inspect_runner(runner).sites


def disagreements(sites: Sequence[AttentionSite], table: Table) -> list[str]:
    """Returns a line for each side that differs from the table, each site without an entry, and each unused entry."""
    unused = set(table)
    problems = []
    for site in sites:
        patterns = [pattern for pattern in table if re.match(pattern, site.name)]
        unused -= set(patterns)
        if len(patterns) != 1:
            problems.append(f"{site.name}: {len(patterns)} entries in the table, must be 1")
            continue
        for side, problem in side_problems(site, table[patterns[0]]):
            if problem:
                problems.append(f"{site.name}, {side}: {problem}")
    return problems + [f"no site matches {pattern}" for pattern in sorted(unused)]


def side_problems(site: AttentionSite, sides: tuple[Cells | None, Cells | None]) -> Iterator[tuple[str, str]]:
    """Yields both sides of a site, each with what is wrong; empty if nothing is."""
    for side, found, true in zip(("queries", "keys"), (site.queries, site.keys), sides, strict=True):
        yield side, side_problem(found, true)


def side_problem(found: object, true: Cells | None) -> str:
    if isinstance(found, Refusal):
        return "" if true is None else f"refused though it has cells ({found.reason})"
    if true is None:
        return f"placed in {found} though it has no cells"
    rows, columns, index = true
    if (found.rows, found.columns) != (rows, columns):
        return f"wrong lattice {found}, must be {rows} x {columns}"
    if found.index.shape != index.shape:
        return f"wrong windows and tokens {tuple(found.index.shape)}, must be {tuple(index.shape)}"
    if not torch.equal(found.index, index):
        return f"wrong cells, {int((found.index != index).sum())} of {index.numel()}"
    return ""
