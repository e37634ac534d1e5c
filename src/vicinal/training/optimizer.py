"""The optimiser and its parameter groups: no decay on norms, biases and priors; priors at a rate of their own."""

from typing import Any

import torch
from torch import nn

from vicinal.errors import VicinalError, unknown_name
from vicinal.priors.base import Prior
from vicinal.training.config import TrainConfig

from timm.optim import create_optimizer_v2, list_optimizers, param_groups_weight_decay  # isort: skip

__all__ = ["create_optimizer", "parameter_groups"]


def create_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """timm's optimiser of that name, over `parameter_groups`."""
    if config.opt not in list_optimizers():
        raise unknown_name("--opt", config.opt, list_optimizers())
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            param_group_fn=lambda model: parameter_groups(model, config.weight_decay, config.prior_lr),
        )
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise VicinalError(f"cannot make the optimiser {config.opt}: {error}") from error
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float, prior_lr: float) -> list[dict[str, Any]]:
    """timm's groups with and without decay, and one for priors, without decay, whose rate is `prior_lr` times as high.

    A prior's parameters are those that are its own: a network inside of a prior is an ordinary network.
    """
    priors = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Prior)
        for parameter in module.parameters(recurse=False)
    }
    spared: Any = getattr(model, "no_weight_decay", set)()
    groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=tuple(spared))
    of_priors = [each for group in groups for each in group["params"] if id(each) in priors]
    for group in groups:
        group["params"] = [each for each in group["params"] if id(each) not in priors]
    groups.append({"params": of_priors, "weight_decay": 0.0, "lr_scale": prior_lr, "group_name": "priors"})
    return [group for group in groups if group["params"]]
