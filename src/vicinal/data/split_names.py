"""Names of splits: one table for folders, Parquet files and datasets on the Hub."""

import re
from collections.abc import Iterable
from typing import Literal

from vicinal.errors import VicinalError

__all__ = ["SPLIT_NAMES", "SplitRole", "assign_roles", "known_names", "split_role"]

SplitRole = Literal["train", "val", "test"]
"""What a split is for."""

SPLIT_NAMES: dict[SplitRole, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Usual names of each split, in lower case. An appended `set` does not count: `training_set`."""

_ROLE_OF_NAME = {name: role for role, names in SPLIT_NAMES.items() for name in names}
_FULL_NAMES = {"train": "training", "val": "validation", "test": "test"}


def split_role(name: str) -> SplitRole | None:
    """Returns what the split of a name is for; None if the name is not a usual one.

    >>> from vicinal.data.split_names import split_role
    >>> split_role("Valid"), split_role("training_set"), split_role("cats")
    ('val', 'train', None)
    """
    return _ROLE_OF_NAME.get(re.sub(r"[\W_]+", "", name.casefold()).removesuffix("set"))


def assign_roles(names: Iterable[str], where: str) -> dict[SplitRole, str]:
    """Returns the name of the training, validation and test split, as far as there are such names.

    Args:
        names: names of splits; those that are not usual ones are left out.
        where: name of the dataset in error messages.

    Raises:
        VicinalError: two names stand for the same split.
    """
    roles: dict[SplitRole, str] = {}
    for name in names:
        role = split_role(name)
        if role is not None and roles.setdefault(role, name) != name:
            raise VicinalError(
                f"{where} has {roles[role]} and {name}, which are both names of the {_FULL_NAMES[role]} split; rename "
                "or remove one of them: which is it?"
            )
    return roles


def known_names() -> str:
    """Returns a text that lists the usual names of splits."""
    return ", ".join(name for names in SPLIT_NAMES.values() for name in names)
