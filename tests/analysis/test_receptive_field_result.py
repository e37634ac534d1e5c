"""Figures of receptive fields against fields whose figures are known."""

import json

import numpy as np
import pytest
import torch

from lively_models import vit
from vicinal import VicinalError
from vicinal.analysis.fit_note import NoteKind
from vicinal.analysis.receptive_field import ReceptiveField, receptive_field


def gaussian_field(size, center, sigma_y, sigma_x, **options):
    y, x = np.arange(size[0])[:, None] + 0.5 - center[0], np.arange(size[1]) + 0.5 - center[1]
    field = np.exp(-((y / sigma_y) ** 2) / 2 - (x / sigma_x) ** 2 / 2)
    return made(field / field.sum(), **options)


def made(field, *, grid, at, **options):
    about = {"model": "m", "layer": "l", "stem": grid, "images": 1, "mode": "clip", "positions": "trained"}
    return ReceptiveField(field=field, grid=grid, at=at, **about | options)


@pytest.mark.parametrize("patch", [1, 4, 5])
def test_a_square_is_the_smallest_of_whole_pixels_that_holds_the_share(patch):
    grid, at = (6, 9), (4, 2)
    field = np.random.default_rng(0).random((6 * patch, 9 * patch))
    found = made(field / field.sum(), grid=grid, at=at)
    down, right = ((place + 0.5) * patch for place in at)
    for share in (0.2, 0.3, 0.5, 0.99, 1.0):
        side = found.square(share)
        for wide, reached in ((side, True), (side - 2, False)):
            rows = slice(max(0, round(down - wide / 2)), round(down + wide / 2))
            columns = slice(max(0, round(right - wide / 2)), round(right + wide / 2))
            assert (found.field[rows, columns].sum() >= share - 1e-9) == reached
    inside = found.field[4 * patch : 5 * patch, 2 * patch : 3 * patch].sum()
    assert found.outside_center_patch == pytest.approx(1 - inside)


def test_patches_of_no_whole_number_of_pixels_share_pixels():
    found = made(np.full((10, 10), 0.01), grid=(4, 4), at=(1, 1))
    assert found.patch == (2.5, 2.5)
    assert found.outside_center_patch == pytest.approx(15 / 16)
    assert found.by_patch == pytest.approx(np.full((4, 4), 1 / 16))
    assert found.square(1) == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((32, 32), {"grid": (8, 8), "at": (4, 4)}),
        ((224, 224), {"grid": (14, 14), "at": (7, 7)}),
        ((224, 224), {"grid": (7, 7), "at": (3, 3), "stem": (224, 224)}),
        ((96, 160), {"grid": (6, 10), "at": (2, 6)}),
    ],
)
def test_the_fit_gives_the_widths_of_a_gaussian_in_pixels_and_patches(size, options):
    patch = size[0] / options["grid"][0]
    peak = [(place + 0.5) * patch + shift for place, shift in zip(options["at"], (2, -1), strict=True)]
    found = gaussian_field(size, peak, sigma_y=size[0] / 8, sigma_x=size[0] / 10, **options)
    assert found.fit.sigma_y == pytest.approx(size[0] / 8, rel=0.02)
    assert found.fit.sigma_x == pytest.approx(size[0] / 10, rel=0.02)
    assert (found.fit.center_y, found.fit.center_x) == pytest.approx((2, -1), abs=0.1)
    assert found.fit.r2 > 0.99
    figures = found.as_dict()["fit"]
    assert figures["sigma_y"]["pixels"] == found.fit.sigma_y
    assert figures["sigma_y"]["patches"] == found.fit.sigma_y / patch


