"""A prior is in all spatial layers of an architecture, and nowhere else."""

import pytest
import torch

import vicinal
from spatial_modules import SMP, TRANSFORMERS, spatial_modules
from vicinal.attachment.coverage_smp import SEGMENTATION_MODELS
from vicinal.attachment.coverage_transformers import ARCHITECTURES
from vicinal.attachment.dry_run import verified
from vicinal.inspection.model_inspection import inspect_runner


def assert_served_where_spatial(inspection, rule):
    spatial = spatial_modules(inspection.runner.model, rule)
    assert bool(spatial) == bool(rule[0])
    served = {site.name for site in inspection.served}
    assert served == spatial, [f"{site.name}: {site.reason}" for site in inspection.refused]


def test_every_architecture_has_an_expectation():
    assert TRANSFORMERS.keys() == ARCHITECTURES.keys()
    assert SMP.keys() == SEGMENTATION_MODELS.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_prior_is_in_all_spatial_layers_of_transformers(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    inspection = verified(inspect_runner(ARCHITECTURES[name].runner()))
    assert_served_where_spatial(inspection, TRANSFORMERS[name])


@pytest.mark.parametrize("name", SEGMENTATION_MODELS)
@pytest.mark.filterwarnings("ignore")  # of the library
def test_a_prior_is_in_all_spatial_layers_of_segmentation_models(name):
    pytest.importorskip("segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed")
    torch.manual_seed(0)
    model = SEGMENTATION_MODELS[name]
    assert_served_where_spatial(vicinal.inspect(model.build(), img_size=model.size), SMP[name])
