"""`attach`: put a prior into a model that somebody else wrote; `detach`: take it out again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vicinal.attachment.choosing import Layers, choose
from vicinal.attachment.examining import examine
from vicinal.attachment.running import Example, ImageSize, quietly, runner_for
from vicinal.attachment.swapping import Attached, original_class, swap, swap_back, without_priors
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors import build_prior

__all__ = ["Attachment", "Layer", "attach", "detach"]


@dataclass(frozen=True)
class Layer:
    """One module that got a prior."""

    name: str
    kind: str
    heads: int
    grid: Grid
    place: str
    """The grid and, where an image is cut into windows of it, their number."""
    parameters: int
    changes: bool
    """Whether the prior changes the module's output as it starts."""


@dataclass(frozen=True)
class Attachment:
    """What `attach` did: a table of modules, and of those it left alone."""

    prior: str
    layers: list[Layer]
    left_alone: dict[str, str] = field(default_factory=dict)
    """Reason by module name."""

    def __str__(self) -> str:
        rows = [("module", "class", "heads", "grid", "parameters", "changes at start")]
        rows += [
            (x.name, x.kind, str(x.heads), x.place, str(x.parameters), "yes" if x.changes else "no")
            for x in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [f"{self.prior} attached to {len(self.layers)} modules"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"left alone: {name}: {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines)


def attach(
    model: nn.Module,
    prior: str,
    *,
    img_size: ImageSize | None = None,
    layers: Layers | None = None,
    exclude: str | Iterable[str] | None = None,
    example: Example | None = None,
    **options: Any,
) -> Attachment:
    """Attach a prior to every attention module of a model that has a grid, in place.

    >>> import vicinal
    >>> vicinal.ensure_torchvision()
    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    >>> print(vicinal.attach(model, "gmm:kernels=5"))
    gmm:kernels=5 attached to 2 modules
    module         class      heads  grid              parameters  changes at start
    blocks.0.attn  Attention  3      4 x 4 + 1 prefix  30          no
    blocks.1.attn  Attention  3      4 x 4 + 1 prefix  30          no

    The model runs a few times on noise, to find its attention and to check each module. Its weights keep their names,
    and `detach` gives it back as it was.

    Args:
        model: any vision transformer.
        prior: what to attach, such as `gmm` or `gmm:kernels=3+gab`.
        img_size: height and width of the images; by default what the model declares.
        layers: which of the attention layers that can be served: `last 4`, `first 2`, indices, or a function of index
            and module name; all by default. For another prior in other layers, call again.
        exclude: patterns of module names to leave alone, such as `*.token_transformer.*`.
        example: an input to learn the image's shape from, where the model takes none of the default shape: a tensor, or
            a mapping of keyword arguments with one image tensor.
        options: further options of the prior.
    """
    if not isinstance(model, nn.Module):
        raise VicinalError(f"attach takes a torch.nn.Module, given {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise VicinalError("attach makes parameters, which torch.inference_mode() forbids; call it outside")
    _check_patches_stay(model)
    run = runner_for(model, img_size, example)
    with quietly(model), without_priors(model) as taken:
        found = examine(run)
        sites, left = found.sites, found.reasons
        if not sites:
            raise VicinalError(_nothing(model, left))
        chosen = choose(sites, layers, exclude)
        twice = [site.name for site in chosen if site.module in taken]
        if twice:
            raise VicinalError(
                f"{twice[0]} carries a prior already; compose as in 'gmm+gab', or vicinal.detach(model) first"
            )
        depth, index = len(sites), {site.name: number for number, site in enumerate(sites)}
        # All priors are built before any is attached, so a bad option leaves the model as it was.
        built = [
            build_prior(prior, heads=site.heads, grid=site.grid, layer=index[site.name], depth=depth, **options)
            for site in chosen
        ]
    attached = []
    for site, its_prior in zip(chosen, built, strict=True):
        parameter = next(site.module.parameters(), None)
        its_prior.to(device=None if parameter is None else parameter.device).train(site.module.training)
        swap(site.module, its_prior, site.heads_axis, site.call.fused)
        count = sum(x.numel() for x in its_prior.parameters())
        kind = original_class(site.module).__name__
        attached.append(Layer(site.name, kind, site.heads, site.grid, site.place, count, not _is_identity(its_prior)))
    return Attachment(prior, attached, left)


def detach(model: nn.Module) -> int:
    """Take every prior out of a model again, and say from how many modules.

    >>> import vicinal
    >>> vicinal.ensure_torchvision()
    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    >>> _ = vicinal.attach(model, "gab")
    >>> vicinal.detach(model)
    2
    """
    modules = [module for module in model.modules() if isinstance(module, Attached)]
    for module in modules:
        swap_back(module)
    return len(modules)


def _check_patches_stay(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__.startswith("PatchDropout") and getattr(module, "prob", 0) > 0:
            raise VicinalError(
                f"{name} drops patches at random in training, so tokens lose their places; "
                "make the model without patch dropout"
            )


def _nothing(model: nn.Module, left: Mapping[str, str]) -> str:
    if not left:
        return f"{type(model).__name__} has nothing to attach to: no softmax over a product of queries and keys was run"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3])
    more = f" (and {len(left) - 3} more)" if len(left) > 3 else ""
    return f"{type(model).__name__} has nothing to attach to. {reasons}{more}"


@torch.no_grad()
def _is_identity(prior: nn.Module) -> bool:
    scale, bias = prior()
    return bool((scale is None or (scale == 1).all()) and (bias is None or (bias == 0).all()))
