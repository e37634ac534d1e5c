import csv
import json
import math
import weakref

import pytest
import torch
from torch import nn

import vicinal
from attention_by_hand import cait, hooked, swin, swin_place, vit
from vicinal import VicinalError
from vicinal.analysis.attention_maps import attention_maps, attention_statistics, rollout
from vicinal.attention import attention_weights
from vicinal.inspection import attention_tap


def by_hand(weights, places, patch, prefix=0, visible=None):
    """Distance in patches and pixels, entropy and relative entropy of each head, one weight after another.

    `weights` are `(windows, heads, tokens, tokens)` of one image, `places` of each patch of each window, None for
    padding; `visible(window, query, key)` says what is not masked.
    """
    heads = []
    for head in range(weights.shape[1]):
        sums, queries = [0.0] * 4, 0
        for window, at in enumerate(places):
            for q, here in enumerate(at):
                if here is None:
                    continue
                row = weights[window, head, prefix + q].tolist()
                patches = pixels = on_patches = 0.0
                for k, there in enumerate(at):
                    if there is not None:
                        down, right = here[0] - there[0], here[1] - there[1]
                        patches += row[prefix + k] * math.hypot(down, right)
                        pixels += row[prefix + k] * math.hypot(down * patch[0], right * patch[1])
                        on_patches += row[prefix + k]
                entropy = -sum(w * math.log(w) for w in row if w > 0)
                keys = sum(visible is None or visible(window, q, k) for k in range(len(row)))
                found = (patches / on_patches, pixels / on_patches, entropy, entropy / math.log(keys))
                sums = [a + b for a, b in zip(sums, found, strict=True)]
                queries += 1
        heads.append([total / queries for total in sums])
    return torch.tensor(heads, dtype=torch.float64)


def measured(layer):
    figures = (layer.distance_patches, layer.distance_pixels, layer.entropy, layer.relative_entropy)
    return torch.tensor(figures, dtype=torch.float64).T


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("spec", [None, "gmm:init=spread", "gab+gmm:init=spread"])
@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}])
def test_distance_and_entropy_equal_loops_over_hooked_weights(spec, options):
    model = vit(**options)
    if spec:
        vicinal.attach(model, spec)
    images = torch.randn(3, 3, 32, 48)
    rows, columns = model.patch_embed.grid_size
    places = [[(row, column) for row in range(rows) for column in range(columns)]]
    found = attention_statistics(model, images, batch_size=2)
    assert found.images == 3
    assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    for layer, weights in zip(found.layers, hooked(model, images), strict=True):
        prefix = weights.shape[-1] - rows * columns
        expected = [by_hand(image[None], places, (32 / rows, 48 / columns), prefix) for image in weights]
        close(measured(layer), torch.stack(expected).mean(0))
        assert (layer.layer, layer.grid, layer.windows, layer.keys) == (
            int(layer.name[7]) + 1,
            (rows, columns),
            1,
            weights.shape[-1],
        )


