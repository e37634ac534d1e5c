"""The paper's backbones, registered with timm; create, save, load, resize and export models."""

from vicinal.models.backbones import BACKBONES
from vicinal.models.factory import create_model
from vicinal.models.load import load
from vicinal.models.resize import resize
from vicinal.models.save import push_to_hub, save

__all__ = ["BACKBONES", "create_model", "load", "push_to_hub", "resize", "save"]
