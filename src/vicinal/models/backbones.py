"""The backbones by name: their shapes, which sizes and pooling they take, and their place in timm's registry.

`vit` is registered as `vicinal_vit`, and so on, so `timm.create_model("vicinal_vit", ...)` and all of timm's tools work
once `vicinal.models` is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vicinal.attachment import attach
from vicinal.errors import VicinalError
from vicinal.models.cait import Cait
from vicinal.models.pit import Pit
from vicinal.models.swin import Swin
from vicinal.models.t2t import T2t, TokensToToken
from vicinal.models.vit import Vit, VitRelPos

__all__ = [
    "ALIASES",
    "BACKBONES",
    "Backbone",
    "Priors",
    "attach_priors",
    "check_patch",
    "cut_of",
    "image_size",
    "images_of",
]

Priors = str | Sequence[Mapping[str, Any]]
"""A prior for all layers, or several, each as `{"prior": "gmm", "layers": [names], "options": {...}}`."""

POOLING = {
    "token": "the class token",
    "avg": "the mean over patches",
}


@dataclass(frozen=True)
class Backbone:
    """One of the backbones."""

    name: str
    summary: str
    make: Callable[..., nn.Module]
    shape: Mapping[str, Any]
    patches: Mapping[int, int]
    """Patch size from that many pixels on, by the shorter side."""
    pools: tuple[str, ...]
    """The choices of `global_pool`, the default first."""
    no_other_pool: str = ""
    """Why there is no other."""

    @property
    def timm_name(self) -> str:
        """The name in timm's registry."""
        return "vicinal_" + self.name.replace("-", "_")

    def patch_for(self, size: tuple[int, int]) -> int:
        """The patch size for images of a size, in pixels."""
        return self.patches[max((least for least in self.patches if least <= min(size)), default=min(self.patches))]

    def check_pool(self, pool: str | None) -> str:
        """The pooling that is meant; an error if the backbone has no such."""
        if pool is None or pool == "":  # timm's way to say: do not pool
            return self.pools[0]
        if pool not in self.pools:
            choices = " or ".join(f"{choice!r}, {POOLING[choice]}" for choice in self.pools)
            reason = f": {self.no_other_pool}" if self.no_other_pool and pool in POOLING else ""
            raise VicinalError(f"{self.name} takes global_pool {choices}; given {pool!r}{reason}")
        return pool

    def create(
        self,
        pretrained: bool = False,
        *,
        prior: Priors = "none",
        img_size: Any = None,
        patch_size: int | None = None,
        global_pool: str | None = None,
        in_chans: int = 3,
        num_classes: int = 10,
        drop_path_rate: float = 0.1,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: Any = None,
        cache_dir: Any = None,
        features_only: bool = False,
        out_indices: Any = None,
        **options: Any,
    ) -> nn.Module:
        """What `timm.create_model` calls."""
        size = image_size(32 if img_size is None else img_size)
        patch = check_patch(self.name, size, self.patch_for(size) if patch_size is None else patch_size)
        arguments = {
            "img_size": size,
            "patch_size": patch,
            "global_pool": self.check_pool(global_pool),
            "in_chans": in_chans,
            "num_classes": num_classes,
            "drop_path_rate": drop_path_rate,
            **options,
        }
        features: dict[str, Any] = {}
        if features_only:
            features = {"features_only": True, "out_indices": (0, 1, 2) if out_indices is None else out_indices}
        model: nn.Module = build_model_with_cfg(
            partial(self._make, prior),
            self.timm_name,
            pretrained,
            pretrained_cfg=pretrained_cfg,
            pretrained_cfg_overlay=pretrained_cfg_overlay,
            cache_dir=cache_dir,
            feature_cfg={"feature_cls": "getter"},
            **arguments,
            **features,
        )
        if not features_only:
            declared: Any = model.pretrained_cfg
            declared["input_size"] = (in_chans, *size)
            declared.update(images_of(declared, in_chans))
            model.model_args = arguments  # type: ignore[assignment]
            if global_pool == "":
                model.reset_classifier(num_classes, "")  # type: ignore[operator]
                arguments["global_pool"] = ""
        return model

    def _make(self, prior: Priors, **arguments: Any) -> nn.Module:
        model = self.make(**{**self.shape, **arguments})
        attach_priors(model, prior, (arguments["in_chans"], *arguments["img_size"]))
        return model


