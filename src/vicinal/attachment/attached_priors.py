"""The priors that a model carries: found, and described so that they can be attached again."""

from typing import Any

import torch
from torch import nn

from vicinal.attachment.subclass import WithPrior
from vicinal.errors import VicinalError
from vicinal.priors.base import Prior

__all__ = ["check_sites", "describe_sites", "get_priors", "priors_to_config"]


def get_priors(model: nn.Module) -> dict[str, Prior]:
    """Returns the priors that a model carries, by the name of their attention module."""
    return {name: module.prior for name, module in model.named_modules() if isinstance(module, WithPrior)}


def priors_to_config(model: nn.Module) -> str | list[dict[str, Any]]:
    """Returns what a config file says of the priors that a model carries, so that they can be attached again."""
    parts: list[dict[str, Any]] = []
    priors = get_priors(model)
    for name, prior in priors.items():
        options = {key: _plain(value) for key, value in prior.spec_options.items()}
        same = [part for part in parts if (part["prior"], part["options"]) == (prior.spec, options)]
        if same:
            same[0]["layers"].append(name)
        else:
            parts.append({"prior": prior.spec, "options": options, "layers": [name]})
    if not parts:
        return "none"
    whole = len(parts) == 1 and len(priors) == next(iter(priors.values())).depth
    return str(parts[0]["prior"]) if whole and not parts[0]["options"] else parts


def describe_sites(model: nn.Module) -> dict[str, dict[str, int]]:
    """Returns what each prior was attached to, by layer: heads, rows, columns, prefix and suffix tokens."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, WithPrior):
            grid, suffix = module.prior.grid, module.prior_site.suffix
            found[name] = {
                "heads": module.prior.heads,
                "rows": grid.height,
                "columns": grid.width,
                "prefix": grid.prefix - suffix,
                "suffix": suffix,
            }
            if module.prior_pairs is not None:
                found[name] |= {"queries": module.prior_pairs.queries, "keys": module.prior_pairs.keys}
    return found


def check_sites(model: nn.Module, saved: dict[str, dict[str, int]]) -> None:
    """Raises VicinalError if a model's priors sit elsewhere than those that were saved, naming the layer."""
    found = describe_sites(model)
    for name, site in saved.items():
        if name not in found:
            raise VicinalError(f"{name} carried a prior when the model was saved, and takes none now")
        if found[name] != site:
            raise VicinalError(f"the prior of {name} was saved for {_site(site)}, and finds {_site(found[name])}")
    more = [name for name in found if name not in saved]
    if more:
        raise VicinalError(f"{more[0]} carried no prior when the model was saved")


def _site(site: dict[str, int]) -> str:
    return ", ".join(f"{value} {name}" for name, value in site.items())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
