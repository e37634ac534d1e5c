import weakref

import pytest
import torch

import vicinal
from vicinal.errors import VicinalError
from vicinal.inspection import patch_attention
from vicinal.mixing import Mixing, TransMix


def box(height, width, top, bottom, left, right, count=1):
    mask = torch.zeros(count, height, width, dtype=torch.bool)
    mask[:, top:bottom, left:right] = True
    return mask


def test_the_weights_are_those_of_the_reference(golden):
    known = golden["transmix"]
    attention = torch.tensor(known["class_attention"]).view(2, 4, 4)
    mask = box(32, 32, *known["box_y0_y1_x0_x1"], count=2)
    for transmix, values in (
        (TransMix(), known["lambda_eq7_unnormalised"]),
        (TransMix("paper"), known["lambda_eq7_unnormalised"]),
        (TransMix(normalize=True), known["lambda_normalised"]),
        (TransMix("reference"), known["lambda_mean_of_area_and_attention"]),
        (TransMix("reference", area_weight=0), known["lambda_normalised"]),
        (TransMix(area_weight=1), [known["area_lambda"]] * 2),
    ):
        assert transmix(attention, mask).tolist() == pytest.approx(values, abs=1e-5)
    patches = torch.eye(16).view(16, 4, 4)  # one patch at a time shows the mask on the grid
    downsampled = TransMix()(patches, mask[:1].expand(16, -1, -1))
    assert downsampled.tolist() == torch.tensor(known["downsampled_mask"]).flatten().tolist()


