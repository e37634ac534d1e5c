"""`inspect`: a dry run of `attach`, which reports every attention of a model and leaves the model as it was."""

from dataclasses import replace

from torch import nn

from vicinal.attachment.verify import verify_sites
from vicinal.errors import VicinalError
from vicinal.inspection.model_inspection import Inspection, inspect_runner, without_priors
from vicinal.inspection.model_runner import (
    Example,
    ImageSize,
    ModelRunner,
    eval_without_side_effects,
    in_full_precision,
    make_runner,
    restored_attributes,
)
from vicinal.inspection.sites import AttentionSite
from vicinal.inspection.size_rule import SizeRule, probe_other_size, size_rule

__all__ = ["inspect", "verified"]


def inspect(model: nn.Module, *, img_size: ImageSize | None = None, example: Example | None = None) -> Inspection:
    """Finds every attention of a model and where its tokens sit, without changing the model.

    >>> import vicinal
    >>> import timm
    >>> model = timm.create_model("cait_xxs24_224", img_size=64, depth=2)
    >>> print(vicinal.inspect(model))
    Cait at 64 x 64: 2 of 4 attention layers take a prior
    module         class            heads  tokens
    blocks.0.attn  TalkingHeadAttn  4      4 x 4
    blocks.1.attn  TalkingHeadAttn  4      4 x 4
    refused: blocks_token_only.0.attn: its queries follow no place of the image
    refused: blocks_token_only.1.attn: its queries follow no place of the image

    The model runs on noise; a model that carries priors is looked at as if it had none. `attach(model, prior,
    inspection=...)` and `tap(model, inspection=...)` take the result, so that nothing is probed twice.

    Args:
        model: any vision transformer.
        img_size: height and width of the images; by default what the model declares.
        example: an input to learn the image's shape from, where the model takes none of the default shape: a tensor, or
            a mapping of keyword arguments with one image tensor.

    Returns:
        The sites that take a prior, and those that do not, with the reason.
    """
    if not isinstance(model, nn.Module):
        raise VicinalError(f"inspect takes a torch.nn.Module, got {type(model).__name__}")
    return verified(inspect_runner(make_runner(model, img_size, example)))


def verified(inspection: Inspection) -> Inspection:
    """Returns an inspection in which sites where a prior does not act as it should are refused.

    Sites that take one know how their grid changes with the size of the image.
    """
    if inspection.verified:
        return inspection
    model = inspection.runner.model
    with eval_without_side_effects(model), without_priors(model), in_full_precision(model):
        refused = verify_sites(inspection.runner, inspection.served)
        sites = [
            replace(site, layout=None, refusal=refused[site.name]) if site.name in refused else site
            for site in inspection.sites
        ]
        rules = _size_rules(inspection.runner, sites)
    return replace(inspection, sites=sites, verified=True, size_rules=rules)


def _size_rules(runner: ModelRunner, sites: list[AttentionSite]) -> dict[str, SizeRule]:
    """Returns how the grid of each site that takes a prior changes with the size of the image, by name."""
    served = [site for site in sites if site.layout is not None]
    other = probe_other_size(runner, sites)
    if other is None:
        return dict.fromkeys((site.name for site in served), SizeRule.UNTRIED)
    other_runner, found = other
    with restored_attributes(runner.model):
        refused = verify_sites(other_runner, [site for site in found if site.layout is not None])
    by_name = {site.name: site for site in found}
    return {
        site.name: size_rule(
            site, runner.image, by_name.get(site.name), other_runner.image, verified=site.name not in refused
        )
        for site in served
    }