def attach_priors(model: nn.Module, prior: Priors, shape: tuple[int, int, int]) -> None:
    """Attach one prior to all layers of a model, or several as they are written in a saved model's config.

    Args:
        model: without a prior yet.
        prior: what to attach.
        shape: channels, height and width of its images.
    """
    if prior == "none":
        return
    parts: Sequence[Mapping[str, Any]] = [{"prior": prior}] if isinstance(prior, str) else prior
    example = torch.zeros(1, *shape)
    for part in parts:
        layers = part.get("layers")
        chosen = None if layers is None else partial(_named, frozenset(layers))
        attached = attach(model, part["prior"], example=example, layers=chosen, **part.get("options", {}))
        missing = sorted(set(layers or ()) - {layer.name for layer in attached.layers})
        if missing:
            reason = attached.left_alone.get(missing[0], "the model has no attention of that name")
            raise VicinalError(f"{missing[0]} of {type(model).__name__} takes no prior: {reason}")


def _named(names: frozenset[str], index: int, name: str) -> bool:
    return name in names


def image_size(given: Any) -> tuple[int, int]:
    """Height and width, from a number or two."""
    try:
        height, width = (int(side) for side in to_2tuple(given))
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise VicinalError(f"img_size is one number of pixels or (height, width), given {given!r}")
    return height, width


def images_of(declared: Mapping[str, Any], channels: int) -> dict[str, tuple[float, ...]]:
    """Mean and deviation that are declared for images, for another number of channels if need be."""
    statistics = {key: tuple(declared[key]) for key in ("mean", "std")}
    return {
        key: values if len(values) == channels else (sum(values) / len(values),) * channels
        for key, values in statistics.items()
    }


