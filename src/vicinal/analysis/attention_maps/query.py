"""Queries of attention maps: the class token, the mean over patches, or one patch."""

from typing import Any, Literal

from torch import nn

from vicinal.analysis.attention_maps.layers import AttentionLayer
from vicinal.errors import VicinalError, unknown_name
from vicinal.inspection.patch_attention import classifies_by_token, has_class_token

__all__ = ["Query", "check_query", "patch_in", "query_in"]

Query = Literal["class", "mean"] | tuple[int, int]
"""The class token, the mean over patches, or the patch in a row and a column, from 0."""


def check_query(query: Any) -> None:
    """Raises VicinalError if `query` is not None, `class`, `mean`, or two whole numbers."""
    if isinstance(query, str) and query not in ("class", "mean"):
        raise unknown_name("query", query, ("class", "mean"))
    patch = isinstance(query, tuple | list) and len(query) == 2 and all(isinstance(place, int) for place in query)
    if not (query is None or isinstance(query, str) or patch):
        raise VicinalError(f"query must be 'class', 'mean' or row and column of a patch, got {query!r}")


def query_in(model: nn.Module, layer: AttentionLayer, query: Query | None) -> Query:
    """Returns the query of a layer.

    By default it is the one that the model classifies by, as in `vicinal.inspection.patch_attention`: a query that
    reads the whole image, the class token, or the mean.

    Raises:
        VicinalError: if the layer has no such query.
    """
    has_token = layer.single or has_class_token(model, layer.site)
    if query is None:
        reads_token = layer.single or (has_token and layer.windows == 1 and classifies_by_token(model))
        return "class" if reads_token else "mean"
    if query == "class" and not has_token:
        raise VicinalError(f"{layer.name} has no class token; use query='mean'")
    if query != "class" and layer.single:
        raise VicinalError(f"in {layer.name} one query reads the image, and no patch does; use query='class'")
    return query


def patch_in(layer: AttentionLayer, query: Query, first: AttentionLayer) -> Query:
    """Returns the query of a layer that holds a patch among the first layer's queries; other queries as they are.

    Raises:
        VicinalError: if the first layer has no such patch.
    """
    if isinstance(query, str):
        return query
    (row, column), (rows, columns) = query, first.query_size
    if not (0 <= row < rows and 0 <= column < columns):
        raise VicinalError(
            f"{first.name} has a grid of {rows} x {columns} patches; a query must be a row from 0 to {rows - 1} and a "
            f"column from 0 to {columns - 1}, got {row} {column}"
        )
    return row * layer.query_size[0] // rows, column * layer.query_size[1] // columns
