import pytest
import torch

import vicinal
from attention_by_hand import cait, hooked, swin, swin_place, vit
from vicinal import VicinalError
from vicinal.analysis.attention_maps import rollout


def multiplied(weights):
    """The product of `(tokens, tokens)`, one sum after another, first layer first."""
    tokens = weights[0].shape[-1]
    seen = torch.eye(tokens, dtype=torch.float64)
    for each in weights:
        step = torch.zeros(tokens, tokens, dtype=torch.float64)
        for q in range(tokens):
            row = [0.5 * float(each[q, k]) + 0.5 * (q == k) for k in range(tokens)]
            step[q] = torch.tensor(row, dtype=torch.float64) / sum(row)
        seen = step @ seen
    return seen


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("spec", [None, "gmm:init=spread", "gab+gmm:init=spread"])
def test_rollout_equals_hooks_with_fused_attention_off(spec):
    model, images = vit(), torch.randn(3, 3, 32, 48)
    if spec:
        vicinal.attach(model, spec)
    layers = [weights.mean(1) for weights in hooked(model, images)]
    expected = torch.stack([multiplied([layer[image] for layer in layers]) for image in range(3)])
    rows = {None: expected[:, 0], "mean": expected[:, 1:].mean(1), (2, 5): expected[:, 1 + 2 * 6 + 5]}
    for query, row in rows.items():
        found = rollout(model, images, query=query, batch_size=2)
        assert found.query == (query or "class")
        assert found.layer == "rollout of 3 layers, blocks.0.attn to blocks.2.attn"
        close(found.map, row[:, 1:].unflatten(-1, (4, 6)))


def test_without_a_class_token_it_is_the_mean_over_patches_and_sums_to_one():
    model, images = vit(class_token=False, global_pool="avg"), torch.randn(2, 3, 32, 48)
    layers = [weights.mean(1) for weights in hooked(model, images)]
    found = rollout(model, images)
    assert found.query == "mean"
    for image in range(2):
        close(found.map[image], multiplied([layer[image] for layer in layers]).mean(0).view(4, 6))
    torch.testing.assert_close(found.map.sum((1, 2)), torch.ones(2))


def test_layers_can_be_chosen():
    model, image = vit(), torch.randn(3, 32, 48)
    weights = hooked(model, image[None])
    found = rollout(model, image, layers="last 2")
    close(found.map[0], multiplied([each[0].mean(0) for each in weights[1:]])[0, 1:].view(4, 6))
    one = rollout(model, image, layers=[1])
    assert one.layer == "rollout of blocks.1.attn"
    close(one.map[0], weights[1][0, :, 0, 1:].mean(0).view(4, 6) / 2)  # the other half stays with the class token


@pytest.mark.parametrize(("size", "grid"), [((32, 32), (16, 16)), ((40, 56), (10, 14))])
def test_windows_of_one_grid_are_put_back_where_they_were_cut_from(size, grid):
    model, image = swin(size), torch.randn(1, 3, *size)
    layers = range(2) if grid == (16, 16) else range(2, 4)
    expected = []
    for number, weights in enumerate(hooked(model, image)):
        if number in layers:
            whole = torch.zeros(grid[0] * grid[1], grid[0] * grid[1], dtype=torch.float64)
            for window in range(len(weights)):
                places = [swin_place(window, patch, grid, 2 * (number % 2)) for patch in range(16)]
                cells = [None if place is None else place[0] * grid[1] + place[1] for place in places]
                for q, here in enumerate(cells):
                    for k, there in enumerate(cells):
                        if here is not None and there is not None:
                            whole[here, there] = weights[window, :, q, k].mean()
            expected.append((whole + torch.eye(len(whole))) / (whole.sum(1, keepdim=True) + 1))
    close(rollout(model, image, layers=layers).map[0], (expected[1] @ expected[0]).mean(0).view(grid))


