"""Masks against loops over pairs of patches and formulas in double precision."""

import csv
import json
import math

import numpy as np
import pytest
import torch

import vicinal
from vicinal.analysis.learned_tables import masks_of
from vicinal.attachment import get_priors
from vicinal.errors import VicinalError

PRIORS = [
    "gmm:kernels=3",
    "gmm:init=paper",
    "gmm:share_heads=true",
    "gab:share_heads=false",
    "rpe",
    "rpe-mlp",
    "decay:learnable=true",
    "conv",
    "elm",
    "elm:share_heads=false",
    "gmm+gab",
    "elm+rpe",
]


def model_with(prior):
    """A small model whose priors are somewhere else than at their start, on a grid of 4 x 7 patches and a token."""
    model = vicinal.create_model(
        "vit-micro", prior=prior, img_size=(16, 28), patch_size=4, depth=2, global_pool="token"
    )
    with torch.no_grad():
        for each in get_priors(model).values():
            for parameter in each.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("prior", PRIORS)
def test_tables_hold_what_every_pair_of_patches_gets(prior):
    model = model_with(prior)
    masks = masks_of(model)
    assert [layer.name for layer in masks.layers] == ["blocks.0.attn", "blocks.1.attn"]
    for layer in masks.layers:
        applied = dict(zip(("scale", "bias"), get_priors(model)[layer.name](), strict=True))
        assert layer.tables.keys() == {role for role, values in applied.items() if values is not None}
        height, width, prefix = layer.grid.height, layer.grid.width, layer.grid.prefix
        assert (height, width, prefix, layer.prior) == (4, 7, 1, prior)
        for role, table in layer.tables.items():
            by_pair = applied[role].detach().double().numpy()
            for query in range(height * width):
                for key in range(height * width):
                    row, column = (key // width - query // width), (key % width - query % width)
                    if layer.over == "offsets":
                        found = table[:, row + height - 1, column + width - 1]
                    elif query == 2 * width + 3:  # the central patch
                        found = table[:, key // width, key % width]
                    else:
                        continue
                    assert np.array_equal(found, by_pair[:, prefix + query, prefix + key])


def test_the_mixture_is_the_formula():
    model = model_with("gmm:kernels=3,init=spread")
    for layer in masks_of(model).layers:
        prior = get_priors(model)[layer.name]
        alpha, sigma = prior.alpha.tolist(), prior.sigma.tolist()
        (mixture,) = layer.mixtures.values()
        assert np.array_equal(mixture.alpha, alpha)
        assert np.array_equal(mixture.sigma, sigma)
        assert mixture.constant == 0
        for head in range(layer.heads):
            for row in range(-3, 4):
                for column in range(-6, 7):
                    distance = math.hypot(row, column)
                    kernels = [
                        alpha[kernel][head] * math.exp(-(distance**2) / (2 * (sigma[kernel][head] ** 2 + 1e-5)))
                        for kernel in range(3)
                    ]
                    found = mixture.kernels_at(np.array([distance]))[:, head, 0]
                    assert found == pytest.approx(kernels, rel=1e-12)
                    assert layer.scale[head, row + 3, column + 6] == pytest.approx(sum(kernels), abs=1e-5)


def test_every_mixture_of_a_composition_is_there_and_the_scale_is_their_product():
    model = model_with("gmm:kernels=2,constant=0.5+gmm:kernels=3")
    for layer in masks_of(model).layers:
        assert {part: each.alpha.shape[0] for part, each in layer.mixtures.items()} == {"gmm-1": 2, "gmm-2": 3}
        product = np.ones(layer.heads)
        for part, each in zip(get_priors(model)[layer.name].parts, layer.mixtures.values(), strict=True):
            assert np.array_equal(each.sigma, part.sigma.tolist())
            product *= each.constant + each.kernels_at(np.array([math.hypot(1, 2)]))[..., 0].sum(0)
        assert layer.scale[:, 3 + 1, 6 + 2] == pytest.approx(product, rel=1e-4, abs=1e-5)
    stored = masks_of(model).as_dict()["layers"][0]
    assert stored["constants"] == {"gmm-1.constant": 0.5, "gmm-2.constant": 1.0}
    assert masks_of(model_with("rpe")).layers[0].mixtures == {}


@pytest.mark.parametrize("logit", [1.0, -0.5, 3.0])
@pytest.mark.parametrize("prior", PRIORS)
def test_the_convolution_is_what_the_center_attends_to_where_all_content_is_the_same(prior, logit):
    model = model_with(prior)
    for layer in masks_of(model, logit=logit).layers:
        scale, bias = get_priors(model)[layer.name]()
        height, width, query = 4, 7, 1 + 2 * 7 + 3
        assert layer.center == (2, 3)
        for head in range(layer.heads):
            weights = []
            for key in range(1, 1 + height * width):
                times = 1.0 if scale is None else scale[head, query, key].item()
                plus = 0.0 if bias is None else bias[head, query, key].item()
                weights.append(math.exp(logit * times + plus))
            expected = np.array(weights).reshape(height, width) / sum(weights)
            assert layer.convolution[head] == pytest.approx(expected, rel=1e-9, abs=1e-15)
            assert layer.convolution[head].sum() == pytest.approx(1)


def test_attention_itself_is_the_convolution_where_queries_and_keys_are_the_same():
    """All tokens of one image get the same query and key, of product c; values tell who is looked at."""
    model = model_with("gmm+conv")
    layer = masks_of(model, logit=2.0).layers[0]
    prior, tokens = get_priors(model)[layer.name], layer.grid.tokens
    same = torch.full((1, layer.heads, tokens, 8), (2.0 / 8**0.5) ** 0.5)  # (q . k) / sqrt(8) = 2
    looked_at = vicinal.attend(same, same, torch.eye(tokens).expand(1, layer.heads, -1, -1), prior=prior)
    seen = looked_at[0, :, 1 + 2 * 7 + 3, 1:].detach().double().view(-1, 4, 7)
    seen /= seen.sum((1, 2), keepdim=True)  # without the class token
    assert layer.convolution == pytest.approx(seen.numpy(), abs=1e-6)


def test_a_prior_on_some_layers_gives_masks_of_these():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4)
    vicinal.attach(model, "gmm:kernels=2", layers="last 2")
    vicinal.attach(model, "none", layers=[0])
    masks = masks_of(model, name="mine")
    assert masks.model == "mine"
    assert [layer.name for layer in masks.layers] == ["blocks.2.attn", "blocks.3.attn"]
    assert masks.index("blocks.3.attn") == masks.index(1) == masks.index(-1) == 1


@pytest.mark.parametrize("prior", ["gmm:kernels=3+gab", "elm"])
def test_files_hold_every_number_at_its_offset(tmp_path, prior):
    masks = masks_of(model_with(prior))
    masks.save(tmp_path / "masks.csv")
    with open(tmp_path / "masks.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(
        values.size for layer in masks.layers for values in (*layer.tables.values(), layer.convolution)
    )
    layers = {layer.name: layer for layer in masks.layers}
    for line in rows:
        layer, row, column = layers[line["layer"]], int(line["row"]), int(line["column"])
        of_patches = line["quantity"] == "convolution" or layer.over == "patches"
        down, right = (2, 3) if of_patches else (3, 6)
        values = getattr(layer, line["quantity"])
        assert float(line["value"]) == values[int(line["head"]) - 1, row + down, column + right]
        assert line["prior"] == prior
    masks.save(tmp_path / "masks.json")
    stored = json.loads((tmp_path / "masks.json").read_text())
    assert stored == masks.as_dict()
    assert (stored["model"], stored["logit"]) == ("vicinal_vit_micro", 1)
    for found, layer in zip(stored["layers"], masks.layers, strict=True):
        assert np.array_equal(found["scale"], layer.scale)
        assert (found["bias"] is None) == (layer.bias is None)
        assert np.array_equal(found["convolution"], layer.convolution)
        assert found["options"].keys() == layer.options.keys()


def test_learned_options_are_written_by_layer_kernel_and_head(tmp_path):
    model = model_with("gmm:kernels=3+conv")
    masks = masks_of(model)
    masks.save_options(tmp_path / "options.csv")
    with open(tmp_path / "options.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    heads = masks.layers[0].heads
    assert len(rows) == 2 * heads * (3 + 3 + 1 + 2)
    for row in rows:
        mixture, convolution = get_priors(model)[row["layer"]].parts
        kernel, head = int(row["kernel"] or 1) - 1, int(row["head"]) - 1
        expected = {
            "gmm.sigma": mixture.sigma,
            "gmm.alpha": mixture.alpha,
            "conv.sigma": convolution.sigma[None],
            "conv.mu_row": convolution.mu.T[:1],
            "conv.mu_column": convolution.mu.T[1:],
        }[row["option"]][kernel, head]
        assert float(row["value"]) == pytest.approx(expected.item(), rel=1e-7)


def test_bad_input_is_told():
    with pytest.raises(VicinalError, match="has no prior"):
        masks_of(vicinal.create_model("vit-micro", depth=1, global_pool="token"))
    model = model_with("gmm")
    with pytest.raises(VicinalError, match="unknown layer 2: there are 2 "):
        masks_of(model).index(2)
    with pytest.raises(VicinalError, match=r"unknown layer 'blocks.7.attn'; did you mean 'blocks"):
        masks_of(model).index("blocks.7.attn")
    with pytest.raises(VicinalError, match=r"logit .* got nan"):
        masks_of(model, logit=math.nan)
    with pytest.raises(VicinalError, match=r"logit .* 1e\+308.* blocks.0.attn"):
        masks_of(model_with("gmm:init=spread"), logit=1e308)
    next(iter(get_priors(model).values())).flat_alpha.data.fill_(math.nan)
    with pytest.raises(VicinalError, match=r"prior of blocks.0.attn is not finite"):
        masks_of(model)
