"""Where a model looks: the attention of its last layer, laid over the picture."""

import textwrap
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vicinal.attachment import patch_attention

__all__ = ["attention_map", "draw_overlay"]


def attention_map(model: nn.Module, images: Tensor) -> Tensor:
    """How much attention each patch gets in a model's last layer, averaged over heads: `(n, grid height, grid width)`.

    >>> import torch, vicinal
    >>> from vicinal.analysis.overlay import attention_map
    >>> model = vicinal.create_model("vit-micro", img_size=(32, 48))
    >>> attention_map(model.eval(), torch.randn(2, 3, 32, 48)).shape
    torch.Size([2, 8, 12])

    Whose attention it is, `vicinal.attachment.patch_attention` says.

    Args:
        model: any vision transformer.
        images: `(n, channels, height, width)`, as the model takes them.
    """
    with torch.no_grad(), patch_attention(model, img_size=(images.shape[-2], images.shape[-1])) as attention:
        model(images)
    return attention.map.float()


def draw_overlay(picture: NDArray[Any], attention: Tensor, title: str, file: Path) -> None:
    """Draw a picture next to the same with attention laid over, into a PNG.

    Args:
        picture: `(height, width, channels)`, 1 channel or 3, of values between 0 and 1.
        attention: of each patch, `(grid height, grid width)`.
        title: above the picture.
        file: where to.
    """
    from matplotlib.figure import Figure

    height, width = picture.shape[:2]
    relative = attention / attention.mean()  # 1 where all patches would get the same
    figure = Figure(figsize=(7.4, 0.5 + 3.2 * height / width), layout="compressed")
    left, right = figure.subplots(1, 2)
    left.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    gray = 0.5 + 0.5 * picture.mean(2)  # light, so that dark parts are not taken for dark colours of the map
    right.imshow(gray, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    drawn = right.imshow(
        relative.numpy(force=True),
        cmap="viridis",
        alpha=0.6,
        vmin=0,
        vmax=max(2.0, float(relative.max())),
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        interpolation="nearest",
    )
    for axes in (left, right):
        axes.set_axis_off()
    left.set_title(textwrap.fill(title, 40), fontsize=10, parse_math=False)
    right.set_title("attention of the last layer", fontsize=10)
    bar = figure.colorbar(drawn, cax=right.inset_axes((1.03, 0, 0.05, 1)))
    bar.set_label("attention (mean patch = 1)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    figure.savefig(file, dpi=130)
