"""The recipes: named sets of training settings. Settings that a recipe does not list keep `TrainConfig`'s defaults.

An entry states its command, and its cost and figure only where they were measured.
"""

from typing import Any

__all__ = ["DEFAULT_RECIPE", "RECIPES"]

QUICK: dict[str, Any] = {}
"""Random crop and flip, 50 epochs: for small data, short runs and CPUs.

    vicinal train --recipe quick --model vit-mini --prior gmm --dataset cifar10

It is the default, so `--recipe quick` need not be given. Cost and accuracy of this command have not been measured here.
"""

PAPER: dict[str, Any] = {
    "pool": "paper",
    "epochs": 300,
    "batch_size": 128,
    "lr": 1e-3,
    "min_lr": 1e-6,
    "prior_lr": 1.0,
    "weight_decay": 0.05,
    "decay_norms": True,
    "smoothing": 0.1,
    "drop_path": 0.1,
    "crop_padding": 4,
    "flip": True,
    "auto_augment": True,
    "erasing": 0.25,
    "fill": "reference",
    "mix": "both",
    "mix_prob": 0.5,
    "mix_partner": "random",
}
"""The settings of the paper on Gaussian mixture masks: AutoAugment, random erasing, Mixup and CutMix, stochastic depth.

    vicinal train --recipe paper --model vit --prior gmm --dataset cifar10

The paper's program iterates over the data three times in each epoch, so its 100 epochs with 10 of warm-up are 300 and
30 here (a tenth of the epochs, the default). Cost and accuracy of a full run have not been measured here.
"""

FINETUNE: dict[str, Any] = {"epochs": 10, "lr": 5e-4, "layer_decay": 0.75, "drop_path": 0.1}
"""Few epochs from weights that were trained before; each layer learns at 0.75 times the rate of the next one.

    vicinal train --recipe finetune --model vit_tiny_patch16_224 --pretrained --prior gmm --dataset folder:photos
    vicinal train --recipe finetune --init-from runs/x --dataset folder:photos

Layer decay and its values are those usual for ViTs (BEiT, https://arxiv.org/abs/2106.08254). Priors learn at `prior_lr`
times the rate in every layer. Cost and accuracy have not been measured here.
"""

RECIPES: dict[str, dict[str, Any]] = {"quick": QUICK, "paper": PAPER, "finetune": FINETUNE}
DEFAULT_RECIPE = "quick"
