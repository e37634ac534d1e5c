"""The optimizer and its parameter groups: no decay for norms, biases and priors; a separate rate for priors."""

from typing import Any

import torch
from torch import nn

from vicinal.errors import unknown_name
from vicinal.priors.base import Prior
from vicinal.training.config import ConfigError, TrainConfig

from timm.optim import create_optimizer_v2, list_optimizers, param_groups_weight_decay  # isort: skip

__all__ = ["create_optimizer", "parameter_groups"]


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Returns timm's optimizer `config.opt` over `parameter_groups`.

    Args:
        model: with its priors attached.
        config: `opt`, `lr`, `weight_decay` and `prior_lr` are used.

    Raises:
        VicinalError: if timm has no optimizer of that name, or cannot create it.
    """
    if config.opt not in list_optimizers():
        raise unknown_name("opt", config.opt, list_optimizers())
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            param_group_fn=lambda model: parameter_groups(model, config.weight_decay, config.prior_lr),
        )
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise ConfigError("opt", f"{config.opt} cannot be created: {error}") from error
    if config.decay_norms:
        _decay_all_but_priors(optimizer, model, config.weight_decay)
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float, prior_lr: float) -> list[dict[str, Any]]:
    """Returns timm's groups with and without weight decay, and one for priors.

    The group of priors has no decay and the `lr_scale` of timm's schedulers. It holds the parameters that a prior has
    itself. Submodules of a prior, such as the network of `rpe-mlp`, are in timm's groups.

    Args:
        model: with its priors attached.
        weight_decay: of the weights that decay.
        prior_lr: factor of the priors' learning rate.
    """
    prior_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Prior)
        for parameter in module.parameters(recurse=False)
    }
    excluded: Any = getattr(model, "no_weight_decay", set)()
    groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=tuple(excluded))
    priors = [parameter for group in groups for parameter in group["params"] if id(parameter) in prior_ids]
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in prior_ids]
    groups.append({"params": priors, "weight_decay": 0.0, "lr_scale": prior_lr, "group_name": "priors"})
    return [group for group in groups if group["params"]]


def _decay_all_but_priors(optimizer: torch.optim.Optimizer, model: nn.Module, weight_decay: float) -> None:
    """Sets the weight decay of every group, but not of the one that holds priors only."""
    prior_ids = {id(each) for module in model.modules() if isinstance(module, Prior) for each in module.parameters()}
    for group in optimizer.param_groups:
        if not all(id(parameter) in prior_ids for parameter in group["params"]):
            group["weight_decay"] = weight_decay
