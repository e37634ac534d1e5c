"""The paper's backbones, registered with timm; create, save, load, resize and export models."""

from vicinal._torchvision import ensure_torchvision

ensure_torchvision()  # before any of these imports timm

from vicinal.models.backbones import BACKBONES  # noqa: E402
from vicinal.models.factory import create_model  # noqa: E402
from vicinal.models.load import load  # noqa: E402
from vicinal.models.resize import resize  # noqa: E402
from vicinal.models.save import push_to_hub, save  # noqa: E402

__all__ = ["BACKBONES", "create_model", "load", "push_to_hub", "resize", "save"]
