"""Cells of a trained model are those that it had when its weights were random."""

import pytest
import torch
from torch.nn import functional as F

import vicinal
from vicinal.cells import Cells
from vicinal.inspection.model_inspection import inspect_runner
from vicinal.inspection.model_runner import make_runner

STEPS = 300
BATCH = 32
MODELS = {
    "vit-mini": {"depth": 4},
    "swin": {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    "cait": {"embed_dim": 48, "depth": 4, "num_heads": 3},
    "pit": {"embed_dim": (24, 48, 96), "depths": (1, 2, 1), "num_heads": (2, 4, 8)},
}


def train(model, images, labels):
    """Trains a model, and returns the mean loss of the first and of the last twenty steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    losses = []
    for step in range(STEPS):
        batch = (torch.arange(BATCH) + step * BATCH) % len(images)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:20]) / 20, sum(losses[-20:]) / 20


def places(model):
    """Returns cells of queries and keys of every attention, and where heads are; or the kind of refusal."""
    return [
        (site.name, site.heads, site.windows, *(describe(side) for side in (site.queries, site.keys)))
        for site in inspect_runner(make_runner(model)).sites
    ]


def describe(side):
    return (side.rows, side.columns, side.index.tolist()) if isinstance(side, Cells) else side.kind


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_does_not_move_cells(name, many_labeled_images):
    images, labels = many_labeled_images
    model = vicinal.create_model(name, img_size=32, drop_path_rate=0, **MODELS[name])
    before = places(model)
    first, last = train(model.train(), images, labels)
    assert last < 0.9 * first  # it has learned something
    assert places(model) == before
    assert sum(isinstance(site[3], tuple) and site[3] == site[4] for site in before) >= 3
