"""`vicinal models`: what models there are, and which of them take a prior."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from vicinal._torchvision import ensure_torchvision
from vicinal.errors import VicinalError

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
        pattern: of timm names, such as 'deit*'. Without one, timm's families.
        coverage: make each of these models, see which of its attention takes a prior, and write a page.
        out: where that page goes; docs/coverage.md for all models, runs/coverage.md for those of a pattern.
        notes: what was found, model by model; models found there are not made again, unless timm has changed.
        limit: skip models of more than that many million parameters.
        memory: GiB that making and examining a model may use.
    """
    if coverage:
        out = out or Path("runs/coverage.md" if pattern else "docs/coverage.md")
        print(cover(pattern or "*", out, notes, round(limit * 1e6), round(memory * 2**30)))
    else:
        print(names(pattern) if pattern else families())


def families() -> str:
    """timm's families, and how many models each has."""
    from vicinal.attachment.coverage import families

    counts = Counter(families().values())
    lines = [f"{'family':32}models"]
    lines += [f"{family:32}{count:>6}" for family, count in sorted(counts.items())]
    return "\n".join([*lines, "", "vicinal models 'swin*' lists names; --coverage says which of them take a prior"])


def names(pattern: str) -> str:
    """The names that fit a pattern."""
    ensure_torchvision()
    import timm

    found = timm.list_models(pattern)
    if not found:
        raise VicinalError(f"no timm model is named {pattern!r}; try a pattern such as '*{pattern.strip('*')}*'")
    return "\n".join(found)


def cover(pattern: str, out: Path, notes: Path, limit: int, memory: int) -> str:
    """Look at every model, with a progress bar, and write the page."""
    from tqdm import tqdm

    from vicinal.attachment.coverage import Finding, page, survey

    findings = []
    steps = survey(pattern, notes, limit=limit, memory=memory)
    with tqdm(total=next(steps), unit="model") as bar:
        for finding in steps:
            assert isinstance(finding, Finding)
            findings.append(finding)
            bar.set_postfix_str(finding.model)
            bar.update()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(findings, limit))
    taking = sum(bool(finding.served) for finding in findings)
    return f"{taking} of {len(findings)} models take a prior; wrote {out}"


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    tyro.cli(models, prog="vicinal models", args=words)
