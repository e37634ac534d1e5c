"""Looks at a model and changes nothing: which attention it computes, where its tokens sit, what it attends to."""

from vicinal.inspection.attention_tap import Tap, tap
from vicinal.inspection.model_inspection import Inspection
from vicinal.inspection.patch_attention import PatchAttention, patch_attention
from vicinal.inspection.refusal import Refusal, RefusalKind
from vicinal.inspection.sites import AttentionSite

__all__ = [
    "AttentionSite",
    "Inspection",
    "PatchAttention",
    "Refusal",
    "RefusalKind",
    "Tap",
    "patch_attention",
    "tap",
]
