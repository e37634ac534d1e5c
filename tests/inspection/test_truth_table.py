"""Inspection finds exactly the cells that a model's code lays out, for every query and key of every attention."""

import pytest

from models_by_name import TIMM, timm_runner
from site_comparison import disagreements, inspected
from timm_truth import TIMM_TRUTH
from transformers_by_name import OTHERS
from transformers_truth import OTHERS_TRUTH

# Less than a second each: a prefix, a class token alone, pooled keys; a suffix, shifted windows, object queries,
# windows with class tokens, queries in front, a single window that is rolled, unrolled tokens.
QUICK_TIMM = ["vit_tiny_patch16_224", "cait_xxs24_224", "pvt_v2_b0"]
QUICK_OTHERS = ["yolos", "swin", "detr_small", "rf_detr_backbone", "eomt", "mask2former", "hiera", "torch_decoder"]


def by_speed(names, quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def test_every_model_has_a_table():
    assert set(TIMM) == set(TIMM_TRUTH)
    assert set(OTHERS) == set(OTHERS_TRUTH)


@pytest.mark.parametrize("name", by_speed(TIMM, QUICK_TIMM))
@pytest.mark.filterwarnings("ignore")  # timm's own
def test_cells_of_timm_are_those_of_the_code(name):
    assert disagreements(inspected(timm_runner(name)), TIMM_TRUTH[name]) == []


@pytest.mark.parametrize("name", by_speed(OTHERS, QUICK_OTHERS))
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_cells_of_transformers_and_torch_are_those_of_the_code(name):
    assert disagreements(inspected(OTHERS[name]()), OTHERS_TRUTH[name]) == []
