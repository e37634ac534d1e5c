"""What `vicinal analyze` looks at: trained models, pictures for them, and a folder for what is found."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vicinal.cli.pictures import batches, of_set, search
from vicinal.errors import VicinalError
from vicinal.training.locating import model_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vicinal.data import Preprocessing
    from vicinal.training.runs import Run

__all__ = ["Look", "Subject", "as_file_name", "folder_for", "subjects_of"]

Device = Literal["auto", "cpu"]


@dataclass
class Subject:
    """A model to look at."""

    name: str
    model: "nn.Module"
    preprocessing: "Preprocessing"
    run: "Run | None" = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its images."""
        return self.preprocessing.height, self.preprocessing.width


def subjects_of(
    runs: Sequence[str], timm: Sequence[str], img_size: Sequence[int], random_weights: bool, device: Device
) -> list[Subject]:
    """Open runs, saved models, and models of timm's."""
    if not runs and not timm:
        raise VicinalError("nothing to look at: give the folder of a run, such as runs/x, or --timm NAME")
    if len(img_size) > 2:
        raise VicinalError(f"--img-size is one number of pixels, or height and width; given {tuple(img_size)}")
    folders = [model_folder(run) for run in runs]  # all of them, before any is opened

    import torch

    from vicinal.models import load
    from vicinal.models.creating import make_timm_model
    from vicinal.training.runs import Run

    size = (img_size[0], img_size[-1]) if img_size else None
    found = []
    for run, folder in zip(runs, folders, strict=True):
        training = Run(run) if (Path(run) / "config.yaml").is_file() else None
        model = load(folder, img_size=size)
        found.append((_name(Path(run).name, model), model, training))
    given = {"img_size": size} if size else {}
    for name in timm:
        found.append((name, make_timm_model(name, pretrained=not random_weights, **given), None))
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device == "auto" else None
    for _, model, _ in found:
        model.to(accelerator or "cpu").eval()
    return [Subject(name, model, _preprocessing(model, size), run) for name, model, run in found]


def _name(folder: str, model: Any) -> str:
    """The folder's name, and the model's, if that does not say it."""
    architecture = model.pretrained_cfg["architecture"].removeprefix("vicinal_").replace("_", "-")
    return folder if architecture in folder else f"{folder} ({architecture})"


def _preprocessing(model: Any, size: tuple[int, int] | None) -> "Preprocessing":
    """What the model declares, at the size that it was made for."""
    from vicinal.data import Preprocessing

    declared = dict(model.pretrained_cfg)
    channels, *own = declared["input_size"]
    return Preprocessing.of_model({**declared, "input_size": (channels, *(size or own))})


@dataclass
class Look:
    """Which pictures to show to a model, and how many at a time."""

    images: str | None
    data_dir: Path | None
    count: int
    batch_size: int
    seed: int
    problems: list[str] = field(default_factory=list)
    """What could not be read."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.batch_size < 1:
            raise VicinalError(f"--count and --batch-size are at least 1, given {self.count} and {self.batch_size}")

    def batches(self, subject: Subject) -> Iterator[tuple[list[str], "Tensor"]]:
        """Names and images, as the subject takes them."""
        self.problems.clear()
        path = None if self.images is None else Path(self.images.removeprefix("folder:")).expanduser()
        if path is not None and (path.exists() or str(self.images).startswith("folder:")):
            files, self.problems[:] = search([path])
            if not files:
                raise VicinalError("no pictures to look at: " + "; ".join(self.problems))
            some = batches(files[: self.count], subject.preprocessing, self.batch_size, self.problems)
        elif self.images is not None:
            some = of_set(self.images, self.data_dir, subject.preprocessing, self.count, self.seed, self.batch_size)
        elif subject.run is not None:
            config = subject.run.config
            folder = self.data_dir or config.data_dir
            some = of_set(config.dataset, folder, subject.preprocessing, self.count, self.seed, self.batch_size)
        else:
            raise VicinalError(
                f"{subject.name} does not say which pictures to look at: give --images, a folder of pictures or one of "
                "`vicinal datasets`"
            )
        none = True
        for batch in some:
            none = False
            yield batch
        if none:
            raise VicinalError("none of the pictures can be read:\n  " + "\n  ".join(self.problems))

    def complain(self) -> None:
        """Say at the end which pictures are missing in what was found."""
        if self.problems:
            raise VicinalError("without what could not be read:\n  " + "\n  ".join(self.problems))


def folder_for(subjects: Sequence[Subject], out: Path | None) -> Path:
    """Where to write: as given, or into the run that is looked at."""
    if out is None:
        if len(subjects) != 1 or subjects[0].run is None:
            raise VicinalError("say where to write with --out FOLDER; a single run has a folder of its own")
        out = subjects[0].run.folder / "analysis"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VicinalError(f"cannot make the folder {out}: {error.strerror}") from None
    return out


def as_file_name(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-.") or "x"