@pytest.mark.parametrize(("size", "maps"), [((32, 32), [(16, 16), (8, 8)]), ((40, 56), [(20, 28), (10, 14)])])
def test_in_shifted_and_padded_windows_distances_are_those_in_the_image(size, maps):
    model = swin(size)
    image = torch.randn(1, 3, *size)
    found = attention_statistics(model, image)
    blocks = [block for stage in model.layers for block in stage.blocks]
    for number, (layer, weights, block) in enumerate(zip(found.layers, hooked(model, image), blocks, strict=True)):
        grid, shift = maps[number // 2], 2 * (number % 2)
        places = [[swin_place(window, patch, grid, shift) for patch in range(16)] for window in range(len(weights))]
        mask = block.attn_mask
        expected = by_hand(
            weights,
            places,
            (size[0] / grid[0], size[1] / grid[1]),
            visible=None if mask is None else lambda window, q, k, mask=mask: mask[window, q, k] == 0,
        )
        assert layer.grid == grid
        close(measured(layer), expected)


def test_dilated_windows_reach_as_far_as_they_do():
    """MaxViT's grid attention takes every n-th patch."""
    model = vicinal.create_model(
        "maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32,), depths=(1,), stem_width=16, num_classes=0
    )
    image = torch.randn(1, 3, 64, 64)
    layer = attention_statistics(model, image).layers[1]
    assert layer.name.endswith("attn_grid.attn")
    with vicinal.tap(model.eval(), [1], img_size=64) as t:
        model(image)
    (weights,), across = t.last, int(layer.windows**0.5)
    window = layer.grid[0] // across
    inside = [divmod(patch, window) for patch in range(window**2)]
    places = [
        [(row * across + number // across, column * across + number % across) for row, column in inside]
        for number in range(across**2)
    ]
    side = 64 / layer.grid[0]
    close(measured(layer), by_hand(weights.double(), places, (side, side)))


def test_heads_that_see_all_alike_have_the_uniform_distance_and_all_of_the_entropy():
    model = vit()
    for block in model.blocks:
        block.attn.qkv.weight.data[24:48] *= 1e-9  # keys hardly differ
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(6.0))
    for layer in attention_statistics(model, torch.randn(2, 3, 32, 48)).layers:
        assert layer.uniform_patches == pytest.approx(float(torch.cdist(places, places).mean()), rel=1e-6)
        assert layer.uniform_pixels == pytest.approx(8 * layer.uniform_patches)
        assert layer.distance_patches == pytest.approx([layer.uniform_patches] * 4, rel=1e-6)
        assert layer.entropy == pytest.approx([math.log(25)] * 4, rel=1e-6)
        assert layer.relative_entropy == pytest.approx([1] * 4, rel=1e-6)


def test_the_uniform_distance_in_shifted_windows_leaves_out_what_is_masked():
    found = attention_statistics(swin(), torch.randn(1, 3, 32, 32)).layers
    sums = pairs = 0
    mask = swin().layers[0].blocks[1].attn_mask
    for window in range(16):
        places = [swin_place(window, patch, (16, 16), 2) for patch in range(16)]
        for q, here in enumerate(places):
            seen = [math.dist(here, there) for k, there in enumerate(places) if mask[window, q, k] == 0]
            sums, pairs = sums + sum(seen) / len(seen), pairs + 1
    assert found[1].uniform_patches == pytest.approx(sums / pairs, rel=1e-6)


def test_class_layers_have_an_entropy_and_no_distance():
    model, images = cait(), torch.randn(2, 3, 32, 48)
    found = attention_statistics(model, images)
    for layer, weights in zip(found.layers, hooked(model, images), strict=True):
        if layer.name.startswith("blocks_token_only"):
            assert all(math.isnan(value) for value in (*layer.distance_pixels, layer.uniform_patches))
        else:
            assert all(value > 0 for value in layer.distance_pixels)
        entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
        close(torch.tensor(layer.entropy, dtype=torch.float64), entropy)
        assert layer.keys == weights.shape[-1]


@pytest.mark.parametrize("measure", [attention_statistics, attention_maps, rollout])
def test_the_weights_of_one_layer_are_in_memory_at_a_time(monkeypatch, measure):
    computed = []

    def compute(*arguments, **options):
        assert not any(weights() is not None for weights in computed)
        weights = attention_weights(*arguments, **options)
        computed.append(weakref.ref(weights))
        return weights

    monkeypatch.setattr(attention_tap, "attention_weights", compute)
    measure(vit(), torch.randn(4, 3, 32, 48), batch_size=2)
    assert len(computed) == 6


def test_batches_with_labels_give_the_same_and_the_model_is_left_as_it_was():
    model, images = vit().train(), torch.randn(5, 3, 32, 48)
    whole = attention_statistics(model, images)
    parts = attention_statistics(model, ([part, torch.zeros(len(part))] for part in images.split(3)), batch_size=2)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        close(measured(a), measured(b))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or "forward" in vars(module) for module in model.modules())


def test_a_compiled_model_is_read_as_it_was_before():
    model, images = vit(), torch.randn(1, 3, 32, 48)
    assert attention_statistics(torch.compile(model), images) == attention_statistics(model, images)


def test_layers_that_attend_over_channels_are_left_out_with_the_reason():
    model = vicinal.create_model("davit_tiny", img_size=64, embed_dims=(32,), depths=(1,), num_heads=(4,))
    found = attention_statistics(model, torch.randn(1, 3, 64, 64))
    assert [layer.layer for layer in found.layers] == [1]
    ((name, reason),) = found.left_out.items()
    (refused,) = vicinal.inspect(model, img_size=64).refused
    assert name == refused.name == "stages.0.blocks.0.1.attn"
    assert refused.keys.reason in reason
    assert found.table().splitlines()[-1] == f"left out: 1 layer. {reason}"


def test_figures_are_written_as_json_csv_and_a_table(tmp_path):
    found = attention_statistics(cait(), torch.randn(1, 3, 32, 48), name="a cait")
    found.save(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == found.as_dict()
    found.save(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(layer.entropy) for layer in found.layers) == len(found.as_dict()["heads"])
    line, layer = lines[6], found.layers[1]
    assert (line["model"], line["layer"], line["name"], line["head"]) == ("a cait", "2", "blocks.1.attn", "3")
    assert float(line["distance_pixels"]) == layer.distance_pixels[2]
    assert float(line["relative_entropy"]) == layer.relative_entropy[2]
    assert lines[-1]["distance_pixels"] == ""
    text = found.table().splitlines()
    assert text[0] == "a cait: mean over heads (smallest-largest of a head), 1 image"
    mean = sum(layer.distance_patches) / 4
    assert f"{mean:.2f} ({min(layer.distance_patches):.2f}-{max(layer.distance_patches):.2f})" in text[3]
    assert len({len(line) for line in text[1:]}) == 1


@pytest.mark.parametrize(
    ("model", "images", "options", "message"),
    [
        (vit, torch.empty(0, 3, 32, 48), {}, "there are no images; give at least one"),
        (vit, [], {}, "there are no images; give at least one"),
        (vit, torch.zeros(2, 3, 32, 48, dtype=torch.uint8), {}, "images must be .* got torch.uint8"),
        (vit, ["cat.png"], {}, "images must be .* got str"),
        (vit, torch.randn(2, 3, 40, 48), {}, "does not run on images of 3 x 40 x 48"),
        (vit, [torch.randn(1, 3, 32, 48), torch.randn(1, 3, 32, 32)], {}, "3 x 32 x 48 and 3 x 32 x 32"),
        (vit, torch.full((1, 3, 32, 48), math.nan), {}, "attention of blocks.0.attn is not finite"),
        (vit, torch.randn(1, 3, 32, 48), {"batch_size": 0}, "batch_size must be .* got 0"),
        (lambda: nn.Conv2d(3, 3, 1), torch.randn(1, 3, 8, 8), {}, "Conv2d has no attention to read"),
    ],
)
def test_bad_input_says_what_to_do(model, images, options, message):
    with pytest.raises(VicinalError, match=message):
        attention_statistics(model(), images, **options)
