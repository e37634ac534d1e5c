"""`vicinal.inspect`: what it reports, that it changes nothing, and that nobody probes twice."""

import copy

import pytest
import torch
from torch import nn

import vicinal
from small_models import beit, cait, images, swin, swin_v2, vit
from test_token_orders import SHIFTED, Model
from vicinal import Grid, VicinalError
from vicinal.cells import Cells
from vicinal.inspection import Inspection
from vicinal.inspection.model_inspection import inspect_runner
from vicinal.inspection.model_runner import make_runner
from vicinal.inspection.refusal import RefusalKind


def description(inspection):
    """Returns everything that an inspection says of each site."""
    return [
        (
            *(site.name, site.heads, site.windows, site.place, site.steps, site.head_layout, site.refusal),
            *(side.index.tolist() if isinstance(side, Cells) else side for side in (site.queries, site.keys)),
        )
        for site in inspection.sites
    ]


def snapshot(model):
    """Returns everything of a model that an inspection could change."""
    return (
        {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()},
        {name: (x.dtype, x.requires_grad, x.grad) for name, x in model.named_parameters()},
        [
            (type(each), each.training, set(vars(each)), len(each._forward_hooks), len(each._forward_pre_hooks))
            for each in model.modules()
        ],
    )


def same_snapshots(one, other):
    same = one[1:] == other[1:] and one[0].keys() == other[0].keys()
    return same and all(
        one[0][name][0] == other[0][name][0] and torch.equal(one[0][name][1], other[0][name][1]) for name in one[0]
    )


class Forwards:
    """Counts the forwards of a model inside."""

    def __init__(self, model):
        self.model, self.count = model, 0

    def __enter__(self):
        self.hook = self.model.register_forward_pre_hook(self.add)
        return self

    def __exit__(self, *_):
        self.hook.remove()

    def add(self, *_):
        self.count += 1


def test_the_report_has_every_attention():
    inspection = vicinal.inspect(cait())
    assert isinstance(inspection, Inspection)
    assert inspection.verified
    assert [site.name for site in inspection.served] == ["blocks.0.attn", "blocks.1.attn"]
    assert [site.grid for site in inspection.served] == [Grid(4, 4)] * 2
    assert [site.heads for site in inspection.sites] == [4] * 4
    assert [site.refusal.kind for site in inspection.refused] == [RefusalKind.SILENT] * 2
    assert inspection.sites == inspection.served + inspection.refused
    with pytest.raises(AttributeError, match=r"blocks_token_only\.0\.attn"):
        _ = inspection.refused[0].grid


def test_the_report_prints_served_and_refused():
    inspection = vicinal.inspect(cait())
    lines = str(inspection).splitlines()
    assert "Cait at 32 x 32: 2 of 4" in lines[0]
    assert [line.split() for line in lines[2:4]] == [
        [f"blocks.{number}.attn", "TalkingHeadAttn", "4", "4", "x", "4"] for number in (0, 1)
    ]
    for line, site in zip(lines[4:], inspection.refused, strict=True):
        assert site.name in line
        assert site.reason in line


