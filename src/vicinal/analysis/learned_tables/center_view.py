"""The view of the central patch on a table."""

from typing import Any

__all__ = ["center_view"]


def center_view(values: Any, height: int, width: int, *, per_offset: bool) -> Any:
    """Returns what the patch at `(height // 2, width // 2)` has in a table for each patch, `(heads, height, width)`.

    Args:
        values: tensor or array: `(heads, 2h-1, 2w-1)` over offsets, or `(heads, patches, patches)` over pairs.
        height: rows of the grid.
        width: columns of the grid.
        per_offset: whether the table is over offsets.
    """
    row, column = height // 2, width // 2
    if per_offset:  # offset 0 is at (height - 1, width - 1), and the first row of the grid is `row` above it
        return values[:, height - 1 - row :, width - 1 - column :][:, :height, :width]
    return values[:, row * width + column].reshape(-1, height, width)
