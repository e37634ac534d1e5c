"""The priors of a model as a config states them: one for all layers, or several with the names of their layers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vicinal.attachment import attach
from vicinal.attachment.plain_attention import use_package_attention
from vicinal.errors import VicinalError
from vicinal.priors.spec import current_options, current_spec, parse_spec

__all__ = ["Priors", "attach_priors", "current_priors"]

Priors = str | Sequence[Mapping[str, Any]]
"""A prior for all layers, or several, each as `{"prior": "gmm", "layers": [names], "options": {...}}`."""


def attach_priors(model: nn.Module, prior: Priors | None, shape: tuple[int, int, int]) -> None:
    """Attaches one prior to all layers of a model, or several to the layers that they name.

    Attention without a prior is computed by the package too, where it is a call of `F.scaled_dot_product_attention`.

    Args:
        model: a model without priors.
        prior: what to attach; nothing for None and `none`.
        shape: channels, height and width of the images.

    Raises:
        VicinalError: a layer does not exist or cannot take a prior.
    """
    if prior is not None and prior != "none":
        _attach_each(model, prior, shape)
    use_package_attention(model)


def _attach_each(model: nn.Module, prior: Priors, shape: tuple[int, int, int]) -> None:
    parts: Sequence[Mapping[str, Any]] = [{"prior": prior}] if isinstance(prior, str) else prior
    example = torch.zeros(1, *shape)
    for part in parts:
        layers = part.get("layers")
        chosen = None if layers is None else partial(_is_named, frozenset(layers))
        attached = attach(model, part["prior"], example=example, layers=chosen, **part.get("options", {}))
        missing = sorted(set(layers or ()) - {layer.name for layer in attached.layers})
        if missing:
            reason = attached.left_alone.get(missing[0], "the model has no attention of that name")
            raise VicinalError(f"{missing[0]} of {type(model).__name__} takes no prior: {reason}")


def _is_named(names: frozenset[str], index: int, name: str) -> bool:
    return name in names


def current_priors(prior: Priors | None, *, warn: bool = False) -> Priors:
    """Returns priors with renamed option values replaced by their new names.

    Args:
        prior: as a user or a config file has them; None is `none`.
        warn: warn of renamed values: True for priors that a user wrote, False for priors read from a file.
    """
    if prior is None:
        return "none"
    if not isinstance(prior, Sequence) or isinstance(prior, str):
        return current_spec(prior, warn=warn)
    return [_current_part(part, warn) for part in prior]


def _current_part(part: Mapping[str, Any], warn: bool) -> Mapping[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("prior"), str):
        return part  # `attach_priors` raises the error
    current = {**part, "prior": current_spec(part["prior"], warn=warn)}
    if part.get("options"):
        current["options"] = current_options(parse_spec(part["prior"])[0].name, part["options"], warn=warn)
    return current
