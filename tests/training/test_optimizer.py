import copy
import math

import pytest
import torch
from timm.optim import param_groups_layer_decay

import vicinal
from vicinal.errors import VicinalError
from vicinal.models.factory import find_backbone, make_timm_model
from vicinal.training.config import TrainConfig
from vicinal.training.optimizer import create_optimizer


def groups_of(model, **settings):
    """Decay, rate and names of each group of the optimizer of a run with the rate 1e-3."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (group["weight_decay"], group["lr"] * group.get("lr_scale", 1.0), {names[id(each)] for each in group["params"]})
        for group in create_optimizer(model, TrainConfig(**settings)).param_groups
    ]


def test_decay_spares_priors_norms_biases_and_what_the_model_names():
    model = vicinal.create_model("vit-micro", prior="gmm+gab", img_size=8, in_chans=1, global_pool="token")
    groups = groups_of(model)
    decayed = {name for decay, _, names in groups if decay for name in names}
    others = {name for decay, _, names in groups if not decay for name in names}
    assert decayed | others == {name for name, _ in model.named_parameters()}
    assert all(name.endswith(".weight") and ".norm" not in name for name in decayed)
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= others


@pytest.mark.parametrize("prior", ["gmm+gab", "rpe-mlp", "elm", "conv+rpe-mlp:init=normal"])
def test_all_of_a_prior_is_undecayed_and_has_a_rate_of_its_own(prior):
    model = vicinal.create_model("vit-micro", prior=prior, img_size=8, in_chans=1)
    fast = [(decay, names) for decay, rate, names in groups_of(model) if rate == pytest.approx(0.03)]
    assert fast == [(0.0, {name for name, _ in model.named_parameters() if ".prior." in name})]
    assert all(rate == 1e-3 for _, rate, _ in groups_of(vicinal.create_model("vit-micro")))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("vit-relpos", "relative_position_bias_table"),
        ("swin", "relative_position_bias_table"),
        ("vit_relpos_small_patch16_224", "rel_pos.mlp.fc1.weight"),
        ("beit_base_patch16_224", "relative_position_bias_table"),
        ("levit_128s", "attention_biases"),
        ("samvit_base_patch16", "rel_pos_h"),
    ],
)
def test_no_table_or_network_of_relative_positions_is_decayed(name, table):
    own = find_backbone(name)
    with torch.device("cpu" if own else "meta"):
        model = vicinal.create_model(name) if own else make_timm_model(name)
    tables = {each for each, _ in model.named_parameters() if each.endswith(table)}
    assert tables
    for decay, _, names in groups_of(model):
        assert not decay or not tables & names


def test_groups_serve_any_optimizer_and_scheduler():
    """torch's own, which know nothing of timm's lr_scale: every rate keeps its ratio."""
    model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1)
    groups = vicinal.parameter_groups(model, lr=2e-3, weight_decay=0.1, prior_lr=7)
    assert all(group.keys() == {"params", "lr", "weight_decay"} for group in groups)
    optimizer = torch.optim.SGD(groups, lr=99.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=2)
    for factor in (0.5, 0.75, 1.0):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [2e-3 * factor, 2e-3 * factor, 14e-3 * factor]
        )
        optimizer.step()
        schedule.step()


def test_the_loop_trains_with_the_public_groups():
    model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1)
    public = vicinal.parameter_groups(model, lr=1e-3, weight_decay=0.05)
    for group, (decay, rate, names) in zip(public, groups_of(model), strict=True):
        assert (group["weight_decay"], group["lr"], len(group["params"])) == (decay, pytest.approx(rate), len(names))


@pytest.mark.parametrize("name", ["vit-mini", "swin", "cait", "pit", "t2t", "vit-relpos"])
def test_layer_decay_is_timms_and_leaves_priors_alone(name):
    """The model with a prior against timm's own groups of the model without."""
    plain, model = (vicinal.create_model(name, prior=prior, img_size=32) for prior in ("none", "gmm"))
    names = {id(parameter): each for each, parameter in plain.named_parameters()}
    expected = {
        names[id(each)]: group["lr_scale"] * 1e-3
        for group in param_groups_layer_decay(plain, layer_decay=0.5)
        for each in group["params"]
    }
    assert len(set(expected.values())) > 3
    groups = groups_of(model, layer_decay=0.5)
    rates = {each: rate for _, rate, found in groups for each in found if ".prior." not in each}
    assert rates == pytest.approx(expected)
    priors = [(decay, rate) for decay, rate, found in groups for each in found if ".prior." in each]
    assert len(priors) == sum(".prior." in each for each, _ in model.named_parameters())
    assert all(decay == 0 and rate == pytest.approx(0.03) for decay, rate in priors)
    assert {each for decay, _, found in groups if decay for each in found} == {
        each for decay, _, found in groups_of(model) if decay for each in found
    }


def test_frozen_parameters_are_in_no_group():
    model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1).requires_grad_(False)
    model.head.requires_grad_(True)
    assert sorted(name for _, _, names in groups_of(model) for name in names) == ["head.bias", "head.weight"]


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"weight_decay": math.nan}, {"prior_lr": -3.0}, {"layer_decay": 2.0}])
def test_a_wrong_number_is_an_error_that_names_it(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(VicinalError, match=rf"^{name} must be .*, got {value}$"):
        vicinal.parameter_groups(vicinal.create_model("vit-micro"), **{"lr": 1.0, "weight_decay": 0.0} | wrong)


def test_layers_must_be_known_for_layer_decay():
    with pytest.raises(VicinalError, match=r"layer_decay must be None for Linear.*group_matcher"):
        vicinal.parameter_groups(torch.nn.Linear(2, 2), lr=1.0, weight_decay=0.0, layer_decay=0.5)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(VicinalError, match=r"opt 'adamww'.*'adamw'"):
        create_optimizer(vicinal.create_model("vit-micro"), TrainConfig(opt="adamww"))


@pytest.mark.parametrize("opt", ["adam", "adamw"])
def test_the_fused_update_is_that_of_torchs_loop(opt):
    model = vicinal.create_model("vit-micro", img_size=8, prior="gmm").double()
    loop = copy.deepcopy(model)
    config = TrainConfig(opt=opt, lr=1e-2, prior_lr=1, weight_decay=0.0)
    fused = create_optimizer(model, config)
    assert all(group["fused"] for group in fused.param_groups)
    plain = (torch.optim.Adam if opt == "adam" else torch.optim.AdamW)(loop.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        for one, other in zip(model.parameters(), loop.parameters(), strict=True):
            one.grad = other.grad = torch.randn_like(one)
        fused.step()
        plain.step()
    torch.testing.assert_close(list(model.parameters()), list(loop.parameters()), rtol=1e-12, atol=1e-13)
