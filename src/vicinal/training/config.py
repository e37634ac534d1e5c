"""What a run is: every choice in one frozen dataclass, the recipes, and YAML in and out."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from vicinal.errors import VicinalError, unknown_name

__all__ = ["FREE", "RECIPES", "TrainConfig", "recipe"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on. The defaults are the `quick` recipe's.

    >>> import vicinal
    >>> config = vicinal.TrainConfig(model="vit-mini", prior="conv", dataset="cifar10", epochs=15)
    >>> config.lr, config.smoothing
    (0.001, 0.1)
    """

    # the model
    model: str | None = None
    """One of `vicinal models`, or any name of timm's; vit-micro by default."""
    prior: str = "none"
    """Spatial prior, such as gmm or gmm:kernels=3+gab; `vicinal priors` lists them."""
    pool: Literal["token", "avg"] | None = None
    """Class token or mean over patches; each model's own default if not given. A prior does not change it."""
    img_size: tuple[int, ...] = ()
    """Pixels, or height and width; the set's own size if not given."""
    patch_size: int | None = None
    """Pixels; each model's own if not given."""
    drop_path: float = 0.0
    """Share of residual branches dropped (stochastic depth)."""
    pretrained: bool = False
    """Start from timm's weights for this model, with a new head."""
    init_from: str | None = None
    """Start from the weights of a finished run or a saved model; its model, pooling and prior come with it."""

    # the data
    dataset: str = "digits"
    """One of `vicinal datasets`, or folder:PATH, parquet:PATH, hub:ID."""
    data_dir: Path | None = None
    """Where a Parquet copy of the set is, in place of the Hub."""
    cache_dir: Path | None = None
    """Where decoded images are kept; ~/.cache/vicinal by default."""
    train_size: int | None = None
    """Train on that many images, each class in proportion; all that validation leaves by default."""
    val_size: float = 0.1
    """Training images held out for validation: a share below 1, or a number; 0 for none."""
    crop: bool = True
    """Random crop: with padding below 96 px, random resized crop from 96 px up."""
    flip: bool | None = None
    """Mirror half of the images; by default where a mirrored image means the same (not digits, not SVHN)."""
    auto_augment: bool = False
    """AutoAugment, with the policy that fits the set."""
    erasing: float = 0.0
    """Probability to erase a rectangle of an image."""
    mix: Literal["none", "mixup", "cutmix", "both", "transmix"] = "none"
    """Mix images and labels of a batch; both: half Mixup, half CutMix; transmix: CutMix labelled by attention."""
    mix_prob: float = 0.5
    """Share of the batches that are mixed."""
    mix_per_example: bool = False
    """Mix each image by chance and amount of its own, not the whole batch alike."""
    transmix: Literal["paper", "reference"] = "paper"
    """Labels by attention as it is, or as the published program does: normalised, and averaged with the area."""
    mixup_share: float = 0.0
    """With transmix: the share of what is mixed that is Mixup."""
    smoothing: float = 0.1
    """Label smoothing."""

    # the optimiser
    epochs: int = 50
    """Passes over the training images."""
    warmup: float = 5
    """Epochs in which the learning rate rises."""
    batch_size: int = 64
    """Images per optimiser step, over all processes."""
    accumulate: int = 1
    """Compute each step in that many pieces, for less memory."""
    opt: str = "adamw"
    """One of timm's optimisers."""
    lr: float = 1e-3
    """Learning rate at its highest; a cosine takes it to min_lr."""
    min_lr: float = 1e-6
    """Learning rate at the end, and at the start of the warm-up."""
    prior_lr: float = 30.0
    """Priors learn that many times faster than the network: its widths move little in a short training otherwise."""
    weight_decay: float = 0.05
    """Not for priors, norms and biases."""
    clip_grad: float | None = None
    """Longest gradient; not clipped by default."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.999, which is then what is evaluated and saved."""

    # the machine
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp16 needs a GPU; fp64 is for checks."""
    compile: bool = False
    """torch.compile the model."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU where there is one."""
    workers: int | None = None
    """Processes that prepare images; by default none where the images are cached and training is on a CPU."""
    seed: int = 0
    """Every random choice derives from it."""
    out: Path | None = None
    """Run folder; runs/MODEL-PRIOR-DATASET-sSEED by default. It may not exist."""
    checkpoint_minutes: float = 10.0
    """Save a checkpoint that often, besides one at the end of every epoch."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainConfig).items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        for name, (least, most, what) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (least <= value <= most and math.isfinite(value)):
                raise VicinalError(f"{_flag(name)} is {what}, given {value:g}")
        if len(self.img_size) > 2 or any(side < 1 for side in self.img_size):
            raise VicinalError(f"--img-size is one number of pixels, or height and width; given {self.img_size}")
        if self.val_size >= 1 and self.val_size != int(self.val_size):
            raise VicinalError(f"--val-size is a share below 1 or a whole number of images, given {self.val_size:g}")
        if self.warmup > self.epochs:
            raise VicinalError(f"--warmup {self.warmup:g} is longer than the {self.epochs} epochs of the run")
        if self.min_lr > self.lr:
            raise VicinalError(f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}")
        if self.init_from is not None and (self.model or self.pool or self.patch_size or self.pretrained):
            raise VicinalError(
                "--init-from brings its own model: leave --model, --pool, --patch-size and --pretrained out"
            )

    def changed(self, **changes: Any) -> Self:
        """The same with some fields changed."""
        if wrong := set(changes) - _names():
            raise unknown_name("field", sorted(wrong)[0], _names())
        return replace(self, **changes)

    @property
    def folder(self) -> Path:
        """Where the run goes."""
        if self.out is not None:
            return self.out
        model = Path(self.init_from).name if self.init_from else self.model or DEFAULT_MODEL
        parts = [model, *([] if self.prior == "none" else [self.prior]), self.dataset.split("/")[-1], f"s{self.seed}"]
        return Path("runs") / "".join(c if c.isalnum() or c in "-_.=+" else "-" for c in "-".join(parts))

    def to_yaml(self) -> str:
        """All fields, in their order."""
        values = {
            name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return yaml.safe_dump(values, sort_keys=False)

    @classmethod
    def from_yaml(cls, file: str | Path) -> "TrainConfig":
        """Read a file: any of the fields, and `recipe` for the values of the others."""
        try:
            values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise VicinalError(f"cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise VicinalError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise VicinalError(f"{file} holds no fields; expected lines such as 'model: vit'")
        base = values.pop("recipe", "quick")
        if isinstance(values.get("prior"), str):
            from vicinal.priors.spec import current_spec

            values["prior"] = current_spec(values["prior"])  # old files may have old spellings
        try:
            return recipe(base, **values)
        except VicinalError as error:
            raise VicinalError(f"{file}: {error}") from None


DEFAULT_MODEL = "vit-micro"

# What may differ when a run is resumed, because the result does not depend on it.
FREE = {"data_dir", "cache_dir", "workers", "out", "checkpoint_minutes"}

RECIPES: dict[str, dict[str, Any]] = {
    # Flip and crop: for small data, short runs and CPUs.
    "quick": {},
    # The GMM paper's. Its program walks the data three times an epoch: its 100 epochs, 10 of warm-up, are 300 and 30.
    "paper": {
        "epochs": 300,
        "warmup": 30,
        "batch_size": 128,
        "lr": 1e-3,
        "min_lr": 1e-6,
        "prior_lr": 1.0,
        "weight_decay": 0.05,
        "smoothing": 0.1,
        "drop_path": 0.1,
        "auto_augment": True,
        "erasing": 0.25,
        "mix": "both",
        "mix_prob": 0.5,
    },
}


def recipe(name: str, **changes: Any) -> TrainConfig:
    """The configuration that a recipe stands for, with some fields changed.

    >>> import vicinal
    >>> vicinal.recipe("paper", model="vit", prior="gmm", dataset="cifar10").epochs
    300
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise unknown_name("recipe", str(name), RECIPES)
    return TrainConfig().changed(**(RECIPES[name] | changes))


