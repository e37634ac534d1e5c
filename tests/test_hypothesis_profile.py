"""Property tests draw the same examples in every run of `make test`, whatever was imported before."""

import importlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st


def drawn_examples(**options):
    """Returns the examples that a property test draws."""
    found = []

    @settings(max_examples=200, **options)
    @given(st.integers(0, 2**32), st.floats(-1e6, 1e6))
    def draw(number, decimal):
        found.append((number, decimal))

    draw()
    return found


def test_examples_do_not_depend_on_what_was_imported(tmp_path, monkeypatch):
    before = drawn_examples(derandomize=True)
    constants = ", ".join(f"{number}, {number}.5" for number in random.Random(0).sample(range(10**5), 300))
    (tmp_path / "constants_of_ours.py").write_text(f"NUMBERS = [{constants}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("constants_of_ours")
    assert drawn_examples(derandomize=True) == before


def test_profiles_know_no_clock():
    assert {settings.get_profile(name).deadline for name in ("fixed", "random")} == {None}
    assert settings.get_profile("fixed").derandomize


def test_the_random_profile_draws_other_examples_each_time():
    chosen = settings.get_profile("random")
    assert not chosen.derandomize
    assert drawn_examples(derandomize=chosen.derandomize) != drawn_examples(derandomize=chosen.derandomize)
