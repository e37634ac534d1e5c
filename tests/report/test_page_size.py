"""The size of a page."""

from page_text import page_text
from vicinal.report import page, write_report


def test_a_small_study_has_a_small_page(study_report):
    assert study_report.stat().st_size < 5_000_000


def test_the_largest_pictures_are_left_out_of_a_page_that_would_be_too_large(study_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MAX_BYTES", 150_000)
    file = write_report(study_folder, out=tmp_path / "small.html")
    assert file.stat().st_size < 200_000
    text = page_text(file)
    assert "Left out, to keep this file small; `vicinal analyze " in text
    assert "Results" in text
    assert "Training curves" in text
