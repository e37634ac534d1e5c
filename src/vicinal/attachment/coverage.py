"""Which of timm's models take a prior: a survey that makes and inspects every one.

One model at a time, in a process of its own that is bounded in memory and replaced now and then. What was found goes
line by line into a file, so that an interrupted survey goes on where it was.
"""

import fnmatch
import gc
import json
import multiprocessing
import resource
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vicinal._torchvision import ensure_torchvision
from vicinal.attachment.dry_run import inspect
from vicinal.errors import VicinalError
from vicinal.inspection import AttentionSite, RefusalKind
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import eval_without_side_effects, make_runner

ensure_torchvision()

import timm  # noqa: E402

__all__ = ["Finding", "RefusedLayers", "families", "inspect_model", "read_notes", "survey"]

MODELS_PER_PROCESS = 40
NO_MEMORY = "it needs more memory than the survey may use"
WITHOUT_GRID = {RefusalKind.SILENT, RefusalKind.SPREAD, RefusalKind.POOLED}
"""Refused because queries and keys are not patches of one grid: a class token, channels, pooled keys."""


@dataclass(frozen=True)
class RefusedLayers:
    """Modules of one class that take no prior, for one reason."""

    module: str
    """Name of the class."""
    kind: RefusalKind
    reason: str
    queries: int
    keys: int
    count: int = 1
    """Number of such layers."""

    @property
    def missed(self) -> bool:
        """Whether it is attention over a grid, of more than one patch, that a prior could serve."""
        return self.kind not in WITHOUT_GRID and self.queries == self.keys > 1


@dataclass(frozen=True)
class Finding:
    """What is known of one model."""

    model: str
    family: str
    """timm's file."""
    parameters: int = 0
    image: tuple[int, int] = (0, 0)
    served: dict[str, int] = field(default_factory=dict)
    """Modules that take a prior, by class and place, such as `Attention, 14 x 14 + 1 prefix`."""
    windows: bool = False
    """Whether some of them work on windows."""
    refused: tuple[RefusedLayers, ...] = ()
    """Attention that takes no prior."""
    skipped: str = ""
    """Why the model was not examined."""
    timm: str = timm.__version__

    @property
    def missed(self) -> list[RefusedLayers]:
        """Attention over a grid that takes no prior."""
        return [layers for layers in self.refused if layers.missed]

    def to_json(self) -> str:
        """Returns the finding as one line of JSON."""
        return json.dumps(asdict(self), default=lambda kind: kind.name)

    @classmethod
    def from_json(cls, line: str) -> "Finding":
        """Returns the finding of a line. Raises ValueError, TypeError or KeyError if the line is not one."""
        values: dict[str, Any] = json.loads(line)
        values["image"] = tuple(values["image"])
        values["refused"] = tuple(
            RefusedLayers(**each | {"kind": RefusalKind[each["kind"]]}) for each in values["refused"]
        )
        return cls(**values)


def families() -> dict[str, str]:
    """Returns timm's file of each model, by the model's name."""
    return {
        name: module
        for module in timm.list_modules()
        for name in timm.list_models(module=module)
        if timm.model_entrypoint(name).__module__.startswith("timm.")  # others register theirs too
    }


def inspect_model(name: str, family: str, limit: int) -> Finding:
    """Makes one model and returns which of its attention modules take a prior.

    Args:
        name: of a timm model.
        family: of that model, to be passed on.
        limit: number of parameters above which a model is skipped.
    """
    with torch.device("meta"):
        empty = timm.create_model(name).eval()
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > limit:
        return Finding(name, family, count, skipped=f"more than {limit / 1e6:.0f} M parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name)
    runner = make_runner(model)
    with eval_without_side_effects(model):
        if not observe_attention(model, lambda: runner(runner.noise(1))):  # cheaper than to probe it
            return Finding(name, family, count, runner.image)
    found = inspect(model)
    served = Counter(f"{type(site.module).__name__}, {site.place}" for site in found.served)
    windows = any(site.windows > 1 for site in found.served)
    return Finding(name, family, count, runner.image, dict(served), windows, _refused_layers(found.refused))


def _refused_layers(sites: list[AttentionSite]) -> tuple[RefusedLayers, ...]:
    """Returns sites that take no prior, those of one class and reason as one."""
    counts: Counter[RefusedLayers] = Counter()
    for site in sites:
        if site.refusal is not None:
            kind, reason = site.refusal.kind, site.refusal.reason
            counts[RefusedLayers(type(site.module).__name__, kind, reason, *site.logits[-2:])] += 1
    return tuple(replace(layers, count=count) for layers, count in counts.items())


def survey(pattern: str, notes: Path, *, limit: int, memory: int) -> Iterator[Finding | int]:
    """Inspects every timm model whose name fits: yields how many there are, then a finding for each.

    Args:
        pattern: of names, such as `swin*`.
        notes: file of findings, one per line; models found there are not inspected again.
        limit: number of parameters above which a model is skipped.
        memory: bytes that the inspecting process can use.
    """
    known = families()
    names = sorted(name for name in known if fnmatch.fnmatch(name, pattern))
    if not names:
        raise VicinalError(f"no timm model is named {pattern!r}; 'vicinal models' lists families")
    done = {
        finding.model: finding
        for finding in read_notes(notes)
        if finding.timm == timm.__version__ and (not finding.skipped or finding.parameters > limit)
    }
    yield len(names)
    notes.parent.mkdir(parents=True, exist_ok=True)
    cut_off = notes.exists() and not notes.read_bytes().endswith(b"\n")
    with _Inspector(memory) as inspector, notes.open("a") as file:
        file.write("\n" if cut_off else "")
        for name in names:
            if name not in done:
                finding = inspector.inspect(name, known[name], limit)
                file.write(finding.to_json() + "\n")
                file.flush()
                done[name] = finding
            yield done[name]


def read_notes(notes: Path) -> list[Finding]:
    """Returns the findings of an earlier survey; lines that were cut off, or of another form, are left out."""
    findings = []
    for line in notes.read_text().splitlines() if notes.exists() else ():
        try:
            findings.append(Finding.from_json(line))
        except (ValueError, TypeError, KeyError):
            continue
    return findings


class _Inspector:
    """A process that inspects models, and is replaced when it dies."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def __enter__(self) -> "_Inspector":
        self.pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_limit_memory,
            initargs=(self.memory,),
            max_tasks_per_child=MODELS_PER_PROCESS,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def inspect(self, name: str, family: str, limit: int) -> Finding:
        """Returns the finding of one model; a failure is a finding too."""
        try:
            return self.pool.submit(inspect_or_skip, name, family, limit).result()
        except (BrokenProcessPool, MemoryError, SystemError):  # it died, or had not even room to answer
            self.__exit__()
            self.__enter__()
            return Finding(name, family, skipped=NO_MEMORY)


def _limit_memory(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    warnings.filterwarnings("ignore")


def inspect_or_skip(name: str, family: str, limit: int) -> Finding:
    """Returns the finding of one model; if it fails, a finding that says why the model was skipped."""
    try:
        return inspect_model(name, family, limit)
    except (VicinalError, RuntimeError, MemoryError, SystemError) as error:
        # Python without memory for its frames raises SystemError; a runner puts the model's error into its own message
        said = ("allocate memory", "bad_alloc", "MemoryError")
        if isinstance(error, MemoryError | SystemError) or any(words in str(error) for words in said):
            return Finding(name, family, skipped=NO_MEMORY)
        return Finding(name, family, skipped=f"{type(error).__name__}: {error}".split("\n")[0][:200])
    finally:
        gc.collect()
