"""Inspection finds the cells of models that took no part in its design."""

import pytest

from site_comparison import disagreements, inspected
from unseen_hard_cases import UNSEEN_HARD_CASES
from unseen_timm import UNSEEN_TIMM
from unseen_transformers import UNSEEN_OTHERS

UNSEEN = UNSEEN_TIMM | UNSEEN_OTHERS | UNSEEN_HARD_CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.filterwarnings("ignore")  # of timm and transformers
def test_cells_of_unseen_models_are_those_of_the_code(name):
    make, table = UNSEEN[name]
    assert disagreements(inspected(make()), table) == []
