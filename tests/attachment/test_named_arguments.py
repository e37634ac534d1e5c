"""Products and softmaxes whose tensors are given by name are the same attention."""

import pytest
import torch
from torch import nn

import vicinal


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.kind == "by place":
            weights = torch.softmax(torch.bmm(q, k.mT), -1)
        elif self.kind == "bmm by name":
            weights = torch.softmax(input=torch.bmm(input=q, mat2=k.mT), dim=-1)
        elif self.kind == "matmul by name":
            weights = nn.functional.softmax(input=torch.matmul(q, other=k.mT), dim=-1)
        else:
            zero = torch.zeros(1, 1, 1, dtype=x.dtype)
            weights = torch.baddbmm(input=zero, batch1=q, batch2=k.mT, beta=0.5).softmax(dim=-1)
        return x + weights @ v


def model(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 24, 4, 4), nn.Flatten(2), Transposed(), Attention(kind), Attention(kind)).double()


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


@pytest.mark.parametrize("kind", ["bmm by name", "matmul by name", "baddbmm by name"])
@torch.no_grad()
def test_arguments_by_name_give_the_same_output(kind):
    one, other = model("by place"), model(kind)
    for each in (one, other):
        table = vicinal.attach(each, "gmm:kernels=2,init=identity+gab:amplitude=2", img_size=16)
        assert [layer.place for layer in table.layers] == ["4 x 4"] * 2
        for module in each.modules():
            if isinstance(module, vicinal.Prior) and hasattr(module, "flat_alpha"):
                module.flat_alpha.fill_(0.5)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(other(x), one(x), atol=1e-12, rtol=0)
    vicinal.detach(one)
    assert (one(x) - other(x)).abs().max() > 1e-3
