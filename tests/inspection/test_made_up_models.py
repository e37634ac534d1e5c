"""Inspection finds any fixed order of tokens, however attention is computed, and refuses what has no lattice."""

import pytest
import torch

from cells_by_code import both, raster
from made_up_models import (
    COLUMNS,
    HEADS,
    IMAGE,
    ROWS,
    MadeUp,
    column_by_column,
    einsum_of_lists,
    heads_outside_images,
    keys_first,
    permuted,
    plain,
    sorted_by_content,
    two_scales,
    upper_half,
)
from site_comparison import disagreements, inspected
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.refusal import RefusalKind

COUNT = ROWS * COLUMNS
PERMUTATION = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))


def sites_of(**options):
    return inspected(ModelRunner(MadeUp(**options), IMAGE))


def test_tokens_in_columns_are_found():
    cells = ROWS, COLUMNS, torch.arange(COUNT).view(ROWS, COLUMNS).T.reshape(1, -1)
    assert disagreements(sites_of(order=column_by_column), {r"layers\.": both(cells)}) == []


def test_a_fixed_permutation_of_tokens_is_found():
    cells = ROWS, COLUMNS, PERMUTATION[None]
    assert disagreements(sites_of(order=permuted(PERMUTATION)), {r"layers\.": both(cells)}) == []


def test_tokens_of_half_the_image_form_a_lattice_of_its_rows():
    assert disagreements(sites_of(order=upper_half), {r"layers\.": both(raster(ROWS // 2, COLUMNS))}) == []


def test_tokens_sorted_by_content_are_refused():
    for site in sites_of(order=sorted_by_content):
        assert {site.queries.kind, site.keys.kind} <= {RefusalKind.CONTENT, RefusalKind.IRREGULAR, RefusalKind.UNREAD}


def test_tokens_of_two_scales_are_refused():
    for site in sites_of(order=two_scales):
        assert (site.queries.kind, site.keys.kind) == (RefusalKind.IRREGULAR, RefusalKind.IRREGULAR)


@pytest.mark.parametrize("attend", [plain, einsum_of_lists, keys_first, heads_outside_images])
def test_cells_and_heads_do_not_depend_on_how_attention_is_computed(attend):
    sites = sites_of(attend=attend)
    assert disagreements(sites, {r"layers\.": both(raster(ROWS, COLUMNS))}) == []
    assert [site.heads for site in sites] == [HEADS, HEADS]
    assert all(site.refusal is None for site in sites)
