"""Masks of a model at earlier epochs, from the parameters that its run has logged."""

import numpy as np
import torch
from torch import nn

from vicinal.analysis.learned_tables.mask_result import Masks
from vicinal.analysis.learned_tables.masks import masks_of
from vicinal.attachment import get_priors
from vicinal.priors.parameters import set_parameters
from vicinal.training.prior_history import PriorHistory

__all__ = ["masks_over_epochs"]


def masks_over_epochs(
    model: nn.Module, history: PriorHistory, *, count: int = 6, name: str | None = None
) -> dict[int, Masks]:
    """Returns the masks of a model's priors at evenly chosen epochs, the first and the last among them.

    The result is empty if a prior learns more than the history has, such as a free table. The model is as before.

    Args:
        model: one with priors, of the run that logged the history.
        history: as `Run.priors` has it.
        count: maximum number of epochs; at least 1, which is the last one.
        name: display name of the model; by default its architecture.

    Raises:
        VicinalError: if the model has no prior, or one is not finite.
    """
    priors = {layer: prior for layer, prior in get_priors(model).items() if prior.spec != "none"}
    before = [(parameter, parameter.detach().clone()) for prior in priors.values() for parameter in prior.parameters()]
    if not set(priors) <= set(history.layers):
        return {}
    last = len(history.epochs) - 1
    chosen = (
        sorted({last, *np.linspace(0, last, min(count, last + 1)).round().astype(int).tolist()})
        if count > 1
        else [last]
    )
    found = {}
    try:
        for index in chosen:
            for layer, prior in priors.items():
                if not set_parameters(prior, {name: values[index] for name, values in history.layers[layer].items()}):
                    return {}
            found[history.epochs[index]] = masks_of(model, name=name)
    finally:
        with torch.no_grad():
            for parameter, trained in before:
                parameter.copy_(trained)
    return found
