"""The environment variable `VICINAL_NATIVE`: 0 for off, 1 for the best variant, or the name of one."""

import os

from vicinal.attention.native.cpu_features import VARIANTS, Variant
from vicinal.errors import VicinalError

__all__ = ["VARIABLE", "chosen_variant", "setting_value", "variant_names"]

VARIABLE = "VICINAL_NATIVE"


def setting_value() -> str:
    """Returns the value of `VICINAL_NATIVE`, `1` by default."""
    return os.environ.get(VARIABLE, "").strip().lower() or "1"


def chosen_variant(variants: tuple[Variant, ...]) -> Variant | None:
    """Returns the variant that `VICINAL_NATIVE` asks for, or the best one; None if it switches the library off.

    Args:
        variants: those that this CPU can run, the best first.

    Raises:
        VicinalError: it asks for anything else.
    """
    setting = setting_value()
    if setting in ("0", "1"):
        return variants[0] if setting == "1" else None
    found = next((each for each in variants if each.name == setting), None)
    if found is not None:
        return found
    problem = "this CPU cannot run it" if setting in [each.name for each in VARIANTS] else "there is no such variant"
    choices = f"0 (off), 1 (the best variant) or one of {variant_names(variants)}"
    raise VicinalError(f"{VARIABLE} must be {choices}, got {setting!r}: {problem}")


def variant_names(variants: tuple[Variant, ...]) -> str:
    """Returns the names of variants with commas."""
    return ", ".join(each.name for each in variants)