@pytest.mark.parametrize("seed", range(20))
def test_any_rectangle_is_what_a_loop_says(seed):
    torch.manual_seed(seed)
    height, width, rows, columns = (int(torch.randint(*span, ())) for span in ((8, 40), (8, 40), (1, 8), (1, 8)))
    attention, mask = torch.rand(3, rows, columns), torch.rand(3, height, width) < 0.5
    for number in range(3):
        inside = everything = 0.0
        for row in range(rows):
            for column in range(columns):
                weight = float(attention[number, row, column])
                inside += weight * float(mask[number, row * height // rows, column * width // columns])
                everything += weight
        area = sum(mask[number].flatten().tolist()) / (height * width)
        for transmix, expected in (
            (TransMix(), inside),
            (TransMix("reference"), (inside / everything + area) / 2),
            (TransMix(area_weight=0.3), 0.7 * inside + 0.3 * area),
        ):
            assert float(transmix(attention, mask)[number]) == pytest.approx(expected, abs=1e-5)


def test_everything_and_nothing():
    attention = torch.rand(2, 4, 6)
    for transmix in (TransMix(normalize=True), TransMix("reference")):
        assert transmix(attention, torch.ones(2, 32, 48, dtype=torch.bool)).tolist() == pytest.approx([1, 1])
        assert transmix(attention, torch.zeros(2, 32, 48, dtype=torch.bool)).tolist() == [0, 0]
    blind = TransMix(normalize=True)(torch.zeros(1, 4, 4), box(8, 8, 0, 2, 0, 8))
    assert blind.tolist() == [0.25]  # no attention on any patch: by area


def model_and_images(name="vit-micro", size=(32, 48), count=5, **options):
    model = vicinal.create_model(name, img_size=size, num_classes=4, **options)
    return model, torch.randn(count, 3, *size), torch.arange(count) % 4


@pytest.mark.parametrize(
    "options", [{"prior": "gmm:init=spread", "global_pool": "token"}, {"global_pool": "avg"}, {"global_pool": "token"}]
)
@pytest.mark.parametrize("per_example", [False, True])
def test_labels_follow_the_attention_that_the_model_computes(options, per_example):
    model, images, labels = model_and_images(depth=2, **options)
    mixing = Mixing("transmix", classes=4, prob=1.0, smoothing=0.1, per_example=per_example, model=model)
    with vicinal.tap(model) as weights:  # all of them
        batch = mixing(images, labels, seed=0)
        with mixing:
            model(batch.images)
    seen = weights.last.mean(1)
    if model.global_pool == "avg":
        attention = seen.mean(1) if seen.shape[-1] == 96 else seen[:, 1:, 1:].mean(1)
    else:
        attention = seen[:, 0, 1:]
    cells = batch.mask[:, ::4, ::4].flatten(1)  # patches of 4 pixels: the first pixel of each
    share = (attention * cells).sum(1)
    assert (share > 0.05).any()
    own, other = (0.1 / 4 + 0.9 * torch.eye(4)[each] for each in (labels, labels.flip(0)))
    expected = (1 - share)[:, None] * own + share[:, None] * other
    targets = mixing.targets(batch)
    torch.testing.assert_close(targets, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(targets.sum(1), torch.ones(5))
    assert not targets.requires_grad
    assert not torch.allclose(targets, batch.targets(), atol=1e-3)


@pytest.mark.parametrize("name", ["swin", "cait", "pit", "t2t"])
def test_every_backbone_has_attention_to_go_by(name):
    depth = {"depths": (1, 1, 1)} if name in ("swin", "pit") else {"depth": 1}
    model, images, labels = model_and_images(name, (32, 32), **depth)
    mixing = Mixing("transmix", classes=4, prob=1.0, model=model)
    batch = mixing(images, labels, seed=0)
    with mixing:
        model(batch.images)
    targets = mixing.targets(batch)
    torch.testing.assert_close(targets.sum(1), torch.ones(5))
    assert not torch.allclose(targets, batch.targets(), atol=1e-3)


def test_all_weight_on_the_area_is_cutmix_exactly():
    model, images, labels = model_and_images(depth=1)
    for seed in range(10):
        mixing = Mixing("transmix", classes=4, prob=0.8, model=model, transmix=TransMix(area_weight=1))
        batch = mixing(images, labels, seed=seed)
        with mixing:
            model(batch.images)
        plain = Mixing("cutmix", classes=4, prob=0.8)(images, labels, seed=seed)
        assert torch.equal(batch.images, plain.images)
        torch.testing.assert_close(mixing.targets(batch), plain.targets(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("per_example", [False, True])
def test_a_share_stays_mixup_and_its_labels_too(per_example):
    model, images, labels = model_and_images(depth=1, count=8)
    mixing = Mixing("transmix", classes=4, prob=1.0, mixup_share=0.5, per_example=per_example, model=model)
    cut = []
    for seed in range(60):
        batch = mixing(images, labels, seed=seed)
        masks = torch.zeros(8, dtype=torch.bool) if batch.mask is None else batch.mask.flatten(1).any(1)
        cut += masks.tolist()
        if seed < 5:
            with mixing:
                model(batch.images)
            assert torch.equal(mixing.targets(batch)[~masks], batch.targets()[~masks])
    assert 0.3 < sum(cut) / len(cut) < 0.65  # few boxes are empty


def test_which_attention_is_read_can_be_said():
    model, images, labels = model_and_images(depth=2)
    mixings = [
        Mixing("transmix", classes=4, prob=1.0, model=patch_attention(model, layer, queries=queries))
        for layer, queries in ((None, None), (0, None), (None, "mean"))
    ]
    targets = []
    for mixing in mixings:
        batch = mixing(images, labels, seed=0)
        with mixing:
            model(batch.images)
        targets.append(mixing.targets(batch))
    assert all(mixing.mode == "transmix" for mixing in mixings)
    assert not any(torch.allclose(targets[0], other, atol=1e-4) for other in targets[1:])


def test_attention_belongs_to_one_batch():
    model, images, labels = model_and_images(depth=1)
    mixing = Mixing("transmix", classes=4, prob=1.0, model=model)
    first, second = (mixing(images, labels, seed=seed) for seed in (0, 1))
    with mixing:
        model(first.images)
    targets = mixing.targets(first)
    with pytest.raises(VicinalError, match="another batch"):
        mixing.targets(second)
    assert torch.equal(mixing.targets(first), targets)  # as often as one likes
    with mixing:
        model(second.images)
    mixing.targets(second)
    with pytest.raises(VicinalError, match="another batch"):
        mixing.targets(first)


def test_attention_of_a_batch_that_was_not_mixed_is_no_other_ones():
    model, images, labels = model_and_images(depth=1)
    mixing = Mixing("transmix", classes=4, prob=0.5, model=model)
    batches = [mixing(images, labels, seed=seed) for seed in range(20)]
    whole = next(batch for batch in batches if batch.mask is None)
    cut = next(batch for batch in batches if batch.mask is not None)
    mixing.targets(whole)  # needs no attention
    with pytest.raises(VicinalError, match="nothing was read yet"):
        mixing.targets(cut)
    with mixing:
        model(whole.images)
    mixing.targets(whole)
    with pytest.raises(VicinalError, match="another batch"):
        mixing.targets(cut)


def test_pieces_of_a_batch_are_labeled_one_by_one():
    model, images, labels = model_and_images(depth=1)
    model.eval()  # no drop path
    mixing = Mixing("transmix", classes=4, prob=1.0, model=model)
    batch = mixing(images, labels, seed=0)
    targets = []
    for piece in batch.pieces(2):
        with mixing:
            model(piece.images)
        targets.append(mixing.targets(piece))
    with mixing:
        model(batch.images)
    torch.testing.assert_close(torch.cat(targets), mixing.targets(batch))


def test_a_batch_is_not_kept_beyond_its_step():
    model, images, labels = model_and_images(depth=1)
    mixing = Mixing("transmix", classes=4, prob=1.0, model=model)
    batch = mixing(images, labels, seed=0)
    with mixing:
        model(batch.images)
    mixing.targets(batch)
    gone = weakref.ref(batch)
    del batch
    assert gone() is None


def test_bad_input_says_what_to_do():
    with pytest.raises(VicinalError, match=r"area_weight .* got 2"):
        TransMix(area_weight=2)
    with pytest.raises(VicinalError, match="unknown variant 'papre'; did you mean 'paper'"):
        TransMix("papre")
    with pytest.raises(VicinalError, match=r"got \(2, 3, 4, 4\) and \(2, 8, 8\)"):
        TransMix()(torch.rand(2, 3, 4, 4), box(8, 8, 0, 2, 0, 2, count=2))
    with pytest.raises(VicinalError, match=r"model=.* both work with any"):
        Mixing("transmix", classes=4)
    resnet = vicinal.create_model("resnet18", img_size=32)
    with pytest.raises(VicinalError, match=r"attention to read. .* both work with any"):
        Mixing("transmix", classes=4, model=resnet)
    model, images, labels = model_and_images(depth=1)
    mixing = Mixing("transmix", classes=4, prob=1.0, model=model)
    batch = mixing(images, labels, seed=0)
    model(batch.images)
    with pytest.raises(VicinalError, match="nothing was read yet: run the model inside `with` first"):
        mixing.targets(batch)
    with mixing:
        model(batch.images[:2])
    with pytest.raises(VicinalError, match=r"attention .*got \(2, 8, 12\) and \(5, 32"):
        mixing.targets(batch)
