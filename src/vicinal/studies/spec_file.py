"""The YAML file of a study: its values, and the line of each for error messages."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vicinal.errors import VicinalError

__all__ = ["FieldPath", "SpecFile"]

FieldPath = tuple[str | int, ...]
"""Keys and indices from the top of the file to a value, such as `("arms", "gmm", "prior")`."""


@dataclass(frozen=True)
class SpecFile:
    """The values of a study, and where they are written."""

    name: str
    """Where the values come from, for messages."""
    values: Mapping[str, Any]
    lines: Mapping[FieldPath, int] = field(default_factory=dict)
    """Line of each value, from 1; none for values that are not from a file."""
    text: str = ""
    """The file as it is; made from the values if they are not from a file."""

    @classmethod
    def read(cls, file: Path) -> "SpecFile":
        """Returns the content of a file.

        Raises:
            VicinalError: if the file cannot be read, is not YAML, is empty, or has a key twice.
        """
        try:
            text = file.read_text(encoding="utf-8")
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            lines = {} if node is None else dict(_lines(node, (), str(file)))
            values = None if node is None else loader.construct_document(node)
        except OSError as error:
            raise VicinalError(f"cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise VicinalError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise VicinalError(f"{file} has no fields; expected lines such as 'arms:' (docs/studies.md)")
        return cls(str(file), values, lines, text)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "SpecFile":
        """Returns a study whose values come from Python."""
        return cls("study", values, {}, yaml.safe_dump(_plain(values), sort_keys=False))

    def error(self, path: FieldPath, problem: str) -> VicinalError:
        """Returns the error of a field, which names file, line and field.

        Args:
            path: of the field; the line of the nearest field around it is named if the field is missing.
            problem: what is wrong, what was expected and what to do.
        """
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)
        line = "" if known is None else f", line {self.lines[known]}"
        name = f", {'.'.join(map(str, path))}" if path else ""
        return VicinalError(f"{self.name}{line}{name}: {problem}")


def _lines(node: yaml.Node, path: FieldPath, file: str) -> Iterator[tuple[FieldPath, int]]:
    """Yields the path and the line of every value below a node.

    Raises:
        VicinalError: if a mapping has a key twice; YAML would keep the last one.
    """
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), file)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line, name = key.start_mark.line + 1, str(key.value)
            if key.tag == "tag:yaml.org,2002:merge":
                yield from _lines(value, path, file)
                continue
            if name in seen:
                raise VicinalError(f"{file}, line {line}, {'.'.join(map(str, (*path, name)))}: is there twice")
            seen.add(name)
            yield (*path, name), line
            yield from _lines(value, (*path, name), file)


def _plain(value: Any) -> Any:
    """Returns a value with only what YAML has: dictionaries, lists, text, numbers, booleans and None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
