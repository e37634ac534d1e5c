"""Attention of a model's last layer, drawn over the image: the short way to a map."""

from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.analysis.attention_maps.plot import Panel, draw_panels
from vicinal.inspection import patch_attention
from vicinal.inspection.model_inspection import Inspection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention_map", "draw_overlay"]


def attention_map(model: nn.Module, images: Tensor, *, inspection: Inspection | None = None) -> Tensor:
    """Returns the attention to each patch in a model's last layer, mean over heads, `(n, grid height, grid width)`.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps import attention_map
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> attention_map(model.eval(), torch.randn(2, 3, 32, 48)).shape
    torch.Size([2, 8, 12])

    The query is chosen as in `vicinal.inspection.patch_attention`.

    Args:
        model: any vision transformer.
        images: `(n, channels, height, width)`, as the model takes them.
        inspection: as `inspect_images` returns it for the model, so that it is not inspected again.

    Raises:
        VicinalError: if no layer has a map of the image.
    """
    size = (images.shape[-2], images.shape[-1])
    with torch.no_grad(), patch_attention(model, img_size=size, inspection=inspection) as attention:
        model(images)
    return attention.map.float()


def draw_overlay(picture: NDArray[Any], attention: Tensor, title: str) -> "Figure":
    """Returns a plot of an image, and of the same under its attention map.

    Args:
        picture: `(height, width, channels)`, 1 channel or 3, of values in [0, 1].
        attention: to each patch, `(grid height, grid width)`.
        title: above both.
    """
    overlaid = Panel("attention, last layer", picture, attention.numpy(force=True))
    return draw_panels([[Panel("image", picture), overlaid]], title)
