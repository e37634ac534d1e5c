import json
import os
import signal
import time

import pytest
import timm

from vicinal import VicinalError
from vicinal.attachment.coverage import families, inspect_model, inspect_or_skip, timm_survey
from vicinal.attachment.coverage_page import coverage_page
from vicinal.attachment.survey import NO_MEMORY, NO_TIME, Finding, Limits, RefusedLayers, SurveyProcess, read_notes
from vicinal.cli.main import main
from vicinal.inspection import RefusalKind


def test_lists_families_and_names(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "\nswin_transformer_v2 " in out
    (line,) = [line for line in out.splitlines() if line.startswith("vit-micro ")]
    assert line.split()[1:6] == ["141,130", "4,", "8", "avg,", "token"]
    assert "vicinal_" not in out
    assert "vicinal models 'swin*' lists names" in out
    assert main(["models", "pit*"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["pit", "pit_b_224"]
    assert main(["models", "deit_tiny*"]) == 0
    assert capsys.readouterr().out.split() == ["deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224"]


def test_an_unknown_pattern_is_an_error(capsys, tmp_path):
    assert main(["models", "vitt"]) == 2
    assert capsys.readouterr().err == "vicinal: no model is named 'vitt'; try a pattern such as '*vitt*'\n"
    out, notes = tmp_path / "page.md", tmp_path / "notes.jsonl"
    assert main(["models", "vitt", "--coverage", "--out", str(out), "--notes", str(notes)]) == 2
    assert "no timm model is named 'vitt'" in capsys.readouterr().err
    assert not out.exists()


def test_one_model_is_looked_at():
    finding = inspect_model("test_vit3", "vision_transformer", limit=10**7)
    assert finding.served == {"Attention, 10 x 10 + 1 prefix": 9}
    (refused,) = finding.refused
    assert (refused.module, refused.kind, refused.count) == ("AttentionPoolLatent", RefusalKind.SILENT, 1)
    assert (refused.queries, refused.keys) == (1, 101)
    assert finding.image == (160, 160)
    assert (finding.spatial, finding.spatial_served, finding.unseen, finding.unexpected) == (9, 9, {}, {})
    assert not finding.missed
    without = inspect_model("test_resnet", "resnet", limit=10**7)
    assert (without.served, without.refused, without.image) == ({}, (), (160, 160))
    large = inspect_model("test_vit", "vision_transformer", limit=1000)
    assert large.skipped == "more than 0 M parameters"
    assert large.served == {}


def test_a_survey_writes_a_page_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    out, notes = tmp_path / "docs" / "page.md", tmp_path / "runs" / "notes.jsonl"
    words = ["models", "test_vit*", "--coverage", "--out", str(out), "--notes", str(notes), "--limit", "0.4"]
    notes.parent.mkdir()
    refused = (RefusedLayers("A", RefusalKind.SPREAD, "it follows the image", 8, 8, 2),)
    known = Finding("test_vit2", "f", 1, (8, 8), refused=refused, version=timm.__version__).to_json()
    outdated = Finding("test_vit", "f", 1, (8, 8), refused=refused, version="0.9.0").to_json()
    old_form = json.dumps({"model": "test_vit", "family": "f", "image": [8, 8], "left": {"A: over channels": 2}})
    notes.write_text(f'{known}\n{outdated}\n{old_form}\n{{"model": "test_vit", "fam')  # was cut off here
    assert main(words) == 0
    assert capsys.readouterr().out == f"1 of 4 models take a prior; wrote {out}\n"
    found = {finding.model: finding for finding in read_notes(notes)}
    assert found["test_vit"].served == {"Attention, 10 x 10 + 1 prefix": 6}
    assert found["test_vit2"].refused == refused  # not inspected again
    assert "M parameters" in found["test_vit3"].skipped
    text = out.read_text()
    assert "| vision_transformer | 1 | 6 | 6 | Attention (1) |  |" in text
    assert f"| f | 1 | 0 | 0 |  | A: {RefusalKind.SPREAD.value} (1) |" in text

    monkeypatch.setattr("vicinal.attachment.survey.SurveyProcess.run", None)  # nothing is left to look at
    assert main(words) == 0
    assert out.read_text() == text
    monkeypatch.setattr("vicinal.attachment.survey.SurveyProcess.run", lambda _, inspect, *model: inspect(*model))
    assert main([*words[:-1], "1"]) == 0  # what was too large is looked at again when more is allowed
    assert {x.model: x for x in read_notes(notes)}["test_vit3"].served == {"Attention, 10 x 10 + 1 prefix": 9}


@pytest.mark.slow
def test_a_model_that_needs_too_much_memory_is_noted(tmp_path, capsys):
    out, notes = tmp_path / "page.md", tmp_path / "notes.jsonl"
    assert main(["models", "test_vit", "--coverage", "--out", str(out), "--notes", str(notes), "--memory", "0.02"]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 models take a prior")
    (finding,) = read_notes(notes)
    assert finding.skipped == "it needs more memory than the survey may use"
    assert f"| test_vit | {finding.skipped} |" in out.read_text()


@pytest.mark.parametrize(
    ("error", "skipped"),
    [
        (MemoryError(), NO_MEMORY),
        (SystemError("frame"), NO_MEMORY),
        (RuntimeError("std::bad_alloc"), NO_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"), NO_MEMORY),
        (VicinalError("the model does not run on images of 3 x 8 x 8: MemoryError: "), NO_MEMORY),
        (RuntimeError("shapes differ\nby much"), "RuntimeError: shapes differ by much"),
    ],
)
def test_every_way_to_say_that_memory_is_out_is_known(monkeypatch, error, skipped):
    def fail(*_):
        raise error

    monkeypatch.setattr("vicinal.attachment.coverage.inspect_model", fail)
    assert inspect_or_skip("name", "family", 10).skipped == skipped


def test_a_model_that_takes_too_long_is_noted(tmp_path, capsys):
    out, notes = tmp_path / "page.md", tmp_path / "notes.jsonl"
    words = ["models", "test_vit", "--coverage", "--out", str(out), "--notes", str(notes), "--seconds", "0.01"]
    assert main(words) == 0
    assert [finding.skipped for finding in read_notes(notes)] == ["it takes longer than 0.01 s"]
    assert "| test_vit | it takes longer than 0.01 s |" in out.read_text()


def test_a_survey_without_time_counts_what_was_noted(tmp_path, capsys):
    out, notes = tmp_path / "page.md", tmp_path / "notes.jsonl"
    known = [Finding("test_vit2", "f", 1, (8, 8), spatial=2, spatial_served=2, version=timm.__version__)]
    notes.write_text("".join(f"{each.to_json()}\n" for each in known))
    words = ["models", "test_vit*", "--coverage", "--out", str(out), "--notes", str(notes), "--minutes", "0"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"0 of 1 models take a prior; 3 not reached; wrote {out}\n"
    assert read_notes(notes) == known
    assert "- 4 models: 1 examined, 0 not (too large, mostly), 3 not reached yet." in out.read_text()
    assert "2 of 2 spatial layers take a prior" in out.read_text()


def test_a_survey_goes_through_all_families_first(tmp_path):
    names = list(timm_survey("*", tmp_path / "notes", limit=1, memory=1, seconds=1).families)
    known = families()
    assert len({known[name] for name in names[: len(set(known.values()))]}) == len(set(known.values()))
    assert sorted(names) == sorted(known)


def process_number(name, family):
    return Finding(name, family, parameters=os.getpid())


def test_a_process_ends_by_itself_after_some_models_and_its_successor_is_killed_when_busy(monkeypatch):
    monkeypatch.setattr("vicinal.attachment.survey.SECONDS_TO_END", 60.0)  # starting takes a while
    with SurveyProcess(Limits(memory=2**33, seconds=100, models=2)) as process:
        first = process.run(process_number, "name", "family").parameters
        idle = process.process
        second, third = (process.run(process_number, "name", "family").parameters for _ in range(2))
        assert first == second != third
        assert idle.exitcode == 0
        monkeypatch.setattr("vicinal.attachment.survey.SECONDS_TO_END", 0.1)
        process.limits = Limits(memory=2**33, seconds=1, models=2)
        busy = process.process
        found = process.run(sleep_long, "name", "family")
        assert process.process is None
    assert busy.exitcode == -signal.SIGKILL
    assert found.skipped == NO_TIME.format(1)


def sleep_long(name, family):
    time.sleep(600)


@pytest.mark.parametrize(
    ("kind", "queries", "keys", "short"),
    [
        (RefusalKind.SILENT, 1, 17, "one query"),
        (RefusalKind.SPREAD, 8, 8, RefusalKind.SPREAD.value),
        (RefusalKind.POOLED, 64, 16, "fewer keys than queries"),
        (RefusalKind.POOLED, 16, 64, "more keys than queries"),
        (RefusalKind.WINDOWS, 16, 16, RefusalKind.WINDOWS.value),
    ],
)
@pytest.mark.parametrize("spatial", [True, False])
def test_the_page_tells_spatial_layers_that_were_missed(kind, queries, keys, short, spatial):
    refused = (RefusedLayers("A", kind, "a reason", queries, keys, 3, spatial),)
    finding = Finding("name", "family", 5, (8, 8), refused=refused, spatial=3 * spatial)
    assert bool(finding.missed) == spatial
    text = coverage_page([finding], 10**6)
    assert f"| family | 1 | {3 * spatial} | 0 |  | A: {short} (1) |" in text
    assert ("## Spatial layers that take none" in text) == spatial
    assert ("| name | A: a reason (3) |" in text) == spatial


def test_the_page_tells_where_the_table_and_the_inspection_differ():
    found = {"A, 4 x 4": 2, "B, 4 x 4": 1}
    finding = Finding(
        "name", "family", 5, (8, 8), found, spatial=3, spatial_served=2, unexpected={"B": 1}, unseen={"C": 1}
    )
    text = coverage_page([finding], 10**6)
    assert "| family | 1 | 3 | 2 | A (1)<br>B (1) |  |" in text
    assert "| name | C: no attention was found in it (1) |" in text
    assert "## Layers that take one and are not spatial by the table" in text
    assert "| name | B (1) |" in text
    assert "2 of 3 spatial layers take a prior" in text
    assert Finding.from_json(finding.to_json()) == finding
