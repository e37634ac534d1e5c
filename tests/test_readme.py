"""README.md, and the pages of docs: examples run; links, files and names exist."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import vicinal

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = ["--epochs", "1", "--warmup", "0", "--train-size", "128"]


def run_python_blocks(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    names: dict[str, object] = {}  # later blocks build on earlier ones
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def anchors(page):
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def test_readme_python_examples_run():
    run_python_blocks(README)


@pytest.mark.parametrize("page", ["analysis.md", "mixing.md", "models.md", "priors.md"])
def test_python_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "analysis.md":  # it opens a run
        vicinal.train(vicinal.TrainConfig(epochs=1, warmup=0, train_size=128, out="runs/x"))
    run_python_blocks(ROOT / "docs" / page)


@pytest.mark.slow
def test_readme_commands_run(tmp_path):
    """Those that need no download and no photographs, on one epoch of 128 images."""
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^vicinal .+$", README.read_text(), re.M)]
    commands = [words for words in commands if not {"cifar10", "folder:photos"} & set(words)]
    assert len(commands) >= 7
    for words in commands:
        new = words[1] == "train" and "--resume" not in words
        command = [sys.executable, "-m", *words, *(QUICK if new else [])]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not heading or heading in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_of_the_package_exist(page):
    text = page.read_text()
    for path in re.findall(r"\b(?:src|tests|benchmarks)/[\w/.-]*\w", text):
        assert (ROOT / path).exists() or "NAME" in path, path
    for name in set(re.findall(r"\bvicinal(?:\.[A-Za-z]\w*)+", text)):
        found, parent = importlib.import_module("vicinal"), "vicinal"
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                importlib.import_module(f"{parent}.{part}")
            found, parent = getattr(found, part), f"{parent}.{part}"
