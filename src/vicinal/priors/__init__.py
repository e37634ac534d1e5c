"""Spatial priors for self-attention, one per file."""

from vicinal.priors.base import Prior, ScaleBias
from vicinal.priors.registry import Option, build_prior, get_prior, list_priors, prior_options, register_prior

__all__ = [
    "Option",
    "Prior",
    "ScaleBias",
    "build_prior",
    "get_prior",
    "list_priors",
    "prior_options",
    "register_prior",
]
