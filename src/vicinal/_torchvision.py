"""Lets torchvision, and so timm, import next to a CPU-only torch.

PyPI's torchvision registers fake kernels for two operators that only its CUDA library defines, so its import fails if
the library cannot load. Declaring the operators is enough, because this package does not call them. `import vicinal`
installs a hook on the first import of torchvision; with other builds it is a no-op. torch is imported only when an
operator must be declared, so that `import vicinal` does not load it.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ensure_torchvision", "install_hook"]

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def ensure_torchvision() -> None:
    """Imports torchvision; declares its missing operators if, and only if, they make the import fail.

    `import vicinal` has the same effect on the first import of torchvision. This function also serves programs in which
    another import hook finds torchvision first.

    >>> import vicinal
    >>> vicinal.ensure_torchvision()
    >>> import timm
    """

    def load() -> None:
        import torchvision  # noqa: F401

    _run_with_operators(load)


def install_hook() -> None:
    """Puts the hook in front of `sys.meta_path`, unless it is there or torchvision has been imported."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torchvision as the other finders do, with a loader that declares missing operators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """Runs another loader, then takes the hook out of `sys.meta_path`.

    Not at `find_spec`: packages ask `importlib.util.find_spec("torchvision")` whether it is installed.
    """

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # as `importlib.util.LazyLoader` does: the module shows its own loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _run_with_operators(lambda: self._loader.exec_module(module))
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


def _run_with_operators(load: Callable[[], None]) -> None:
    """Calls `load`; if it fails for want of an operator, declares what is missing and calls it once more."""
    try:
        return load()
    except RuntimeError as error:
        if "torchvision::" not in str(error) or not _declare_missing():
            raise
    load()


def _declare_missing() -> bool:
    """Declares the operators that torch does not know, for the life of the process. Returns whether there were any."""
    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    for name in missing:
        torch.library.define(f"torchvision::{name}", _SCHEMA)
    return bool(missing)
