"""`vicinal models --coverage --library`: surveys of transformers and segmentation_models_pytorch."""

import pytest

from vicinal.attachment.coverage_transformers import ARCHITECTURES, architectures
from vicinal.attachment.library_page import library_page, library_table
from vicinal.attachment.survey import Finding, RefusedLayers, read_notes
from vicinal.cli.main import main
from vicinal.inspection import RefusalKind

FINDINGS = [
    Finding(
        "detr",
        "DetrModel",
        5,
        (8, 8),
        {"DetrSelfAttention, 8 x 10": 2},
        refused=(RefusedLayers("DetrCrossAttention", RefusalKind.SILENT, "its queries follow nothing", 9, 80, 3),),
        version="1.2",
    ),
    Finding("other", "OtherModel", skipped="ValueError: a | b", version="1.2"),
]


def test_the_page_names_served_and_refused_layers_and_what_was_not_built():
    text = library_page(FINDINGS, "transformers", "a command")
    assert "not reached" not in text
    partial = library_page(FINDINGS, "transformers", "a command", unreached=7)
    assert f"- {len(FINDINGS) + 7} architectures: " in partial
    assert " not, 7 not reached yet.\n" in partial
    assert "Written by `a command` with transformers 1.2" in text
    row = "| detr | DetrModel | 8 x 8 | DetrSelfAttention, 8 x 10 (2) |"
    assert f"{row} DetrCrossAttention: its queries follow nothing (3) |" in text
    assert "| other | OtherModel | ValueError: a / b |" in text


def test_the_table_counts_layers():
    lines = library_table(FINDINGS).splitlines()
    assert lines[0].split() == ["architecture", "served", "refused", "why"]
    assert lines[1].split(maxsplit=3) == ["detr", "2", "3", f"DetrCrossAttention: {RefusalKind.SILENT.value}"]
    assert lines[2].split(maxsplit=3) == ["other", "-", "-", "not built: ValueError: a | b"]


def test_transformers_own_lists_are_surveyed_once():
    pytest.importorskip("transformers")
    names = architectures()
    assert list(names)[: len(ARCHITECTURES)] == list(ARCHITECTURES)
    assert names["convnext"] == "ConvNextModel"
    assert not {"dinov2_with_registers", "siglip_vision_model", "rf_detr"} & (names.keys() - ARCHITECTURES.keys())


@pytest.mark.slow
def test_a_survey_of_transformers_prints_a_table_and_writes_a_page(tmp_path, capsys):
    pytest.importorskip("transformers")
    out, notes = tmp_path / "page.md", tmp_path / "notes.jsonl"
    words = ["models", "vit_m*", "--coverage", "--library", "transformers", "--out", str(out), "--notes", str(notes)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("architecture")
    assert printed.endswith(f"2 of 2 models take a prior; wrote {out}\n")
    assert {finding.model: finding.layers for finding in read_notes(notes)} == {"vit_mae": 3, "vit_msn": 2}
    assert "| vit_msn | ViTMSNModel | 128 x 128 | ViTMSNAttention, 8 x 8 + 1 prefix (2) |  |" in out.read_text()


def test_an_unknown_architecture_is_an_error(tmp_path, capsys):
    pytest.importorskip("transformers")
    words = ["models", "nothing", "--coverage", "--library", "transformers", "--notes", str(tmp_path / "notes.jsonl")]
    assert main(words) == 2
    assert "no architecture of transformers is named 'nothing'" in capsys.readouterr().err