def test_a_spike_over_a_constant_is_told_as_one():
    field = np.full((32, 32), 0.8 / 1024)
    field[16:20, 16:20] += 0.2 / 16
    found = made(field, grid=(8, 8), at=(4, 4))
    assert found.constant_share == pytest.approx(0.8, abs=0.01)
    assert (found.fit.fits, found.fit.kinds) == (True, (NoteKind.TOO_NARROW, NoteKind.MOSTLY_CONSTANT))
    assert "80%" in found.fit.note
    figures = found.as_dict()["fit"]
    assert figures["at_most"] == {"sigma_x": True, "sigma_y": True}
    assert figures["sigma_x"]["patches"] == pytest.approx(0.33)
    assert figures["constant_share"] == found.constant_share
    wide = gaussian_field((32, 32), (18, 18), 5, 6, grid=(8, 8), at=(4, 4))
    assert wide.as_dict()["fit"]["at_most"] == {"sigma_x": False, "sigma_y": False}
    assert wide.fit.kinds == ()


def test_profiles_are_among_the_figures():
    field = np.random.default_rng(0).random((12, 18))
    found = made(field / field.sum(), grid=(2, 3), at=(0, 2), stem=(4, 6))
    across, within = (found.as_dict()[key] for key in ("across", "within"))
    assert across["pixels"] == [-13.5, -10.5, -7.5, -4.5, -1.5, 1.5]
    columns = [found.field[:, 3 * number : 3 * number + 3].sum() * 6 for number in range(6)]
    assert across["energy"] == pytest.approx(columns)
    assert within["share"][-1] == pytest.approx(1)
    assert within["pixels"][np.searchsorted(within["share"], 0.5)] == found.square(0.5)


def test_figures_are_json():
    found = receptive_field(vit(), torch.randn(2, 3, 8, 8), at=(0, 1))  # 2 x 2 patches are too few for a fit
    figures = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert figures["at"] == [0, 1]
    assert figures["fit"]["sigma_x"] == {"pixels": None, "patches": None}
    assert [each["share"] for each in figures["squares"]] == [0.2, 0.3, 0.5, 0.99]
    assert figures["squares"][2]["pixels"] == 4 * figures["squares"][2]["patches"]


def test_a_saved_field_is_the_same_when_loaded(tmp_path):
    found = receptive_field(vit(img_size=(8, 16)), torch.randn(2, 3, 8, 16), mode="abs")
    found.save(tmp_path / "field.npz")
    loaded = ReceptiveField.load(tmp_path / "field.npz")
    assert np.array_equal(loaded.field, found.field)
    assert loaded.as_dict() == found.as_dict()
    assert vars(loaded).keys() >= ReceptiveField.__dataclass_fields__.keys()
    (tmp_path / "other.npz").write_bytes(b"PK")
    np.savez(tmp_path / "another.npz", a=np.zeros(1))
    for name in ("other.npz", "another.npz", "missing.npz"):
        with pytest.raises(VicinalError, match=name):
            ReceptiveField.load(tmp_path / name)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(VicinalError, match=r"share .* got 0"):
        made(np.ones((2, 2)) / 4, grid=(2, 2), at=(0, 0)).square(0)


def test_old_spellings_warn_and_work():
    found = gaussian_field((32, 32), (18, 18), 5, 6, grid=(8, 8), at=(4, 4))
    with pytest.warns(DeprecationWarning, match="ReceptiveField.centre is deprecated; use center"):
        assert found.centre == found.center
    with pytest.warns(DeprecationWarning, match="outside_center_patch"):
        assert found.outside_centre_patch == found.outside_center_patch


def test_a_field_is_saved_as_figures_and_pixels_and_printed_as_a_table(tmp_path):
    found = gaussian_field((32, 32), (18, 18), 5, 6, grid=(8, 8), at=(4, 4))
    found.save(tmp_path / "field.json")
    assert json.loads((tmp_path / "field.json").read_text()) == found.as_dict()
    found.save(tmp_path / "field.csv")
    energy = np.loadtxt(tmp_path / "field.csv", delimiter=",", skiprows=1)[:, 2]
    assert np.array_equal(energy, found.field.ravel())
    with pytest.raises(VicinalError, match=r"field\.txt"):
        found.save(tmp_path / "field.txt")
    header, line = found.table().splitlines()[1:]
    assert header.split()[:5] == ["model", "layer", "sigma_x", "sigma_y", "R^2"]
    assert line.split()[:3] == ["m", "l", f"{found.fit.sigma_x:.1f}"]
