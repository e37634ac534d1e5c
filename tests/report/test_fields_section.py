import base64
import csv
import io
import re

import numpy as np
import pytest
from PIL import Image

from trained_arms import NOISE, noise_folder, source_of, trained_source
from vicinal.analysis.image_selection import ImageSelection
from vicinal.analysis.opened_model import open_models
from vicinal.analysis.receptive_field import receptive_field
from vicinal.report.sections import fields as section_module
from vicinal.report.sections.fields import fields_section


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return trained_source(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def html(source):
    return str(fields_section(source).html)


@pytest.fixture(scope="module")
def fields(source):
    """The field of each arm, measured on images that are chosen without the report."""
    found = []
    for opened in open_models([arm.shown.folder for arm in source.arms], device="cpu"):
        _, images = ImageSelection(count=16).first(opened, 16)
        found.append(receptive_field(opened.model, images))
    return found


def pictures(html):
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")).sum(-1)
        for text in re.findall(r'<span class="tile"><img src="data:image/png;base64,([^"]*)"', html)
    ]


def test_data_are_the_fields_of_all_arms(source, html, fields):
    text = base64.b64decode(re.search(r'href="data:text/csv;base64,([^"]*)"', html)[1]).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    for arm, field in zip(source.arms, fields, strict=True):
        energies = [float(row["energy"]) for row in rows if row["arm"] == arm.arm]
        assert np.allclose(energies, field.by_patch.ravel(), rtol=1e-4)
        assert {row["split"] for row in rows} == {"test"}


def test_pictures_are_brighter_where_the_energy_is_higher(html, fields):
    for field, picture in zip(fields, pictures(html), strict=True):
        energy = field.field
        assert picture.shape == energy.shape
        order = np.argsort(energy.ravel())
        assert (np.diff(picture.ravel()[order].astype(int)) >= -3).all()  # magma rises, up to rounding of each color


def test_table_and_caption_have_the_figures_split_and_number(html, fields):
    for field in fields:
        assert f"{field.square(0.5):.1f}</td>" in html
        assert f"{field.outside_center_patch:.1%}</td>" in html
    assert "16 test images; the same for all arms" in html
    assert "blocks.3, row 3, column 3" in html
    assert "arm &lt;none&gt;" in html


def test_a_run_without_test_images_is_shown_on_validation_images(tmp_path):
    dataset = noise_folder(tmp_path / "data", ("train", "val"))
    found = trained_source(tmp_path, ("none",), dataset=dataset, **NOISE)
    assert "16 val images" in fields_section(found).html


def test_data_that_moved_give_a_sentence(tmp_path):
    found = trained_source(tmp_path, ("none",), dataset=noise_folder(tmp_path / "data", ("train", "test")), **NOISE)
    assert "<img" in fields_section(found).html
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    html = str(fields_section(found).html)
    assert "<img" not in html
    assert re.search(r'class="missing">arm &lt;none&gt;: .*moved.*</p>', html)


def test_arms_beyond_the_limit_are_named(source, monkeypatch):
    monkeypatch.setattr(section_module, "MAX_ARMS", 1)
    html = str(fields_section(source).html)
    assert len(pictures(html)) == 1
    assert "left out: arm &lt;gmm:kernels=2&gt;." in html


def test_no_finished_run_gives_no_section(source):
    assert fields_section(source_of([], source.folder)) is None
