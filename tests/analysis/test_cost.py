import csv
import io
import json

import pytest
import torch
from torch import nn

import vicinal
from vicinal.analysis.cost import cost_of, format_costs, published, saved_bytes

PAPER = {"vit": "vit", "swin": "swin", "cait": "cait-tiny", "pit": "pit", "t2t": "t2t"}


@pytest.mark.parametrize("prior", ["none", "gmm:kernels=5"])
@pytest.mark.parametrize("name", PAPER)
def test_multiplications_are_those_of_the_reference(name, prior, golden):
    reference = golden["models_32px_10_classes"][PAPER[name]]
    cost = cost_of(vicinal.create_model(name, prior=prior), name, prior)
    assert cost.layer_macs == pytest.approx(reference["plain"]["linear_and_conv_macs"], rel=0.005)
    assert cost.all_macs == pytest.approx(reference["plain"]["all_matmul_macs"], rel=0.005)
    assert cost.depth == reference["published"]["depth"] == cost.published.depth
    assert cost.published.parameters == reference["published"]["params"]
    assert cost.published.macs == reference["published"]["macs"]
    assert cost.prior_parameters == (0 if prior == "none" else reference["gmm_params_k5"])


def test_the_published_figure_of_vit_leaves_out_the_class_token(golden):
    cost = cost_of(vicinal.create_model("vit", prior="gmm", global_pool="avg"), "vit", "gmm")
    assert cost.layer_macs == golden["models_32px_10_classes"]["vit"]["gmm"]["linear_and_conv_macs"]
    assert cost.layer_macs / 1e6 == pytest.approx(170.9, rel=0.005)


def test_multiplications_of_a_network_counted_by_hand():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.grouped = nn.Conv2d(8, 16, 3, padding=1, groups=8)
            self.last = nn.Linear(16, 5)

        def forward(self, x):
            x = self.grouped(self.first(x)).flatten(2).transpose(1, 2)  # 16 channels at 4 x 6 places
            x = (x @ x.transpose(1, 2)).softmax(-1) @ x
            return self.last(x.mean(1))

    network = Network()
    network.image_size = (8, 12)
    cost = cost_of(network, "mine")
    assert cost.layer_macs == 24 * 8 * 27 + 24 * 16 * 9 + 16 * 5
    assert cost.all_macs == cost.layer_macs + 2 * 24 * 24 * 16
    assert cost.depth == 1
    assert cost.published is None


@pytest.mark.parametrize("prior", ["none", "gmm", "rpe"])
def test_memory_of_a_batch_is_what_autograd_keeps(prior):
    model = vicinal.create_model("vit-mini", prior=prior, global_pool="token", drop_path_rate=0)
    images = torch.randn(32, 3, 32, 32)
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), images)}
    measured = saved_bytes(lambda: model.train()(images), kept)
    assert cost_of(model, "vit-mini", batch_size=32).activation_bytes == pytest.approx(measured, rel=0.01)


def test_memory_is_that_without_dropped_branches():
    torch.manual_seed(0)
    model = vicinal.create_model("vit-mini", drop_path_rate=0.5)
    images = torch.randn(32, 3, 32, 32)
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), images)}
    measured = saved_bytes(lambda: model.train()(images), kept)
    assert measured < 0.7 * cost_of(model, "vit-mini", batch_size=32).activation_bytes


def test_counting_leaves_the_model_as_it_was():
    model = vicinal.create_model("vit-mini", prior="gmm", global_pool="token").eval()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    cost_of(model, "vit-mini")
    assert torch.equal(torch.rand(2), expected)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_paper_says_nothing_of_other_sizes_and_priors():
    assert published("vit", "gmm:kernels=3", (32, 32)) is not None
    assert published("vit", "gmm", (64, 64)) is None
    assert published("vit", "gab", (32, 32)) is None
    assert published("vit", "gmm+gab", (32, 32)) is None
    assert published("vit-mini", "none", (32, 32)) is None


def test_formats_say_the_same():
    costs = [cost_of(vicinal.create_model(name, prior="gmm"), name, "gmm") for name in ("vit", "vit-mini")]
    from_json = json.loads(format_costs(costs, "json"))
    from_csv = list(csv.DictReader(io.StringIO(format_costs(costs, "csv"))))
    table = format_costs(costs, "md").splitlines()
    assert [int(row["layer_macs"]) for row in from_csv] == [each["layer_macs"] for each in from_json]
    assert from_json[0]["published"] == {"parameters": "2.7M", "macs": "170.9M", "depth": 9}
    assert (from_csv[0]["published_macs"], from_csv[1]["published_macs"]) == ("170.9M", "")
    assert len({len(line) for line in table}) == 1
    assert [cell.strip() for cell in table[2].split("|")[1:8]] == [
        "vit",
        "gmm",
        "32 x 32",
        "2,693,506",
        "1,080",
        "173.1M",
        "187.7M",
    ]
