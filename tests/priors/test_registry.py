import inspect
import runpy
import subprocess
import sys

import pytest
import torch

import vicinal
from vicinal import Grid, Prior, VicinalError, build_prior, list_priors, register_prior
from vicinal.priors import registry
from vicinal.priors.spec import current_spec

GRID = Grid(4, 4)


def build(spec, **options):
    return build_prior(spec, heads=2, grid=GRID, **options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gnm", "unknown prior 'gnm'; did you mean 'gmm'"),
        ("blur", "unknown prior 'blur'. Known: conv, decay, elm"),
        ("gmm:kernel=3", "unknown option of prior 'gmm': 'kernel'; did you mean 'kernels'"),
        ("none:kernels=3", "unknown option of prior 'none': 'kernels'. Known: none"),
        ("gmm:kernels=0", "gmm: kernels .* got 0"),
        ("gmm:kernels=-2", "gmm: kernels .* got -2"),
        ("gmm:kernels=two", "option 'kernels' of prior 'gmm' .* got 'two'"),
        ("gmm:kernels=2.5", "got '2.5'"),
        ("gmm:init=papr", "identity|paper|spread, got 'papr'"),
        ("gmm:share_heads=maybe", "true|false, got 'maybe'"),
        ("gmm:sigma=1/x", "a number or numbers joined by '/' or none, got '1/x'"),
        ("gmm:sigma=1/2/3", r"gmm: sigma .* \(5, 2\), got shape \(3, 1\)"),
        ("gab:sigma=1/2/3", r"gab: sigma .* \(1,\), got shape \(3,\)"),
        ("decay:gamma=1.5", r"decay: gamma .* got \[1.5"),
        ("conv:growth=-1", "conv: growth .* got -1"),
        ("rpe-mlp:hidden=0", "rpe-mlp: hidden .* got 0"),
        ("", "malformed prior '': a name is missing"),
        ("gmm+", "malformed prior 'gmm\\+': a name is missing"),
        ("gmm:", "malformed prior 'gmm:': cannot read 'gmm:'"),
        ("gmm:kernels", "malformed prior 'gmm:kernels': cannot read option 'kernels'"),
        ("gmm:kernels=3,", "cannot read option ''"),
        ("gmm:kernels=3,kernels=4", "option 'kernels' is given twice"),
        ("gmm kernels=3", "cannot read 'gmm kernels=3'"),
        (None, "'gmm:kernels=3', got None"),
    ],
)
def test_bad_specs_say_what_was_wrong_and_what_to_write(spec, message):
    with pytest.raises(VicinalError, match=message.replace("|", r"\|")):
        build(spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_prior("gmm", heads=0, grid=GRID), "heads .* got 0"),
        (lambda: build_prior("gmm", heads=2, grid=(4, 4)), r"Grid\(height, width, prefix\), got \(4, 4\)"),
        (
            lambda: build("gmm:kernels=3", kernels=4),
            "option 'kernels' of 'gmm' is given in the spec and as an argument",
        ),
        (lambda: build("gmm+gab", kernels=4), r"names 2 priors; write the options \['kernels'\] inside the spec"),
        (lambda: build("gmm", kernels=True), "kernels.* got True"),
        (lambda: build("gmm", kernels=2.0), "kernels.* got 2.0"),
        (lambda: build("gmm", share_heads=1), "share_heads.* got 1"),
    ],
)
def test_bad_arguments_say_what_was_expected(make, message):
    with pytest.raises(VicinalError, match=message):
        make()


def test_spec_and_keywords_mean_the_same():
    torch.manual_seed(1)
    written = build("gmm:kernels=3,init=spread,share_heads=True")
    torch.manual_seed(1)
    given = build("gmm", kernels=3, init="spread", share_heads=True)
    assert torch.equal(written()[0], given()[0])
    assert (written.kernels, written.init, written.share_heads) == (3, "spread", True)


def test_numbers_join_with_a_slash_and_exponents_are_no_separator():
    prior = build("gmm:kernels=2,sigma=1/2.5,alpha=1e+3+gab")
    assert prior.parts[0].sigma[:, 0].tolist() == [1, 2.5]
    assert prior.parts[0].alpha.unique().tolist() == [1000]
    assert build("gmm:sigma=none").sigma[0, 0] == 0.5


def test_gmm_has_exactly_two_parameters_per_kernel_and_head():
    for kernels in (1, 5, 20):
        parameters = list(build("gmm", kernels=kernels).parameters())
        assert sum(parameter.numel() for parameter in parameters) == 2 * kernels * 2
    assert sum(parameter.numel() for parameter in build("gmm:share_heads=true").parameters()) == 10


