"""What a model costs: parameters, multiplications, depth, and memory in training; next to what its paper says."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from vicinal.analysis.cost.saved_tensors import saved_bytes
from vicinal.attachment import get_priors
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import ModelRunner, eval_without_side_effects, make_runner
from vicinal.models.factory import find_backbone

__all__ = ["Cost", "Published", "cost_of", "format_costs", "published"]

LAYERS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Published:
    """What the paper's table says of a backbone and of its masked variant alike (arXiv:2309.05375)."""

    parameters: str
    macs: str
    depth: int


PUBLISHED = {
    "vit": Published("2.7M", "170.9M", 9),
    "swin": Published("7.1M", "236.9M", 12),
    "cait": Published("5.1M", "305.9M", 26),
    "pit": Published("7.0M", "239.1M", 12),
    "t2t": Published("6.5M", "417.4M", 13),
}


@dataclass(frozen=True)
class Cost:
    """What one model costs, for images of one size."""

    model: str
    prior: str
    img_size: tuple[int, int]
    parameters: int
    """Trainable ones, those of the prior included."""
    prior_parameters: int
    layer_macs: int
    """Multiplications for one more image in linear and convolution layers: what the paper counts. What is computed once
    for a batch, such as the table of a prior, is not in it."""
    all_macs: int
    """In all products, so with Q K^T, A V and the mixing of talking heads."""
    depth: int
    """Attention layers."""
    batch_size: int
    activation_bytes: int
    """What is kept for the backward pass of a batch, in training."""
    published: Published | None = None


class _LayerMacs(TorchFunctionMode):
    """Counts the multiplications of linear and convolution layers, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LAYERS:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            self.count += result.numel() // weight.shape[0] * weight.numel()
        return result


def cost_of(model: nn.Module, name: str, prior: str = "none", *, batch_size: int = 128) -> Cost:
    """Run a model on noise, and count.

    >>> import vicinal
    >>> from vicinal.analysis.cost.measure import cost_of
    >>> cost = cost_of(vicinal.create_model("vit", prior="gmm"), "vit", "gmm")
    >>> cost.prior_parameters, cost.layer_macs, cost.all_macs, cost.depth
    (1080, 173115264, 187716864, 9)

    Args:
        model: what to look at; its weights do not matter.
        name: what it is called, in the result and in the paper's table.
        prior: what its prior is called.
        batch_size: images to hold activations of. The memory is computed from that of 2 and of 4 images, since it grows
            with their number evenly.
    """
    run = make_runner(model)
    with eval_without_side_effects(model):
        depth = len({call.module for call in observe_attention(model, lambda: run(run.noise(1)))})
        (layers_1, all_1), (layers_2, all_2) = (_macs(run, images) for images in (1, 2))
        model.train()
        two, four = (_activations(run, images) for images in (2, 4))
    backbone = find_backbone(name)
    of_the_prior = [p for each in get_priors(model).values() for p in each.parameters() if p.requires_grad]
    return Cost(
        model=name,
        prior=prior,
        img_size=run.image,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        prior_parameters=sum(p.numel() for p in of_the_prior),
        layer_macs=layers_2 - layers_1,
        all_macs=all_2 - all_1,
        depth=depth,
        batch_size=batch_size,
        activation_bytes=two + (four - two) // 2 * (batch_size - 2),
        published=published(backbone.name, prior, run.image) if backbone else None,
    )


def published(name: str, prior: str, img_size: tuple[int, int]) -> Published | None:
    """The paper's figures, where it has some: images of 32 pixels, plain or with its mask."""
    same = img_size == (32, 32) and prior.split(":")[0] in ("none", "gmm") and "+" not in prior
    return PUBLISHED.get(name) if same else None


def _baddbmm_flops(input: Any, left: Any, right: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Returns floating-point operations of a batched product, from the shapes of its arguments."""
    return int(2 * left[0] * left[1] * left[2] * right[2])


def _macs(run: ModelRunner, images: int) -> tuple[int, int]:
    """Multiplications for a batch, in layers and in all; what a prior's table takes is there once."""
    layers = _LayerMacs()
    # The counter knows `baddbmm`, but not its in-place form, which attention under a prior uses.
    products = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: _baddbmm_flops})
    with sdpa_kernel(SDPBackend.MATH), products, layers:  # the counter sees no products inside a fused kernel
        run(run.noise(images))
    return layers.count, products.get_total_flops() // 2


def _activations(run: ModelRunner, images: int) -> int:
    parameters = {tensor.untyped_storage().data_ptr() for tensor in (*run.model.parameters(), *run.model.buffers())}
    batch = run.noise(images)
    return saved_bytes(lambda: run(batch), parameters | {batch.untyped_storage().data_ptr()})  # type: ignore[arg-type,return-value]


def format_costs(costs: Sequence[Cost], style: Literal["md", "csv", "json"]) -> str:
    """A table for reading (md), or all figures in full (csv, json)."""
    if style == "json":
        return json.dumps([asdict(cost) for cost in costs], indent=2)
    if style == "csv":
        return _csv(costs)
    batch = costs[0].batch_size
    head = ["model", "prior", "pixels", "parameters", "of the prior", "MACs, layers", "MACs, all", "depth"]
    head += [f"memory, batch {batch}", "published parameters", "MACs", "depth"]
    rows = [head]
    for cost in costs:
        paper = cost.published
        rows.append(
            [
                cost.model,
                cost.prior,
                " x ".join(map(str, cost.img_size)),
                f"{cost.parameters:,}",
                f"{cost.prior_parameters:,}",
                f"{cost.layer_macs / 1e6:.1f}M",
                f"{cost.all_macs / 1e6:.1f}M",
                str(cost.depth),
                f"{cost.activation_bytes / 1e6:,.0f} MB",
                *([paper.parameters, paper.macs, str(paper.depth)] if paper else ["", "", ""]),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [f"| {' | '.join(_aligned(row, widths))} |" for row in rows]
    rule = "|".join("-" * (width + 2) if column < 2 else "-" * (width + 1) + ":" for column, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    pairs = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in pairs]


def _csv(costs: Sequence[Cost]) -> str:
    rows = []
    for cost in costs:
        row = asdict(cost) | {"img_size": "x".join(map(str, cost.img_size))}
        paper = row.pop("published") or {}
        rows.append(row | {f"published_{key}": paper.get(key, "") for key in ("parameters", "macs", "depth")})
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
