"""Writes the fixtures in this folder: saved models with their outputs, two runs and a configuration.

vicinal 0.1.0 wrote them, with `python tests/compatibility/make_fixtures.py`. Later versions must open the same files
with the same outputs. This script is kept to show how the files were made. Do not run it to make a failing test pass: a
failing test means that files which users have today no longer open, or mean something else. A new file format gets new
fixtures next to these.

    models/NAME/            what `vicinal.save` wrote
    outputs.safetensors     float64 outputs of each model; the metadata holds seed and shape of each input
    runs/finished/          what `vicinal train` wrote, without checkpoints and TensorBoard's files
    runs/interrupted/       the same run, stopped by SIGTERM after step 72 of 96
    config.yaml             what `TrainConfig.to_yaml` wrote

The runs start from `models/vit-none` through `--init-from`, because `vicinal train` has no flags for width and depth,
and each checkpoint of its smallest model takes 2 MB. Their paths are relative to this folder, which must be the working
directory when `runs/interrupted` is resumed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import vicinal
from vicinal.attachment import get_priors

HERE = Path(__file__).parent
SMALL_VIT = {"embed_dim": 12, "depth": 2, "num_heads": 3, "img_size": 8}
# name: backbone, prior, further arguments of create_model
MODELS = {
    "vit-gmm": ("vit-micro", "gmm", SMALL_VIT),
    "vit-elm": ("vit-micro", "elm", SMALL_VIT),
    "vit-gab": ("vit-micro", "gab", {**SMALL_VIT, "img_size": (8, 12)}),
    "vit-rpe": ("vit-micro", "rpe", {**SMALL_VIT, "global_pool": "avg"}),
    "vit-rpe-mlp": ("vit-micro", "rpe-mlp", SMALL_VIT),
    "vit-decay": ("vit-micro", "decay", SMALL_VIT),
    "vit-decay-learned": ("vit-micro", "decay:gamma=0.5,learnable=true", SMALL_VIT),
    "vit-conv": ("vit-micro", "conv", SMALL_VIT),
    "vit-conv-neighbours": ("vit-micro", "conv:centers=neighbours,growth=0.4", SMALL_VIT),
    "vit-none": ("vit-micro", "none", {**SMALL_VIT, "in_chans": 1}),
    "vit-gmm+gab": ("vit-micro", "gmm:kernels=3+gab", SMALL_VIT),
    "vit-by-layer": ("vit-micro", "none", SMALL_VIT),  # priors attached below
    "vit-relpos-gmm": ("vit-relpos", "gmm:kernels=2", {**SMALL_VIT, "patch_size": 2}),
    "swin-gmm": (
        "swin",
        "gmm:kernels=2",
        {"embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "window_size": 2, "img_size": 8},
    ),
    "cait-gmm": (
        "cait",
        "gmm:kernels=2",
        {**SMALL_VIT, "patch_size": 2, "depth_token_only": 1, "head_dim": 4, "mlp_width": 24},
    ),
    "pit-gmm": (
        "pit",
        "gmm:kernels=2",
        {"embed_dim": (8, 16), "depths": (1, 1), "num_heads": (1, 2), "img_size": 8},
    ),
    "t2t-gmm": ("t2t", "gmm:kernels=2", {"embed_dim": 8, "depth": 1, "num_heads": 2, "img_size": 16}),
    "timm-vit-gmm": ("vit_tiny_patch16_224", "gmm:kernels=2", {**SMALL_VIT, "patch_size": 2}),
}
CLASS_NAMES = [f"class {number}" for number in range(10)]
PREPROCESSING = {
    "mean": (0.1, 0.2, 0.3),
    "std": (0.4, 0.5, 0.6),
    "interpolation": "bilinear",
    "crop_pct": 0.9,
}

RUN = {
    "init_from": "models/vit-none",
    "prior": "gmm:kernels=2",
    "dataset": "digits",
    "train_size": 512,
    "val_size": 64.0,
    "crop": False,
    "mix": "cutmix",
    "mix_prob": 0.2,
    "drop_path": 0.05,
    "epochs": 3,
    "warmup": 1.0,
    "batch_size": 16,
    "lr": 0.03,
    "prior_lr": 5.0,
    "ema": 0.9,
    "device": "cpu",
    "workers": 0,
    "seed": 3,
}
STOPPED_AFTER = 72  # steps of 96; an epoch has 32

CONFIG = {
    "model": "vit-mini",
    "prior": "conv:centers=neighbours",
    "pool": "avg",
    "img_size": (32, 48),
    "patch_size": 8,
    "drop_path": 0.2,
    "dataset": "cifar10",
    "train_size": 5000,
    "val_size": 500,
    "flip": False,
    "erasing": 0.25,
    "mix": "transmix",
    "mix_prob": 0.8,
    "transmix": "reference",
    "epochs": 15,
    "warmup": 2.5,
    "batch_size": 128,
    "accumulate": 2,
    "opt": "lamb",
    "lr": 2e-3,
    "min_lr": 1e-5,
    "prior_lr": 10,
    "clip_grad": 1.0,
    "ema": 0.999,
    "precision": "bf16",
    "seed": 7,
    "out": "runs/cifar10",
}


def make_model(name: str, seed: int) -> torch.nn.Module:
    """Returns a model all of whose weights and prior values differ from those that it starts with."""
    backbone, prior, options = MODELS[name]
    torch.manual_seed(seed)
    model = vicinal.create_model(backbone, prior=prior, **options).eval()
    if name == "vit-by-layer":
        vicinal.attach(model, "gmm", layers="first 1", kernels=2)
        vicinal.attach(model, "gab", layers="last 1")
    buffers = [values for prior in get_priors(model).values() for values in prior.buffers()]  # of decay and rpe-mlp
    with torch.no_grad():
        for values in [*model.parameters(), *buffers]:
            values += torch.rand_like(values) - 0.5
    return model


def noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns noise from -1 to 1, float64.

    It is uniform, because torch computes normal numbers with vectorized logarithms, which depend on the processor.
    """
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1


