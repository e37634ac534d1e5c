"""`attach` puts a prior into a model that somebody else wrote; `detach` takes it out again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vicinal.attachment.dry_run import inspect, verified
from vicinal.attachment.position_inputs import find_position_inputs, remove_input_hooks, require_inputs
from vicinal.attachment.subclass import PriorSite, WithPrior, add_prior, original_class, remove_prior
from vicinal.attention.native import prepare_native_for
from vicinal.cells import PairLayout
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.image_context import ImageSizeHook, noted_size
from vicinal.inspection.layer_selection import Layers, select_layers
from vicinal.inspection.model_inspection import Inspection
from vicinal.inspection.model_runner import Example, ImageSize, eval_without_side_effects, uncompiled
from vicinal.inspection.patch_coordinates import PatchCoordinates
from vicinal.inspection.sites import AttentionSite
from vicinal.priors import Prior, build_prior
from vicinal.text_table import text_table

__all__ = ["Attachment", "Layer", "add_priors", "attach", "check_model", "detach", "fits", "layer_of"]


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
        lines = [f"{self.prior} attached to {len(self.layers)} modules", text_table(rows)]
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
    inspection: Inspection | None = None,
    **options: Any,
) -> Attachment:
    """Attaches a prior to every attention module of a model whose tokens sit in a grid, in place.

    >>> import vicinal
    >>> model = vicinal.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
    >>> print(vicinal.attach(model, "gmm:kernels=5"))
    gmm:kernels=5 attached to 2 modules
    module         class      heads  grid              parameters  changes at start
    blocks.0.attn  Attention  3      4 x 4 + 1 prefix  30          no
    blocks.1.attn  Attention  3      4 x 4 + 1 prefix  30          no

    The model runs a few times on noise, to find its attention, to measure where its tokens sit and to verify each
    module. Its weights keep their names, and `detach` gives it back as it was. What cannot be served is refused, with
    the reason. On images of another size than `img_size` the grid follows the image; the model raises where it is not
    known.

    Args:
        model: any vision transformer.
        prior: what to attach, such as `gmm` or `gmm:kernels=3+gab`.
        img_size: height and width of the images; by default what the model declares.
        layers: which of the attention layers that can be served: `last 4`, `first 2`, indices, or a function of index
            and module name; all by default. For another prior in other layers, call again.
        exclude: patterns of module names to leave alone, such as `*.token_transformer.*`.
        example: an input to learn the image's shape from, where the model takes none of the default shape: a tensor, or
            a mapping of keyword arguments with one image tensor.
        inspection: what `inspect` returned for this model, so that it is not probed again.
        options: further options of the prior.

    Returns:
        The modules that got a prior, and why others were left alone.
    """
    check_model(model)
    prepare_native_for(model)  # before the modules are verified
    if inspection is None:
        inspection = inspect(model, img_size=img_size, example=example)
    elif inspection.runner.model is not uncompiled(model):
        raise VicinalError("the inspection is of another model; give that of this one")
    inspection = verified(inspection)
    left = {site.name: site.reason for site in inspection.refused}
    if not inspection.served:
        raise VicinalError(_nothing(model, left))
    chosen = select_layers(inspection.served, layers, exclude)
    built = _build_priors(prior, chosen, inspection.served, options)
    fitting = [(site, each) for site, each in built if fits(each, site)]
    reason = f"{prior} has a free number for every pair of patches, and its keys are not its queries"
    left |= {site.name: reason for site, each in built if not fits(each, site)}
    if not fitting:
        raise VicinalError(_nothing(model, left))
    add_priors(inspection, fitting)
    return Attachment(prior, [layer_of(site, each) for site, each in fitting], left)


def check_model(model: nn.Module) -> None:
    """Raises VicinalError if a prior cannot be attached to the model, or not now."""
    if not isinstance(model, nn.Module):
        raise VicinalError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise VicinalError("attach makes parameters, which torch.inference_mode() forbids; call it outside")
    _check_patches_stay(model)


def _build_priors(
    prior: str, chosen: list[AttentionSite], served: list[AttentionSite], options: dict[str, Any]
) -> list[tuple[AttentionSite, Prior]]:
    """Returns each chosen site with its prior. All are built before any is attached: a bad option changes no model.

    Raises:
        VicinalError: if a site carries a prior already, or the prior cannot be built.
    """
    twice = [site.name for site in chosen if isinstance(site.module, WithPrior)]
    if twice:
        raise VicinalError(
            f"{twice[0]} carries a prior already; compose as in 'gmm+gab', or vicinal.detach(model) first"
        )
    index = {site.name: number for number, site in enumerate(served)}
    numbers: dict[str, Any] = {"depth": len(served), **options}
    return [
        (site, build_prior(prior, heads=site.heads, grid=site.grid, layer=index[site.name], **numbers))
        for site in chosen
    ]


def add_priors(inspection: Inspection, priors: list[tuple[AttentionSite, Prior]]) -> None:
    """Adds a prior to the module of each site, and the hooks that these need to the model; all of them, or none."""
    sites = [site for site, _ in priors]
    names = find_position_inputs(inspection, sites)
    for site, prior in priors:
        device = next((parameter.device for parameter in site.module.parameters()), None)
        prior.to(device=device).train(site.module.training)
        assert site.layout is not None
        add_prior(site.module, prior, PriorSite.of(site), site.layout)
    try:
        _note_image_size(inspection, sites)
        require_inputs(inspection, names)
    except BaseException:
        for site in sites:
            remove_prior(site.module)
        raise


def layer_of(site: AttentionSite, prior: Prior) -> Layer:
    """Returns the row of a site in the table."""
    parameters = sum(x.numel() for x in prior.parameters())
    kind = original_class(site.module).__name__
    return Layer(site.name, kind, site.heads, site.grid, site.place, parameters, not _is_identity(prior))


def fits(prior: Prior, site: AttentionSite) -> bool:
    """Returns whether a prior serves a site: one that is no function of the offset has no values for pooled keys."""
    return prior.per_offset or not isinstance(site.layout, PairLayout)


def _note_image_size(inspection: Inspection, sites: list[AttentionSite]) -> None:
    """Runs the model with its priors once, and has each of them keep the size of the image that was noted."""
    runner, model = inspection.runner, inspection.runner.model
    modules = [site.module for site in sites]
    hooks = _image_size_hooks(model)
    with eval_without_side_effects(model), torch.no_grad():
        if not hooks:
            hooks = [ImageSizeHook(len(runner.shape) + 1, runner.shape[0])]
            hooks[0].register(list(inspection.image_modules))
        try:
            runner(runner.noise(1))
        except BaseException:
            if not any(isinstance(m, WithPrior) and m not in modules for m in model.modules()):
                hooks[0].remove(model)
            raise
    noted = noted_size(hooks[0].key)
    size = runner.image if isinstance(noted, PatchCoordinates) else noted
    for site in sites:
        module: Any = site.module
        if size is not None and site.layout is not None:
            rule, raster = inspection.size_rules[site.name], site.layout.is_raster
            module.prior_site = module.prior_site.on_images(module, hooks[0].key, size, rule, raster)


def _image_size_hooks(model: nn.Module) -> list[ImageSizeHook]:
    return [hook for m in model.modules() for hook in m._forward_pre_hooks.values() if isinstance(hook, ImageSizeHook)]


def detach(model: nn.Module) -> int:
    """Takes every prior out of a model again, and returns from how many modules.

    >>> import vicinal
    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    >>> _ = vicinal.attach(model, "gab")
    >>> vicinal.detach(model)
    2
    """
    modules = [module for module in model.modules() if isinstance(module, WithPrior)]
    for module in modules:
        remove_prior(module)
    for hook in _image_size_hooks(model):
        hook.remove(model)
    remove_input_hooks(model)
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