@pytest.mark.parametrize("spec", ["gmm", "elm", "gab", "rpe", "decay:learnable=true", "conv", "gmm+gab"])
def test_timm_spares_every_prior_parameter_from_weight_decay(spec):
    from timm.optim import param_groups_weight_decay

    model = torch.nn.Module()
    model.prior = build(spec)
    groups = param_groups_weight_decay(model, weight_decay=0.05)
    spared = [parameter for group in groups if group["weight_decay"] == 0 for parameter in group["params"]]
    assert {id(parameter) for parameter in spared} == {id(parameter) for parameter in model.parameters()}
    assert all(parameter.dim() == 1 for parameter in model.parameters())


def test_users_can_register_their_own():
    @register_prior("stripes")
    class Stripes(Prior):
        """Looks along rows."""

        def __init__(self, heads, grid, layer=0, depth=1, *, strength: float = 1.0, every=2):
            super().__init__(heads, grid, layer, depth)
            self.strength, self.every = strength, every

        def bias(self):
            return -self.strength * self.grid.offsets()[0].abs().expand(self.grid.table_shape)[None] / self.every

    assert list_priors()[-1] == "stripes"
    prior = build("stripes:strength=3,every=4+gab", layer=1, depth=2)
    assert (prior.parts[0].strength, prior.parts[0].every) == (3.0, 4)
    assert prior()[1].shape == (2, 16, 16)
    with pytest.raises(VicinalError, match="'streng'; did you mean 'strength'"):
        build("stripes:streng=1")
    with pytest.raises(VicinalError, match="got 'x'"):
        build("stripes:every=x")


def test_a_taken_or_bad_name_is_refused():
    class Mine(Prior):
        pass

    with pytest.raises(VicinalError, match="a prior named 'gmm' exists already; register Mine under another name"):
        register_prior("gmm")(Mine)
    with pytest.raises(VicinalError, match="got '3d'"):
        register_prior("3d")
    register_prior("mine")(Mine)
    register_prior("mine")(Mine)  # running a notebook cell again is fine

    class Other(Prior):
        pass

    with pytest.raises(VicinalError, match="'mine' exists already"):
        register_prior("mine")(Other)


def test_composing_different_grids_is_refused():
    from vicinal.priors.composition import Composition

    with pytest.raises(VicinalError, match="2 heads on 4 x 4 and 2 heads on 5 x 4"):
        Composition([build("gmm"), build_prior("gab", heads=2, grid=Grid(5, 4))])


@pytest.mark.parametrize("module", ["gaussian_mixture", "elementwise", "convolution", "plot"])
@pytest.mark.filterwarnings("ignore:'vicinal.priors.* found in sys.modules:RuntimeWarning")  # by tests before
def test_a_prior_draws_itself(module, tmp_path, monkeypatch, capsys):
    path = tmp_path / "prior.png"
    monkeypatch.setattr(sys, "argv", [module, "--out", str(path), "--grid", "3", "5", "--heads", "2"])
    runpy.run_module(f"vicinal.priors.{module}", run_name="__main__")
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_prior_draws_itself_in_a_process_of_its_own(tmp_path):
    path = tmp_path / "prior.png"
    command = [sys.executable, "-W", "error", "-m", "vicinal.priors.gaussian_mixture", "--out", str(path)]
    result = subprocess.run([*command, "--grid", "3", "5"], capture_output=True, text=True, check=True)
    assert result.stdout == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_built_in_file_ends_in_its_drawing():
    for name, home in registry._BUILTIN.items():
        source = inspect.getsource(inspect.getmodule(registry.get_prior(name)))
        assert f'main("{name}' in source.split('if __name__ == "__main__":')[1], home


def test_exports_resolve():
    assert all(getattr(vicinal, name) is not None for name in vicinal.__all__)


@pytest.mark.parametrize(
    "make", [lambda: build("conv:centers=neighbours"), lambda: build("conv", centers="neighbours")]
)
def test_an_old_spelling_warns_and_is_kept_in_the_new_one(make):
    with pytest.warns(DeprecationWarning, match="centers=neighbors") as warned:
        old = make()
    assert warned[0].filename == __file__
    assert old.centers == "neighbors"
    assert "neighbours" not in f"{old.spec} {old.spec_options}"
    assert torch.equal(old.mu, build("conv:centers=neighbors").mu)


def test_a_class_takes_an_old_spelling():
    with pytest.warns(DeprecationWarning, match="centers=neighbors"):
        assert registry.get_prior("conv")(2, GRID, centers="neighbours").centers == "neighbors"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("conv:growth=0.4,centers=neighbours+gab", "conv:growth=0.4,centers=neighbors+gab"),
        ("gmm:kernels=3, +", "gmm:kernels=3, +"),
        ("conv:centers=zero", "conv:centers=zero"),
        ("mine:centers=neighbours", "mine:centers=neighbours"),
    ],
)
def test_specs_of_files_are_read_in_both_spellings_without_a_warning(old, new):
    assert current_spec(old) == new
