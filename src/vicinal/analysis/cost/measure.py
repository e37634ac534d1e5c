"""Measures the cost of a model: parameters, operations, depth, and memory in training."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from vicinal.analysis.cost.result import Cost, published
from vicinal.analysis.cost.saved_tensors import saved_bytes
from vicinal.analysis.inputs import check_batch_size, model_name
from vicinal.attachment import get_priors
from vicinal.attention.native import native_ready
from vicinal.errors import VicinalError
from vicinal.inspection.attention_observer import observe_attention
from vicinal.inspection.model_runner import ImageSize, ModelRunner, eval_without_side_effects, make_runner
from vicinal.models import create_model
from vicinal.models.factory import find_backbone

__all__ = ["cost_of", "costs_of"]

COUNTED_LAYERS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


class _LayerMacs(TorchFunctionMode):
    """Counts the multiply-accumulate operations of all linear and convolution layers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COUNTED_LAYERS:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            self.count += result.numel() // weight.shape[0] * weight.numel()
        return result


def cost_of(model: nn.Module, name: str | None = None, prior: str | None = None, *, batch_size: int = 128) -> Cost:
    """Returns the cost of a model, which runs on noise.

    >>> import vicinal
    >>> from vicinal.analysis.cost import cost_of
    >>> cost = cost_of(vicinal.create_model("vit", prior="gmm"), "vit", "gmm")
    >>> cost.prior_parameters, cost.layer_macs, cost.all_macs, cost.depth
    (1080, 173115264, 187716864, 9)

    Args:
        model: any vision model; its weights do not matter.
        name: display name of the model, and its name in the paper's table; by default its architecture.
        prior: display name of its prior; by default the specs of those that are attached.
        batch_size: number of images to compute the memory of activations for. The memory is extrapolated from that of
            2 and of 4 images, since it is linear in their number.

    Raises:
        VicinalError: if the model does not run on images of the size that it declares.
    """
    check_batch_size(batch_size)
    priors = get_priors(model)
    name = model_name(model) if name is None else name
    if prior is None:
        prior = " and ".join(dict.fromkeys(each.spec or type(each).__name__ for each in priors.values())) or "none"
    run = make_runner(model)
    with eval_without_side_effects(model):
        depth = len({call.module for call in observe_attention(model, lambda: run(run.noise(1)))})
        (layers_1, all_1), (layers_2, all_2) = (_macs(run, images) for images in (1, 2))
        model.train()
        two, four = (_activation_bytes(run, images) for images in (2, 4))
    backbone = find_backbone(name)
    return Cost(
        model=name,
        prior=prior,
        img_size=run.image,
        parameters=_count_parameters(model),
        prior_parameters=sum(_count_parameters(each) for each in priors.values()),
        layer_macs=layers_2 - layers_1,
        all_macs=all_2 - all_1,
        depth=depth,
        batch_size=batch_size,
        activation_bytes=two + (four - two) // 2 * (batch_size - 2),
        published=published(backbone.name, prior, run.image) if backbone else None,
    )


def costs_of(
    models: Sequence[str],
    priors: Sequence[str] = ("none",),
    *,
    img_size: ImageSize | None = None,
    num_classes: int = 10,
    global_pool: Literal["token", "avg"] | None = None,
    batch_size: int = 128,
) -> list[Cost]:
    """Returns the costs of new models, each with each of some priors.

    Args:
        models: names, as for `create_model`.
        priors: specs, as for `create_model`.
        img_size: as for `create_model`.
        num_classes: as for `create_model`.
        global_pool: as for `create_model`.
        batch_size: as for `cost_of`.

    Raises:
        VicinalError: if there are no models or priors, or one of them cannot be created.
    """
    if not models or not priors:
        raise VicinalError(f"models and priors must be one or more names, got {list(models)} and {list(priors)}")
    check_batch_size(batch_size)
    costs = []
    for name in models:
        for prior in priors:
            model = create_model(name, prior=prior, img_size=img_size, num_classes=num_classes, global_pool=global_pool)
            costs.append(cost_of(model, name, prior, batch_size=batch_size))
    return costs


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _baddbmm_flops(input: Any, left: Any, right: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Returns floating-point operations of a batched product, from the shapes of its arguments."""
    return int(2 * left[0] * left[1] * left[2] * right[2])


def _attention_flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Returns floating-point operations of both products of the native attention, from the shapes of its arguments."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))


def _packed_attention_flops(qkv: Any, heads: int, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Returns floating-point operations of both products of the native attention of a projection."""
    return int(4 * qkv[0] * qkv[1] * qkv[1] * qkv[2] // 3)


def _counted_operators() -> dict[Any, Callable[..., int]]:
    """Returns what `FlopCounterMode` does not count by itself: attention under a prior uses it."""
    found: dict[Any, Callable[..., int]] = {torch.ops.aten.baddbmm_: _baddbmm_flops}
    if native_ready():
        library = torch.ops.vicinal_native
        found |= {library.forward: _attention_flops, library.forward_packed: _packed_attention_flops}
    return found


def _macs(run: ModelRunner, images: int) -> tuple[int, int]:
    """Returns MACs of a batch, in layers and in all products; those of a prior's table are included once."""
    layers = _LayerMacs()
    products = FlopCounterMode(display=False, custom_mapping=_counted_operators())
    with sdpa_kernel(SDPBackend.MATH), products, layers:  # products inside a fused kernel are not counted
        run(run.noise(images))
    return layers.count, products.get_total_flops() // 2


def _activation_bytes(run: ModelRunner, images: int) -> int:
    """Returns the memory that is saved for the backward pass of a batch, without parameters, buffers and images."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in (*run.model.parameters(), *run.model.buffers())}
    batch = run.noise(images)
    return saved_bytes(lambda: run(batch), parameters | {batch.untyped_storage().data_ptr()})
