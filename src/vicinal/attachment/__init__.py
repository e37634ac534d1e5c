"""How a prior gets into a model that somebody else wrote, and out again; taps that read its attention."""

from vicinal.attachment.attach import Attachment, Layer, attach, detach
from vicinal.attachment.tapping import Tap, tap

__all__ = ["Attachment", "Layer", "Tap", "attach", "detach", "tap"]