def write_models() -> None:
    """Writes `models` and `outputs.safetensors`."""
    outputs, inputs = {}, {}
    for seed, name in enumerate(MODELS):
        model = make_model(name, seed)
        declared = {"class_names": CLASS_NAMES, "preprocessing": PREPROCESSING} if name == "vit-gmm" else {}
        vicinal.save(model, HERE / "models" / name, **declared)
        shape = (2, *model.pretrained_cfg["input_size"])
        with torch.no_grad():
            outputs[name] = model.double()(noise(shape, 100 + seed))
        inputs[name] = json.dumps({"seed": 100 + seed, "shape": shape})
    save_file(outputs, HERE / "outputs.safetensors", metadata=inputs)


def write_finished_run() -> None:
    """Writes `runs/finished` by the command line."""
    command = [sys.executable, "-m", "vicinal", "train", "--out", "runs/finished"]
    for name, value in RUN.items():
        flag = name.replace("_", "-")
        command += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    subprocess.run(command, cwd=HERE, check=True)
    for name in ("tensorboard", "checkpoints"):  # nothing reads them once a run is finished
        shutil.rmtree(HERE / "runs" / "finished" / name)


def write_interrupted_run() -> None:
    """Writes `runs/interrupted`: a signal arrives during the last step before the stop."""
    from vicinal.training import train as loop

    step = loop.train_step

    def signalled(job, config, number, images, labels):
        if number + 1 == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(job, config, number, images, labels)

    loop.train_step = signalled
    os.chdir(HERE)
    try:
        vicinal.fit(vicinal.TrainConfig(**RUN, out="runs/interrupted"))
    except loop.Interrupted as stop:
        print(stop)
    shutil.rmtree("runs/interrupted/tensorboard")


def main() -> None:
    """Writes all fixtures; raises FileExistsError if there are some, because they must stay as they are."""
    if (HERE / "models").exists():
        raise FileExistsError(f"{HERE} has fixtures, which must stay as they are")
    write_models()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["VICINAL_CACHE"] = cache
        write_finished_run()
        write_interrupted_run()
    (HERE / "config.yaml").write_text(vicinal.TrainConfig(**CONFIG).to_yaml())


if __name__ == "__main__":
    main()
