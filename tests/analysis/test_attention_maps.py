import csv
import json

import pytest
import torch

import vicinal
from attention_by_hand import cait, hooked, swin, swin_place, vit
from vicinal import VicinalError
from vicinal.analysis.attention_maps import attention_maps, save_maps
from vicinal.inspection import patch_attention


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("spec", [None, "gmm:init=spread", "gab+gmm:init=spread"])
def test_maps_equal_hooks_with_fused_attention_off(spec):
    model, images = vit(), torch.randn(3, 3, 32, 48)
    if spec:
        vicinal.attach(model, spec)
    expected = hooked(model, images)
    rows = {"class": 0, (0, 0): 1, (2, 5): 1 + 2 * 6 + 5, (3, 0): 1 + 3 * 6}
    for query, row in rows.items():
        maps = attention_maps(model, images, query=query, batch_size=2)
        assert [each.layer for each in maps] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
        for found, weights in zip(maps, expected, strict=True):
            assert (found.query, found.heads) == (query, (0, 1, 2, 3))
            close(found.values, weights[:, :, row, 1:].unflatten(-1, (4, 6)))
    for found, weights in zip(attention_maps(model, images, query="mean"), expected, strict=True):
        close(found.values, weights[:, :, 1:, 1:].mean(2).unflatten(-1, (4, 6)))


def test_layers_heads_and_their_mean_can_be_chosen():
    model, images = vit(), torch.randn(2, 3, 32, 48)
    weights = hooked(model, images)[1][:, :, 0, 1:].unflatten(-1, (4, 6))
    (found,) = attention_maps(model, images, layers=1, heads=[2, -4])
    assert found.heads == (2, 0)
    close(found.values, weights[:, [2, 0]])
    close(found.map, weights[:, [2, 0]].mean(1))
    (found,) = attention_maps(model, images, layers=lambda _, name: name == "blocks.1.attn", heads="mean")
    assert found.heads is None
    close(found.values, weights.mean(1, keepdim=True))
    (of_one,) = attention_maps(model, images[1], layers=[-2], heads=3)
    close(of_one.values, weights[1:, 3:])


@pytest.mark.parametrize(
    "make",
    [
        vit,
        lambda: vit(global_pool="avg"),
        lambda: vit(global_pool="avg", class_token=False, reg_tokens=2),
        lambda: vit(global_pool="map"),
        cait,
        lambda: vicinal.create_model("cait", img_size=(32, 48), depth=1),
        lambda: swin((32, 48)),
    ],
)
def test_by_default_it_is_the_query_that_patch_attention_reads(make):
    model, images = make().eval(), torch.randn(2, 3, 32, 48)
    for number, found in enumerate(attention_maps(model, images, heads="mean")):
        with torch.no_grad(), patch_attention(model, number, img_size=(32, 48)) as attention:
            model(images)
        assert found.layer == attention.layer.name
        torch.testing.assert_close(found.map, attention.map, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("size", "maps"), [((32, 32), [(16, 16), (8, 8)]), ((40, 56), [(20, 28), (10, 14)])])
