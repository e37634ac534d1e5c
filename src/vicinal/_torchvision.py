"""Lets `import timm` work next to a CPU-only torch and PyPI's torchvision.

That torchvision build registers fake kernels for two operators which only its CUDA library defines, and fails on import
where the library cannot load. Declaring the operators is enough: nothing here calls them. Call `ensure_torchvision()`
before the first import of timm or torchvision; everywhere else it does nothing.
"""

import torch

__all__ = ["ensure_torchvision"]

_declared: list[torch.library.Library] = []  # a declaration lives as long as its Library


def ensure_torchvision() -> None:
    """Import torchvision, declaring the operators it misses if, and only if, that is why the import fails.

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
