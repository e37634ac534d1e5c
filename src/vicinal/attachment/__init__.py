"""How a prior gets into a model that somebody else wrote, and out again."""

from vicinal.attachment.attach import Attachment, Layer, attach, detach

__all__ = ["Attachment", "Layer", "attach", "detach"]
