"""What holds for every prior, whatever its formula."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vicinal import Grid, build_prior
from vicinal.priors import registry

SPECS = [
    "gmm:init=paper",
    "gmm:init=spread,share_heads=true",
    "elm",
    "gab",
    "gab:share_heads=false",
    "rpe:init=normal",
    "rpe-mlp:init=normal",
    "decay",
    "decay:learnable=true",
    "conv",
    "conv:centers=zero,growth=0.4",
    "gmm:init=spread+gab",
    "elm+conv",
    "none",
]
PER_OFFSET = [spec for spec in SPECS if "elm" not in spec]
ISOTROPIC = ["gmm:init=paper", "gmm:init=spread", "gab", "decay", "conv:centers=zero"]
IDENTITY = ["gmm", "gmm:kernels=1", "elm", "rpe", "rpe-mlp", "none", "gmm+rpe+elm"]

grids = st.builds(Grid, st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
heads = st.integers(1, 4)


def build(spec, heads, grid, **options):
    torch.manual_seed(3)
    prior = build_prior(spec, heads=heads, grid=grid, **options)
    for name, parameter in prior.named_parameters():
        if name.endswith(("flat_mask", "flat_bias")):  # free tables: make them uneven
            torch.nn.init.normal_(parameter)
    return prior


def parts(pair):
    return [values for values in pair if values is not None]


def test_every_built_in_prior_is_covered():
    used = {part.split(":")[0] for spec in SPECS for part in spec.split("+")}
    assert used == set(registry._BUILTIN)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15)
@given(heads=heads, grid=grids)
def test_shapes_and_finite_values_on_any_rectangle(spec, heads, grid):
    prior = build(spec, heads, grid)
    for values in parts(prior()):
        assert values.shape == (heads, grid.tokens, grid.tokens)
        assert values.isfinite().all()
    for values in parts(prior.pairs()):
        assert values.shape == (heads, grid.patches, grid.patches)
    if spec in PER_OFFSET:
        assert all(values.shape == (heads, *grid.table_shape) for values in parts(prior.table()))
    else:
        assert prior.table() is None


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=10)
@given(grid=grids)
def test_prefix_tokens_are_neutral_and_leave_patches_as_they_are(spec, grid):
    bare = build(spec, 2, Grid(grid.height, grid.width))
    with_prefix = build(spec, 2, grid)
    for values, plain, neutral in zip(with_prefix(), bare(), (1.0, 0.0), strict=True):
        if values is None:
            assert plain is None
            continue
        assert (values[:, : grid.prefix] == neutral).all()
        assert (values[:, :, : grid.prefix] == neutral).all()
        assert torch.equal(values[:, grid.prefix :, grid.prefix :], plain)


@pytest.mark.parametrize("spec", PER_OFFSET)
@settings(max_examples=10)
@given(grid=st.builds(Grid, st.integers(2, 5), st.integers(2, 5)))
def test_translation_changes_nothing(spec, grid):
    for values in parts(build(spec, 2, grid)()):
        picture = values.view(2, grid.height, grid.width, grid.height, grid.width)
        assert torch.equal(picture[:, :-1, :-1, :-1, :-1], picture[:, 1:, 1:, 1:, 1:])


@pytest.mark.parametrize("spec", ISOTROPIC)
@settings(max_examples=10)
@given(grid=grids)
def test_isotropic_priors_are_symmetric_under_reflection(spec, grid):
    for table in parts(build(spec, 3, grid).table()):
        torch.testing.assert_close(table, table.flip(1))
        torch.testing.assert_close(table, table.flip(2))
    for values in parts(build(spec, 3, grid)()):
        torch.testing.assert_close(values, values.mT)


@pytest.mark.parametrize("spec", ["gmm:sigma=2,alpha=0.7", "gab:sigma=2", "decay", "conv", "rpe-mlp:init=normal"])
@settings(max_examples=10)
@given(grid=st.builds(Grid, st.integers(1, 6), st.integers(1, 6)))
def test_a_rectangle_is_a_part_of_a_larger_square(spec, grid):
    options = {"sigma": [1.0] * 4} if spec == "conv" else {}  # given widths do not depend on the grid
    small, large = (build(spec, 4, place, **options).pairs() for place in (grid, Grid(6, 6)))
    for part, whole in zip(parts(small), parts(large), strict=True):
        square = whole.view(4, 6, 6, 6, 6)[:, : grid.height, : grid.width, : grid.height, : grid.width]
        torch.testing.assert_close(part, square.reshape(part.shape))


@pytest.mark.parametrize("spec", IDENTITY)
@settings(max_examples=10)
@given(heads=heads, grid=grids)
def test_identity_at_identity_init(spec, heads, grid):
    scale, bias = build_prior(spec, heads=heads, grid=grid)()
    assert scale is None or (scale == 1).all()
    assert bias is None or (bias == 0).all()


@pytest.mark.parametrize(
    "spec", ["gmm:init=paper", "gab", "decay:learnable=true", "conv:growth=0.4", "rpe-mlp:init=normal"]
)
@pytest.mark.parametrize("rescale", [True, False])
@settings(max_examples=10)
@given(before=grids, after=grids)
def test_resize_there_and_back_returns_the_same(spec, rescale, before, after):
    prior = build(spec, 3, before)
    there = prior.resize(after, rescale=rescale)
    assert there.grid == after
    back = there.resize(before, rescale=rescale)
    for values, original in zip(parts(back()), parts(prior()), strict=True):
        torch.testing.assert_close(values, original, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["rpe:init=normal", "elm", "elm:share_heads=false", "elm+gmm"])
@settings(max_examples=10)
@given(height=st.integers(1, 3), width=st.integers(1, 3), prefix=st.integers(0, 2))
def test_free_tables_survive_a_nested_finer_grid(spec, height, width, prefix):
    prior = build(spec, 2, Grid(height, width, 1))
    # With 2n - 1 patches for n, every old position is a position of the finer grid, so nothing is lost on the way.
    finer = prior.resize(Grid(2 * height - 1, 2 * width - 1, prefix))
    assert all(values.isfinite().all() for values in parts(finer()))
    for values, original in zip(parts(finer.resize(prior.grid)()), parts(prior()), strict=True):
        torch.testing.assert_close(values, original, rtol=1e-4, atol=1e-5)


def test_resize_keeps_widths_in_patches_or_rescales_them():
    prior = build_prior("gmm:sigma=2,alpha=1", heads=1, grid=Grid(8, 8))
    assert prior.resize(Grid(16, 16)).sigma.unique().tolist() == [2]
    assert prior.resize(Grid(16, 16), rescale=True).sigma.unique().tolist() == [4]
    conv = build_prior("conv", heads=6, grid=Grid(8, 8))
    assert conv.resize(Grid(16, 8), rescale=True).mu[3].tolist() == [2, 0]
    decay = build_prior("decay:gamma=0.64", heads=2, grid=Grid(4, 4))
    torch.testing.assert_close(decay.resize(Grid(8, 8), rescale=True).gamma, torch.tensor([0.8, 0.8]))
    # Twice as fine and rescaled: the same function of the distance in the image.
    mlp = build("rpe-mlp:init=normal", 2, Grid(4, 4))
    coarse, fine = mlp.table()[1], mlp.resize(Grid(8, 8), rescale=True).table()[1]
    torch.testing.assert_close(fine[:, 1::2, 1::2], coarse)


def test_resize_leaves_the_original_alone_and_keeps_what_is_frozen():
    prior = build("rpe", 2, Grid(3, 3))
    prior.requires_grad_(False)
    before = copy.deepcopy(prior.state_dict())
    resized = prior.resize(Grid(5, 5, 1))
    assert not resized.flat_bias.requires_grad
    assert resized.flat_bias.dim() == 1
    assert prior.grid == Grid(3, 3)
    assert all(torch.equal(prior.state_dict()[name], value) for name, value in before.items())


def test_resize_stretches_an_rpe_table_and_keeps_its_center():
    prior = build_prior("rpe", heads=1, grid=Grid(3, 3))
    ramp = torch.arange(-2.0, 3.0)
    prior.flat_bias.data = (ramp[:, None] + 10 * ramp[None, :]).flatten()
    table = prior.resize(Grid(5, 3)).table()[1][0]
    torch.testing.assert_close(table[:, 2], torch.linspace(-2, 2, 9))
    assert table[4, 2] == 0


@settings(max_examples=10)
@given(order=st.permutations(["gmm:sigma=2,alpha=0.5", "gab", "conv", "elm", "none"]))
def test_composition_multiplies_scales_adds_biases_and_ignores_order(order):
    grid = Grid(3, 4, 1)
    scale, bias = build_prior("+".join(order), heads=2, grid=grid)()
    gmm, gab, conv = (build_prior(spec, heads=2, grid=grid)() for spec in ("gmm:sigma=2,alpha=0.5", "gab", "conv"))
    torch.testing.assert_close(scale, gmm[0])
    torch.testing.assert_close(bias, gab[1] + conv[1])


def test_composition_multiplies_scales():
    grid = Grid(3, 3)
    scale, _ = build_prior("gmm:sigma=2,alpha=0.5+gmm:sigma=1,alpha=2", heads=2, grid=grid)()
    first, second = (
        build_prior(spec, heads=2, grid=grid)() for spec in ("gmm:sigma=2,alpha=0.5", "gmm:sigma=1,alpha=2")
    )
    torch.testing.assert_close(scale, first[0] * second[0])


@pytest.mark.parametrize("spec", SPECS)
def test_state_dict_round_trip(spec):
    torch.manual_seed(1)
    first = build_prior(spec, heads=3, grid=Grid(4, 4, 1))
    torch.manual_seed(2)
    second = build_prior(spec, heads=3, grid=Grid(4, 4, 1))
    second.load_state_dict(first.state_dict())
    for left, right in zip(first(), second(), strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


@pytest.mark.parametrize("spec", SPECS)
def test_prints_its_class_heads_and_grid(spec):
    text = repr(build_prior(spec, heads=3, grid=Grid(4, 5, 1)))
    assert "heads=3, grid=4 x 5 + 1 prefix" in text


@pytest.mark.parametrize("spec", [*SPECS, "rpe-mlp:init=normal+elm"])
def test_what_inference_keeps_is_never_stale(spec):
    prior = build(spec, 2, Grid(3, 4, 1))

    def fresh():
        return prior.on(prior.grid)._over_tokens()

    def assert_current():
        with torch.no_grad():
            kept = prior()
            for values, expected in zip(kept, fresh(), strict=True):
                assert (values is None and expected is None) or torch.equal(values, expected)
            assert all(a is b for a, b in zip(prior(), kept, strict=True))  # and it is kept

    assert_current()
    changes = [
        lambda p: p.data.mul_(1.5),  # leaves no trace in the version counter
        lambda p: p.data.__setitem__(..., 0.25),
        lambda p: setattr(p, "data", p.data + 1),
        lambda p: torch.nn.init.constant_(p, 0.5),
    ]
    for change in changes:
        for parameter in prior.parameters():
            change(parameter)
        assert_current()
    prior.grid = Grid(3, 4, 2)
    assert_current()
    for part in prior.modules():
        if hasattr(part, "constant"):
            part.constant += 0.5
    assert_current()
    prior.double()
    assert_current()
    with torch.inference_mode():
        prior()
    for values in parts(prior()):
        assert values.requires_grad == any(parameter.requires_grad for parameter in prior.parameters())
    assert not copy.deepcopy(prior)._cache._values
