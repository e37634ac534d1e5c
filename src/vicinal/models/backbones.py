"""The backbones by name: their shapes, pooling and default patch sizes, and their registration with timm.

`vit` is registered as `vicinal_vit`, and so on: `timm.create_model("vicinal_vit", ...)` and timm's tools work after
`import vicinal.models`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vicinal.attention.native import prepare_native_for
from vicinal.errors import VicinalError
from vicinal.image_size import height_and_width
from vicinal.models.cait import Cait
from vicinal.models.model_config import channel_statistics
from vicinal.models.patch_size import validate_patch_size
from vicinal.models.pit import Pit
from vicinal.models.prior_config import Priors, attach_priors
from vicinal.models.swin import Swin
from vicinal.models.t2t import T2t
from vicinal.models.vit import Vit, VitRelPos

__all__ = ["ALIASES", "BACKBONES", "Backbone"]

POOLING = {
    "token": "the class token",
    "avg": "the mean over patches",
}


@dataclass(frozen=True)
class Backbone:
    """A backbone: its class, shape, default patch sizes and pooling."""

    name: str
    summary: str
    """One line for `vicinal models`."""
    make: Callable[..., nn.Module]
    """The model's class."""
    shape: Mapping[str, Any]
    """Width, depth and heads, as arguments of the class."""
    patches: Mapping[int, int]
    """Default patch size by the smallest image side, in pixels, from which it applies."""
    pools: tuple[str, ...]
    """Valid values of `global_pool`, the default first."""
    no_other_pool: str = ""
    """Reason for a single valid value, for the error message."""
    other_paper_pool: str | None = None
    """`global_pool` of the GMM paper's recipe, if it is not the default."""

    @property
    def paper_pool(self) -> str:
        """`global_pool` of the GMM paper's recipe: the class token in a ViT."""
        return self.other_paper_pool or self.pools[0]

    @property
    def timm_name(self) -> str:
        """Name in timm's registry."""
        return "vicinal_" + self.name.replace("-", "_")

    def patch_for(self, size: tuple[int, int]) -> int:
        """Returns the default patch size, in pixels, for images of a height and width."""
        return self.patches[max((least for least in self.patches if least <= min(size)), default=min(self.patches))]

    def validate_pool(self, pool: str | None) -> str:
        """Returns a valid `global_pool`, the default for None.

        Raises:
            VicinalError: the backbone does not have this pooling.
        """
        if pool is None or pool == "":  # in timm, "" disables pooling
            return self.pools[0]
        if pool not in self.pools:
            choices = " or ".join(f"{choice!r}, {POOLING[choice]}" for choice in self.pools)
            reason = f": {self.no_other_pool}" if self.no_other_pool and pool in POOLING else ""
            raise VicinalError(f"global_pool of {self.name} must be {choices}, got {pool!r}{reason}")
        return pool

    def create(
        self,
        pretrained: bool = False,
        *,
        prior: Priors | None = "none",
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
        """Returns a new model; the arguments are those of `timm.create_model`, and `prior`.

        Raises:
            VicinalError: image size, patch size, pooling or prior is invalid.
        """
        size = height_and_width(32 if img_size is None else img_size)
        patch = validate_patch_size(self.name, size, self.patch_for(size) if patch_size is None else patch_size)
        arguments = {
            "img_size": size,
            "patch_size": patch,
            "global_pool": self.validate_pool(global_pool),
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
            declared.update(channel_statistics(declared, in_chans))
            model.model_args = arguments  # type: ignore[assignment]
            if global_pool == "":
                model.reset_classifier(num_classes, "")  # type: ignore[operator]
                arguments["global_pool"] = ""
        return model

    def _make(self, prior: Priors | None, **arguments: Any) -> nn.Module:
        model = self.make(**{**self.shape, **arguments})
        prepare_native_for(model)
        attach_priors(model, prior, (arguments["in_chans"], *arguments["img_size"]))
        return model


def _vit(
    name: str,
    dim: int,
    depth: int,
    heads: int,
    patches: Mapping[int, int] | None = None,
    comment: str = "",
    token_std: float = 1.0,
    pools: tuple[str, str] = ("token", "avg"),
) -> Backbone:
    summary = f"ViT, {dim} wide, {depth} deep, {heads} heads{comment}"
    shape = {"embed_dim": dim, "depth": depth, "num_heads": heads, "token_std": token_std}
    return Backbone(name, summary, Vit, shape, patches or {0: 4, 64: 8}, pools, other_paper_pool="token")


def _cait(name: str, dim: int, comment: str) -> Backbone:
    return Backbone(
        name,
        f"CaiT, {dim} wide, 24 + 2 deep, 4 heads{comment}",
        Cait,
        {"embed_dim": dim, "depth": 24, "num_heads": 4},
        {0: 4, 64: 8},
        ("token",),
        "its class layers would get no gradient",
    )


_ALL = [
    _vit("vit", 192, 9, 12, comment=": the paper's"),
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
        "PiT, 96 to 384 wide, 2 + 6 + 4 deep, two downsamplings: the paper's",
        Pit,
        {"embed_dim": (96, 192, 384), "depths": (2, 6, 4), "num_heads": (2, 4, 8)},
        {0: 2, 64: 4},
        ("token", "avg"),
    ),
    Backbone(
        "t2t",
        "T2T-ViT, 256 wide, 12 deep, 4 heads, overlapping patches: the paper's",
        T2t,
        {"embed_dim": 256, "depth": 12, "num_heads": 4},
        {0: 4, 64: 8},
        ("avg", "token"),
    ),
    _cait("cait-192", 192, ", wider"),
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
    # Mean pooling, in which every layer's prior learns: with a class token, that of the last layer gets no gradient.
    _vit("vit-mini", 96, 6, 6, comment=": for studies on a CPU", token_std=0.02, pools=("avg", "token")),
    _vit("vit-micro", 64, 4, 4, {0: 2, 32: 4, 64: 8}, ": for 8 px digits and quick tests", pools=("avg", "token")),
]
BACKBONES = {backbone.name: backbone for backbone in _ALL}
"""All backbones by name."""
ALIASES = {"cait-tiny": "cait"}
"""Backbones by further names."""

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
    globals()[backbone.timm_name] = entrypoint  # register_model adds the name to __all__


for _backbone in _ALL:
    _register(_backbone)
