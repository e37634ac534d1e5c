"""The table of timm's attention classes names every class that computes attention, and only classes that exist."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re

import pytest
import timm
import timm.layers
import timm.models
import torch
from torch import nn

from vicinal.attachment.coverage import families
from vicinal.attachment.timm_attention import (
    TIMM_ATTENTION,
    AttendsOver,
    attends_over,
    class_name,
    spatial_layers,
)
from vicinal.inspection.attention_observer import observe_attention

ATTENTION_NAME = re.compile("att|softmax|MHSA", re.IGNORECASE)
ATTENTION_CODE = re.compile(r"softmax|scaled_dot_product_attention|MultiheadAttention\(")
READS_VALUES = {"gemma4_vit"}  # families that cannot run on the meta device
VARIANTS = ["vit_base_patch16_siglip_224", "mobilenetv4_hybrid_medium", "resnet50_clip", "vit_base_patch16_18x2_224"]


def classes() -> dict[str, type[nn.Module]]:
    """Returns timm's modules by file and class."""
    found = {}
    for package in (timm.layers, timm.models):
        for file in pkgutil.iter_modules(package.__path__):
            if file.ispkg:
                continue
            module = importlib.import_module(f"{package.__name__}.{file.name}")
            for name, cls in vars(module).items():
                if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__:
                    assert f"{file.name}.{name}" not in found
                    found[f"{file.name}.{name}"] = cls
    return found


@functools.cache
def class_sources(module: str) -> dict[str, str]:
    """Returns the source of the classes of a module by name. `inspect.getsource` parses the file for each class."""
    text = inspect.getsource(importlib.import_module(module))
    lines = text.splitlines()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes}


@pytest.mark.filterwarnings("ignore")  # timm's files that were moved
def test_the_table_names_classes_that_exist_and_all_that_compute_attention():
    found = classes()
    assert TIMM_ATTENTION.keys() <= found.keys()
    code = {
        name
        for name, cls in found.items()
        if ATTENTION_NAME.search(cls.__name__) or ATTENTION_CODE.search(class_sources(cls.__module__)[cls.__name__])
    }
    assert code <= TIMM_ATTENTION.keys()
    assert all(reason for _, reason in TIMM_ATTENTION.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # timm's own
def test_attention_of_every_family_is_in_the_table():
    """Runs on the meta device, where nothing is computed."""
    first = {family: name for name, family in sorted(families().items(), reverse=True)}
    missing, idle = set(), set()
    for name in [*(name for family, name in first.items() if family not in READS_VALUES), *VARIANTS]:
        with torch.device("meta"), torch.no_grad():
            model = timm.create_model(name).eval()
            images = torch.zeros(2, *model.pretrained_cfg["input_size"])
            calls = observe_attention(model, lambda model=model, images=images: model(images))
        missing |= {class_name(call.module) for call in calls} - TIMM_ATTENTION.keys()
        seen = {call.module for call in calls}
        idle |= {(name, each) for each in spatial_layers(model) if model.get_submodule(each) not in seen}
    assert missing == set()
    assert idle == set()


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("gcvit_xxtiny", "stages.0.blocks.0.attn", AttendsOver.SPATIAL),
        ("gcvit_xxtiny", "stages.0.blocks.1.attn", AttendsOver.OTHER),
        ("gcvit_xxtiny", "stages.3.blocks.1.attn", AttendsOver.SPATIAL),
        ("nextvit_small", "stages.1.blocks.3.e_mhsa", AttendsOver.SPATIAL_POOLED),
        ("nextvit_small", "stages.3.blocks.2.e_mhsa", AttendsOver.SPATIAL_POOLED),
        ("nextvit_small", "stages.3.blocks.2.mhca.projection", None),
        ("resnet50_clip", "head", AttendsOver.ONE_QUERY),
        ("volo_d1_224", "network.0.0.attn", AttendsOver.NOT_SOFTMAX),
        ("xcit_nano_12_p16_224", "blocks.0.attn", AttendsOver.CHANNELS),
        ("pvt_v2_b0", "stages.0.blocks.0.attn", AttendsOver.SPATIAL_POOLED),
    ],
)
def test_a_layer_is_known_by_its_class_or_a_rule(name, layer, kind):
    with torch.device("meta"):
        model = timm.create_model(name)
    parent = model.get_submodule(layer.rpartition(".")[0])
    assert attends_over(model.get_submodule(layer), parent) is kind


def test_classes_of_others_are_not_in_the_table():
    class Attention(nn.Identity):
        pass

    Attention.__module__ = "mine.attention"
    assert attends_over(Attention(), nn.Identity()) is None
    assert spatial_layers(nn.Sequential(Attention())) == {}