def check_patch(name: str, size: tuple[int, int], patch: int) -> int:
    """The patch size, if it divides both sides of an image; else an error that names sizes that would do."""
    if not isinstance(patch, int) or patch < 1:
        raise VicinalError(f"{name} takes patch_size as a whole number of pixels, given {patch!r}")
    wrong = [side for side in size if side % patch]
    if wrong:
        below, above = wrong[0] // patch * patch, -(-wrong[0] // patch) * patch
        would = f"{below} or {above}" if below else f"{above}"
        divisors = [n for n in range(2, min(size) // 2 + 1) if size[0] % n == size[1] % n == 0]
        other = f", or patch_size={min(divisors, key=lambda n: abs(n - patch))}" if divisors else ""
        raise VicinalError(
            f"{name} cuts images into patches of {patch} x {patch} pixels, which do not divide {size[0]} x {size[1]}; "
            f"{would} would do in place of {wrong[0]}{other}"
        )
    return patch


def cut_of(model: nn.Module) -> int:
    """How many pixels have to divide an image: a patch; 1 where patches overlap or images are padded to fit."""
    patches: Any = getattr(model, "patch_embed", None)
    if isinstance(patches, TokensToToken):
        return max(patches.patch_size)
    projection = getattr(patches, "proj", None)
    if not isinstance(projection, nn.Conv2d) or getattr(patches, "dynamic_img_pad", False):
        return 1
    apart = projection.kernel_size == projection.stride and projection.padding == (0, 0)
    return max(projection.stride) if apart else 1


def _vit(
    name: str,
    dim: int,
    depth: int,
    heads: int,
    patches: Mapping[int, int] | None = None,
    note: str = "",
    token_std: float = 1.0,
) -> Backbone:
    summary = f"ViT, {dim} wide, {depth} deep, {heads} heads{note}"
    shape = {"embed_dim": dim, "depth": depth, "num_heads": heads, "token_std": token_std}
    return Backbone(name, summary, Vit, shape, patches or {0: 4, 64: 8}, ("token", "avg"))


def _cait(name: str, dim: int, note: str) -> Backbone:
    return Backbone(
        name,
        f"CaiT, {dim} wide, 24 + 2 deep, 4 heads{note}",
        Cait,
        {"embed_dim": dim, "depth": 24, "num_heads": 4},
        {0: 4, 64: 8},
        ("token",),
        "its class layers would learn nothing",
    )


_ALL = [
    _vit("vit", 192, 9, 12, note=": the paper's"),
    Backbone(
        "swin",
        "Swin, 96 to 384 wide, 2 + 6 + 4 deep, windows of 4: the paper's",
        Swin,
        {"embed_dim": 96, "depths": (2, 6, 4), "num_heads": (3, 6, 12)},
        {0: 2, 64: 4},
        ("avg",),
        "it has no class token",
    ),
    _cait("cait", 108, ": the paper's, 5.1 M parameters"),
    Backbone(
        "pit",
        "PiT, 96 to 384 wide, 2 + 6 + 4 deep, the grid halved twice: the paper's",
        Pit,
        {"embed_dim": (96, 192, 384), "depths": (2, 6, 4), "num_heads": (2, 4, 8)},
        {0: 2, 64: 4},
        ("token", "avg"),
    ),
    Backbone(
        "t2t",
        "T2T-ViT, 256 wide, 12 deep behind overlapping patches, 4 heads: the paper's",
        T2t,
        {"embed_dim": 256, "depth": 12, "num_heads": 4},
        {0: 4, 64: 8},
        ("avg", "token"),
    ),
    _cait("cait-192", 192, ", the wider one"),
    _vit("vit-base", 256, 8, 4, {0: 2, 64: 8}, ", smaller patches"),
    _vit("vit-heat", 192, 8, 6, {0: 2, 64: 4}, ", smaller patches"),
    _vit("vit-d6", 252, 6, 12),
    _vit("vit-d15", 144, 15, 12),
    _vit("vit-d30", 72, 30, 12),
    _vit("vit-d30-108", 108, 30, 12),
    _vit("vit-d30-192", 192, 30, 12),
    _vit("vit-d60", 72, 60, 12),
    Backbone(
        "vit-relpos",
        "ViT, 192 wide, 9 deep, 12 heads, relative positions instead of absolute ones",
        VitRelPos,
        {"embed_dim": 192, "depth": 9, "num_heads": 12},
        {0: 4, 64: 8},
        ("avg", "token"),
    ),
    _vit("vit-mini", 96, 6, 6, note=": for studies on a CPU", token_std=0.02),
    _vit("vit-micro", 64, 4, 4, {0: 2, 32: 4, 64: 8}, ": for 8 px digits and quick tests"),
]
BACKBONES = {backbone.name: backbone for backbone in _ALL}
ALIASES = {"cait-tiny": "cait"}

default_cfgs = generate_default_cfgs(
    {
        backbone.timm_name: {
            "input_size": (3, 32, 32),
            "num_classes": 10,
            "crop_pct": 1.0,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "fixed_input_size": True,
            "first_conv": None if backbone.name == "t2t" else "patch_embed.proj",
            "classifier": "head.fc" if backbone.name == "swin" else "head",
        }
        for backbone in _ALL
    }
)


def _register(backbone: Backbone) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return backbone.create(pretrained, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = backbone.timm_name
    entrypoint.__doc__ = backbone.summary
    register_model(entrypoint)
    globals()[backbone.timm_name] = entrypoint  # timm adds the name to __all__


for _backbone in _ALL:
    _register(_backbone)
