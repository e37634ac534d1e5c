"""Which of timm's models take a prior: every one is made, examined and written down.

One model at a time, in a process of its own that is bounded in memory and renewed now and then. What was found goes
line by line into a file, so that an interrupted survey goes on where it was.
"""

import fnmatch
import gc
import json
import multiprocessing
import resource
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from vicinal._torchvision import ensure_torchvision
from vicinal.attachment.examining import examine
from vicinal.attachment.finding import calls_of
from vicinal.attachment.running import quietly, runner_for
from vicinal.errors import VicinalError

ensure_torchvision()

import timm  # noqa: E402

__all__ = ["Finding", "look_at", "page", "survey"]

RENEWED = 40  # models examined by one process
NO_MEMORY = "it needs more memory than the survey may use"


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
    left: dict[str, int] = field(default_factory=dict)
    """Modules left alone, by class and reason."""
    skipped: str = ""
    """Why the model was not examined."""
    timm: str = timm.__version__

    @property
    def missed(self) -> bool:
        """Whether attention over a grid was left alone: square logits, but refused."""
        return any(not _has_no_grid(reason) for reason in self.left)


def _has_no_grid(reason: str) -> bool:
    known = ("no common grid", "no softmax of a product", "single patch", "over channels", "does not depend")
    return any(text in reason for text in known)


def families() -> dict[str, str]:
    """timm's file of each model."""
    return {
        name: module
        for module in timm.list_modules()
        for name in timm.list_models(module=module)
        if timm.model_entrypoint(name).__module__.startswith("timm.")  # others register theirs too
    }


