"""Where a model looks: the attention of its last layer, laid over the picture."""

from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.analysis.attention_maps.plot import Panel, draw_panels
from vicinal.inspection import patch_attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention_map", "draw_overlay"]


def attention_map(model: nn.Module, images: Tensor) -> Tensor:
    """How much attention each patch gets in a model's last layer, averaged over heads: `(n, grid height, grid width)`.

    >>> import torch, vicinal
    >>> from vicinal.analysis.attention_maps.overlay import attention_map
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> attention_map(model.eval(), torch.randn(2, 3, 32, 48)).shape
    torch.Size([2, 8, 12])

    Whose attention it is, `vicinal.inspection.patch_attention` says.

    Args:
        model: any vision transformer.
        images: `(n, channels, height, width)`, as the model takes them.
    """
    with torch.no_grad(), patch_attention(model, img_size=(images.shape[-2], images.shape[-1])) as attention:
        model(images)
    return attention.map.float()


def draw_overlay(picture: NDArray[Any], attention: Tensor, title: str) -> "Figure":
    """Draw a picture next to the same with attention laid over.

    Args:
        picture: `(height, width, channels)`, 1 channel or 3, of values between 0 and 1.
        attention: of each patch, `(grid height, grid width)`.
        title: above both.
    """
    seen = Panel("attention, last layer", picture, attention.numpy(force=True))
    return draw_panels([[Panel("picture", picture), seen]], title)
