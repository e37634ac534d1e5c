"""How a prior gets into a model that somebody else wrote, and out again; taps that read its attention."""

from vicinal.attachment.attach import Attachment, Layer, attach, detach
from vicinal.attachment.mapping import PatchAttention, patch_attention
from vicinal.attachment.tapping import Tap, tap

__all__ = ["Attachment", "Layer", "PatchAttention", "Tap", "attach", "detach", "patch_attention", "tap"]