def look_at(name: str, family: str, limit: int) -> Finding:
    """Make one model, and see which of its attention modules take a prior.

    Args:
        name: of a timm model.
        family: of that model, to be passed on.
        limit: parameters that a model may have.
    """
    with torch.device("meta"):
        empty = timm.create_model(name).eval()
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > limit:
        return Finding(name, family, count, skipped=f"more than {limit / 1e6:.0f} M parameters")
    if not _attends(empty):
        return Finding(name, family, count, runner_for(empty).image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = runner_for(timm.create_model(name))
    with torch.no_grad(), quietly(run.model):
        found = examine(run)
    served = Counter(f"{type(site.module).__name__}, {site.place}" for site in found.sites)
    left = Counter(f"{type(site.module).__name__}: {site.reason}" for site in found.left_alone)
    windows = any(site.windows > 1 for site in found.sites)
    return Finding(name, family, count, run.image, dict(served), windows, dict(left))


def _attends(empty: nn.Module) -> bool:
    """Whether a model computes any softmax of the kind; on the meta device, where running costs little."""
    run = runner_for(empty)
    try:
        return bool(calls_of(empty, lambda: run(run.noise(1))))
    except VicinalError:  # some models do not run there
        return True


def survey(pattern: str, notes: Path, *, limit: int, memory: int) -> Iterator[Finding | int]:
    """Look at every timm model whose name fits: first how many there are, then a finding for each.

    Args:
        pattern: of names, such as `swin*`.
        notes: file of findings, one a line; models examined there are not looked at again.
        limit: parameters that a model may have.
        memory: bytes that the examining process may use.
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
    with _Examiner(memory) as examiner, notes.open("a") as file:
        file.write("\n" if cut_off else "")
        for name in names:
            if name not in done:
                finding = examiner.look_at(name, known[name], limit)
                file.write(json.dumps(asdict(finding)) + "\n")
                file.flush()
                done[name] = finding
            yield done[name]


def read_notes(notes: Path) -> list[Finding]:
    """The findings of an earlier survey, if there is one; a line cut off by an interruption is dropped."""
    findings = []
    for line in notes.read_text().splitlines() if notes.exists() else ():
        try:
            values = json.loads(line)
            findings.append(Finding(**values | {"image": tuple(values["image"])}))
        except (ValueError, TypeError, KeyError):
            continue
    return findings


class _Examiner:
    """A process that examines models, and is replaced when it dies."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def __enter__(self) -> "_Examiner":
        self.pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_bound,
            initargs=(self.memory,),
            max_tasks_per_child=RENEWED,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def look_at(self, name: str, family: str, limit: int) -> Finding:
        """One finding; what goes wrong is one too."""
        try:
            return self.pool.submit(_look_at, name, family, limit).result()
        except (BrokenProcessPool, MemoryError, SystemError):  # it died, or had not even room to answer
            self.__exit__()
            self.__enter__()
            return Finding(name, family, skipped=NO_MEMORY)


def _bound(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    warnings.filterwarnings("ignore")


def _look_at(name: str, family: str, limit: int) -> Finding:
    try:
        return look_at(name, family, limit)
    except (VicinalError, RuntimeError, MemoryError, SystemError) as error:
        # Python without memory for its own frames says SystemError; a model's own error may be told inside of another
        said = ("allocate memory", "bad_alloc", "MemoryError")
        if isinstance(error, MemoryError | SystemError) or any(words in str(error) for words in said):
            return Finding(name, family, skipped=NO_MEMORY)
        return Finding(name, family, skipped=f"{type(error).__name__}: {error}".split("\n")[0][:200])
    finally:
        gc.collect()


def page(findings: Sequence[Finding], limit: int) -> str:
    """The findings as a page of Markdown."""
    examined = [finding for finding in findings if not finding.skipped]
    attention = [finding for finding in examined if finding.served or finding.missed]
    served = [finding for finding in attention if finding.served]
    whole = [finding for finding in served if not finding.missed]
    windows = [finding for finding in served if finding.windows]
    without = [finding for finding in examined if not finding.served and not finding.missed]
    lines = [
        "# Which models take a prior",
        "",
        f"Written by `vicinal models --coverage` with timm {timm.__version__} and torch {torch.__version__}: every"
        f" model of up to {limit / 1e6:.0f} M parameters is made at its own image size, and `attach`'s checks are run"
        " on every attention module.",
        "",
        f"- {len(findings)} models: {len(examined)} examined, {len(findings) - len(examined)} not (too large, mostly).",
        f"- {len(attention)} have attention over a grid. {len(served)} of them take a prior"
        f" ({len(served) - len(windows)} on global grids only, {len(windows)} on windows too);"
        f" in {len(whole)} every such layer does.",
        f"- {len(without)} have none: no attention, or only over channels, a class token, pooled keys and the like.",
        "",
        "Numbers of models in brackets.",
        "",
        "| family | models | take a prior | classes | left alone, and why |",
        "|---|---|---|---|---|",
    ]
    for family, members in _by_family(attention + [finding for finding in without if finding.left]).items():
        takers = [finding for finding in members if finding.served]
        classes = _totals((name.split(",")[0], finding) for finding in takers for name in finding.served)
        reasons = _totals((_short(reason), finding) for finding in members for reason in finding.left)
        lines.append(f"| {family} | {len(members)} | {len(takers)} | {_cell(classes)} | {_cell(reasons)} |")
    missed = [finding for finding in attention if finding.missed]
    if missed:
        lines += ["", "## Attention over a grid that takes none", "", "| model | class and reason |", "|---|---|"]
        lines += [
            f"| {finding.model} | {'; '.join(reason for reason in finding.left if not _has_no_grid(reason))} |"
            for finding in missed
        ]
    small = [finding for finding in findings if finding.skipped and "M parameters" not in finding.skipped]
    if small:
        lines += ["", "## Not examined", "", "| model | why |", "|---|---|"]
        lines += [f"| {finding.model} | {finding.skipped} |" for finding in small]
    return "\n".join(lines) + "\n"


def _short(reason: str) -> str:
    """Without the numbers of tokens, so that layers of all sizes count as one."""
    kind, text = reason.split(": ", 1)
    if "no common grid" in text:
        queries, keys = (int(word) for word in text.split() if word.isdigit())
        text = (
            "one query" if queries == 1 else "fewer keys than queries" if keys < queries else "more keys than queries"
        )
    return f"{kind}: {text}"


def _totals(pairs: Iterable[tuple[str, Finding]]) -> dict[str, set[str]]:
    models: dict[str, set[str]] = {}
    for text, finding in pairs:
        models.setdefault(text, set()).add(finding.model)
    return models


def _cell(models: dict[str, set[str]]) -> str:
    return "<br>".join(f"{text} ({len(names)})" for text, names in models.items())


def _by_family(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    families: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: (finding.family, finding.model)):
        families.setdefault(finding.family, []).append(finding)
    return families
