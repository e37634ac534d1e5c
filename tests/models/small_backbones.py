"""The backbones with few layers, for tests that do not depend on how many there are."""

import vicinal

SMALL = {
    "vit": {"depth": 2},
    "swin": {"depths": (2, 1, 1)},
    "cait": {"depth": 2, "depth_token_only": 1},
    "pit": {"depths": (1, 1, 1)},
    "t2t": {"depth": 1},
    "vit-relpos": {"depth": 2},
}
LAYERS = {"vit": 2, "swin": 4, "cait": 2, "pit": 3, "t2t": 2, "vit-relpos": 2}
"""Attention over a grid: what a prior is attached to."""


def small(name, **options):
    return vicinal.create_model(name, **{**SMALL[name], **options})
