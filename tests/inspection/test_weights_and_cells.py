"""Cells depend on a model's code alone: not on the size of its weights, nor on their precision."""

import pytest
import torch

from models_by_name import timm_runner
from site_comparison import disagreements, inspected
from timm_truth import TIMM_TRUTH

MODELS = ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0", "cait_xxs24_224"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of timm


@torch.no_grad()
def sharpen(model, factor):
    """Multiplies queries and keys such that logits are `factor` times larger; returns how many layers it changed."""
    changed = 0
    for name, layer in model.named_modules():
        kind = name.rpartition(".")[2]
        parts = {"qkv": 2 / 3, "q": 1, "k": 1, "kv": 1 / 2}.get(kind)
        if parts is None:
            continue
        rows = round(parts * layer.out_features)
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter[:rows] *= factor**0.5
        changed += 1
    return changed


@pytest.mark.parametrize("name", MODELS)
def test_cells_are_the_same_with_logits_eight_times_larger(name):
    runner = timm_runner(name)
    assert sharpen(runner.model, 8) > 0
    assert disagreements(inspected(runner), TIMM_TRUTH[name]) == []


@pytest.mark.parametrize("name", MODELS)
def test_cells_of_a_model_in_bf16_are_found_and_its_weights_stay(name):
    runner = timm_runner(name)
    runner.model.bfloat16()
    before = {key: value.clone() for key, value in runner.model.state_dict().items()}
    assert disagreements(inspected(runner), TIMM_TRUTH[name]) == []
    after = runner.model.state_dict()
    assert all(torch.equal(value, after[key]) and value.dtype is after[key].dtype for key, value in before.items())
