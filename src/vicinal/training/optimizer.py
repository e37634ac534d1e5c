"""The optimizer and its parameter groups: what decays, and the learning rate of priors and of layers."""

import math
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from vicinal.errors import VicinalError, unknown_name
from vicinal.former_bits import FORMER_BITS
from vicinal.priors.base import Prior
from vicinal.training.config import ConfigError, TrainConfig

from timm.optim import (  # isort: skip
    create_optimizer_v2,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)

__all__ = ["create_optimizer", "parameter_groups"]

RELATIVE_POSITIONS = (
    "*relative_position_bias_table",  # Swin, BEiT, vit_relpos, MaxViT
    "*attention_biases",  # LeViT, TinyViT, EfficientFormer
    "*rel_pos_[hw]",  # SAM, MViT v2
    "*height_rel",  # HaloNet, BoTNet
    "*width_rel",
    "*rel_pos.mlp.*",  # networks in place of tables: vit_relpos, MaxViT
    "*cpb_mlp.*",  # Swin v2
)
"""Patterns of the names of learned tables and networks of relative positions, in timm and transformers."""
FUSED = ("adam", "adamw")
"""Optimizers of torch that update a parameter in one pass on a CPU. Their loop calls MKL's sqrt for every parameter,
which starts its threads and, on busy cores, waits for them."""


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Returns timm's optimizer `config.opt` over `parameter_groups`.

    The ratio of a group's rate to `lr` is its `lr_scale`, by which timm's schedulers multiply.

    Args:
        model: with its priors attached.
        config: `opt`, `lr`, `weight_decay`, `decay_norms`, `prior_lr` and `layer_decay` are used.

    Raises:
        VicinalError: if timm has no optimizer of that name, or cannot create it.
    """
    if config.opt not in list_optimizers():
        raise unknown_name("opt", config.opt, list_optimizers())
    groups = parameter_groups(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        prior_lr=config.prior_lr,
        layer_decay=config.layer_decay,
    )
    if config.decay_norms:
        groups = _decay_norms(groups, model, config.weight_decay)
    for group in groups:
        group["lr_scale"] = group.pop("lr") / config.lr
    on_cpu = next(model.parameters()).device.type == "cpu"
    options = {"fused": True} if on_cpu and config.opt in FUSED and not FORMER_BITS else {}
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            groups, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, **options
        )
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise ConfigError("opt", f"{config.opt} cannot be created: {error}") from error
    return optimizer


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float, prior_lr: float = 30.0, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Returns parameter groups for any optimizer and any scheduler: each has `params`, `lr` and `weight_decay`.

    All parameters of priors form the last group, without decay, at `prior_lr` times the rate. Of the other parameters,
    norms, biases, relative positions and what the model's `no_weight_decay()` names are not decayed.
    Parameters that need no gradient are in no group.

    >>> import torch, vicinal
    >>> model = vicinal.create_model("vit-micro", prior="gmm", img_size=32)
    >>> groups = vicinal.parameter_groups(model, lr=1e-3, weight_decay=0.05)
    >>> [(group["lr"], group["weight_decay"]) for group in groups]
    [(0.001, 0.0), (0.001, 0.05), (0.03, 0.0)]
    >>> optimizer = torch.optim.AdamW(groups)
    >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    Args:
        model: with its priors attached.
        lr: learning rate.
        weight_decay: of the parameters that decay.
        prior_lr: factor of the priors' learning rate. At 1, sigma barely moves in a short run.
        layer_decay: factor of the learning rate from each layer to the one before it, for fine-tuning, by timm's
            `param_groups_layer_decay`; it does not change the rate of priors. None for one rate in all layers.

    Raises:
        VicinalError: if a value is out of range, or `layer_decay` is given and the model does not name its layers.
    """
    for name, value in {"lr": lr, "weight_decay": weight_decay, "prior_lr": prior_lr}.items():
        if not (value >= 0 and math.isfinite(value)):
            raise VicinalError(f"{name} must be a number, at least 0, got {value}")
    excluded: Any = getattr(model, "no_weight_decay", set)()
    undecayed = (*excluded, *RELATIVE_POSITIONS)
    if layer_decay is None:
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed)
    else:
        groups = _by_layer(model, weight_decay, undecayed, layer_decay)
    prior_ids = {id(each) for module in model.modules() if isinstance(module, Prior) for each in module.parameters()}
    priors = [each for group in groups for each in group["params"] if id(each) in prior_ids]
    for group in groups:
        group["params"] = [each for each in group["params"] if id(each) not in prior_ids]
        group["lr"] = lr * group.pop("lr_scale", 1.0)
    groups.append({"params": priors, "weight_decay": 0.0, "lr": lr * prior_lr})
    return [group for group in groups if group["params"]]


def _by_layer(model: nn.Module, weight_decay: float, undecayed: tuple[str, ...], decay: float) -> list[dict[str, Any]]:
    """Returns timm's groups by layer, each with an `lr_scale`."""
    if not 0 < decay <= 1:
        raise VicinalError(f"layer_decay must be above 0 and at most 1, got {decay}")
    if not hasattr(model, "group_matcher"):  # timm would count parameters instead, those of priors too
        raise VicinalError(
            f"layer_decay must be None for {type(model).__name__}, which does not name its layers as timm's models do "
            "(group_matcher)"
        )
    groups: list[dict[str, Any]] = param_groups_layer_decay(
        model, weight_decay, no_weight_decay_list=undecayed, layer_decay=decay
    )
    return groups


def _decay_norms(groups: list[dict[str, Any]], model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns groups in which everything decays but priors and relative positions."""
    spared = {id(each) for module in model.modules() if isinstance(module, Prior) for each in module.parameters()}
    for name, parameter in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in RELATIVE_POSITIONS):
            spared.add(id(parameter))
    result = []
    for group in groups:
        kept = [each for each in group["params"] if id(each) in spared]
        decayed = [each for each in group["params"] if id(each) not in spared]
        result += [{**group, "params": kept}] if kept else []
        result += [{**group, "params": decayed, "weight_decay": weight_decay}] if decayed else []
    return result