def _names() -> set[str]:
    return {field.name for field in fields(TrainConfig)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_RANGES: dict[str, tuple[float, float, str]] = {
    "patch_size": (1, math.inf, "a number of pixels"),
    "drop_path": (0, 0.99, "a share from 0 to below 1"),
    "train_size": (1, math.inf, "a number of images, at least 1"),
    "val_size": (0, math.inf, "a share below 1 or a number of images"),
    "erasing": (0, 1, "a probability from 0 to 1"),
    "mix_prob": (0, 1, "a probability from 0 to 1"),
    "mixup_share": (0, 1, "a share from 0 to 1"),
    "smoothing": (0, 0.99, "a share from 0 to below 1"),
    "epochs": (1, math.inf, "a whole number, at least 1"),
    "warmup": (0, math.inf, "a number of epochs, at least 0"),
    "batch_size": (1, math.inf, "a number of images, at least 1"),
    "accumulate": (1, math.inf, "a number of pieces, at least 1"),
    "lr": (1e-12, math.inf, "a number above 0"),
    "min_lr": (0, math.inf, "a number of at least 0"),
    "prior_lr": (0, math.inf, "a number of at least 0"),
    "weight_decay": (0, math.inf, "a number of at least 0"),
    "clip_grad": (1e-12, math.inf, "a number above 0"),
    "ema": (0, 0.9999999, "a decay from 0 to below 1"),
    "workers": (0, 1024, "a number of processes, at least 0"),
    "seed": (0, 2**31 - 1, "a whole number from 0 to 2147483647"),
    "checkpoint_minutes": (0, math.inf, "a number of minutes, at least 0"),
}


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A value that a person wrote, in the type that the field has."""
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType, Literal) else (kind,)
    if get_origin(kind) is Literal:
        if value in choices:
            return value
        raise unknown_name(_flag(name), str(value), choices)
    for choice in choices:
        if get_origin(choice) is Literal and isinstance(value, str):
            return _typed(name, value, choice)
        if choice is type(None) and value is None:
            return None
        if choice is bool and isinstance(value, bool):
            return value
        if choice is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if choice is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if choice is float and isinstance(value, str):  # YAML reads 1e-3 as a text
            try:
                return float(value)
            except ValueError:
                continue
        if choice is str and isinstance(value, str):
            return value
        if choice is Path and isinstance(value, str | Path):
            return Path(value)
        if get_origin(choice) is tuple:
            sides = (value,) if isinstance(value, int) and not isinstance(value, bool) else value
            if isinstance(sides, list | tuple) and all(type(side) is int for side in sides):
                return tuple(sides)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    expected = " or ".join(words.get(choice, "numbers") for choice in choices if choice is not type(None))
    raise VicinalError(f"{_flag(name)} is {expected}, given {value!r}")