def test_a_patch_in_a_window_sees_its_window_where_it_was_cut_from(size, maps):
    model, image = swin(size), torch.randn(1, 3, *size)
    row, column = 13, 1
    found = attention_maps(model, image, query=(row, column))
    for number, weights in enumerate(hooked(model, image)):
        (rows, columns), shift = maps[number // 2], 2 * (number % 2)
        at = (row * rows // maps[0][0], column * columns // maps[0][1])
        expected = torch.zeros(weights.shape[1], rows, columns, dtype=torch.float64)
        for window in range(len(weights)):
            places = [swin_place(window, patch, (rows, columns), shift) for patch in range(16)]
            if at in places:
                for key, place in enumerate(places):
                    if place is not None:
                        expected[:, place[0], place[1]] = weights[window, :, places.index(at), key]
        assert found[number].query == at
        close(found[number].values[0], expected)


def test_class_layers_show_the_class_token_and_have_no_patch_that_looks():
    model, images = cait(), torch.randn(2, 3, 32, 48)
    expected = hooked(model, images)
    found = attention_maps(model, images)
    assert [each.query for each in found] == ["mean", "mean", "class", "class"]
    close(found[3].values, expected[3][:, :, 0, 1:].unflatten(-1, (4, 6)))
    assert [each.layer for each in attention_maps(model, images, query=(1, 2))] == ["blocks.0.attn", "blocks.1.attn"]
    only = attention_maps(model, images, query="class")
    assert [each.layer for each in only] == ["blocks_token_only.0.attn", "blocks_token_only.1.attn"]


def test_maps_are_written_as_json_and_csv(tmp_path):
    maps = attention_maps(vit(), torch.randn(2, 3, 32, 48), heads=[1, 3], query=(1, 4), name="a vit")
    save_maps(maps, tmp_path / "maps.json")
    stored = json.loads((tmp_path / "maps.json").read_text())
    assert stored[2] | {"attention": None} == {
        "model": "a vit",
        "layer": "blocks.2.attn",
        "query": [1, 4],
        "heads": [2, 4],
        "attention": None,
    }
    torch.testing.assert_close(torch.tensor(stored[2]["attention"]), maps[2].values)
    save_maps(maps, tmp_path / "maps.csv")
    with open(tmp_path / "maps.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * 2 * 2 * 24
    line = lines[2 * 2 * 24 + 24 + 6 + 2]  # second layer, first image, second head, second row, third column
    assert list(line.values())[:-1] == ["a vit", "blocks.1.attn", "1 4", "0", "4", "1", "2"]
    assert float(line["attention"]) == float(maps[1].values[0, 1, 1, 2])
    assert lines[-1]["image"] == "1"
    save_maps(maps, tmp_path / "maps.csv", ["ship", "cat"])
    with open(tmp_path / "maps.csv", newline="") as file:
        named = list(csv.DictReader(file))
    assert [{**each, "image": ["ship", "cat"].index(each["image"])} for each in named] == [
        {**each, "image": int(each["image"])} for each in lines
    ]
    save_maps(maps, tmp_path / "maps.json", ["ship", "cat"])
    assert json.loads((tmp_path / "maps.json").read_text()) == [{**each, "images": ["ship", "cat"]} for each in stored]
    with pytest.raises(VicinalError, match=r"image_names .* 2 images, got 1"):
        save_maps(maps, tmp_path / "maps.csv", ["ship"])
    with pytest.raises(VicinalError, match=r"maps\.txt"):
        save_maps(maps, tmp_path / "maps.txt")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (vit, {"layers": 3}, "unknown layer 3: there are 3 "),
        (vit, {"layers": "blocks"}, "layers must be .* from 1 to 3, got 'blocks'"),
        (vit, {"heads": [0, 4]}, r"unknown head 4: blocks.0.attn has 4, 0 to 3"),
        (vit, {"heads": []}, "heads .* got none"),
        (vit, {"heads": "max"}, "unknown heads 'max'"),
        (
            vit,
            {"query": (4, 0)},
            "4 x 6 patches; .* row from 0 to 3 and a column from 0 to 5, got 4 0",
        ),
        (vit, {"query": (0, -1)}, "column from 0 to 5, got 0 -1"),
        (vit, {"query": "clas"}, "unknown query 'clas'; did you mean 'class'"),
        (vit, {"query": 3}, "query must be 'class', 'mean' or row and column of a patch, got 3"),
        (lambda: swin((32, 48)), {"query": "class"}, "has no class token; use query='mean'"),
        (cait, {"query": (0, 0), "layers": "last"}, "blocks_token_only.1.attn one query reads the image, and no patch"),
    ],
)
def test_bad_input_says_what_to_do(make, options, message):
    with pytest.raises(VicinalError, match=message):
        attention_maps(make(), torch.randn(1, 3, 32, 48), **options)


def test_channels_have_no_map():
    model = vicinal.create_model("davit_tiny", img_size=64, embed_dims=(32,), depths=(1,), num_heads=(4,))
    assert len(attention_maps(model, torch.randn(1, 3, 64, 64))) == 1
    with pytest.raises(VicinalError, match=r"stages.0.blocks.0.1.attn has no map"):
        attention_maps(model, torch.randn(1, 3, 64, 64), layers="last")
