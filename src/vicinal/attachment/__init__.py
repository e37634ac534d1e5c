"""Changes a model: puts a prior into somebody else's attention, and takes it out again."""

from vicinal.attachment import timm_forwards as timm_forwards  # registers fast forwards
from vicinal.attachment.attach import Attachment, Layer, attach, detach
from vicinal.attachment.attached_priors import get_priors
from vicinal.attachment.dry_run import inspect
from vicinal.attachment.prior_file import load_prior, save_prior
from vicinal.inspection import PatchAttention, Tap, patch_attention, tap

__all__ = [
    "Attachment",
    "Layer",
    "PatchAttention",
    "Tap",
    "attach",
    "detach",
    "get_priors",
    "inspect",
    "load_prior",
    "patch_attention",
    "save_prior",
    "tap",
]
