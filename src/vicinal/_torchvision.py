"""Lets `import timm` work next to a CPU-only torch and PyPI's torchvision.

That torchvision build registers fake kernels for two operators that only its CUDA library defines, so its import fails
if the library cannot load. Declaring the operators is enough, because this package does not call them. Call
`ensure_torchvision()` before the first import of timm or torchvision; with other builds it is a no-op.
"""

import torch

__all__ = ["ensure_torchvision"]

_declared: list[torch.library.Library] = []  # an operator stays declared as long as its Library exists


def ensure_torchvision() -> None:
    """Imports torchvision; declares its missing operators if, and only if, they make the import fail.

    >>> import vicinal
    >>> vicinal.ensure_torchvision()
    >>> import timm
    """
    try:
        import torchvision
    except RuntimeError as error:
        if _declared or "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        import torchvision  # noqa: F401
