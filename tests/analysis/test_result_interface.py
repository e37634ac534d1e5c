"""Every result has as_dict(), table() and save(path), and is named by name=."""

import csv
import json

import pytest
import torch

import vicinal
from vicinal import VicinalError
from vicinal.analysis.attention_maps import attention_maps, attention_statistics, rollout
from vicinal.analysis.cost import cost_of
from vicinal.analysis.learned_tables import fit_model, masks_of
from vicinal.analysis.receptive_field import receptive_field

IMAGES = torch.rand(2, 3, 16, 16)
MEASURES = {
    "receptive_field": lambda model: receptive_field(model, IMAGES, name="mine"),
    "attention_maps": lambda model: attention_maps(model, IMAGES, layers="last", name="mine")[0],
    "rollout": lambda model: rollout(model, IMAGES, name="mine"),
    "attention_statistics": lambda model: attention_statistics(model, IMAGES, name="mine"),
    "fit_model": lambda model: fit_model(model, name="mine"),
    "masks_of": lambda model: masks_of(model, name="mine"),
    "cost_of": lambda model: cost_of(model, name="mine", batch_size=4),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_results_have_one_interface(measure, tmp_path):
    model = vicinal.create_model("vit-micro", prior="gmm:init=spread", img_size=16, depth=2, global_pool="token")
    found = MEASURES[measure](model)
    assert found.model == "mine"
    assert "mine" in found.table()
    found.save(tmp_path / "x.json")
    document = json.loads((tmp_path / "x.json").read_text())
    assert document == json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert document["model"] == "mine"
    found.save(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(list(found.csv_rows()))
    assert not any(None in row or None in row.values() for row in rows)
    with pytest.raises(VicinalError, match=r"x\.txt"):
        found.save(tmp_path / "x.txt")
    assert {file.name for file in tmp_path.iterdir()} == {"x.json", "x.csv"}


def test_old_methods_warn_and_work(tmp_path):
    model = vicinal.create_model("vit-micro", prior="gmm:init=spread", img_size=16, depth=1, global_pool="token")
    masks = masks_of(model)
    with pytest.warns(DeprecationWarning, match=r"Masks\.write_json .* save"):
        masks.write_json(tmp_path / "old")
    with pytest.warns(DeprecationWarning, match=r"Masks\.write_csv .* save"):
        masks.write_csv(tmp_path / "old.csv")
    with pytest.warns(DeprecationWarning, match="save_options"):
        masks.write_options_csv(tmp_path / "options.csv")
    with pytest.warns(DeprecationWarning, match="center"):
        assert masks.layers[0].centre == masks.layers[0].center
    masks.save(tmp_path / "new.csv")
    assert (tmp_path / "old.csv").read_bytes() == (tmp_path / "new.csv").read_bytes()
    assert json.loads((tmp_path / "old").read_text()) == masks.as_dict()


def test_a_model_is_named_by_its_architecture_and_its_prior_by_its_spec():
    cost = cost_of(vicinal.create_model("vit", prior="gmm", img_size=32), batch_size=4)
    assert (cost.model, cost.prior) == ("vicinal_vit", "gmm")
    assert cost.published is not None
    assert (
        cost_of(vicinal.create_model("vit-micro", img_size=16, depth=1, global_pool="token"), batch_size=4).prior
        == "none"
    )


def test_an_inspection_is_passed_on(monkeypatch):
    from vicinal.analysis.attention_maps import inspect_images

    model = vicinal.create_model("vit-micro", img_size=16, depth=2, global_pool="token")
    expected = [measure(model, IMAGES) for measure in (attention_maps, rollout, attention_statistics)]
    inspection = inspect_images(model, IMAGES)
    monkeypatch.setattr("vicinal.inspection.attention_tap.inspect_runner", None)
    maps, rolled, statistics = (
        measure(model, IMAGES, inspection=inspection) for measure in (attention_maps, rollout, attention_statistics)
    )
    assert all(torch.equal(one.values, other.values) for one, other in zip(maps, expected[0], strict=True))
    assert torch.equal(rolled.values, expected[1].values)
    assert statistics == expected[2]
    with pytest.raises(VicinalError, match="3 x 16 x 16 and 3 x 8 x 8"):
        rollout(model, torch.rand(1, 3, 8, 8), inspection=inspection)
    with pytest.raises(VicinalError, match="another model"):
        rollout(vicinal.create_model("vit-micro", img_size=16, global_pool="token"), IMAGES, inspection=inspection)


def test_names_resolve_lazily():
    import vicinal.analysis as analysis

    assert set(dir(analysis)) == set(analysis.__all__)
    for name in analysis.__all__:
        assert getattr(analysis, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = analysis.nothing
