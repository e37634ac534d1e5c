"""Models that tests save and load."""

import json

import torch

import vicinal
from small_backbones import SMALL

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def trained(name="vit-mini", prior="gmm:init=paper", **options):
    """A model whose every weight differs from how such a model starts."""
    model = vicinal.create_model(name, prior=prior, **{**SMALL.get(name, {}), **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def save_trained(folder):
    return vicinal.save(trained(), folder, class_names=[f"class {number}" for number in range(10)])


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