def test_class_layers_go_on_with_the_class_token():
    """timm's class token sees itself and the patches; what it starts as is no patch."""
    model, image = cait(), torch.randn(1, 3, 32, 48)
    weights = [each[0].mean(0) for each in hooked(model, image)]
    patches = multiplied(weights[:2])
    token = torch.zeros(24, dtype=torch.float64)
    for (row,) in weights[2:]:
        token = 0.5 * token + 0.5 * (row[0] * token + row[1:] @ patches)
    found = rollout(model, image)
    assert found.query == "class"
    close(found.map[0], token.view(4, 6))
    close(rollout(model, image, query=(3, 1)).map[0], patches[3 * 6 + 1].view(4, 6))
    close(rollout(model, image, query="mean").map[0], patches.mean(0).view(4, 6))


def test_class_layers_that_see_patches_only_keep_a_quarter_for_the_token():
    model = vicinal.create_model("cait", prior="gab", img_size=(32, 48), depth=2)
    found = rollout(model, torch.randn(2, 3, 32, 48))
    assert found.layer.endswith("to blocks_token_only.1.attn")
    torch.testing.assert_close(found.map.sum((1, 2)), torch.full((2,), 0.75))


@pytest.mark.parametrize("first", [0, 1])
def test_attention_pooling_reads_what_was_rolled_out(first):
    """With the class token, or without."""
    model, image = vit(global_pool="map", pool_include_prefix=first == 0), torch.randn(1, 3, 32, 48)
    tokens = multiplied([each[0].mean(0) for each in hooked(model, image)[:3]])
    with vicinal.tap(model.eval(), img_size=(32, 48)) as t:
        model(image)
    pooling = t.last[0, :, 0].mean(0).double()
    close(rollout(model, image).map[0], (pooling @ tokens[first:])[1:].view(4, 6).detach() / 2)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            swin,
            {},
            r"one grid: layers.0.blocks.0.attn has 16 x 16, layers.1.blocks.0.attn has 8 x 8; choose layers "
            r"that are, such as 2, 3$",
        ),
        (
            lambda: vicinal.create_model("t2t", depth=2),
            {},
            r"patch_embed.transformers.0.attn has 16 x 16, blocks.0.attn has 8 x 8; .* such as 1, 2$",
        ),
        (
            lambda: vicinal.create_model("pit", depths=(1, 1, 1)),
            {},
            r"has 16 x 16 \+ 1 prefix, stages.1.blocks.0.attn has 8 x 8 \+ 1 prefix",
        ),
        (
            lambda: vicinal.create_model("cait", depth=1),
            {"layers": "last 2"},
            "needs layers in which patches attend to patches",
        ),
        (lambda: vit(img_size=32), {"query": (0, 4)}, "column from 0 to 3, got 0 4"),
        (lambda: vit(img_size=32), {"query": "row"}, "unknown query 'row'"),
        (lambda: vit(img_size=32), {"layers": [7]}, "unknown layer 7"),
        (
            lambda: vit(img_size=32, class_token=False, global_pool="avg"),
            {"query": "class"},
            "blocks.0.attn has no class token; use query='mean'",
        ),
        (
            lambda: vicinal.create_model(
                "davit_tiny", img_size=32, embed_dims=(32,), depths=(1,), num_heads=(4,), window_size=4
            ),
            {},
            r"stages.0.blocks.0.1.attn has no map",
        ),
    ],
)
def test_bad_input_says_what_to_do(make, options, message):
    with pytest.raises(VicinalError, match=message):
        rollout(make(), torch.randn(1, 3, 32, 32), **options)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: vicinal.create_model("crossvit_tiny_240"), 240),
        (lambda: vicinal.create_model("pit", depths=(1, 1, 2)), 32),
    ],
)
def test_layers_that_are_advised_can_be_rolled_out(make, size):
    model, image = make(), torch.randn(1, 3, size, size)
    with pytest.raises(VicinalError, match="such as ") as raised:
        rollout(model, image)
    advised = [int(each) for each in str(raised.value).rpartition("such as ")[2].split(",")]
    found = rollout(model, image, layers=advised)
    assert (found.map > 0).all()
    assert found.map.sum() <= 1 + 1e-5


def test_no_images_are_an_error():
    with pytest.raises(VicinalError, match="there are no images"):
        rollout(vit(), torch.empty(0, 3, 32, 48))
