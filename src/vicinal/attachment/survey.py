"""A survey of many models: each is inspected in another process, and what was found is noted line by line.

The process is bounded in memory and time, and replaced when it dies. An interrupted survey continues where it was.
"""

import contextlib
import gc
import json
import math
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vicinal.inspection import AttentionSite, RefusalKind
from vicinal.inspection.model_inspection import Inspection

__all__ = ["Finding", "Limits", "RefusedLayers", "Survey", "finding_of", "finding_or_skip", "read_notes"]

NO_MEMORY = "it needs more memory than the survey may use"
NO_TIME = "it takes longer than {:g} s"
MAX_REASON = 200  # characters of an error that are noted


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
    spatial: bool = False
    """Whether they are known to be attention between places of the image."""


@dataclass(frozen=True)
class Finding:
    """What is known of one model."""

    model: str
    family: str
    """timm's file, or the model's class."""
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
    spatial: int = 0
    """Number of modules that are known to be spatial, from a source other than the inspection."""
    spatial_served: int = 0
    """Number of these in which every attention takes a prior."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Attention that takes a prior in modules that are not known to be spatial, by class."""
    unseen: dict[str, int] = field(default_factory=dict)
    """Modules that are known to be spatial and in which the inspection found no attention, by class."""
    version: str = ""
    """Version of the library that the model is from."""

    @property
    def layers(self) -> int:
        """Number of layers that take a prior."""
        return sum(self.served.values())

    @property
    def missed(self) -> list[RefusedLayers]:
        """Spatial attention that takes no prior."""
        return [layers for layers in self.refused if layers.spatial]

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


def finding_of(inspection: Inspection, name: str, family: str, spatial: dict[str, str] | None = None) -> Finding:
    """Returns what an inspection found, as a finding.

    Args:
        inspection: of the model.
        name: of the model.
        family: of the model.
        spatial: class of each module that is known to be spatial, by name; None if nothing is known.
    """
    model, sites = inspection.runner.model, inspection.sites
    served = Counter(f"{type(site.module).__name__}, {site.place}" for site in inspection.served)
    refused: Counter[RefusedLayers] = Counter()
    for site in inspection.refused:
        assert site.refusal is not None
        kind, reason, queries, keys = site.refusal.kind, site.refusal.reason, *site.logits[-2:]
        known = _module_name(site) in (spatial or {})
        refused[RefusedLayers(type(site.module).__name__, kind, reason, queries, keys, spatial=known)] += 1
    finding = Finding(
        model=name,
        family=family,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        image=inspection.runner.image,
        served=dict(served),
        windows=any(site.windows > 1 for site in inspection.served),
        refused=tuple(replace(layers, count=count) for layers, count in refused.items()),
    )
    if spatial is None:
        return finding
    seen = {_module_name(site) for site in sites}
    refusing = {_module_name(site) for site in inspection.refused}
    unseen = Counter(cls for module, cls in spatial.items() if module not in seen)
    unexpected = Counter(type(site.module).__name__ for site in inspection.served if _module_name(site) not in spatial)
    return replace(
        finding,
        spatial=len(spatial),
        spatial_served=len(spatial.keys() & (seen - refusing)),
        unseen=dict(unseen),
        unexpected=dict(unexpected),
    )


def _module_name(site: AttentionSite) -> str:
    """Returns the name of a site's module: the site's without the number of the attention."""
    return site.name.partition("#")[0]


def finding_or_skip(name: str, family: str, find: Callable[[], Finding]) -> Finding:
    """Returns the finding of one model; if it fails, a finding that says why the model was skipped."""
    try:
        return find()
    except Exception as error:
        # Python without memory for its frames raises SystemError; a runner puts the model's error into its own message
        said = ("allocate memory", "bad_alloc", "MemoryError")
        if isinstance(error, MemoryError | SystemError) or any(words in str(error) for words in said):
            return Finding(name, family, skipped=NO_MEMORY)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(name, family, skipped=text[:MAX_REASON])
    finally:
        gc.collect()


def read_notes(notes: Path) -> list[Finding]:
    """Returns the findings of an earlier survey; lines that were cut off, or of another form, are left out."""
    findings = []
    for line in notes.read_text().splitlines() if notes.exists() else ():
        try:
            findings.append(Finding.from_json(line))
        except (ValueError, TypeError, KeyError):
            continue
    return findings


@dataclass(frozen=True)
class Limits:
    """What the inspecting process can use."""

    memory: int
    """Bytes."""
    seconds: float
    """Time for one model."""
    models: int = 1
    """Number of models after which the process is replaced."""


@dataclass(frozen=True)
class Survey:
    """Inspects models by name when it is iterated over, and yields a finding for each."""

    families: Mapping[str, str]
    """Family of each model, by the model's name."""
    inspect: Callable[[str, str], Finding]
    """Inspects a model, given its name and family, in another process: picklable, and a failure is a finding too."""
    notes: Path
    """File of findings, one per line."""
    limits: Limits
    version: str
    """Version of the library."""
    is_final: Callable[[Finding], bool] = lambda finding: not finding.skipped
    """Whether a noted model need not be inspected again; one of another version always is."""
    minutes: float = math.inf
    """Time after which no further model is inspected; those that are noted are yielded still."""

    def __len__(self) -> int:
        return len(self.families)

    def __iter__(self) -> Iterator[Finding]:
        done = {
            finding.model: finding
            for finding in read_notes(self.notes)
            if finding.version == self.version and self.is_final(finding)
        }
        self.notes.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + 60 * self.minutes
        cut_off = self.notes.exists() and not self.notes.read_bytes().endswith(b"\n")
        with SurveyProcess(self.limits) as process, self.notes.open("a") as file:
            file.write("\n" if cut_off else "")
            for name, family in self.families.items():
                if name not in done and time.monotonic() > end:
                    continue
                if name not in done:
                    done[name] = replace(process.run(self.inspect, name, family), version=self.version)
                    file.write(done[name].to_json() + "\n")
                    file.flush()
                yield done[name]


class SurveyProcess:
    """A process that inspects models, one after the other; it starts with the first, and is replaced when it ends."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.process: multiprocessing.process.BaseProcess | None = None

    def __enter__(self) -> "SurveyProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
            self.process = None

    def run(self, inspect: Callable[[str, str], Finding], name: str, family: str) -> Finding:
        """Returns the finding of one model; one that needs too much memory or time is a finding too."""
        if self.process is None:
            self._start()
        self.count += 1
        try:
            self.connection.send((inspect, name, family))
            finding = self.connection.recv() if self.connection.poll(self.limits.seconds) else None
        except (EOFError, OSError):  # the process died
            self.__exit__()
            return Finding(name, family, skipped=NO_MEMORY)
        if finding is None:
            self.__exit__()
            return Finding(name, family, skipped=NO_TIME.format(self.limits.seconds))
        if self.count == self.limits.models:
            self.__exit__()
        assert isinstance(finding, Finding)
        return finding

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, self.limits.memory), daemon=True)
        self.process.start()
        self.count = 0
        other.close()


def _work(connection: Connection, memory: int) -> None:
    """Inspects models until the survey ends."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    warnings.filterwarnings("ignore")
    try:
        while True:
            inspect, name, family = connection.recv()
            connection.send(inspect(name, family))
    except (EOFError, OSError, MemoryError, SystemError):  # the survey ended, or there is no memory to answer
        return
