"""What each arm changed, how the runs were made, and what failed."""

from typing import Any

from markupsafe import Markup

from vicinal.report.html import html_table
from vicinal.report.section import Section
from vicinal.report.source import ReportArm, ReportSource
from vicinal.training.config import TrainConfig
from vicinal.training.run_folder import Run

__all__ = ["settings_section"]

IGNORED = ("out", "seed", "checkpoint_minutes", "track", "workers")


def settings_section(source: ReportSource) -> Section | None:
    """Returns the settings that differ between arms, the whole configuration, and the machine; None without runs."""
    arms = [arm for arm in source.arms if arm.runs]
    if not arms:
        return None
    parts = []
    configs = [arm.runs[0].config for arm in arms]
    differing = [name for name in _field_names() if len({_text(getattr(config, name)) for config in configs}) > 1]
    if differing:
        rows = [[name, *(_text(getattr(config, name)) for config in configs)] for name in differing]
        caption = "Settings that differ between arms; all others are the same"
        parts.append(html_table(["setting", *(arm.label for arm in arms)], rows, caption=caption, sortable=False))
    parts.append(_failures(source))
    parts += [_configuration(arm) for arm in arms]
    parts.append(_environments(arms))
    return Section("settings", "What was run", Markup("").join(parts))


def _failures(source: ReportSource) -> Markup:
    if source.result is None or not source.result.failures:
        return Markup("")
    rows = [[name, message] for name, message in source.result.failures.items()]
    return html_table(["run", "why"], rows, caption="Runs without results", sortable=False)


def _configuration(arm: ReportArm) -> Markup:
    text = arm.runs[0].config.to_yaml()
    return Markup('<details><summary>Configuration of {}</summary><pre tabindex="0">{}</pre></details>').format(
        f"{arm.label}, {arm.runs[0].folder.name}", text
    )


def _environments(arms: list[ReportArm]) -> Markup:
    """Returns the machines and versions of all runs; runs with the same ones share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for arm in arms:
        for run in arm.runs:
            lines.setdefault(_environment(run), []).append(run.folder.name)
    rows = [[*values, ", ".join(runs)] for values, runs in lines.items()]
    header = ["device", "threads", "attention", "vicinal", "torch", "timm", "commit", "runs"]
    return html_table(header, rows, caption="Where the runs were made", sortable=False)


def _environment(run: Run) -> tuple[str, ...]:
    record = run.environment
    versions = record.get("versions", {})
    device = str(record.get("device_name") or record.get("device", "unknown"))
    packages = tuple(str(versions.get(name, "unknown")) for name in ("vicinal", "torch", "timm"))
    commit = str(record.get("git_commit") or "unknown")[:12]
    return (device, str(record.get("threads", "unknown")), str(record.get("attention", "unknown")), *packages, commit)


def _field_names() -> list[str]:
    return [name for name in TrainConfig.__dataclass_fields__ if name not in IGNORED]


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else "not set" if value is None else str(value)
