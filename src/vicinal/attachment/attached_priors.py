"""The priors that a model carries: found, and described so that they can be attached again."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from vicinal.attachment.subclass import WithPrior
from vicinal.cells import PairLayout
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.inspection.sites import AttentionSite
from vicinal.priors.base import Prior
from vicinal.priors.token_values import TokenPairs

__all__ = [
    "check_sites",
    "compare_sites",
    "describe_site",
    "describe_sites",
    "get_priors",
    "priors_to_config",
    "site_of",
    "spec_of",
]


def get_priors(model: nn.Module) -> dict[str, Prior]:
    """Returns the priors that a model carries, by the name of their attention module."""
    return {name: module.prior for name, module in model.named_modules() if isinstance(module, WithPrior)}


def priors_to_config(model: nn.Module) -> str | list[dict[str, Any]]:
    """Returns what a config file says of the priors that a model carries, so that they can be attached again."""
    parts: list[dict[str, Any]] = []
    priors = get_priors(model)
    for name, prior in priors.items():
        spec, options = spec_of(prior)
        same = [part for part in parts if (part["prior"], part["options"]) == (spec, options)]
        if same:
            same[0]["layers"].append(name)
        else:
            parts.append({"prior": spec, "options": options, "layers": [name]})
    if not parts:
        return "none"
    whole = len(parts) == 1 and len(priors) == next(iter(priors.values())).depth
    return str(parts[0]["prior"]) if whole and not parts[0]["options"] else parts


def spec_of(prior: Prior) -> tuple[str, dict[str, Any]]:
    """Returns the spec of a prior and its further options, with tensors and arrays as lists."""
    return prior.spec, {key: _plain(value) for key, value in prior.spec_options.items()}


def describe_sites(model: nn.Module) -> dict[str, dict[str, int]]:
    """Returns what each prior was attached to, by layer: heads, rows, columns, prefix and suffix tokens."""
    return {name: site_of(module) for name, module in model.named_modules() if isinstance(module, WithPrior)}


def site_of(module: WithPrior) -> dict[str, int]:
    """Returns heads, rows, columns, prefix and suffix tokens of a module that carries a prior."""
    return _numbers(module.prior.heads, module.prior.grid, module.prior_site.suffix, module.prior_pairs)


def describe_site(site: AttentionSite) -> dict[str, int]:
    """Returns what `site_of` will return of a site that takes a prior."""
    assert site.layout is not None
    pairs = TokenPairs(site.layout.offsets) if isinstance(site.layout, PairLayout) else None
    return _numbers(site.heads, site.grid, site.layout.suffix, pairs)


def _numbers(heads: int, grid: Grid, suffix: int, pairs: TokenPairs | None) -> dict[str, int]:
    numbers = {
        "heads": heads,
        "rows": grid.height,
        "columns": grid.width,
        "prefix": grid.prefix - suffix,
        "suffix": suffix,
    }
    return numbers if pairs is None else numbers | {"queries": pairs.queries, "keys": pairs.keys}


def check_sites(model: nn.Module, saved: dict[str, dict[str, int]]) -> None:
    """Raises VicinalError if a model's priors sit elsewhere than those that were saved, naming the layer."""
    found = describe_sites(model)
    for difference in compare_sites(found, saved):
        raise VicinalError(difference)
    more = [name for name in found if name not in saved]
    if more:
        raise VicinalError(f"{more[0]} carried no prior when the model was saved")


def compare_sites(
    found: Mapping[str, dict[str, int]],
    saved: Mapping[str, dict[str, int]],
    refused: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yields a description of every saved layer that is missing, or is another one than it was.

    Args:
        found: sites of the model by layer, as `describe_sites` returns them.
        saved: sites of the priors that were saved.
        refused: why further layers take no prior, by name.
    """
    for name, site in saved.items():
        if name not in found:
            reason = (refused or {}).get(name)
            yield f"{name} carried a prior when the model was saved, and takes none now" + (
                f": {reason}" if reason else ""
            )
        elif found[name] != site:
            yield f"the prior of {name} was saved for {_site(site)}, and finds {_site(found[name])}"


def _site(site: dict[str, int]) -> str:
    return ", ".join(f"{value} {name}" for name, value in site.items())


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
