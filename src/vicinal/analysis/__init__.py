"""Analyses of trained models: receptive fields, attention maps, learned tables and cost.

Each subpackage has functions that measure, results with `as_dict()`, `table()` and `save(path)`, and functions that
draw. Names below resolve when first used. Functions that are named like their subpackage are imported from it, as in
`from vicinal.analysis.receptive_field import receptive_field`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vicinal.analysis.attention_maps import attention_statistics as attention_statistics
    from vicinal.analysis.attention_maps import rollout as rollout
    from vicinal.analysis.cost import cost_of as cost_of
    from vicinal.analysis.gaussian_fit import fit_gaussian as fit_gaussian
    from vicinal.analysis.image_selection import ImageSelection as ImageSelection
    from vicinal.analysis.learned_tables import fit_model as fit_model
    from vicinal.analysis.learned_tables import masks_of as masks_of
    from vicinal.analysis.learned_tables import tables_of as tables_of
    from vicinal.analysis.mixture_fit import fit_mixture as fit_mixture
    from vicinal.analysis.opened_model import OpenedModel as OpenedModel
    from vicinal.analysis.opened_model import open_models as open_models
    from vicinal.analysis.receptive_field import ReceptiveField as ReceptiveField

_HOME = {
    "ImageSelection": "vicinal.analysis.image_selection",
    "OpenedModel": "vicinal.analysis.opened_model",
    "ReceptiveField": "vicinal.analysis.receptive_field",
    "attention_statistics": "vicinal.analysis.attention_maps",
    "cost_of": "vicinal.analysis.cost",
    "fit_gaussian": "vicinal.analysis.gaussian_fit",
    "fit_mixture": "vicinal.analysis.mixture_fit",
    "fit_model": "vicinal.analysis.learned_tables",
    "masks_of": "vicinal.analysis.learned_tables",
    "open_models": "vicinal.analysis.opened_model",
    "rollout": "vicinal.analysis.attention_maps",
    "tables_of": "vicinal.analysis.learned_tables",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vicinal.analysis' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
