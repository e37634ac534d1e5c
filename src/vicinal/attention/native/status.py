"""The state of the native library, for code, people and records."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

__all__ = ["TORCH_PATH", "NativeState", "NativeStatus"]

TORCH_PATH = "torch"
"""How attention is computed without the native library: by operations of torch."""


class NativeState(Enum):
    """Whether attention is computed by the native library, or why it is not."""

    READY = "ready"
    """Built; loaded where something has prepared it in this process."""
    NOT_BUILT = "not built"
    OFF = "off"
    NO_COMPILER = "no compiler"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class NativeStatus:
    """The state of the native library, with what a person or a record wants to know."""

    state: NativeState
    reason: str
    """One sentence."""
    variant: str | None = None
    """The variant that is used, or would be."""
    digest: str | None = None
    """The first digits of the digest of the sources."""
    path: Path | None = None
    """The library."""
    compiler: str | None = None
    """Path and version."""
    log: Path | None = None
    """Output of the compiler, where the build failed."""

    @property
    def attention_path(self) -> str:
        """How attention is computed on a CPU, for records: `torch`, or variant and digest of the native library."""
        return f"native {self.variant} {self.digest}" if self.state is NativeState.READY else TORCH_PATH
