"""The configuration of a run: all settings in one frozen dataclass, read from and written to YAML."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from vicinal.errors import VicinalError, unknown_name
from vicinal.training.config_error import ConfigError
from vicinal.training.config_ranges import RANGES
from vicinal.training.model_path import is_weights_file
from vicinal.training.recipes import DEFAULT_RECIPE, RECIPES

__all__ = ["DEFAULT_MODEL", "FORMAT", "RECIPES", "RESUME_FIELDS", "ConfigError", "TrainConfig", "recipe"]

DEFAULT_MODEL = "vit-micro"

FORMAT = 2
"""Version of the rules of training, `format` in config.yaml. Files without it are of version 1."""

RESUME_FIELDS = {"data_dir", "cache_dir", "workers", "out", "checkpoint_minutes"}
"""Fields that can change when a run is resumed, because the result does not depend on them."""


@dataclass(frozen=True)
class TrainConfig:
    """All settings that a run depends on. The defaults are those of the recipe `quick`.

    >>> import vicinal
    >>> config = vicinal.TrainConfig(model="vit-mini", prior="conv", dataset="cifar10", epochs=15)
    >>> config.lr, config.smoothing
    (0.001, 0.1)

    Raises:
        ConfigError: if a value is of the wrong type or out of range.
    """

    # Model
    model: str | None = None
    """A name from `vicinal models`, or any timm model; vit-micro by default."""
    prior: str = "none"
    """Spatial prior, such as gmm or gmm:kernels=3+gab; `vicinal priors` lists them."""
    pool: Literal["token", "avg"] | None = None
    """Pooling: class token, or average over patches; the model's default if not given. A prior does not change it."""
    img_size: tuple[int, ...] = ()
    """Image size in pixels: one number, or height and width; the dataset's size by default."""
    patch_size: int | None = None
    """Patch size in pixels; the model's default if not given."""
    drop_path: float = 0.0
    """Stochastic depth: probability to drop a residual branch."""
    pretrained: bool = False
    """Start from timm's pretrained weights, with a new classifier head."""
    init_from: str | None = None
    """Start from the weights of a finished run or a saved model, whose model, pooling and prior are used; or from a
    safetensors file of the timm model that model names, with a new classifier head."""
    freeze: bool = False
    """Train the classifier head and priors only; the other weights stay as they were loaded."""

    # Data
    dataset: str = "digits"
    """A name from `vicinal datasets`, or folder:PATH, parquet:PATH, hub:ID."""
    data_dir: Path | None = None
    """Folder with a Parquet copy of the dataset; the Hub is used by default."""
    cache_dir: Path | None = None
    """Cache folder for decoded images; ~/.cache/vicinal by default."""
    train_size: int | None = None
    """Number of training images, stratified by class; by default all that are not held out for validation."""
    val_size: float = 0.1
    """Training images held out for validation: a fraction below 1, or a number of images; 0 for none."""
    balance: Literal["none", "weights", "sampling"] = "none"
    """Make rare classes count as much as frequent ones: weights in the loss, or their images drawn more often."""
    crop: bool = True
    """Random crop: with padding below 96 px, random resized crop from 96 px on."""
    flip: bool | None = None
    """Random horizontal flip; by default for datasets whose classes allow it (not for digits and SVHN)."""
    auto_augment: bool = False
    """AutoAugment with the policy for the dataset."""
    erasing: float = 0.0
    """Probability of random erasing."""
    mix: Literal["none", "mixup", "cutmix", "both", "transmix"] = "none"
    """Mix images and labels of a batch; both: Mixup or CutMix, half each; transmix: CutMix, labels by attention."""
    mix_prob: float = 0.5
    """Probability that a batch is mixed."""
    mix_per_example: bool = False
    """Draw the mixing for each image, instead of once for the whole batch."""
    transmix: Literal["paper", "reference"] = "paper"
    """TransMix labels: from attention as in the paper; or, as in its code, normalized and averaged with the area."""
    mixup_share: float = 0.0
    """With transmix: fraction of the mixed batches, or images, that use Mixup."""
    smoothing: float = 0.1
    """Label smoothing."""

    # Optimization
    epochs: int = 50
    """Number of passes over the training images."""
    warmup: float | None = None
    """Number of warm-up epochs, in which the learning rate rises; a tenth of the epochs by default."""
    batch_size: int = 64
    """Images per optimizer step, over all processes."""
    accumulate: int = 1
    """Gradient accumulation: number of pieces that each batch is divided into, to save memory."""
    opt: str = "adamw"
    """Name of a timm optimizer."""
    lr: float = 1e-3
    """Maximum learning rate; a cosine schedule lowers it to min_lr."""
    min_lr: float = 1e-6
    """Learning rate at the end, and at the start of the warm-up."""
    prior_lr: float = 30.0
    """Learning-rate multiplier for prior parameters. At 1, sigma barely moves in a short run."""
    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one before it, for fine-tuning; not applied to priors."""
    weight_decay: float = 0.05
    """Weight decay; not applied to priors, norms, biases and relative positions."""
    clip_grad: float | None = None
    """Maximum gradient norm; no clipping by default."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999, which is then evaluated and saved."""
    patience: int | None = None
    """Early stopping: number of epochs without a better validation top-1 after which training ends; off by default."""
    keep: Literal["last", "best"] = "last"
    """Weights that are tested and saved: the last, or those of the epoch with the best validation top-1."""

    # Machine
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of the computation; fp16 needs a GPU, fp64 is for tests."""
    compile: bool = False
    """Compile the model with torch.compile."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto: a GPU if there is one."""
    workers: int | None = None
    """Number of processes that load images; by default 0 if images are cached and training is on a CPU."""
    seed: int = 0
    """Seed of all random choices."""
    out: Path | None = None
    """Run folder; runs/MODEL-PRIOR-DATASET-sSEED by default. Must not exist yet."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; one more is saved at the end of every epoch."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainConfig).items():
            object.__setattr__(self, name, _convert(name, getattr(self, name), kind))
        for name, (low, high, expected) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ConfigError(name, f"must be {expected}, got {value:g}")
        if len(self.img_size) > 2 or any(side < 1 for side in self.img_size):
            raise ConfigError("img_size", f"must be one number of pixels, or height and width, got {self.img_size}")
        if self.val_size >= 1 and self.val_size != int(self.val_size):
            raise ConfigError("val_size", f"must be below 1 or a whole number of images, got {self.val_size:g}")
        if self.warmup is not None and self.warmup >= self.epochs:
            raise ConfigError("warmup", f"must be below the number of epochs ({self.epochs}), got {self.warmup:g}")
        if self.min_lr > self.lr:
            raise ConfigError("min_lr", f"must be at most lr ({self.lr:g}), got {self.min_lr:g}")
        if self.init_from is not None and self.pretrained:
            raise ConfigError("init_from", "does not go with pretrained: leave one of them out")
        if self.init_from is not None and not is_weights_file(self.init_from) and (self.model or self.pool):
            raise ConfigError("init_from", "of a run or a saved model does not go with model and pool: leave these out")

    def changed(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Raises:
            VicinalError: if there is no field of that name, or a value cannot be used.
        """
        if wrong := set(changes) - _field_names():
            raise unknown_name("field", sorted(wrong)[0], _field_names())
        return replace(self, **changes)

    @property
    def warmup_epochs(self) -> float:
        """Number of warm-up epochs: `warmup`, or a tenth of the epochs."""
        return self.epochs / 10 if self.warmup is None else self.warmup

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or a name made of model, prior, dataset and seed."""
        if self.out is not None:
            return self.out
        model = self.model or (Path(self.init_from).name if self.init_from else DEFAULT_MODEL)
        parts = [model, *([] if self.prior == "none" else [self.prior]), self.dataset.split("/")[-1], f"s{self.seed}"]
        return Path("runs") / "".join(c if c.isalnum() or c in "-_.=+" else "-" for c in "-".join(parts))

    def to_yaml(self) -> str:
        """Returns all fields as YAML, in the order of their definition."""
        values = {
            name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return yaml.safe_dump({"format": FORMAT, **values}, sort_keys=False)

    @classmethod
    def from_yaml(cls, file: str | Path, *, stored: bool = False) -> "TrainConfig":
        """Returns the configuration in a YAML file.

        Args:
            file: maps names of fields to values. `recipe` names the recipe for the fields that are not in the file.
            stored: the file is that of a run. Before format 2, a warm-up could be as long as the run; it becomes None.

        Raises:
            VicinalError: if the file cannot be read, is not YAML, or has unknown fields or unusable values.
        """
        try:
            values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise VicinalError(f"cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise VicinalError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise VicinalError(f"{file} has no fields; expected lines such as 'model: vit'")
        name, version = values.pop("recipe", DEFAULT_RECIPE), values.pop("format", 1)
        if version not in (1, FORMAT):
            raise VicinalError(f"{file}: format must be 1 or {FORMAT}, got {version!r}; a later version wrote it")
        if stored and version == 1 and (values.get("warmup") or 0) >= values["epochs"]:
            values["warmup"] = None
        if isinstance(values.get("prior"), str):
            from vicinal.priors.spec import current_spec

            values["prior"] = current_spec(values["prior"])  # old files may have old spellings
        try:
            return recipe(name, **values)
        except VicinalError as error:
            raise VicinalError(f"{file}: {error}") from None


def recipe(name: str, **changes: Any) -> TrainConfig:
    """Returns the configuration of a recipe, with some fields changed.

    >>> import vicinal
    >>> vicinal.recipe("paper", model="vit", prior="gmm", dataset="cifar10").epochs
    300

    Args:
        name: `quick`, `paper` or `finetune`; `vicinal.training.recipes` describes them.
        **changes: fields of `TrainConfig`.

    Raises:
        VicinalError: if there is no recipe or field of that name, or a value cannot be used.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise unknown_name("recipe", str(name), RECIPES)
    return TrainConfig().changed(**(RECIPES[name] | changes))


def _field_names() -> set[str]:
    return {field.name for field in fields(TrainConfig)}


_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Returns a value from Python, YAML or the command line as the type of its field."""
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType, Literal) else (kind,)
    if get_origin(kind) is Literal:
        if value in choices:
            return value
        raise unknown_name(name, str(value), choices)
    for choice in choices:
        if get_origin(choice) is Literal and isinstance(value, str):
            return _convert(name, value, choice)
        if choice is type(None) and value is None:
            return None
        if choice is bool and isinstance(value, bool):
            return value
        if choice is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if choice is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if choice is float and isinstance(value, str):  # YAML reads 1e-3 as a string
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
    expected = " or ".join(_KIND_NAMES.get(choice, "numbers") for choice in choices if choice is not type(None))
    raise ConfigError(name, f"must be {expected}, got {value!r}")
