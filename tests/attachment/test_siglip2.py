"""SigLIP 2 of transformers takes patches that its image processor has cut, with numbers of rows and columns."""

import pytest
import torch

import vicinal
from by_hand import assert_same, attention_io, formula_by_hand, heads_by_hand, project
from small_models import lively
from test_naflex import PREFIX, PRIOR, SHAPES, batch, cut, picture, places_of
from vicinal import VicinalError
from vicinal.attachment.small_model import PatchifiedImages
from vicinal.inspection import patch_attention

transformers = pytest.importorskip("transformers")


def siglip2():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Siglip2VisionConfig(patch_size=16, num_patches=16, **size)
    return lively(transformers.Siglip2VisionModel(config)).double().eval()


def inputs(shapes, tokens):
    """Returns places of the patches of each image, with padding, and arguments of the model."""
    given = batch(*(cut(picture(*shape), tokens) for shape in shapes))
    places = [each[PREFIX:] for each in places_of(given)]
    mask, sizes = given["patch_valid"].long(), torch.tensor(shapes)
    return places, {"pixel_values": given["patches"], "pixel_attention_mask": mask, "spatial_shapes": sizes}


def assert_right(model, shapes, tokens):
    """Compares the output of the last attention module with the formula."""
    places, given = inputs(shapes, tokens)
    module = model.encoder.layers[1].self_attn
    args, kwargs, (out, _) = attention_io(module, lambda: model(**given))
    q, k, v = heads_by_hand(module, args[0] if args else kwargs["hidden_states"])
    logits, mask = q @ k.mT * q.shape[-1] ** -0.5, kwargs["attention_mask"]
    for image, each in enumerate(places):
        scale, bias = formula_by_hand(module.prior, each, each)
        logits[image] = scale * logits[image] + bias
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    assert_same(out, project(module, logits.softmax(-1), v))


@pytest.mark.parametrize("wrapped", [False, True])
@torch.no_grad()
def test_attention_follows_the_formula_by_the_shape_of_each_image(wrapped):
    model = siglip2()
    if wrapped:  # attached to a model of images, and run without it
        vicinal.attach(PatchifiedImages(model, 16), PRIOR, img_size=(64, 96))
    else:
        vicinal.attach(model, PRIOR, example=inputs([(4, 6)], 24)[1])
    model.double()
    for shapes, tokens in [([(4, 6)], 24), ([(6, 4)], 24), (SHAPES, 26)]:
        assert_right(model, shapes, tokens)


@torch.no_grad()
def test_a_map_of_attention_is_of_the_shape_that_was_inspected():
    model = PatchifiedImages(siglip2(), 16)
    with patch_attention(model, layer=0, img_size=(64, 96)) as attention:
        model(picture(4, 6)[None])
        assert attention.map.shape == (1, 4, 6)
        with pytest.raises(VicinalError, match="inspected on images of 64 x 96, got patches cut before"):
            model(picture(6, 4)[None])


def test_an_example_of_other_patches_raises():
    example = inputs([(4, 6)], 24)[1]
    with pytest.raises(VicinalError, match=r"patch \* patch\), got \(1, 24, 700\)"):
        vicinal.attach(siglip2(), PRIOR, example=example | {"pixel_values": example["pixel_values"][..., :700]})
