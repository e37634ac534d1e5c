"""The configuration of a run: all settings in one frozen dataclass, read from and written to YAML."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

import yaml

from vicinal.errors import VicinalError, unknown_name
from vicinal.training.config_error import ConfigError
from vicinal.training.config_file import FORMAT, read_fields
from vicinal.training.config_ranges import check_ranges
from vicinal.training.recipes import RECIPES
from vicinal.typed_value import choices, convert_value

__all__ = ["DEFAULT_MODEL", "FIELD_GROUPS", "RESUME_FIELDS", "ConfigError", "TrainConfig", "recipe"]

DEFAULT_MODEL, OWN_DATA_MODEL = "vit-micro", "vit-mini"

RESUME_FIELDS = {"dataset", "data_dir", "cache_dir", "workers", "out", "checkpoint_minutes", "track"}
"""Fields that can change when a run is resumed, because the result does not depend on them, if the data is the same."""

FIELD_GROUPS = {
    "model": "model",
    "data": "dataset",
    "augmentation and mixing": "crop",
    "optimization": "epochs",
    "hardware": "precision",
    "output": "out",
}
"""The first field of each group, in the order of `TrainConfig`."""


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
    """A name from `vicinal models`, or any timm model; by default vit-micro, for own data (folder:PATH) vit-mini."""
    prior: str = "none"
    """Spatial prior, such as gmm or gmm:kernels=3+gab; `vicinal priors` lists them."""
    pool: Literal["token", "avg", "paper"] | None = None
    """Pooling: class token; average over patches; or paper, the class token in a ViT. The model's default if not given.
    A prior does not change it."""
    img_size: tuple[int, ...] = ()
    """Image size in pixels: one number, or height and width; the dataset's size by default. Own data has 64, and with a
    timm model the model's own size."""
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
    skip_unreadable: bool = False
    """Leave out images that cannot be read, and list them in the run folder; they are an error by default."""
    train_size: int | None = None
    """Number of training images, stratified by class; by default all that are not held out for validation."""
    val_size: float = 0.1
    """Training images held out for validation, unless the dataset has a validation split: a fraction below 1, or a
    number of images; 0 for none."""
    balance: Literal["none", "weights", "sampling"] = "none"
    """Make rare classes count as much as frequent ones: weights in the loss, or their images drawn more often."""

    # Augmentation and mixing
    crop: bool = True
    """Random crop: with padding below 96 px, random resized crop from 96 px on."""
    crop_padding: int | None = None
    """Padding of the random crop in pixels, below 96 px; 1/8 of the image size by default."""
    flip: bool | None = None
    """Random horizontal flip; by default for datasets whose classes allow it (not for digits and SVHN)."""
    auto_augment: bool = False
    """AutoAugment with the policy for the dataset."""
    rand_augment: str | None = None
    """RandAugment in timm's notation, such as rand-m9-n2-mstd0.5-inc1, in place of AutoAugment."""
    color_jitter: float = 0.0
    """Largest random change of brightness, contrast and saturation, from 0 to 1."""
    erasing: float = 0.0
    """Probability of random erasing."""
    erasing_area: float = 0.4
    """Largest fraction of an image that is erased; the smallest is 0.02."""
    erasing_aspect: float = 0.3
    """Smallest ratio of the sides of an erased box; the largest is its inverse."""
    fill: Literal["mean", "reference"] = "mean"
    """Value of erased pixels and of those that AutoAugment moves in: the dataset's mean; or, as in the GMM paper's
    program, gray in AutoAugment, and in erasing the mean before normalization as a normalized value."""
    mix: Literal["none", "mixup", "cutmix", "both", "transmix"] = "none"
    """Mix images and labels of a batch; both: Mixup or CutMix, half each; transmix: CutMix, labels by attention."""
    mix_prob: float = 0.5
    """Probability that a batch is mixed."""
    mix_per_example: bool = False
    """Draw the mixing for each image, instead of once for the whole batch."""
    transmix: Literal["paper", "reference"] = "paper"
    """TransMix labels: from attention as in the paper; or, as in its code, normalized and averaged with the area."""
    mix_partner: Literal["reversed", "random"] = "reversed"
    """Image that is mixed in: the one at the same place of the batch in reverse order, or in random order."""
    mixup_alpha: float = 1.0
    """Parameter of the Beta distribution of Mixup."""
    cutmix_alpha: float = 1.0
    """Parameter of the Beta distribution of CutMix."""
    mixup_share: float = 0.0
    """With transmix: fraction of the mixed batches, or images, that use Mixup."""
    smoothing: float = 0.1
    """Label smoothing."""

    # Optimization
    epochs: int = 50
    """Number of passes over the training images."""
    steps: int | None = None
    """Number of optimizer steps, in place of epochs; the last epoch ends with them."""
    warmup: float | None = None
    """Number of warm-up epochs, in which the learning rate rises; a tenth of the run by default."""
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
    decay_norms: bool = False
    """Apply weight decay to norms, biases and position embeddings too, as the GMM paper's program does; never to priors
    and relative positions."""
    clip_grad: float | None = None
    """Maximum gradient norm; no clipping by default."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, such as 0.999, which is then evaluated and saved."""
    patience: int | None = None
    """Early stopping: number of epochs without a better validation top-1 after which training ends; off by default."""
    keep: Literal["last", "best"] = "last"
    """Weights that are tested and saved: the last, or those of the epoch with the best validation top-1."""
    seed: int = 0
    """Seed of all random choices."""

    # Hardware
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Precision of the computation; fp16 needs a GPU, fp64 is for tests."""
    compile: bool = False
    """Compile the model with torch.compile."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto: a GPU if there is one."""
    workers: int | None = None
    """Number of processes that load images; by default 0 if images are cached and training is on a CPU."""

    # Output
    out: Path | None = None
    """Run folder, which must not exist yet; by default runs/MODEL-PRIOR-DATASET-sSEED, with a number if that exists."""
    track: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """Tracker that metrics are logged to, besides metrics.csv; wandb and mlflow are packages to be installed."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; one more is saved at the end of every epoch."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainConfig).items():
            object.__setattr__(self, name, _convert(name, getattr(self, name), kind))
        check_ranges(self)

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
    def own_data(self) -> bool:
        """Whether the dataset is not one of the named ones."""
        return ":" in self.dataset

    @property
    def model_name(self) -> str:
        """The model: `model`, or the default for the dataset."""
        return self.model or (OWN_DATA_MODEL if self.own_data else DEFAULT_MODEL)

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or a name made of model, prior, dataset and seed, which an earlier run can have."""
        if self.out is not None:
            return self.out
        model = Path(self.init_from).name if self.init_from else self.model_name
        parts = [
            model,
            *([] if self.prior == "none" else [self.prior]),
            self.dataset.replace(":", "/").split("/")[-1],
            f"s{self.seed}",
        ]
        return Path("runs") / "".join(c if c.isalnum() or c in "-_.=+" else "-" for c in "-".join(parts))

    def to_yaml(self) -> str:
        """Returns the fields as YAML, in the order of their definition."""
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
        name, values = read_fields(Path(file), stored=stored)
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


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Returns a value from Python, YAML or the command line as the type of its field."""
    try:
        return convert_value(value, kind)
    except ValueError as error:
        if isinstance(value, str) and (names := choices(kind)):
            raise unknown_name(name, value, names) from None
        raise ConfigError(name, f"must be {error}, got {value!r}") from None
