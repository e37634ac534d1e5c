import pytest
import torch
from timm.layers import resample_abs_pos_embed

import vicinal
from small_backbones import LAYERS, SMALL, small
from vicinal.attachment import get_priors


@pytest.mark.parametrize("name", SMALL)
def test_a_model_of_32_pixels_opens_at_48_and_64(name, tmp_path):
    model = small(name, prior="gmm:kernels=2,sigma=1.5,alpha=0.3").eval()
    folder = vicinal.save(model, tmp_path / "model")
    for pixels in (48, 64, (48, 32)):
        loaded = vicinal.load(folder, img_size=pixels)
        height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
        assert loaded.patch_embed.patch_size == model.patch_embed.patch_size
        assert loaded(torch.randn(2, 3, height, width)).isfinite().all()
        assert len(get_priors(loaded)) == LAYERS[name]
    again = vicinal.load(vicinal.save(loaded, tmp_path / "rectangle"))
    images = torch.randn(1, 3, 48, 32)
    assert torch.equal(again(images), loaded(images))


def test_positions_are_interpolated_and_the_class_token_keeps_its_own():
    model = vicinal.create_model("vit-mini", global_pool="token")
    before = model.pos_embed.detach().clone()
    vicinal.resize(model, (48, 64))
    assert model.pos_embed.shape == (1, 1 + 12 * 16, 96)
    assert torch.equal(model.pos_embed[:, 0], before[:, 0])
    expected = resample_abs_pos_embed(before, (12, 16), (8, 8), num_prefix_tokens=1)
    assert torch.equal(model.pos_embed, expected)
    assert model.pos_embed.requires_grad


@pytest.mark.parametrize("name", ["swin", "cait", "pit", "t2t"])
def test_a_smooth_ramp_of_positions_stays_a_ramp(name):
    model = small(name)
    holder = model.patch_embed if name == "swin" else model
    prefix = 1 if name == "pit" else 0
    side = model.patch_embed.grid_size[0]
    ramp = torch.arange(side * 1.0).repeat(side, 1)[..., None].expand(-1, -1, holder.pos_embed.shape[-1])
    with torch.no_grad():
        holder.pos_embed.copy_(
            ramp[None] if name == "swin" else torch.nn.functional.pad(ramp.flatten(0, 1), (0, 0, prefix, 0))
        )
    vicinal.resize(model, 64)
    resized = holder.pos_embed.detach()
    row = resized[0, 3, :, 0] if name == "swin" else resized[0, prefix : prefix + 2 * side, 0]
    expected = (torch.arange(2 * side) + 0.5) / 2 - 0.5
    torch.testing.assert_close(row[4:-4], expected[4:-4], rtol=0, atol=1e-4)  # cubic interpolation bends the ends


def test_relative_tables_are_stretched_about_their_center():
    model = vicinal.create_model("vit-relpos", global_pool="token")
    table = model.blocks[0].attn.rel_pos.relative_position_bias_table
    y, x = torch.meshgrid(torch.arange(-7.0, 8), torch.arange(-7.0, 8), indexing="ij")
    with torch.no_grad():
        table[:225] = (y + 10 * x).reshape(-1, 1)
        table[225:] = torch.tensor([[1.0], [2.0], [3.0]])
    vicinal.resize(model, (64, 32))
    resized = model.blocks[0].attn.rel_pos.relative_position_bias_table.detach()
    square = resized[:-3, 5].view(31, 15)
    assert float(square[15, 7]) == pytest.approx(0, abs=1e-5)
    assert float(square[30, 14]) == pytest.approx(77, abs=1e-3)
    assert float(square[0, 7]) == pytest.approx(-7, abs=1e-4)
    assert resized[-3:, 0].tolist() == [1.0, 2.0, 3.0]


def test_swin_keeps_its_windows_and_its_tables():
    model = vicinal.create_model("swin")
    before = [block.attn.relative_position_bias_table.clone() for stage in model.layers for block in stage.blocks]
    vicinal.resize(model, 48)
    after = [block.attn for stage in model.layers for block in stage.blocks]
    assert {attention.window_size for attention in after} == {(4, 4)}
    assert all(torch.equal(x.relative_position_bias_table, y) for x, y in zip(after, before, strict=True))
    assert [block.shift_size for block in model.layers[2].blocks] == [(0, 0), (2, 2)] * 2  # its 6 x 6 has windows now


@pytest.mark.parametrize(("rescale", "expected"), [(True, 3.0), (False, 1.5)])
def test_widths_are_stretched_or_kept(rescale, expected, tmp_path):
    model = vicinal.create_model("vit-mini", prior="gmm:kernels=1,sigma=1.5", global_pool="token")
    folder = vicinal.save(model, tmp_path / "model")
    for prior in get_priors(vicinal.load(folder, img_size=64, rescale=rescale)).values():
        assert prior.grid == vicinal.Grid(16, 16, prefix=1)
        torch.testing.assert_close(prior.sigma, torch.full_like(prior.sigma, expected))


@pytest.mark.parametrize("prior", ["elm", "rpe", "rpe-mlp", "conv", "decay", "gab+gmm"])
def test_every_prior_goes_along(prior):
    model = vicinal.create_model("vit-mini", prior=prior, global_pool="token").eval()
    trained = get_priors(model)
    with torch.no_grad():
        for parameter in (p for each in trained.values() for p in each.parameters()):
            parameter += 0.1 * torch.randn_like(parameter)
    vicinal.resize(model, (32, 48))
    for name, each in get_priors(model).items():
        expected = trained[name].resize(vicinal.Grid(8, 12, prefix=1), rescale=True)
        for ours, theirs in zip(each(), expected(), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
    assert model(torch.randn(1, 3, 32, 48)).isfinite().all()


def test_modes_random_numbers_and_the_same_size_are_left_alone():
    model = vicinal.create_model("vit-mini", prior="gmm:init=paper").train()
    model.blocks[2].eval()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    vicinal.resize(model, 48)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert not model.blocks[2].attn.prior.training
    assert not model.blocks[2].training
    before = model.pos_embed
    vicinal.resize(model, (48, 48))
    assert model.pos_embed is before


def test_timms_models_change_size_too(tmp_path):
    model = vicinal.create_model("deit_tiny_patch16_224", prior="gmm", img_size=64, num_classes=3).eval()
    loaded = vicinal.load(vicinal.save(model, tmp_path / "model"), img_size=(96, 128))
    assert loaded(torch.randn(1, 3, 96, 128)).shape == (1, 3)


@pytest.mark.parametrize("name", ["vit", "t2t"])
def test_sizes_that_patches_do_not_divide_are_refused(name):
    with pytest.raises(vicinal.VicinalError, match="patches of 4 x 4 pixels, got 50 x 50"):
        vicinal.resize(small(name), 50)


def test_what_cannot_be_is_told():
    with pytest.raises(vicinal.VicinalError, match=r"patches of 4 x 4 pixels.*use 48 or 52 in place of 50"):
        vicinal.resize(vicinal.create_model("vit-mini"), 50)
    with pytest.raises(vicinal.VicinalError, match=r"cannot change its image size; create it with img_size=\(64, 64\)"):
        vicinal.resize(vicinal.create_model("xcit_nano_12_p16_224", num_classes=2), 64)
    with pytest.raises(vicinal.VicinalError, match=r"img_size .* got 'large'"):
        vicinal.resize(vicinal.create_model("vit-mini"), "large")
