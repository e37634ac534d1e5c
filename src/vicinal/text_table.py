"""Aligned tables, as plain text or as Markdown."""

from collections.abc import Collection, Sequence

__all__ = ["markdown_table", "text_table"]


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Returns rows of cells as lines of text, with aligned columns.

    >>> from vicinal.text_table import text_table
    >>> print(text_table([["layer", "sigma"], ["blocks.0", "2.00"]], right=[1]))
    layer     sigma
    blocks.0   2.00

    Args:
        rows: the same number of cells in each, the header first.
        right: indices of the columns that are aligned to the right; the others are aligned to the left.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(_aligned(row, widths, right)).rstrip() for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int], right: Collection[int]) -> list[str]:
    pairs = enumerate(zip(row, widths, strict=True))
    return [cell.rjust(width) if column in right else cell.ljust(width) for column, (cell, width) in pairs]


def markdown_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Returns rows of cells as a Markdown table, whose source is aligned too.

    >>> from vicinal.text_table import markdown_table
    >>> print(markdown_table([["model", "depth"], ["vit", "9"]], right=[1]))
    | model | depth |
    |-------|------:|
    | vit   |     9 |

    Args:
        rows: the same number of cells in each, the header first.
        right: indices of the columns that are aligned to the right; the others are aligned to the left.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"| {' | '.join(_aligned(row, widths, right))} |" for row in rows]
    rule = "|".join("-" * (width + 1) + (":" if column in right else "-") for column, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
