"""What `vicinal analyze` looks at: trained models, pictures for them, and a folder for what is found."""

import itertools
import os
import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vicinal.cli._images import batches, of_set, search
from vicinal.errors import VicinalError
from vicinal.training.model_path import model_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vicinal.data import Preprocessing
    from vicinal.training.run_folder import Run

__all__ = [
    "Look",
    "Subject",
    "as_file_name",
    "distinct",
    "folder_for",
    "layer_of",
    "places_for",
    "subjects_of",
    "writing",
]

Device = Literal["auto", "cpu"]


@dataclass
class Subject:
    """A model to look at."""

    name: str
    """No other subject has it."""
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
    from vicinal.models.factory import make_timm_model
    from vicinal.training.run_folder import Run

    size = (img_size[0], img_size[-1]) if img_size else None
    found = []
    for run, folder, short in zip(runs, folders, _short(runs), strict=True):
        training = Run(run) if (Path(run) / "config.yaml").is_file() else None
        model = load(folder, img_size=size)
        found.append((_name(short, model), model, training))
    given = {"img_size": size} if size else {}
    for name in timm:
        found.append((name, make_timm_model(name, pretrained=not random_weights, **given), None))
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device == "auto" else None
    for _, model, _ in found:
        model.to(accelerator or "cpu").eval()
    names = distinct(name for name, _, _ in found)
    return [
        Subject(name, model, _preprocessing(model, size), run)
        for name, (_, model, run) in zip(names, found, strict=True)
    ]


def _short(runs: Sequence[str]) -> list[str]:
    """The last folder of each run, with as many above it as tell it from the others."""
    paths = [Path(run if run.startswith("hf-hub:") else os.path.abspath(run)).parts for run in runs]
    found = []
    for path in paths:
        length = 1
        while any(other[-length:] == path[-length:] for other in paths if other != path):
            length += 1
        found.append(str(Path(*path[-length:])))
    return found


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
        if not 0 <= self.seed < 2**63:
            raise VicinalError(f"--seed is a whole number from 0 to 2^63 - 1, given {self.seed}")

    def batches(self, subject: Subject) -> Iterator[tuple[list[str], "Tensor"]]:
        """Names and images, as the subject takes them."""
        self.problems.clear()
        some: Iterator[tuple[list[str], Tensor]]
        path = None if self.images is None else Path(self.images.removeprefix("folder:")).expanduser()
        if path is not None and (path.exists() or str(self.images).startswith("folder:")):
            files, self.problems[:] = search([path])
            if not files:
                raise VicinalError("no pictures to look at: " + "; ".join(self.problems))
            if len(files) > self.count:  # a folder of classes begins with many of one class
                files = random.Random(self.seed).sample(files, len(files))
            found = batches(files, subject.preprocessing, self.batch_size, self.problems, self.count)
            some = (([Path(name).stem for name in names], images) for names, images in found)
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
    """Where to write: as given, or into the run that is looked at. It is not made yet."""
    if out is None:
        if len(subjects) != 1 or subjects[0].run is None:
            raise VicinalError("say where to write with --out FOLDER; a single run has a folder of its own")
        out = subjects[0].run.folder / "analysis"
    with _telling(out):  # now, and not after hours of looking
        there = next(each for each in (out, *out.parents) if each.exists())
        tempfile.TemporaryFile(dir=there).close()
    return out


def places_for(subjects: Sequence[Subject], folder: Path) -> list[Path]:
    """Where what is found of each subject goes: one has the folder, several have a folder each in it."""
    return [folder] if len(subjects) == 1 else [folder / as_file_name(subject.name) for subject in subjects]


@contextmanager
def writing(places: Iterable[Path], *old: str) -> Iterator[None]:
    """Write into folders, which are made, and cleared of what is there from before.

    Args:
        places: the folders.
        old: names of the files that the instrument writes, and patterns of more. What fits a pattern is somebody else's
            where none of the names is.
    """
    names = [name for name in old if "*" not in name]
    with _telling():
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            if any((place / name).exists() for name in names):
                for file in [file for pattern in old for file in place.glob(pattern)]:
                    file.unlink()
        yield


@contextmanager
def _telling(folder: Path | None = None) -> Iterator[None]:
    """Turn what goes wrong in writing into a short message."""
    try:
        yield
    except OSError as error:
        where = folder or error.filename or "everything"
        raise VicinalError(
            f"cannot write {where}: {error.strerror or error}; give another folder with --out"
        ) from error


def layer_of(word: str) -> int | str:
    """A layer as a user names it: a number is an index, anything else a name."""
    try:
        return int(word)
    except ValueError:
        return word


def distinct(names: Iterable[str]) -> list[str]:
    """Names that are different as names of files too: one that was there before gets a number."""
    found: dict[str, str] = {}
    for name in names:
        tries = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
        new = next(each for each in tries if as_file_name(each).lower() not in found)  # some disks know one case only
        found[as_file_name(new).lower()] = new
    return list(found.values())


def as_file_name(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-.") or "x"
