"""Accuracies that papers report for models and datasets which this package has too."""

from dataclasses import dataclass

__all__ = ["Published", "find_published"]

GMM_PAPER = "GMM paper: all training images, 300 passes, the best test epoch, one run"


@dataclass(frozen=True)
class Published:
    """A figure of a paper. Its protocol differs from ours."""

    value: float
    """Top-1 accuracy in %."""
    source: str


PRIORS = ("none", "gmm", "gmm:init=paper")
"""Those that the paper has figures of: the mask with five kernels, whatever its initialization."""
_GMM_DATASETS = ("cifar10", "cifar100", "svhn", "tiny-imagenet")
_GMM_TABLE = {
    "vit": ((93.65, 95.06), (75.36, 77.81), (97.93, 98.01), (59.89, 62.27)),
    "swin": ((95.26, 95.39), (77.88, 78.26), (97.89, 97.90), (60.45, 61.03)),
    "cait": ((94.79, 95.15), (78.42, 78.97), (98.13, 98.09), (62.46, 63.64)),
    "pit": ((93.68, 94.41), (72.82, 74.16), (97.78, 97.82), (57.63, 58.37)),
    "t2t": ((95.32, 96.16), (78.10, 79.91), (97.99, 97.98), (61.50, 63.33)),
}
"""Without and with GMM, by model, for each dataset."""


def find_published(model: str, dataset: str, prior: str) -> Published | None:
    """Returns the published accuracy of a model without a prior or with `gmm`; None if there is none.

    >>> find_published("vit", "cifar10", "gmm").value
    95.06
    """
    if model not in _GMM_TABLE or dataset not in _GMM_DATASETS or prior not in PRIORS:
        return None
    pair = _GMM_TABLE[model][_GMM_DATASETS.index(dataset)]
    return Published(pair[prior != "none"], GMM_PAPER)
