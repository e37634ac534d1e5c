"""vicinal gives vision transformers a sense of what is near: spatial priors for self-attention.

Names resolve when first used, so that `import vicinal` and `vicinal --help` do not load torch. The import installs a
hook which lets timm import where PyPI's torchvision is installed next to a CPU-only torch (`_torchvision.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from vicinal._torchvision import install_hook

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vicinal._torchvision import ensure_torchvision as ensure_torchvision
    from vicinal.attachment import attach as attach
    from vicinal.attachment import detach as detach
    from vicinal.attachment import inspect as inspect
    from vicinal.attachment.prior_file import load_prior as load_prior
    from vicinal.attachment.prior_file import save_prior as save_prior
    from vicinal.attention import attend as attend
    from vicinal.errors import VicinalError as VicinalError
    from vicinal.grid import Grid as Grid
    from vicinal.inspection import tap as tap
    from vicinal.mixing import Mixing as Mixing
    from vicinal.mixing import TransMix as TransMix
    from vicinal.models import create_model as create_model
    from vicinal.models import push_to_hub as push_to_hub
    from vicinal.models.resize import resize as resize
    from vicinal.models.save import save as save
    from vicinal.priors import Prior as Prior
    from vicinal.priors import build_prior as build_prior
    from vicinal.priors import list_priors as list_priors
    from vicinal.priors import register_prior as register_prior
    from vicinal.studies.run_comparison import compare as compare
    from vicinal.studies.study import study as study
    from vicinal.training.config import TrainConfig as TrainConfig
    from vicinal.training.config import recipe as recipe
    from vicinal.training.cpu_memory import tune_cpu as tune_cpu
    from vicinal.training.model_path import load as load
    from vicinal.training.optimizer import parameter_groups as parameter_groups
    from vicinal.training.prediction import predict as predict
    from vicinal.training.run_folder import Run as Run
    from vicinal.training.train import fit as fit
    from vicinal.training.train import resume as resume
    from vicinal.training.train import train as train

_HOME = {
    "Grid": "vicinal.grid",
    "Mixing": "vicinal.mixing",
    "Prior": "vicinal.priors",
    "Run": "vicinal.training.run_folder",
    "TrainConfig": "vicinal.training.config",
    "TransMix": "vicinal.mixing",
    "VicinalError": "vicinal.errors",
    "attach": "vicinal.attachment",
    "attend": "vicinal.attention",
    "build_prior": "vicinal.priors",
    "compare": "vicinal.studies.run_comparison",
    "create_model": "vicinal.models",
    "detach": "vicinal.attachment",
    "ensure_torchvision": "vicinal._torchvision",
    "fit": "vicinal.training.train",
    "inspect": "vicinal.attachment",
    "list_priors": "vicinal.priors",
    "load": "vicinal.training.model_path",
    "load_prior": "vicinal.attachment",
    "parameter_groups": "vicinal.training.optimizer",
    "predict": "vicinal.training.prediction",
    "push_to_hub": "vicinal.models",
    "recipe": "vicinal.training.config",
    "register_prior": "vicinal.priors",
    "resize": "vicinal.models",
    "resume": "vicinal.training.train",
    "save": "vicinal.models",
    "save_prior": "vicinal.attachment",
    "study": "vicinal.studies.study",
    "tap": "vicinal.inspection",
    "train": "vicinal.training.train",
    "tune_cpu": "vicinal.training.cpu_memory",
}

__all__ = [*_HOME, "__version__"]

install_hook()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vicinal' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