@pytest.mark.parametrize("make", [vit, swin, swin_v2, cait, beit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_changes(make, dtype):
    model = nn.Sequential(nn.BatchNorm2d(3), make()).to(dtype).train()
    model[1].eval()
    model[0].requires_grad_(False)
    before, random = snapshot(model), torch.get_rng_state()
    inspection = vicinal.inspect(model, img_size=32)
    assert inspection.served
    assert same_snapshots(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.overrides._get_current_function_mode() is None


def test_a_model_that_fails_is_left_as_it_was():
    model = vit().train()
    before = snapshot(model)
    with pytest.raises(VicinalError, match="3 x 30 x 30"):
        vicinal.inspect(model, img_size=30)
    assert same_snapshots(snapshot(model), before)
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("make", [vit, swin, swin_v2, cait, beit])
def test_a_model_that_carries_priors_is_inspected_as_if_it_had_none(make):
    model = make()
    before = description(vicinal.inspect(model))
    vicinal.attach(model, "gmm:init=spread+gab")
    carried = snapshot(model)
    assert description(vicinal.inspect(model)) == before
    assert same_snapshots(snapshot(model), carried)
    vicinal.detach(model)
    assert description(vicinal.inspect(model)) == before


def test_attach_and_tap_do_not_probe_again():
    model = cait().eval()
    with Forwards(model) as probed:
        inspection = vicinal.inspect(model)
    with Forwards(model) as forwards:
        table = vicinal.attach(model, "gab", inspection=inspection)
    # One run to see which modules are given the image, and one to note its size.
    assert forwards.count <= 2 < probed.count
    assert [layer.name for layer in table.layers] == ["blocks.0.attn", "blocks.1.attn"]
    with Forwards(model) as forwards:
        reader = vicinal.tap(model, None, inspection=inspection)
        attention = vicinal.inspection.patch_attention(model, inspection=inspection)
    assert forwards.count == 0
    with reader, attention:
        model(images(model))
    assert list(reader.weights) == [site.name for site in inspection.sites]
    assert attention.map.shape == (2, 4, 4)


def test_the_inspection_gives_the_same_attachment():
    one, other = swin(), swin()
    inspection = vicinal.inspect(one)
    assert vicinal.attach(one, "gab", inspection=inspection) == vicinal.attach(other, "gab")


def test_an_inspection_serves_priors_one_after_another():
    model = vit()
    inspection = vicinal.inspect(model)
    vicinal.attach(model, "gab", layers=[0], inspection=inspection)
    vicinal.attach(model, "gmm", layers=[1, 2], inspection=inspection)
    assert [type(block.attn.prior).__name__ for block in model.blocks] == ["GaussianBias"] + ["GaussianMixture"] * 2
    model(images(model))


def test_an_inspection_of_another_model_is_refused():
    model = vit()
    inspection = vicinal.inspect(model)
    twin = copy.deepcopy(model)
    for use in (
        lambda: vicinal.attach(twin, "gmm", inspection=inspection),
        lambda: vicinal.tap(twin, inspection=inspection),
        lambda: vicinal.inspection.patch_attention(twin, inspection=inspection),
    ):
        with pytest.raises(VicinalError, match="inspection"):
            use()
    assert not any(hasattr(type(module), "plain_class") for module in twin.modules())


def test_an_unverified_inspection_is_verified_before_a_prior_is_attached():
    model = Model(SHIFTED, windows=4)  # tokens of opposite edges attend to each other
    inspection = inspect_runner(make_runner(model, 32))
    assert not inspection.verified
    assert len(inspection.served) == 2
    with pytest.raises(VicinalError, match=r"blocks\.0"):
        vicinal.attach(model, "gab", inspection=inspection)


@pytest.mark.parametrize("model", ["vit", None, 3])
def test_what_is_not_a_module_is_named(model):
    with pytest.raises(VicinalError, match=type(model).__name__):
        vicinal.inspect(model)


def test_cells_follow_a_rectangular_image():
    inspection = vicinal.inspect(vit(img_size=(32, 64), reg_tokens=2))
    for site in inspection.served:
        assert (site.queries.rows, site.queries.columns) == (4, 8)
        assert site.queries.index.tolist() == [[-1] * 3 + list(range(32))]
        centers = site.queries.centers[0, 3:].view(4, 8, 2)
        torch.testing.assert_close(centers[:, 0, 0], (torch.arange(4.0).double() + 0.5) / 4, atol=0.02, rtol=0)
        torch.testing.assert_close(centers[0, :, 1], (torch.arange(8.0).double() + 0.5) / 8, atol=0.02, rtol=0)


def test_a_compiled_model_is_inspected_attached_and_read_as_it_was_before():
    model = vit()
    compiled = torch.compile(model, backend="eager")
    plain = compiled(images(model))
    found = vicinal.inspect(compiled, img_size=32)
    assert [site.place for site in found.served] == ["4 x 4 + 1 prefix"] * 3
    vicinal.attach(compiled, "gab:amplitude=3", inspection=found)
    x = images(model)
    with vicinal.tap(compiled, inspection=found) as t:
        out = compiled(x)
    torch.testing.assert_close(out, model(x))
    assert t.last.shape == (2, 4, 17, 17)
    assert plain.shape == out.shape
