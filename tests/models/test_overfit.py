"""Models learn: each gets 32 images by heart."""

import pytest
import torch
from torch.nn import functional as F

import vicinal

STEPS = 150
WARM_UP = 10
PRIORS = ["none", "gmm", "elm", "gab", "rpe", "rpe-mlp", "decay", "conv", "gmm:init=paper"]


def steps_to_learn(model, images, labels):
    """Optimizer steps until every image is named right, in evaluation mode too; None if they are not enough."""
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    for step in range(STEPS):
        model.train()
        logits = model(images)
        if (logits.argmax(1) == labels).all():
            model.eval()
            with torch.no_grad():
                if (model(images).argmax(1) == labels).all():
                    return step
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        warm_up.step()
    return None


@pytest.mark.parametrize("prior", PRIORS)
def test_a_small_vit_learns_with_every_prior(prior, labeled_images):
    model = vicinal.create_model("vit-mini", prior=prior, depth=3, drop_path_rate=0)
    assert steps_to_learn(model, *labeled_images) is not None


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.slow
def test_vit_learns_with_every_prior(prior, labeled_images):
    model = vicinal.create_model("vit", prior=prior, drop_path_rate=0)
    assert steps_to_learn(model, *labeled_images) is not None


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("swin", "avg"),
        ("cait", "token"),
        ("pit", "token"),
        ("t2t", "avg"),
        ("vit", "avg"),
        ("vit-relpos", "avg"),
    ],
)
@pytest.mark.slow
def test_backbones_learn_with_a_mask(name, pool, labeled_images):
    model = vicinal.create_model(name, prior="gmm:kernels=5", global_pool=pool, drop_path_rate=0)
    assert steps_to_learn(model, *labeled_images) is not None
