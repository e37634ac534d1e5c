"""`vicinal models`: what models there are, and which of them take a prior."""

import fnmatch
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vicinal.errors import VicinalError

if TYPE_CHECKING:
    from vicinal.models.backbones import Backbone

__all__ = ["run"]


def models(
    pattern: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    coverage: bool = False,
    out: Path | None = None,
    notes: Path = Path("runs/coverage.jsonl"),
    limit: float = 100.0,
    memory: float = 12.0,
) -> None:
    """List the models, or find out which of them take a prior.

    Args:
        pattern: of names, such as 'deit*'. Without one, our backbones and timm's families.
        coverage: make each of timm's models that fit, see which of its attention takes a prior, and write a page.
        out: where that page goes; docs/coverage.md for all models, runs/coverage.md for those of a pattern.
        notes: what was found, model by model; models found there are not made again, unless timm has changed.
        limit: skip models of more than that many million parameters.
        memory: GiB that making and examining a model may use.
    """
    if coverage:
        out = out or Path("runs/coverage.md" if pattern else "docs/coverage.md")
        print(cover(pattern or "*", out, notes, round(limit * 1e6), round(memory * 2**30)))
    else:
        print(names(pattern) if pattern else overview())


def overview() -> str:
    """Our backbones, then timm's families and how many models each has."""
    from vicinal.attachment.coverage import families
    from vicinal.models import BACKBONES

    lines = [f"{'model':14}{'parameters':>11}  {'patch':9}{'pooling':12}at 32 px, 10 classes"]
    for backbone in BACKBONES.values():
        patches = f"{backbone.patch_for((32, 32))}, {backbone.patch_for((64, 64))}"
        pools = ", ".join(backbone.pools)
        lines.append(f"{backbone.name:14}{_parameters(backbone):>11,}  {patches:9}{pools:12}{backbone.summary}")
    lines += ["", "patch: below 64 px, and from 64 px on; pooling: the default first", ""]
    lines += [f"{'timm family':32}models"]
    counts = Counter(families().values())
    lines += [f"{family:32}{count:>6}" for family, count in sorted(counts.items())]
    return "\n".join([*lines, "", "vicinal models 'swin*' lists names; --coverage says which of them take a prior"])


def _parameters(backbone: "Backbone") -> int:
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in backbone.create().parameters())


def names(pattern: str) -> str:
    """The names that fit a pattern, ours first."""
    from vicinal.attachment.coverage import families
    from vicinal.models import BACKBONES

    found = [*fnmatch.filter(BACKBONES, pattern), *sorted(fnmatch.filter(families(), pattern))]
    if not found:
        raise VicinalError(f"no model is named {pattern!r}; try a pattern such as '*{pattern.strip('*')}*'")
    return "\n".join(found)


def cover(pattern: str, out: Path, notes: Path, limit: int, memory: int) -> str:
    """Look at every model, with a progress bar, and write the page."""
    from tqdm import tqdm

    from vicinal.attachment.coverage import Finding, survey
    from vicinal.attachment.coverage_page import coverage_page

    findings = []
    steps = survey(pattern, notes, limit=limit, memory=memory)
    with tqdm(total=next(steps), unit="model") as bar:
        for finding in steps:
            assert isinstance(finding, Finding)
            findings.append(finding)
            bar.set_postfix_str(finding.model)
            bar.update()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(coverage_page(findings, limit))
    taking = sum(bool(finding.served) for finding in findings)
    return f"{taking} of {len(findings)} models take a prior; wrote {out}"


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    tyro.cli(models, prog="vicinal models", args=words)
