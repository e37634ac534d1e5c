"""The file config.yaml: its fields, and those of earlier versions as this version names them."""

from pathlib import Path
from typing import Any

import yaml

from vicinal.errors import VicinalError
from vicinal.training.recipes import DEFAULT_RECIPE

__all__ = ["FORMAT", "read_fields"]

FORMAT = 2
"""Version of the rules of training, `format` in config.yaml. Files without it are of version 1."""


def read_fields(file: Path, *, stored: bool) -> tuple[str, dict[str, Any]]:
    """Returns the name of the recipe and the fields of a configuration in a YAML file, in current spellings.

    Args:
        file: the file.
        stored: the file is that of a run. Before format 2, a warm-up could be as long as the run; it becomes None.

    Raises:
        VicinalError: if the file cannot be read, is not YAML, or is of a later version.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise VicinalError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise VicinalError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise VicinalError(f"{file} has no fields; expected lines such as 'model: vit'")
    name, version = values.pop("recipe", DEFAULT_RECIPE), values.pop("format", 1)
    if version not in (1, FORMAT):
        raise VicinalError(f"{file}: format must be 1 or {FORMAT}, got {version!r}; a later version wrote it")
    if stored and version == 1 and (values.get("warmup") or 0) >= values["epochs"]:
        values["warmup"] = None
    if version == 1 and "pool" in values and values["pool"] is None:
        values["pool"] = "paper"  # the default of all models before vit-mini and vit-micro got the mean
    if isinstance(values.get("prior"), str):
        from vicinal.priors.spec import current_spec

        values["prior"] = current_spec(values["prior"])  # old files may have old spellings
    return name, values
