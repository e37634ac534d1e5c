import pytest

import vicinal
from vicinal.errors import VicinalError
from vicinal.training.config import TrainConfig
from vicinal.training.optimizer import create_optimizer, parameter_groups


def groups_of(model, **settings):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, **{"weight_decay": 0.05, "prior_lr": 30.0, **settings})
    return [
        (group["weight_decay"], group.get("lr_scale", 1.0), {names[id(each)] for each in group["params"]})
        for group in groups
    ]


def test_decay_spares_priors_norms_biases_and_what_the_model_names():
    model = vicinal.create_model("vit-micro", prior="gmm+gab", img_size=8, in_chans=1, global_pool="token")
    groups = groups_of(model)
    decayed = {name for decay, _, names in groups if decay for name in names}
    others = {name for decay, _, names in groups if not decay for name in names}
    assert decayed | others == {name for name, _ in model.named_parameters()}
    assert all(name.endswith(".weight") and ".norm" not in name for name in decayed)
    assert {"pos_embed", "cls_token", "norm.weight", "head.bias"} <= others


def test_priors_have_a_rate_of_their_own():
    model = vicinal.create_model("vit-micro", prior="gmm+gab", img_size=8, in_chans=1)
    fast = [names for decay, scale, names in groups_of(model) if scale == 30.0 and decay == 0.0]
    assert fast == [{name for name, _ in model.named_parameters() if ".prior." in name}]
    assert all(scale == 1.0 for _, scale, _ in groups_of(vicinal.create_model("vit-micro")))


def test_a_network_inside_of_a_prior_is_an_ordinary_network():
    model = vicinal.create_model("vit-micro", prior="rpe-mlp", img_size=8, in_chans=1)
    assert all(scale == 1.0 for _, scale, _ in groups_of(model))


def test_the_schedule_keeps_the_ratio(tmp_path):
    from timm.scheduler import CosineLRScheduler

    model = vicinal.create_model("vit-micro", prior="gmm", img_size=8, in_chans=1)
    optimizer = create_optimizer(model, TrainConfig(lr=0.002))
    schedule = CosineLRScheduler(
        optimizer, t_initial=100, lr_min=1e-6, warmup_t=10, warmup_lr_init=1e-6, t_in_epochs=False
    )
    rates = []
    for step in range(100):
        schedule.step_update(step)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert all(rate[-1] == pytest.approx(30 * rate[0]) for rate in rates)
    assert rates[0][0] == pytest.approx(1e-6)
    assert rates[10][0] == pytest.approx(0.002, rel=0.03)
    assert max(rate[0] for rate in rates) == rates[10][0]
    assert rates[99][0] < 2e-6


def test_an_unknown_optimizer_is_named():
    with pytest.raises(VicinalError, match=r"opt 'adamww'.*'adamw'"):
        create_optimizer(vicinal.create_model("vit-micro"), TrainConfig(opt="adamww"))
