"""Why an attention takes no prior: a kind that code decides on, and a reason for people."""

from dataclasses import dataclass
from enum import Enum

__all__ = ["Refusal", "RefusalKind"]


class RefusalKind(Enum):
    """Kinds of refusal."""

    UNREAD = "no axis of the logits counts images"
    SILENT = "tokens follow nothing in the image"
    SPREAD = "tokens follow the whole image"
    IRREGULAR = "tokens form no lattice"
    CONTENT = "places depend on the image's content"
    POOLED = "keys are in other cells than queries"
    WINDOWS = "windows do not share one layout"
    SEVERAL = "a module computes several attentions"
    UNSUPPORTED = "attention of a kind that priors do not serve"
    UNUSED = "the output does not depend on attention between patches"
    UNVERIFIED = "a prior does not act as the formula says"


@dataclass(frozen=True)
class Refusal:
    """Why tokens have no cells, or why an attention takes no prior."""

    kind: RefusalKind
    reason: str
    """One sentence about `it`, the attention module."""
