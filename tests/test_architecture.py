"""docs/architecture.md describes the source as it is."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vicinal"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def listed_files():
    """Returns the files of the page's tree and their descriptions; a folder stands for its `__init__.py`."""
    tree = re.search(r"## Tree.*?```text\n(.*?)```", PAGE, re.S)
    assert tree is not None
    folders: list[str] = []
    files = []
    for line in tree[1].splitlines():
        name, _, description = line.strip().partition(" ")
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        if name.endswith("/"):
            folders.append(name)
            name = "__init__.py"
        files.append(("".join(folders) + name, description.strip()))
    return files


@cache
def defined_names(file):
    """Returns the names that a file defines, such as `tap` and `Tap.last`; none if there is no file."""
    names: set[str] = set()
    if not (SOURCE / file).exists():
        return names
    for node in ast.parse((SOURCE / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_the_tree_lists_every_file_once_and_no_other():
    listed = Counter(name for name, _ in listed_files())
    present = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py")}
    assert set(listed) - present == set(), "listed, but not there"
    assert present - set(listed) == set(), "there, but not listed"
    assert max(listed.values()) == 1


def test_every_file_of_the_tree_has_a_description():
    undescribed = [name for name, text in listed_files() if not text and not name.endswith("/__init__.py")]
    assert undescribed == []


def test_functions_that_the_page_names_exist():
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)
    assert len(named) > 30
    missing = [f"{file}: {name}" for file, name in named if name not in defined_names(file)]
    assert missing == []


def test_every_room_is_in_the_table_of_rooms():
    rooms = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", PAGE, re.M))


def test_the_glossary_stays_short():
    terms = re.findall(r"^\| ([^|]+) \|", PAGE.split("## Glossary")[1], re.M)[1:]
    assert len(terms) <= 20
